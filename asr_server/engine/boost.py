"""Keywords that bias decoding: a state machine over a text's tokens.

Each token that continues a keyword gains a bonus. A broken match returns it, a complete one keeps it.
Matches begin at word starts. Pure rules: `runner.py` looks up the tokens of a state's row, `beam.py` and
`active_chunk.py` step.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from typing import Final, NamedTuple

from asr_server.checkpoint.tokenizer import Tokenizer

FIRST_BONUS: Final = 1.0  # of a keyword's first token, which many other words share
NEXT_BONUS: Final = 2.0  # of each further one
MAX_TOKENS: Final = 24  # of a keyword: what is longer is a sentence

_AT_WORD, _IN_WORD = 0, 1  # outside of a keyword, where a word may begin without a space or not


@dataclass(frozen=True)
class Row:
    """A state's additions to the next token's scores, shifted to be at least 0.

    The score changes by these less the state's potential.
    """

    tokens: tuple[int, ...]
    bonuses: tuple[float, ...]

    @cached_property
    def highest(self) -> float:
        return max(self.bonuses, default=0.0)

    @cached_property
    def _hash(self) -> int:
        return hash((self.tokens, self.bonuses))

    def __hash__(self) -> int:
        """Return it as made once: a row of 64 keywords has some 200 tokens, and is looked up each step."""
        return self._hash


class Match(NamedTuple):
    """A text's progress through keywords."""

    state: int = _AT_WORD
    earned: float = 0.0  # by complete keywords
    pending: float = 0.0  # lost if the match under way breaks off


@dataclass(slots=True)
class _State:
    gain: float = 0.0  # what the tokens of the match have earned
    kept: float = 0.0  # what remains where the match breaks off
    next: dict[int, int] = field(default_factory=dict)
    is_complete: bool = False
    row: Row | None = None


class KeywordBoost:
    start: Final = _AT_WORD

    def __init__(
        self,
        spaced: Iterable[Sequence[int]],  # tokens of keywords that may follow any token
        unspaced: Iterable[Sequence[int]],  # of keywords that need a word start without a space
        opens_word: Callable[[int], bool],  # whether a word may begin without a space behind this token
    ) -> None:
        self._states = [_State(), _State()]
        self._opens_word = opens_word
        spaced = list(spaced)
        for tokens in [*spaced, *unspaced]:
            if 0 < len(tokens) <= MAX_TOKENS:
                self._add(tokens)
        anywhere = {tokens[0] for tokens in spaced if tokens}
        first = self._states[_AT_WORD].next
        self._begun = {token: state for token, state in first.items() if token in anywhere}
        self._states[_IN_WORD].next = self._begun
        self._note_what_is_kept()

    def _add(self, tokens: Sequence[int]) -> None:
        at = _AT_WORD
        for token in tokens:
            before = self._states[at]
            if token not in before.next:
                before.next[token] = len(self._states)
                self._states.append(_State(before.gain + (NEXT_BONUS if at else FIRST_BONUS)))
            at = before.next[token]
        self._states[at].is_complete = True

    def _note_what_is_kept(self) -> None:
        for state in self._states:  # those that continue a state stand behind it
            if state.is_complete:
                state.kept = state.gain
            for following in state.next.values():
                self._states[following].kept = state.kept

    def step(self, state: int, token: int) -> int:
        following = self._states[state].next.get(token, self._begun.get(token))
        if following is not None:
            return following
        return _AT_WORD if self._opens_word(token) else _IN_WORD

    def guess(self, state: int) -> int:
        """Return the likeliest state behind one more token."""
        following = self._states[state].next if state > _IN_WORD else {}
        return next(iter(following.values()), _IN_WORD)

    def potential(self, state: int) -> float:
        """Return the bonus lost if the match breaks off."""
        return self._states[state].gain - self._states[state].kept

    def follow(self, match: Match, token: int) -> Match:
        state = self.step(match.state, token)
        pending = self.potential(state)
        return Match(state, match.earned + self.bonus(match.state, token) - pending, pending)

    def bonus(self, state: int, token: int) -> float:
        before = self._states[state]
        if token in before.next:
            return self._states[before.next[token]].gain - before.kept
        return self._states[self._begun[token]].gain if token in self._begun else 0.0

    def row(self, state: int) -> Row:
        found = self._states[state]
        if found.row is None:
            tokens = tuple(self._begun | found.next)
            bonuses = tuple(self.bonus(state, token) for token in tokens)
            found.row = Row(tokens, bonuses)
        return found.row


@lru_cache(maxsize=32)
def keyword_boost(tokenizer: Tokenizer, keywords: tuple[str, ...]) -> KeywordBoost:
    """Return the machine of these keywords, in several cases."""
    spaced: dict[tuple[int, ...], None] = {}
    unspaced: dict[tuple[int, ...], None] = {}
    for keyword in keywords:
        for spelling in dict.fromkeys((keyword, keyword.lower(), keyword[0].upper() + keyword[1:])):
            spaced |= dict.fromkeys(_tokenizations(tokenizer, " " + spelling))
            plain = dict.fromkeys(_tokenizations(tokenizer, spelling))
            if _is_written_without_spaces(spelling[0]):
                spaced |= plain
            else:
                unspaced |= plain

    @cache
    def opens_word(token: int) -> bool:
        text = tokenizer.decode([token])
        return not text or not (text[-1].isalnum() or text[-1] in "'’�")

    return KeywordBoost(spaced, unspaced, opens_word)


def _tokenizations(tokenizer: Tokenizer, text: str) -> Iterator[tuple[int, ...]]:
    """Yield the text's tokens, also with a shorter first token of several letters."""
    whole = tuple(tokenizer.encode(text))
    yield whole
    longest = len(tokenizer.decode(whole[:1]))
    for end in range(3, longest):
        first, rest = tokenizer.encode(text[:end]), tokenizer.encode(text[end:])
        if len(first) == 1 and len(rest) <= len(whole):
            yield (*first, *rest)


_FIRST_UNSPACED: Final = "\u0e00"  # Thai; from here on most scripts set no spaces, but Georgian and Korean do


def _is_written_without_spaces(letter: str) -> bool:
    return (
        letter >= _FIRST_UNSPACED
        and not "\u10a0" <= letter <= "\u1fff"
        and not "\uac00" <= letter <= "\ud7ff"
    )
