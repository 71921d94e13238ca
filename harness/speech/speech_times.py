"""Where somebody speaks in a clip, by its levels alone: the reference that diarization is measured against.

No detector has a part in it, as each has its own idea of where speech ends. Used by `benchmarks/speakers.py`.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.signal import lfilter

from asr_server.core import SAMPLE_RATE, Samples
from asr_server.levels import HOP, HOPS_PER_LEVEL, Powers, decibels, powers, runs

AUDIBLE_DB: Final = 25.0  # below the loud parts of a clip
PAUSE_S: Final = 0.3  # between two stretches of one person: less is no pause
SHORTEST_S: Final = 0.1  # of a stretch
HOP_S: Final = HOP / SAMPLE_RATE
_LOUD_DB: Final = 12.0  # below the loud parts: what falls behind the last of it may be an echo
_EARLY_HOPS: Final = 10  # 50 ms, in which walls answer one by one; behind them a room's echo falls evenly
_TAIL_DB: Final = 45.0  # below the loud parts, down to which the fall is looked at
_ABOVE_NOISE_DB: Final = 6.0
_MIN_TAIL: Final = 40  # hops, 0.2 s: a voice without an echo has gone by then
# 60 dB in 0.7 to 4 s. What falls faster does no harm, or is the voice.
_FASTEST_DB_S, _SLOWEST_DB_S = 90.0, 15.0
_ABOVE_ECHO_DB: Final = 3.0  # an echo's levels scatter by so much
_MIN_HOPS: Final = 8  # 40 ms above the echo


class Echo(NamedTuple):
    """How a room answers."""

    falls_db_s: float
    gain: float  # of the echo's power, before it falls


def speech_of(samples: Samples) -> list[tuple[float, float]]:
    """Where a clean clip is at most AUDIBLE_DB quieter than its loud parts (the level that 5 % of it exceed),
    in 20 ms, and louder than the echo of what was said before; pauses under PAUSE_S within it are speech,
    stretches under SHORTEST_S are not. In seconds.

    Checked against the times of flite's own phones, dry and in echoes of 0.6 to 1.8 s, 8 to 15 dB beneath the
    voice: 1.1 and 1.5 to 2.9 % of the time spoken is judged otherwise, by levels alone up to 7.3 %.
    """
    power = powers(samples)
    levels = decibels(power)
    audible = levels > np.percentile(levels, 95) - AUDIBLE_DB
    shortest = 1
    if echo := find_echo(levels, power):
        audible &= levels > decibels(echo_power(power, echo)) + _ABOVE_ECHO_DB
        shortest = _MIN_HOPS
    stretches = [
        (first * HOP_S, (end + HOPS_PER_LEVEL - 1) * HOP_S)
        for first, end in runs(audible).tolist()
        if end - first >= shortest
    ]
    return [(start_s, end_s) for start_s, end_s in without_pauses(stretches) if end_s - start_s >= SHORTEST_S]


def without_pauses(stretches: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """One person's stretches, those with less than PAUSE_S between them as one."""
    joined: list[tuple[float, float]] = []
    for start_s, end_s in sorted(stretches):
        if joined and start_s - joined[-1][1] < PAUSE_S:
            joined[-1] = joined[-1][0], max(end_s, joined[-1][1])
        else:
            joined.append((start_s, end_s))
    return joined


def find_echo(levels: Powers, power: Powers) -> Echo | None:
    """The echo of a clip by how it fades behind its last loud sound; None where it is gone at once."""
    loud_db = float(np.percentile(levels, 95))
    start = int(np.flatnonzero(levels > loud_db - _LOUD_DB)[-1]) + _EARLY_HOPS
    end_db = max(float(np.percentile(levels, 3)) + _ABOVE_NOISE_DB, loud_db - _TAIL_DB)
    faint = np.flatnonzero(levels[start:] < end_db)
    tail = levels[start : start + int(faint[0]) if len(faint) else None]
    if len(tail) < _MIN_TAIL:
        return None
    falls_db_s = -float(np.polyfit(np.arange(len(tail)) * HOP_S, tail, 1)[0])
    if not _SLOWEST_DB_S < falls_db_s < _FASTEST_DB_S:
        return None
    unscaled = echo_power(power, Echo(falls_db_s, 1.0))[start : start + len(tail)]
    gain_db = float(np.median(tail - 10 * np.log10(unscaled)))
    return Echo(falls_db_s, 10 ** (gain_db / 10))


def echo_power(power: Powers, echo: Echo) -> npt.NDArray[np.float32]:
    """The power that an echo has in each hop: what sounded more than 50 ms before, by so much weaker each
    hop (Lebart, Boucher and Denbigh, 2001: A new method based on spectral subtraction for speech
    dereverberation).
    """
    kept = 10 ** (-echo.falls_db_s * HOP_S / 10)
    delayed = [0.0] * _EARLY_HOPS + [echo.gain * kept**_EARLY_HOPS]
    return np.asarray(lfilter(delayed, [1.0, -kept], power), np.float32)
