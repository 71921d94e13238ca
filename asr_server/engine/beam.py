"""Beam search over one chunk's tokens; `loop.py` owns its slots.

The rules are openai-whisper's (`decoding.py`, patience 1), with another length penalty, and three that
keep a search narrow. Timestamps count as one (`_one_time`). Unlikely hypotheses are pruned, but for the
greedy one (Steinbiss, Tran and Ney, "Improvements in beam search", 1994). Hypotheses that say the same
are recombined. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from asr_server.engine.boost import KeywordBoost

# How far a hypothesis' log-probability may lie below the likeliest one's.
PRUNING_MARGIN: Final = 1.5
# Hypotheses that end in the same tokens go on alike.
NUM_SAME_TOKENS: Final = 2
# The exponent of the length by which a log-probability is divided before texts are compared: 0 favours the
# short ones, 1 is their tokens' mean (openai-whisper's), by which superfluous words cost too little.
LENGTH_PENALTY: Final = 0.5
# By how many tokens one of these may be ahead of the other: words are spelt in one token or in several.
_MAX_AHEAD = 2


def num_candidates(width: int) -> int:
    return width + 1 if width > 1 else 0


class _Branch(NamedTuple):
    sum_logprob: float
    parent: int  # which of the running hypotheses it continues
    token: int
    logprob: float
    is_greedy: bool


class Hypothesis(NamedTuple):
    tokens: tuple[int, ...] = ()  # end-of-text not included
    logprobs: tuple[float, ...] = ()  # of each token, with the bonus of keywords
    sum_logprob: float = 0.0  # end-of-text included
    is_ended: bool = False
    is_greedy: bool = True  # each token is the model's likeliest after those before it
    bonuses: tuple[float, ...] = ()  # of keywords, for each token and end-of-text; empty without any
    state: int = KeywordBoost.start

    @property
    def model_logprobs(self) -> tuple[float, ...]:
        """Return the log-probability of each token without the bonus of keywords."""
        if not self.bonuses:
            return self.logprobs
        return tuple(logprob - bonus for logprob, bonus in zip(self.logprobs, self.bonuses, strict=False))

    def followed_by(self, branch: _Branch, end_of_text: int, boost: KeywordBoost | None) -> Hypothesis:
        total, _, token, logprob, is_greedy = branch
        bonuses, state = self.bonuses, self.state
        if boost is not None:
            bonuses, state = (*bonuses, boost.delta(state, token)), boost.step(state, token)
        if token == end_of_text:
            return Hypothesis(self.tokens, self.logprobs, total, True, is_greedy, bonuses, state)
        tokens, logprobs = (*self.tokens, token), (*self.logprobs, logprob)
        return Hypothesis(tokens, logprobs, total, False, is_greedy, bonuses, state)


class BeamSearch:
    def __init__(
        self,
        width: int,
        max_tokens: int,
        end_of_text: int,
        margin: float = PRUNING_MARGIN,
        audio_end: float = math.inf,
        boost: KeywordBoost | None = None,
    ) -> None:
        """Args:
        width: most hypotheses a step, and ended ones after which the search stops.
        max_tokens: greatest length.
        margin: drop hypotheses further below the likeliest. Infinite gives openai-whisper's search: no
            recombination, and texts are compared by their mean.
        audio_end: timestamp from which no segment may begin.
        boost: of keywords; next tokens' log-probabilities include its rows.
        """
        self.width = width
        self.running = [Hypothesis()]
        self.ended: list[Hypothesis] = []
        self._max_tokens = max_tokens
        self._end_of_text = end_of_text
        self._audio_end = audio_end
        self._margin = margin
        self._boost = boost
        self._is_pruned = margin < math.inf
        self._length_penalty = LENGTH_PENALTY if self._is_pruned else 1.0

    @property
    def is_over(self) -> bool:
        if not self.running or len(self.ended) >= self.width:
            return True
        return len(self.running[0].tokens) >= self._max_tokens

    def append_if_sure(self, token: int, logprob: float, lead: float) -> bool:
        """Append the token if `advance` would keep it alone; `lead` is of `leads`."""
        if not lead > self._margin or len(self.running) > 1 or self.ended or token >= self._end_of_text:
            return False
        (before,) = self.running
        if self._ends_segment(before):
            return False
        if self._boost is not None:
            if not lead - self._boost.bonus(before.state, token) > self._margin:
                return False  # the model's likeliest may be another one
            logprob -= self._boost.potential(before.state)
        branch = _Branch(before.sum_logprob + logprob, 0, token, logprob, before.is_greedy)
        self.running = [before.followed_by(branch, self._end_of_text, self._boost)]
        return True

    def advance(self, candidates: Sequence[Iterable[tuple[int, float]]]) -> list[int]:
        """Continue with the likeliest candidates.

        Args:
            candidates: each hypothesis's next tokens with log-probabilities.
        Returns:
            the index of each new hypothesis's parent.
        """
        branches = [
            _Branch(before.sum_logprob + logprob, parent, token, logprob, before.is_greedy and rank == 0)
            for parent, (before, following) in enumerate(zip(self.running, candidates, strict=True))
            for rank, (token, logprob) in enumerate(self._following(before, following))
            if logprob > -math.inf  # not forbidden, and a number
        ]
        branches.sort(key=self._rank, reverse=True)
        certain = [self._certain(each) for each in branches if each.token != self._end_of_text]
        lowest = max(certain, default=-math.inf) - self._margin
        kept: list[Hypothesis] = []
        parents: list[int] = []
        for branch in branches:
            if len(kept) == self.width:
                break  # an end that is less likely than all that go on does not count
            if branch.sum_logprob < lowest and not (branch.is_greedy and self._is_pruned):
                continue
            hypothesis = self.running[branch.parent].followed_by(branch, self._end_of_text, self._boost)
            if hypothesis.is_ended:
                if len(self.ended) < self.width:
                    self.ended.append(hypothesis)
            elif self._has_lost(hypothesis):
                continue
            elif (same := self._find_same(hypothesis, kept)) is None:
                kept.append(hypothesis)
                parents.append(branch.parent)
            else:
                place, lead = same
                is_greedy = hypothesis.is_greedy or kept[place].is_greedy  # it goes on for the greedy one
                if lead > 0:
                    kept[place], parents[place] = hypothesis, branch.parent
                kept[place] = kept[place]._replace(is_greedy=is_greedy)
        self.running = kept
        return parents

    def _certain(self, branch: _Branch) -> float:
        """Return a branch's log-probability without what a keyword may yet give back: by that others are
        pruned.
        """
        if self._boost is None:
            return branch.sum_logprob
        state = self._boost.step(self.running[branch.parent].state, branch.token)
        return branch.sum_logprob - self._boost.potential(state)

    def _rank(self, branch: _Branch) -> tuple[bool, float]:
        return self._is_pruned and branch.is_greedy, branch.sum_logprob

    def _following(
        self, before: Hypothesis, candidates: Iterable[tuple[int, float]]
    ) -> Iterable[tuple[int, float]]:
        if self._boost is not None:
            candidates = _unshifted(list(candidates), self._boost, before.state)
        return self._within_audio(before, self._one_time(candidates))

    def _one_time(self, candidates: Iterable[tuple[int, float]]) -> Iterable[tuple[int, float]]:
        """Keep the likeliest timestamp, as likely as all of them together.

        When a sentence ends is seldom sure; that it ends competes with other words.
        """
        if not self._is_pruned:
            return candidates
        return _as_one(list(candidates), lambda token: token > self._end_of_text)

    def _within_audio(
        self, before: Hypothesis, candidates: Iterable[tuple[int, float]]
    ) -> Iterable[tuple[int, float]]:
        if self._audio_end == math.inf or not self._ends_segment(before):
            return candidates
        end, audio_end = self._end_of_text, self._audio_end
        return _as_one(list(candidates), lambda token: token == end or token >= audio_end, end)

    def bind(self, num_tokens: int) -> None:
        """Drop ended texts that do not begin with the first `num_tokens` of the running one."""
        reported = self.running[0].tokens[:num_tokens]
        self.ended = [text for text in self.ended if text.tokens[:num_tokens] == reported]

    def _ends_segment(self, hypothesis: Hypothesis) -> bool:
        return bool(hypothesis.tokens) and hypothesis.tokens[-1] > self._end_of_text

    def reorder(self, order: Sequence[int]) -> None:
        self.running = [self.running[index] for index in order]

    def best(self) -> Hypothesis:
        """Return the likeliest text for its length. If the model produced NaN, its log-probability is
        NaN.
        """
        missing = max(0, self.width - len(self.ended))
        none = Hypothesis(sum_logprob=math.nan)
        return max([*self.ended, *self.running[:missing]], key=self._score, default=none)

    def _score(self, hypothesis: Hypothesis) -> float:
        return hypothesis.sum_logprob / math.pow(max(1, len(hypothesis.tokens)), self._length_penalty)

    def _has_lost(self, hypothesis: Hypothesis) -> bool:
        best = max(self.ended, key=self._score, default=None)
        if best is None or hypothesis.sum_logprob >= best.sum_logprob - self._margin:
            return False
        return self._score(hypothesis) < self._score(best)

    def _find_same(self, hypothesis: Hypothesis, others: Sequence[Hypothesis]) -> tuple[int, float] | None:
        for place, each in enumerate(others):
            if (lead := self._lead(hypothesis, each)) is not None:
                return place, lead
        return None

    def _lead(self, hypothesis: Hypothesis, other: Hypothesis) -> float | None:
        """Return the lead over a hypothesis with the same words, a few tokens earlier or later; None for
        others.

        A longer one may be less likely, as long as its score for its length is equal.
        """
        count, own, others = NUM_SAME_TOKENS, hypothesis.tokens, other.tokens
        if not self._is_pruned or len(own) < count:
            return None
        if own[-count:] == others[-count:]:
            return hypothesis.sum_logprob - other.sum_logprob
        for ahead in range(1, min(_MAX_AHEAD, len(own) - count) + 1):
            allowed = ahead * self._length_penalty * hypothesis.sum_logprob / len(own)
            if others[-count - ahead : -ahead] == own[-count:]:
                return hypothesis.sum_logprob - allowed - sum(other.logprobs[:-ahead])
            if own[-count - ahead : -ahead] == others[-count:]:
                return sum(hypothesis.logprobs[:-ahead]) - other.sum_logprob + allowed
        return None


def leads(logprobs: npt.NDArray[np.floating]) -> list[float]:
    """Return how far each row's first log-probability leads the sum of all others.

    Args:
        logprobs: [rows, candidates], the likeliest first.
    """
    others = logprobs[:, 1] + math.log(logprobs.shape[1] - 1)
    with np.errstate(invalid="ignore"):  # a row of which no token is possible leads by NaN
        values: list[float] = (logprobs[:, 0] - others).tolist()
    return values


def _unshifted(
    candidates: Sequence[tuple[int, float]], boost: KeywordBoost, state: int
) -> list[tuple[int, float]]:
    """Return candidates less what a match that breaks off gives back, the model's likeliest first: however
    large the bonus of another token, the model's own text goes on.
    """
    potential = boost.potential(state)
    own = max(candidates, key=lambda each: each[1] - boost.bonus(state, each[0]))
    ordered = [own, *(each for each in candidates if each is not own)]
    return [(token, logprob - potential) for token, logprob in ordered]


def _as_one(
    candidates: Sequence[tuple[int, float]], are_one: Callable[[int], bool], named: int | None = None
) -> Iterator[tuple[int, float]]:
    of_any = sum(math.exp(logprob) for token, logprob in candidates if are_one(token))
    is_told = not of_any > 0  # none of them is possible, or a number is none
    for token, logprob in candidates:
        if not are_one(token):
            yield token, logprob
        elif not is_told:
            yield token if named is None else named, min(0.0, math.log(of_any))
            is_told = True
