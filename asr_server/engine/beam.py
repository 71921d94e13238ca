"""Beam search over one chunk's tokens: the host's record of it; `runner.py` has the slots.

The rules are openai-whisper's (`decoding.py`: BeamSearchDecoder, with a patience of 1, and
MaximumLikelihoodRanker). Runs in the replica's process. Used by `loop.py` and `active_chunk.py`; imports no
torch and knows no device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Hypothesis:
    """The beginning of a text, or with `is_ended` a whole text."""

    tokens: tuple[int, ...] = ()  # end-of-text not included
    logprobs: tuple[float, ...] = ()  # of each token
    sum_logprob: float = 0.0  # end-of-text included
    is_ended: bool = False

    def followed_by(self, token: int, logprob: float, end_of_text: int) -> Hypothesis:
        total = self.sum_logprob + logprob
        if token == end_of_text:
            return Hypothesis(self.tokens, self.logprobs, total, is_ended=True)
        return Hypothesis((*self.tokens, token), (*self.logprobs, logprob), total)


class Branch(NamedTuple):
    """One of the next hypotheses, and which of the running ones it continues."""

    parent: int  # which of the running hypotheses it continues
    hypothesis: Hypothesis


class BeamSearch:
    """The likeliest hypotheses of one chunk, each a token longer with every step."""

    def __init__(self, width: int, max_tokens: int, end_of_text: int) -> None:
        """
        Args:
            width: hypotheses that go on after each step, and ended ones after which the search is over.
            max_tokens: the longest a hypothesis may become.
        """
        self.width = width
        self.running = [Hypothesis()]
        self._ended: list[Hypothesis] = []
        self._max_tokens = max_tokens
        self._end_of_text = end_of_text

    @property
    def num_candidates(self) -> int:
        """How many next tokens of each hypothesis are compared: one of them may be end-of-text."""
        return self.width + 1

    @property
    def is_over(self) -> bool:
        if not self.running or len(self._ended) >= self.width:
            return True
        return len(self.running[0].tokens) >= self._max_tokens

    def advance(self, candidates: Sequence[Iterable[tuple[int, float]]]) -> list[int]:
        """Goes on with the likeliest continuations.

        Args:
            candidates: for each running hypothesis its likeliest next tokens, with their log-probabilities.
        Returns:
            for each hypothesis that runs now, which of those before it continues.
        """
        branches = [
            Branch(parent, before.followed_by(token, logprob, self._end_of_text))
            for parent, (before, following) in enumerate(zip(self.running, candidates, strict=True))
            for token, logprob in following
            if logprob > -math.inf  # not forbidden, and a number
        ]
        branches.sort(key=lambda branch: branch.hypothesis.sum_logprob, reverse=True)
        kept: list[Branch] = []
        for branch in branches:
            if len(kept) == self.width:
                break  # an end that is less likely than all that go on does not count
            if not branch.hypothesis.is_ended:
                kept.append(branch)
            elif len(self._ended) < self.width:
                self._ended.append(branch.hypothesis)
        self.running = [branch.hypothesis for branch in kept]
        return [branch.parent for branch in kept]

    def best(self) -> Hypothesis:
        """The likeliest for its length: of the ended ones, and where too few have ended of the others too."""
        missing = max(0, self.width - len(self._ended))
        return max([*self._ended, *self.running[:missing]], key=_score, default=Hypothesis())


def _score(hypothesis: Hypothesis) -> float:
    return hypothesis.sum_logprob / max(1, len(hypothesis.tokens))
