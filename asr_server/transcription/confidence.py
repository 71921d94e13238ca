"""Say of each word how probable it is that it was said: a logistic model of what its tokens tell.

The weights are fitted by `benchmarks/confidence.py`, where other evidence was tried and adds nothing.
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
        (_logit(word.probability), least[number], min(beside[number], beside[number + 2]), min(word.focus))
        for number, word in enumerate(words)
    ]
    return np.array(rows)


def _logit(probability: float) -> float:
    inside = min(max(probability, LEAST_PROBABILITY), 1 - LEAST_PROBABILITY)
    return math.log(inside / (1 - inside))
