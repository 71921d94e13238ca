"""Beam search over one chunk's tokens; `loop.py` owns its slots.

The rules are openai-whisper's (`decoding.py`, patience 1), with another length penalty, and three that
keep a search narrow. Timestamps count as one (`_branches`). Unlikely hypotheses are pruned, but for the
greedy one (Steinbiss, Tran and Ney, "Improvements in beam search", 1994). Hypotheses that say the same
are recombined. Imports no torch.

Keywords leave the likeliest hypotheses as they are until one is complete. An unfinished match earns
nothing; it keeps a tentative hypothesis in a free place, or in that of an unlikely one (`_add_tentative`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from asr_server.engine.boost import KeywordBoost, Match

# How far a hypothesis' log-probability may lie below the likeliest one's.
PRUNING_MARGIN: Final = 1.5
# Hypotheses that end in the same tokens go on alike.
NUM_SAME_TOKENS: Final = 2
# The exponent of the length by which a log-probability is divided before texts are compared: 0 favours the
# short ones, 1 is their tokens' mean (openai-whisper's), by which superfluous words cost too little.
LENGTH_PENALTY: Final = 0.5
# Tokens of keywords, beside the likeliest ones, with which a hypothesis may go on.
NUM_NAMED: Final = 3
# Places that unlikely hypotheses leave to those kept for a match. A rare name makes searches wide.
NUM_RESERVED: Final = 2
_LOG_2 = math.log(2)
# By how many tokens one of these may be ahead of the other: words are spelt in one token or in several.
_MAX_AHEAD = 2


def num_candidates(width: int) -> int:
    return width + 1 if width > 1 else 0


def num_named(width: int) -> int:
    return NUM_NAMED if width > 1 else 0


class _Branch(NamedTuple):
    sum_logprob: float  # with the bonus of complete keywords
    parent: int  # which of the running hypotheses it continues
    token: int
    logprob: float  # of the token, by the model
    is_greedy: bool
    match: Match
    is_tentative: bool

    @property
    def if_complete(self) -> float:
        """Return the log-probability if the match under way becomes a keyword."""
        return self.sum_logprob + self.match.pending


class Hypothesis(NamedTuple):
    tokens: tuple[int, ...] = ()  # end-of-text not included
    logprobs: tuple[float, ...] = ()  # of each token, by the model
    sum_logprob: float = 0.0  # end-of-text included, with the bonus of complete keywords
    is_ended: bool = False
    is_greedy: bool = True  # each token is the model's likeliest after those before it
    match: Match = Match()
    is_tentative: bool = False  # kept for its unfinished match alone

    def followed_by(self, branch: _Branch, end_of_text: int) -> Hypothesis:
        shared = branch.is_greedy, branch.match, branch.is_tentative
        if branch.token == end_of_text:
            return Hypothesis(self.tokens, self.logprobs, branch.sum_logprob, True, *shared)
        tokens, logprobs = (*self.tokens, branch.token), (*self.logprobs, branch.logprob)
        return Hypothesis(tokens, logprobs, branch.sum_logprob, False, *shared)


NextTokens = Iterable[tuple[int, float]]  # with their log-probabilities
Candidates = Sequence[NextTokens]  # of each hypothesis


class BeamSearch:
    def __init__(
        self,
        width: int,  # most hypotheses a step, and ended ones after which the search stops
        max_tokens: int,
        end_of_text: int,
        margin: float = PRUNING_MARGIN,  # infinite: openai-whisper's search
        audio_end: float = math.inf,  # timestamp from which no segment may begin
        boost: KeywordBoost | None = None,
    ) -> None:
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

    @property
    def agrees(self) -> bool:
        """Return whether one hypothesis goes on, and not for a match alone."""
        return len(self.running) == 1 and not self.running[0].is_tentative

    def append_if_sure(self, token: int, logprob: float, lead: float, others: NextTokens = ()) -> bool:
        """Append the token if `advance` would keep it alone; `leads` knows its lead.

        With keywords `others` are the tokens that could follow instead.
        """
        if not lead > self._margin or not self.agrees or self.ended or token == self._end_of_text:
            return False
        (before,) = self.running
        if self._ends_segment(before) and (token >= self._audio_end or lead < self._margin + _LOG_2):
            return False  # here the end of the text and a late time count as one
        if self._boost is None:  # by far the most: a step may have 128
            tokens, logprobs = (*before.tokens, token), (*before.logprobs, logprob)
            total = before.sum_logprob + logprob
            self.running = [Hypothesis(tokens, logprobs, total, is_greedy=before.is_greedy)]
            return True
        if _is_close(self._boost, before.match, logprob - self._margin, others):
            return False
        branch = self._branch(0, token, logprob, before.is_greedy)
        self.running = [before.followed_by(branch, self._end_of_text)]
        return True

    def advance(self, candidates: Candidates, named: Candidates = ()) -> list[int]:
        """Continue with the likeliest candidates of each hypothesis, and with others that keywords name.

        Returns the index of each new hypothesis's parent.
        """
        branches = [each for each in self._branches(candidates, named) if each.logprob > -math.inf]
        own = [each for each in branches if not each.is_tentative]
        own.sort(key=lambda each: (self._is_pruned and each.is_greedy, each.sum_logprob), reverse=True)
        going_on = (each.sum_logprob for each in own if each.token != self._end_of_text)
        lowest = max(going_on, default=-math.inf) - self._margin
        kept, parents = self._keep(own, lowest)
        if self._boost is not None:
            self._add_tentative(branches, lowest, kept, parents)
        self.running = kept
        return parents

    def _branches(self, candidates: Candidates, named: Candidates) -> Iterator[_Branch]:
        end, audio_end = self._end_of_text, self._audio_end
        for parent, (before, following) in enumerate(zip(self.running, candidates, strict=True)):
            if self._is_pruned:
                # The likeliest time is as likely as all of them together: when a sentence ends is seldom
                # sure; that it ends competes with other words.
                following = _as_one(list(following), lambda token: token > end)
            if audio_end < math.inf and self._ends_segment(before):
                following = _as_one(list(following), lambda token: token == end or token >= audio_end, end)
            for rank, (token, logprob) in enumerate(following):
                yield self._branch(parent, token, logprob, before.is_greedy and rank == 0)
        for parent, others in enumerate(named):
            for token, logprob in others:
                yield self._branch(parent, token, logprob, is_greedy=False, is_tentative=True)

    def _branch(
        self, parent: int, token: int, logprob: float, is_greedy: bool, is_tentative: bool = False
    ) -> _Branch:
        """Return a branch, tentative no longer once a keyword is complete."""
        before = self.running[parent]
        total, match = before.sum_logprob + logprob, before.match
        if self._boost is not None:
            match = self._boost.follow(before.match, token)
            earned = match.earned - before.match.earned
            total, is_tentative = total + earned, (is_tentative or before.is_tentative) and not earned
        return _Branch(total, parent, token, logprob, is_greedy, match, is_tentative)

    def _keep(self, branches: Iterable[_Branch], lowest: float) -> tuple[list[Hypothesis], list[int]]:
        """Return the hypotheses that go on with their parents; note those that end."""
        kept: list[Hypothesis] = []
        parents: list[int] = []
        for branch in branches:
            if len(kept) == self.width:
                break  # an end that is less likely than all that go on does not count
            if branch.sum_logprob < lowest and not (branch.is_greedy and self._is_pruned):
                continue
            hypothesis = self.running[branch.parent].followed_by(branch, self._end_of_text)
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
        return kept, parents

    def _add_tentative(
        self, branches: Iterable[_Branch], lowest: float, kept: list[Hypothesis], parents: list[int]
    ) -> None:
        """Keep unfinished matches that would be likely enough as keywords, as far as there are places."""
        matching = [each for each in branches if each.match.pending and each.if_complete >= lowest]
        num_own, least_own = len(kept), max(1, self.width - NUM_RESERVED)
        for branch in sorted(matching, key=lambda each: each.if_complete, reverse=True):
            before = self.running[branch.parent]
            hypothesis = before.followed_by(branch, self._end_of_text)._replace(
                is_greedy=False, is_tentative=True
            )
            hoped = hypothesis._replace(sum_logprob=branch.if_complete)
            if self._has_lost(hoped) or any(_is_same_match(hypothesis, each) for each in kept):
                continue
            if len(kept) == self.width:
                if num_own <= least_own:
                    return
                num_own -= 1
                del kept[num_own], parents[num_own]
            kept.append(hypothesis)
            parents.append(branch.parent)

    def bind(self, num_tokens: int) -> None:
        """Drop ended texts that do not begin with the first `num_tokens` of the running one."""
        reported = self.running[0].tokens[:num_tokens]
        self.ended = [text for text in self.ended if text.tokens[:num_tokens] == reported]

    def _ends_segment(self, hypothesis: Hypothesis) -> bool:
        return bool(hypothesis.tokens) and hypothesis.tokens[-1] > self._end_of_text

    def best(self) -> Hypothesis:
        """Return the likeliest text for its length; its log-probability is NaN if the model produced NaN."""
        missing = max(0, self.width - len(self.ended))
        going_on = [each for each in self.running if not each.is_tentative][:missing]
        none = Hypothesis(sum_logprob=math.nan)
        return max([*self.ended, *going_on], key=self._score, default=none)

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
        """Return the lead over a hypothesis with the same words, a few tokens apart; None for others.

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
                return hypothesis.sum_logprob - allowed - sum(other.logprobs[:-ahead]) - other.match.earned
            if own[-count - ahead : -ahead] == others[-count:]:
                own_sum = sum(hypothesis.logprobs[:-ahead]) + hypothesis.match.earned
                return own_sum - other.sum_logprob + allowed
        return None


