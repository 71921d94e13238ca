"""Say how probable it is that a word, or a segment, was said: logistic models of what tokens and frames tell.

The words' weights are fitted by `benchmarks/confidence.py`, where other evidence was tried and adds nothing,
the segments' by `tools/fit_segments.py`.
"""

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from asr_server.audio.voice import Probabilities

FOLDER: Final = Path(__file__).parents[1] / "models" / "confidence"
WEIGHTS: Final = FOLDER / "words.json"
LEAST_PROBABILITY: Final = 1e-4  # of a token: beyond it one would decide alone
NUM_DIGITS: Final = 4

Evidence = npt.NDArray[np.float64]  # [num_words, features], in the order of `FEATURES`
FEATURES: Final = (
    "logit of the mean probability of its tokens",
    "log-probability of its least likely token",
    "log-probability of the least likely token of the words beside it",
    "least share of a token's attention that lies in the token's time",
)


class TokensOfWord(NamedTuple):
    logprobs: Sequence[float]  # of each token
    focus: Sequence[float]  # share of each token's attention that lies in its time

    @property
    def probability(self) -> float:
        return fmean(map(math.exp, self.logprobs))


class Model(msgspec.Struct, frozen=True):
    bias: float
    weights: tuple[float, ...]  # of the features

    def probabilities(self, evidence: Evidence) -> list[float]:
        logits = evidence @ np.array(self.weights) + self.bias
        return [round(each, NUM_DIGITS) for each in (1 / (1 + np.exp(-logits))).tolist()]


@cache
def model() -> Model:
    return msgspec.json.decode(WEIGHTS.read_bytes(), type=Model)


def confidences(words: Sequence[TokensOfWord]) -> list[float]:
    return model().probabilities(evidence_of(words)) if words else []


def evidence_of(words: Sequence[TokensOfWord]) -> Evidence:
    least = [max(math.log(LEAST_PROBABILITY), min(word.logprobs)) for word in words]
    beside = [0.0, *least, 0.0]  # nothing is doubted where no word is
    rows = [
        (logit(word.probability), least[number], min(beside[number], beside[number + 2]), min(word.focus))
        for number, word in enumerate(words)
    ]
    return np.array(rows)


def logit(probability: float) -> float:
    inside = min(max(probability, LEAST_PROBABILITY), 1 - LEAST_PROBABILITY)
    return math.log(inside / (1 - inside))


# -- Segments -----------------------------------------------------------------------------------------------

SEGMENT_WEIGHTS: Final = FOLDER / "segments.json"
SEGMENT_FEATURES: Final = (
    "mean log-probability of its tokens",
    "logit of the chunk's no-speech probability",
    "logarithm of its letters",
    "logarithm of its seconds",
    "logit of the fourth best frame of the detector",
)
LEAST_LOGPROB: Final = -2.0  # below it all text is the same
LEAST_FRAME: Final = 1e-3
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
    (probability,) = model.probabilities(np.array([evidence]))
    return probability


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
        logit(no_speech_prob),
        math.log(max(1, num_letters)),
        math.log(max(LEAST_S, duration_s)),
    ]
    if frames is None:
        return text
    best = np.sort(frames)[-BEST_FRAME] if len(frames) >= BEST_FRAME else 0.0
    return [*text, logit(max(LEAST_FRAME, float(best)))]
