"""Embed each voice of a window.

CAM++ embeds each stretch that a local speaker says alone, from Kaldi's features (`feature-fbank.cc`: 80
mel bands, 25 ms, Povey's window) without their mean. A local speaker that sounds like two people becomes
two: telephones mislead the segmentation. Blocks; keeps no samples.
"""

from collections.abc import Sequence
from functools import cache
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from asr_server.annexes.speakers.clustering import Doubles, Flags, Floats, Ints, directions, mean, merge
from asr_server.annexes.speakers.segmentation import (
    CLASSES,
    EMBEDDING,
    FIRST_FRAME,
    FRAME,
    NUM_FRAMES,
    WINDOW,
    load,
    segment,
)
from asr_server.core import SAMPLE_RATE, Samples
from asr_server.levels import HOP, HOPS_PER_LEVEL, Powers, decibels, powers

_MIN_FEATURES: Final = 30  # 0.3 s: less says nothing about a voice
_MIN_STRETCH: Final = 80  # features of a stretch that is heard by itself
_MAX_FEATURES: Final = 250  # more of one stretch says little more, and costs as much again
_PAUSE: Final = 25  # features within a passage in which its speaker may be silent, or not be alone
# A passage is cut at the quietest moment near each multiple of 2.5 s, as the segmentation may take the next
# person for the last one; both in features of the recording, so that windows cut alike.
_CUT_EVERY, _CUT_WITHIN = 250, 75
# A stretch of which the window before has heard so much, or this share, is not heard again.
_ENOUGH, _ENOUGH_SHARE = 200 * 160, 0.8  # samples
# Mean cosine of two groups of passages below which they are two people: in full band, by telephone. There all
# voices are more alike, and the segmentation more often takes two women for one.
_SPLIT: Final = 0.35, 0.55
# The same for stretches of one passage. One of 2.5 s says less about a voice; `track.py` judges it once more,
# when it knows the people of the whole recording.
_SPLIT_WITHIN: Final = 0.2, 0.35
# What is 10 to 25 dB quieter than the loud tenth of what its speaker says may be an echo: the logarithm of
# its odds is so much less for each decibel.
_FAINT_DB, _FAINTEST_DB, _DOUBT = 10.0, 25.0, 0.3
# Bands of the features above 4.3 kHz, and of 0.2 to 3.7 kHz. Of 242 clips by 14 people a twentieth has less
# in the former by 32 dB (_NARROW, a logarithm), by a line of 8 kHz and mu-law all but a twentieth.
_HIGH_BANDS, _LOW_BANDS, _NARROW = slice(64, 80), slice(8, 58), -7.4
_GATED: Final = 100  # positions that share a gate of CAM++


Activity = npt.NDArray[np.float16]


class Stretch(NamedTuple):
    """Speech of one person alone: a passage without a pause, or a few seconds of it."""

    start: int  # sample of the recording
    end: int
    num_features: int  # that were heard
    embedding: Floats
    is_narrow: bool


class Voice(NamedTuple):
    activity: Activity  # [num_frames]: how likely it speaks
    embedding: Floats  # [192] of length 1; zeros where too little is heard
    clean_s: float  # how much it says alone; of more than 2.5 s, 2.5
    is_narrow: bool = False  # as on a telephone: nothing above 4 kHz
    is_half: bool = False
    stretches: tuple[Stretch, ...] = ()


class Heard(NamedTuple):
    voices: list[Voice]
    stretches: list[Stretch]  # for the next window, which shares half of the samples
    alike: list[float]  # cosines of stretches that one person says