def leads(
    tokens: npt.NDArray[np.floating], logprobs: npt.NDArray[np.floating], end_of_text: int
) -> tuple[list[float], list[float]]:
    """Return each row's likeliest log-probability, and how far it leads the next, all times being one.

    Candidates are [rows, candidates], the likeliest first.
    """
    is_time = tokens > end_of_text
    with np.errstate(invalid="ignore", divide="ignore"):  # a row of which no token is possible leads by NaN
        times = np.log(np.where(is_time, np.exp(logprobs), 0.0).sum(1))
        others = np.where(is_time, -np.inf, logprobs)[:, 1:].max(1)
        first = np.where(is_time[:, 0], np.minimum(times, 0.0), logprobs[:, 0])
        leads = first - np.where(is_time[:, 0], others, np.maximum(others, times))
    return first.tolist(), leads.tolist()


def _is_close(boost: KeywordBoost, match: Match, lowest: float, others: NextTokens) -> bool:
    lowest_plain = lowest - boost.row(match.state).highest
    return any(
        logprob >= lowest_plain and logprob + boost.bonus(match.state, token) >= lowest
        for token, logprob in others
    )


def _is_same_match(hypothesis: Hypothesis, other: Hypothesis) -> bool:
    is_same_end = hypothesis.tokens[-NUM_SAME_TOKENS:] == other.tokens[-NUM_SAME_TOKENS:]
    return is_same_end and hypothesis.match.state == other.match.state


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
