"""Find a request's language by the vote of its first chunks with speech."""

import asyncio
import math
from collections.abc import Collection, Mapping
from heapq import nlargest
from operator import itemgetter
from typing import Final

from asr_server.core import ChunkResult

CONFIDENT: Final = 0.8  # that the language is right: more chunks need not be heard
MAX_VOTES: Final = 4  # chunks with speech, however doubtful
LEAST_PROBABILITY: Final = 1e-6  # so that one chunk cannot rule out a language


def likeliest(probabilities: Mapping[str, float], candidates: Collection[str]) -> str:
    eligible = [code for code in probabilities if code in candidates] or list(probabilities)
    return max(eligible, key=probabilities.__getitem__)


class LanguageDetector:
    """Let one chunk at a time detect, while the others wait.

    A chunk votes with its log-probabilities; the largest sum wins. A sure first chunk decides alone.
    `guess` is the language in which a voting chunk is decoded; if another wins, it is decoded again.
    """

    def __init__(
        self,
        code: str | None,
        candidates: tuple[str, ...] = (),
        max_votes: int = MAX_VOTES,
        per_chunk: bool = False,
    ) -> None:
        self.is_per_chunk = per_chunk and code is None
        self.code = code  # once known
        self.probability: float | None = None  # that it is right, where it was detected
        self.guess = code  # the likeliest so far, perhaps of a chunk without speech
        self._candidates = candidates
        self._max_votes = max_votes
        self._num_votes = 0
        self._votes: dict[str, float] = {}
        self._pending: dict[str, float] = {}  # of the chunk that detects
        self._all_sent = False
        self._probe_finished: asyncio.Event | None = None  # by the chunk that detects
        self._settled = asyncio.Event()
        if code is not None:
            self._settled.set()

    @property
    def is_settled(self) -> bool:
        return self.is_per_chunk or self.code is not None

    def language_of(self, detected: str | None) -> str | None:
        return detected if self.is_per_chunk else self.code

    async def next_language(self) -> str | None:
        while not self.is_settled:
            if self._probe_finished is None or self._probe_finished.is_set():
                self._probe_finished = asyncio.Event()
                return None
            await self._probe_finished.wait()
        return self.code

    def on_probabilities(self, probabilities: Mapping[str, float]) -> str:
        if self.is_per_chunk:
            return likeliest(probabilities, self._candidates)
        eligible = [code for code in probabilities if code in self._candidates] or list(probabilities)
        total = sum(probabilities[code] for code in eligible) or 1.0
        shares = {code: max(probabilities[code] / total, LEAST_PROBABILITY) for code in eligible}
        self._pending = {code: math.log(share) for code, share in shares.items()}
        self.guess, probability = _winner(self._sum())
        if probability >= CONFIDENT:
            self._settle(self.guess, probability)
        return self.guess

    def rivals(self, probabilities: Mapping[str, float]) -> dict[str, float]:
        """Return the two likeliest languages of a part with its own, if that is in doubt; else none."""
        if not self.is_per_chunk or max(probabilities.values()) >= CONFIDENT:
            return {}
        return dict(nlargest(2, probabilities.items(), key=itemgetter(1)))

    def likeliest_of_part(self, probabilities: Mapping[str, float]) -> str:
        return likeliest(probabilities, self._candidates)

    def on_decoded(self, language: str | None) -> None:
        """Note the language in which the detecting chunk was read; None, without speech, has no vote."""
        if self.code is None and language is not None:
            self._votes, self._num_votes = self._sum(), self._num_votes + 1
        self._pending = {}
        if self._probe_finished is not None:
            self._probe_finished.set()
        if self._all_sent or self._num_votes >= self._max_votes:
            self._conclude()

    def on_all_sent(self) -> None:
        self._all_sent = True
        if self._probe_finished is None or self._probe_finished.is_set():
            self._conclude()

    def _conclude(self) -> None:
        if self.code is None and self._votes:
            self._settle(*_winner(self._votes))
        self._settled.set()

    async def conclusion(self) -> str | None:
        """Wait for the language. Only a chunk that has voted may wait."""
        await self._settled.wait()
        return self.code

    def _sum(self) -> dict[str, float]:
        return {code: value + self._votes.get(code, 0.0) for code, value in self._pending.items()}

    def _settle(self, language: str, probability: float) -> None:
        self.code, self.probability = language, probability
        if self._probe_finished is not None:
            self._probe_finished.set()
        self._settled.set()


def joint_logprob(result: ChunkResult, language_probability: float) -> float:
    """Return the sum over the language, the text's tokens and its end.

    Their mean would favour scripts that take several tokens a letter.
    """
    of_language = math.log(max(language_probability, LEAST_PROBABILITY))
    return of_language + result.avg_logprob * (len(result.tokens) + 1)


def _winner(votes: Mapping[str, float]) -> tuple[str, float]:
    code = max(votes, key=votes.__getitem__)
    return code, 1 / sum(math.exp(value - votes[code]) for value in votes.values())
