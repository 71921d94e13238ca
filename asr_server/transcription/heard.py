"""Hear a chunk with the voice detector, once. All questions about its speech are asked of these frames.

Among them: how probable it is that somebody says a segment of text, by a logistic model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import chain, pairwise
from operator import mul
from statistics import fmean
from typing import Final

import msgspec
import numpy as np

from asr_server.audio.voice import FRAME_S, Probabilities, frames_of, possible_and_certain_s
from asr_server.core import Chunk, ChunkResult
from asr_server.levels import Interval, joined
from asr_server.transcription.confidence import FOLDER, Model
from asr_server.transcription.segments import between

SURELY_S: Final = 0.5  # of certain speech: Whisper's own judgement counts no more
# On both sides of a segment: what its times may be off. A faint beginning or a last consonant is no voice to
# the detector.
MARGIN_S: Final = 0.2
MIN_SILENCE_S: Final = 0.4  # that parts words
NO_SPEECH_S: Final = 3.0  # of sound without speech, at least: it is left out, but for `KEPT_S`
KEPT_S: Final = 1.0  # of it beside speech
LANGUAGE_S: Final = 1.0  # of certain speech, by which a language is known
LANGUAGE_PAUSE_S: Final = 0.2  # between two languages, as the detector hears it: a tenth less than it is
LOUD: Final = 0.5  # of the level of the stretches: what lies between them may hide speech


class Heard(msgspec.Struct, frozen=True):
    """When speech in a chunk is possible and when certain, on the file's clock, and what is to be read.

    `frames` are the detector's probabilities from the chunk's start.
    """

    chunk: Chunk
    stretches: Sequence[Chunk]  # of the chunk, to be read
    possible_s: Sequence[Interval] = ()
    certain_s: Sequence[Interval] = ()
    frames: Probabilities = np.empty(0, np.float32)
    is_loud_between: bool = False  # much sound is left out between the stretches
    is_checked: bool = False
    is_copy: bool = False  # of the other channel, and therefore silent

    @property
    def uncut(self) -> Heard:
        """Return what is to be judged by its text alone: sound deafens the detector."""
        return msgspec.structs.replace(self, possible_s=(), frames=np.empty(0, np.float32))

    def around(self, number: int) -> Chunk:
        """Return a stretch with the sound around it, up to the middle of the gaps beside it."""
        edges_s = [(each.start_s, each.start_s + each.duration_s) for each in self.stretches]
        middles_s = [(before[1] + behind[0]) / 2 - self.chunk.start_s for before, behind in pairwise(edges_s)]
        borders_s = [0.0, *middles_s, self.chunk.duration_s]
        return between(self.chunk, *borders_s[number : number + 2])

    @property
    def may_be_spoken(self) -> bool:
        return bool(self.possible_s) or not self.is_checked

    @property
    def apart(self) -> Heard:
        """Return this with the stretches cut in their pauses, where the language may change."""
        stretches = [part for stretch in self.stretches for part in self._sentences(stretch)]
        return msgspec.structs.replace(self, stretches=stretches)

    def _sentences(self, stretch: Chunk) -> list[Chunk]:
        end_s = stretch.start_s + stretch.duration_s
        edges_s = [stretch.start_s]
        for last_s, next_s in self.pauses(stretch.start_s, end_s):
            cut_s = (last_s + next_s) / 2
            is_long = next_s - last_s >= LANGUAGE_PAUSE_S
            sides_s = (edges_s[-1], cut_s), (cut_s, end_s)
            if is_long and all(self.certainly_spoken_s(*each) >= LANGUAGE_S for each in sides_s):
                edges_s.append(cut_s)
        return [
            between(stretch, start_s - stretch.start_s, stop_s - stretch.start_s)
            for start_s, stop_s in pairwise([*edges_s, end_s])
        ]

    def certain(self, start_s: float, end_s: float) -> list[Interval]:
        clipped = [(max(start_s, first_s), min(end_s, last_s)) for first_s, last_s in self.certain_s]
        return [(first_s, last_s) for first_s, last_s in clipped if first_s < last_s]

    def certainly_spoken_s(self, start_s: float, end_s: float) -> float:
        return sum(last_s - first_s for first_s, last_s in self.certain(start_s, end_s))

    def spoken_in_s(self, chunk: Chunk) -> float:
        return self.certainly_spoken_s(chunk.start_s, chunk.start_s + chunk.duration_s)

    def voice(self, start_s: float, end_s: float) -> Probabilities | None:
        """Return the frames between two times, and a little beside them; None: nobody has listened."""
        if not len(self.frames):
            return None
        first, end = (
            (time_s - self.chunk.start_s) / FRAME_S for time_s in (start_s - MARGIN_S, end_s + MARGIN_S)
        )
        return self.frames[max(0, math.floor(first)) : max(0, math.ceil(end))]

    def is_surely_speech(self, start_s: float, end_s: float) -> bool:
        return self.certainly_spoken_s(start_s, end_s) >= SURELY_S

    def pauses(self, start_s: float, end_s: float) -> list[Interval]:
        between_s = [(before[1], behind[0]) for before, behind in pairwise(self.possible_s)]
        return [(last_s, next_s) for last_s, next_s in between_s if start_s <= last_s and next_s <= end_s]

    def with_silences(self, result: ChunkResult, chunk: Chunk) -> ChunkResult:
        """Add intervals in which nobody may speak to the pauses that part words, as loudness finds them."""
        if not result.token_times_s or not self.possible_s:
            return result
        edges_s = [-math.inf, *chain(*self.possible_s), math.inf]
        silences_s = [
            (
                max(0.0, start_s + MARGIN_S - chunk.start_s),
                min(chunk.duration_s, end_s - MARGIN_S - chunk.start_s),
            )
            for start_s, end_s in zip(edges_s[::2], edges_s[1::2], strict=True)
        ]
        silences_s = [(start_s, end_s) for start_s, end_s in silences_s if end_s - start_s >= MIN_SILENCE_S]
        return msgspec.structs.replace(result, pauses_s=tuple(joined([*result.pauses_s, *silences_s])))


def hear(chunk: Chunk) -> Heard:
    """Run the detector; cut the chunk at long gaps in speech. Without speech it stays whole, unread."""
    frames = frames_of(chunk.samples)
    possible_s, certain_s = possible_and_certain_s(frames)
    intervals_s = _stretches_s(possible_s, chunk.duration_s) if possible_s else []
    stretches = [between(chunk, start_s, end_s) for start_s, end_s in intervals_s] or [chunk]
    is_cut = sum(len(stretch.samples) for stretch in stretches) < len(chunk.samples)
    is_loud = is_cut and _is_loud(stretches, chunk)
    possible_s, certain_s = (
        [(chunk.start_s + start_s, chunk.start_s + end_s) for start_s, end_s in intervals_s]
        for intervals_s in (possible_s, certain_s)
    )
    return Heard(chunk, stretches, possible_s, certain_s, frames, is_loud, is_checked=True)


def _stretches_s(speech_s: Sequence[Interval], duration_s: float) -> list[Interval]:
    edges_s = [0.0]
    spoken_to_s = 0.0
    for start_s, end_s in [*speech_s, (duration_s, duration_s)]:
        if start_s - spoken_to_s >= NO_SPEECH_S:
            edges_s += [spoken_to_s + KEPT_S, start_s - KEPT_S]
        spoken_to_s = end_s
    if speech_s[0][0] >= NO_SPEECH_S:
        del edges_s[:2]
    if duration_s - speech_s[-1][1] >= NO_SPEECH_S:
        del edges_s[-1]
    else:
        edges_s.append(duration_s)
    return list(zip(edges_s[::2], edges_s[1::2], strict=True))


def _is_loud(stretches: Sequence[Chunk], chunk: Chunk) -> bool:
    is_left_out = np.ones(len(chunk.samples), bool)
    for stretch in stretches:
        first = stretch.start_sample - chunk.start_sample
        is_left_out[first : first + len(stretch.samples)] = False
    return bool(np.std(chunk.samples[is_left_out]) >= LOUD * np.std(chunk.samples[~is_left_out]))


# -- What was said -------------------------------------------------------------------------------------------

SEGMENT_WEIGHTS: Final = FOLDER / "segments.json"  # fitted by `tools/fit_segments.py`
SEGMENT_FEATURES: Final = (
    "mean log-probability of its tokens",
    "logit of the chunk's no-speech probability",
    "logarithm of its letters",
    "logarithm of its seconds",
    "logit of the fourth best frame of the detector",
)
LEAST_LOGPROB: Final = -2.0  # below it all text is the same
LEAST_FRAME: Final = 1e-3
LEAST_PROBABILITY: Final = 1e-4
BEST_FRAME: Final = 4  # 128 ms of speech
LEAST_S: Final = 0.5  # of a segment: shorter times tell nothing


class SegmentModel(msgspec.Struct, frozen=True):
    heard: Model
    unheard: Model  # without the detector's frames


@cache
def segment_model() -> SegmentModel:
    return msgspec.json.decode(SEGMENT_WEIGHTS.read_bytes(), type=SegmentModel)


def segment_probability(evidence: Sequence[float]) -> float:
    """Return how probable it is that a segment was said; where nobody has listened, by its text alone."""
    both = segment_model()
    model = both.heard if len(evidence) == len(both.heard.weights) else both.unheard
    return 1 / (1 + math.exp(-model.bias - sum(map(mul, model.weights, evidence))))


def segment_evidence(
    logprobs: Sequence[float],
    no_speech_prob: float,
    num_letters: int,
    duration_s: float,
    frames: Probabilities | None,
) -> list[float]:
    """Return the values of `SEGMENT_FEATURES`; those of the detector where it has listened."""
    text = [
        max(LEAST_LOGPROB, fmean(logprobs)),
        _logit(no_speech_prob),
        math.log(max(1, num_letters)),
        math.log(max(LEAST_S, duration_s)),
    ]
    if frames is None:
        return text
    best = np.sort(frames)[-BEST_FRAME] if len(frames) >= BEST_FRAME else 0.0
    return [*text, _logit(max(LEAST_FRAME, float(best)))]


def _logit(probability: float) -> float:
    inside = min(max(probability, LEAST_PROBABILITY), 1 - LEAST_PROBABILITY)
    return math.log(inside / (1 - inside))
