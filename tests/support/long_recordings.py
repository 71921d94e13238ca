"""Long recordings: turns of digits, and between them pauses, tones, music, noise and coughs."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from asr_server.core import SAMPLE_RATE, Chunk, Samples
from tests.support.noises import make_noise
from tests.support.speech import VOICES, say, silence

BETWEEN = ("silence", "silence", "tones", "music", "pink", "white", "coughs")
MAX_PAUSE_S = 20.0
MARGIN_S = 0.03


class Turn(NamedTuple):
    """Some digits said by one voice, with a quarter of a second of silence around them."""

    start_s: float
    samples: Samples
    digits: str
    times: list[tuple[float, float]]  # of each digit, in the recording

    @property
    def end_s(self) -> float:
        return self.start_s + len(self.samples) / SAMPLE_RATE


class LongRecording(NamedTuple):
    samples: Samples
    turns: list[Turn]

    @property
    def duration_s(self) -> float:
        return len(self.samples) / SAMPLE_RATE


def digits_not_whole(recording: LongRecording, chunks: Sequence[Chunk]) -> list[tuple[float, float]]:
    """The times of those that do not lie whole in one chunk, so that they are lost or there twice.

    30 ms at both ends are left out, which belong to the digit's recording rather than to the digit.
    """
    starts_s = np.array([chunk.start_s for chunk in chunks])
    ends_s = np.array([chunk.start_s + chunk.duration_s for chunk in chunks])

    def is_whole(start_s: float, end_s: float) -> bool:
        inside = (starts_s <= start_s + MARGIN_S) & (end_s - MARGIN_S <= ends_s)
        touched = (starts_s < end_s - MARGIN_S) & (start_s + MARGIN_S < ends_s)
        return int(inside.sum()) == int(touched.sum()) == 1

    return [times for turn in recording.turns for times in turn.times if not is_whole(*times)]


def long_recording(duration_s: float, seed: int = 0) -> LongRecording:
    """Turns of one to six digits; between two of them 0 to 20 s of one kind of sound, more often short."""
    rng = np.random.default_rng(seed)
    parts: list[Samples] = []
    turns: list[Turn] = []
    at_s = 0.0
    while at_s < duration_s:
        digits = "".join(rng.choice(list("0123456789"), rng.integers(1, 7)))
        gaps = [*rng.uniform(0.05, 0.5, len(digits) - 1).tolist(), 0.25]
        spoken = say(digits, str(rng.choice(VOICES)), gaps, lead_s=0.25)
        times = [(at_s + start_s, at_s + end_s) for start_s, end_s in spoken.times]
        turn = Turn(at_s, spoken.samples, digits, times)
        pause_s = float(rng.choice([0.0, MAX_PAUSE_S * rng.random() ** 3], p=[0.1, 0.9]))
        kind = str(rng.choice(BETWEEN))
        level_db, noise_seed = float(rng.choice([-50, -40, -30])), int(rng.integers(1 << 30))
        between = make_noise(kind, level_db, pause_s, noise_seed) if pause_s > 0.1 else silence(pause_s)
        turns.append(turn)
        parts += [turn.samples, between]
        at_s += (len(turn.samples) + len(between)) / SAMPLE_RATE
    return LongRecording(np.concatenate([*parts, silence(0.5)]), turns)