def hear(
    samples: Samples, log_probabilities: Floats, start: int = 0, before: Sequence[Stretch] = ()
) -> Heard:
    """Return the voices of at most one window, which begins at the sample `start`.

    `segment` gives its log-probabilities, [num_frames, 7]; `before` are the stretches of the window before.
    """
    heard = Heard([], [], [])
    num_frames = max(0, (len(samples) - FIRST_FRAME) // FRAME + 1)
    activity = np.exp(log_probabilities) @ CLASSES  # [num_frames, 3]
    active = CLASSES[np.argmax(log_probabilities, axis=1)] > 0
    activity[num_frames:], active[num_frames:] = 0, False
    alone = active & (active.sum(axis=1, keepdims=True) == 1)
    levels = _frame_levels(samples)
    for speaker in np.flatnonzero(active.any(axis=0)):
        likely = _without_echo(activity[:, speaker], levels).astype(np.float16)
        frames = _feature_frames(alone[:, speaker], samples)
        passages = _passages(samples, frames, start, before)
        if not passages:  # nothing long enough: all together
            if len(frames) < _MIN_FEATURES:
                frames = _feature_frames(active[:, speaker], samples)
            chosen = _middle(frames)
            embedding, is_narrow = np.zeros(192, np.float32), False
            if len(chosen) >= _MIN_FEATURES:
                embedding, is_narrow = _heard(samples, chosen)
            heard.voices.append(Voice(likely, embedding, len(chosen) / 100, is_narrow))
            continue
        heard.stretches.extend(stretch for passage in passages for stretch in passage)
        passages = [part for passage in passages for part in _by_person(passage)]
        means = [directions([np.arange(len(passage))], *_embeddings(passage)) for passage in passages]
        embeddings = np.concatenate(means)
        num_features = [sum(stretch.num_features for stretch in passage) for passage in passages]
        weights = np.minimum(np.array(num_features, np.float64), _MAX_FEATURES)
        is_called = _is_narrow([stretch for passage in passages for stretch in passage])
        groups, alike = _people(embeddings, weights, _SPLIT[is_called])
        heard.alike.extend(alike)
        people = [[stretch for number in group for stretch in passages[number]] for group in groups]
        whose = nearest(people, start)
        for number, embedding in enumerate(directions(groups, embeddings, weights)):
            is_own = whose == number
            num_alone = len(_feature_frames(alone[:, speaker] & is_own, samples))
            clean_s = min(num_alone, _MAX_FEATURES) / 100
            is_half, own = len(groups) > 1, tuple(people[number])
            voice = Voice(likely * is_own, embedding, clean_s, _is_narrow(own), is_half, own)
            heard.voices.append(voice)
    return heard


def hear_reference(samples: Samples) -> Floats:
    """Return the main speaker's embedding, [192]."""
    samples = samples[:WINDOW]
    voices = [voice for voice in hear(samples, segment(samples)[0]).voices if voice.clean_s]
    return max(voices, key=lambda voice: voice.clean_s).embedding if voices else np.zeros(192, np.float32)


def _frame_levels(samples: Samples) -> Powers:
    levels = decibels(powers(samples))
    middles = FIRST_FRAME + np.arange(NUM_FRAMES) * FRAME - HOPS_PER_LEVEL * HOP // 2
    return levels[np.minimum(middles // HOP, len(levels) - 1)]


def _without_echo(likely: Floats, levels: Powers) -> Floats:
    is_likely = likely > 0.5
    if not is_likely.any():
        return likely
    loud_db = np.percentile(levels[is_likely], 90)
    odds = likely / np.maximum(1 - likely, 1e-4)
    odds *= np.exp(_DOUBT * np.clip(levels - loud_db + _FAINT_DB, _FAINT_DB - _FAINTEST_DB, 0))
    return np.asarray(odds / (1 + odds), np.float32)


def _passages(samples: Samples, frames: Ints, start: int, before: Sequence[Stretch]) -> list[list[Stretch]]:
    """Return the stretches of each long enough passage."""
    return [
        [_stretch(samples, part, start, before) for part in parts]
        for parts in _parts(frames, samples, start)
        if len(parts[0]) >= _MIN_STRETCH
    ]


def _stretch(samples: Samples, part: Ints, start: int, before: Sequence[Stretch]) -> Stretch:
    first, end = start + int(part[0]) * _STEP, start + (int(part[-1]) + 1) * _STEP
    enough = min(_ENOUGH, _ENOUGH_SHARE * (end - first))
    shared = [(min(end, each.end) - max(first, each.start), each) for each in before]
    num_shared, known = max(shared, key=lambda each: each[0], default=(0, None))
    chosen = _middle(part)
    if known is None or num_shared < enough:
        return Stretch(first, end, len(chosen), *_heard(samples, chosen))
    return Stretch(first, end, len(chosen), known.embedding, known.is_narrow)


def _parts(frames: Ints, samples: Samples, start: int) -> list[list[Ints]]:
    quietness = -powers(samples)
    passages: list[list[Ints]] = []
    for rest in np.split(frames, np.flatnonzero(np.diff(frames) > _PAUSE) + 1):
        parts: list[Ints] = []
        for middle in range(_CUT_EVERY - start // _STEP % _CUT_EVERY, len(samples) // _STEP, _CUT_EVERY):
            inner = rest[_MIN_STRETCH:-_MIN_STRETCH]
            near = inner[np.abs(inner - middle) <= _CUT_WITHIN]
            if len(near):
                cut = near[quietness[near * (_STEP // HOP)].argmax()]
                parts.append(rest[rest < cut])
                rest = rest[rest >= cut]
        passages.append([*parts, rest])
    return passages


def _heard(samples: Samples, chosen: Ints) -> tuple[Floats, bool]:
    features = fbank(samples, chosen)
    bands = np.stack([features[:, _HIGH_BANDS].mean(axis=1), features[:, _LOW_BANDS].mean(axis=1)])
    high, low = np.percentile(bands, 90, axis=1)
    return embed(features), bool(high - low < _NARROW)


def _by_person(passage: list[Stretch]) -> list[list[Stretch]]:
    """Return the passage, or its stretches apart if two people say them."""
    groups, _ = _people(*_embeddings(passage), _SPLIT_WITHIN[_is_narrow(passage)])
    return [passage] if len(groups) == 1 else [[stretch] for stretch in passage]


def _is_narrow(stretches: Sequence[Stretch]) -> bool:
    return sum(stretch.is_narrow for stretch in stretches) > len(stretches) / 2


def _embeddings(stretches: list[Stretch]) -> tuple[Floats, Doubles]:
    """Return [num_stretches, 192], and their weights."""
    weights = np.array([stretch.num_features for stretch in stretches], np.float64)
    return np.stack([stretch.embedding for stretch in stretches]), weights


def _people(embeddings: Floats, weights: Doubles, split: float) -> tuple[list[Ints], list[float]]:
    """Return one group, or two that sound like two people; and the cosines within."""
    every = np.arange(len(embeddings))
    groups = merge(np.split(every, every[1:]), embeddings, weights, every, same=-1.0, fewest=2)
    means = [mean(group, embeddings, weights) for group in groups]
    if len(groups) == 2 and float(means[0] @ means[1]) < split:  # the mean cosine of all pairs
        return groups, []
    cosines = (embeddings @ embeddings.T)[np.triu_indices(len(embeddings), 1)]
    return [every], cosines[cosines < 0.999].tolist()  # two may have taken over the same embedding


def nearest(groups: Sequence[Sequence[Stretch]], start: int) -> Ints:
    """Return the nearest group of each frame of the window that begins at the sample `start`."""
    middles = start + FIRST_FRAME + np.arange(NUM_FRAMES) * FRAME
    away = [
        np.min(
            [np.maximum(0, np.maximum(each.start - middles, middles - each.end)) for each in group], axis=0
        )
        for group in groups
    ]
    return np.asarray(np.argmin(away, axis=0))


def _feature_frames(active: Flags, samples: Samples) -> Ints:
    num_features = max(0, (len(samples) - _LENGTH) // _STEP + 1)
    frames = ((np.arange(num_features) * _STEP + _LENGTH // 2 - FIRST_FRAME) / FRAME).round().astype(np.int64)
    return np.flatnonzero(active[np.clip(frames, 0, len(active) - 1)])


def _middle(chosen: Ints) -> Ints:
    surplus = max(0, len(chosen) - _MAX_FEATURES) // 2
    return chosen[surplus : surplus + _MAX_FEATURES]


def embed(features: Floats) -> Floats:
    """Turn [num_frames, 80] into [192] of length 1."""
    features = features - features.mean(axis=0)
    num_positions = (len(features) + 1) // 2
    stretch = np.arange(num_positions) // _GATED
    spread = (stretch[:, None] == np.arange(stretch[-1] + 1)).astype(np.float32)
    pool = (spread / spread.sum(axis=0)).T + np.float32(1 / num_positions)
    (found,) = load(EMBEDDING).run(None, {"features": features[None], "pool": pool, "spread": spread})
    return np.asarray(found[0] / max(float(np.linalg.norm(found[0])), 1e-9), np.float32)


_FFT: Final = 512
_LENGTH, _STEP = 400, 160  # samples of a frame, and between two
_PREEMPHASIS: Final = 0.97
_ROWS: Final = 48  # of 256 x 80 products each, fewer in all than the 2^20 from which OpenBLAS uses threads


def fbank(samples: Samples, chosen: Ints) -> Floats:
    """Return log mel energies [num_chosen, 80], Kaldi's without dither."""
    frames = np.lib.stride_tricks.sliding_window_view(samples, _LENGTH)[::_STEP][chosen]
    frames = frames - frames.mean(axis=1, keepdims=True)
    previous = np.concatenate([frames[:, :1], frames[:, :-1]], axis=1)
    window, mel = _window_and_mel()
    spectrum = np.fft.rfft((frames - np.float32(_PREEMPHASIS) * previous) * window, _FFT)
    power = (spectrum.real**2 + spectrum.imag**2)[:, : _FFT // 2].astype(np.float32)
    # A larger product would wake BLAS's threads, which wait for a core where the engine has them all: 8 ms.
    parts = [power[first : first + _ROWS] @ mel for first in range(0, len(power), _ROWS)]
    energies = np.maximum(np.concatenate(parts), np.finfo(np.float32).eps)
    return np.asarray(np.log(energies), np.float32)


@cache
def _window_and_mel() -> tuple[Floats, Floats]:
    window = np.hanning(_LENGTH) ** 0.85

    def mel(hz: Doubles) -> Doubles:
        return np.asarray(1127 * np.log(1 + hz / 700))

    low, high = mel(np.array([20.0, SAMPLE_RATE / 2]))
    edges = np.linspace(low, high, 82)
    bins = mel(np.arange(_FFT // 2) * SAMPLE_RATE / _FFT)[:, None]
    rise = (bins - edges[:-2]) / (edges[1:-1] - edges[:-2])
    fall = (edges[2:] - bins) / (edges[2:] - edges[1:-1])
    return window.astype(np.float32), np.maximum(0, np.minimum(rise, fall)).astype(np.float32)
