"""The types of `turn.next_state`: turns, events and effects. Times are samples at 16 kHz.

A word is stable once two readings agree on it. Where they do but for their last words, one more is stable if
three follow it: local agreement and hold-n (Liu, Spanakis and Niehues, Interspeech 2020; Machacek, Dabre and
Bojar, 2023). Sent words are never taken back.
"""

import re
import string
from enum import Enum, auto
from itertools import takewhile
from typing import Final

import msgspec

from asr_server.annexes.realtime import server_events as out
from asr_server.core import SAMPLE_RATE, Segment, TokenLogprob, Word
from asr_server.language_codes import UNSPACED

HELD_BACK: Final = 3  # words at a reading's end that may yet change
_WORD: Final = re.compile(r"\S+")


class Agreement(msgspec.Struct, frozen=True):
    num_sent: int = 0  # words
    last_reading: tuple[str, ...] = ()


def agree(agreement: Agreement, reading: str, language: str | None) -> tuple[Agreement, str]:
    words = split_words(reading, language)
    pairs = zip(agreement.last_reading, words, strict=False)
    num_agreed = sum(1 for _ in takewhile(lambda pair: _plain(pair[0]) == _plain(pair[1]), pairs))
    num_held = HELD_BACK * (2 if language in UNSPACED else 1)  # where words are single characters
    is_steady = 0 < num_agreed >= len(agreement.last_reading) - num_held
    num_settled = len(words) - num_held if is_steady else 0
    num_sent = max(agreement.num_sent, num_agreed, num_settled)
    return Agreement(num_sent, words), _join(words[agreement.num_sent : num_sent], language)


def conclude(agreement: Agreement, reading: str, language: str | None) -> str:
    return _join(split_words(reading, language)[agreement.num_sent :], language)


def tokens_between(
    reading: str, language: str | None, tokens: tuple[TokenLogprob, ...], first: int, end: int | None
) -> tuple[TokenLogprob, ...]:
    """Return the tokens that end within words `first` to `end`; None: to the last."""
    ends = [len(reading[:at].encode()) for at in _word_ends(reading, language)]
    lower = ends[first - 1] if 0 < first <= len(ends) else float("inf") if first else float("-inf")
    upper = float("inf") if end is None else max(ends[:end], default=float("-inf"))
    # The tokens begin with a space that the reading lacks.
    position = len(reading.encode()) - sum(len(token.bytes) for token in tokens)
    found = []
    for token in tokens:
        position += len(token.bytes)
        if lower < position <= upper:
            found.append(token)
    return tuple(found)


def _word_ends(text: str, language: str | None) -> list[int]:
    if language in UNSPACED:
        return list(range(len(text) - len(text.lstrip()) + 1, len(text.rstrip()) + 1))
    return [match.end() for match in _WORD.finditer(text)]


def split_words(text: str, language: str | None) -> tuple[str, ...]:
    return tuple(text.strip()) if language in UNSPACED else tuple(_WORD.findall(text))


def _join(words: tuple[str, ...], language: str | None) -> str:
    return ("" if language in UNSPACED else " ").join(words)


def _plain(word: str) -> str:
    return word.strip(string.punctuation).casefold()


SAMPLES_PER_MS: Final = SAMPLE_RATE // 1000


class Turn(msgspec.Struct, frozen=True):
    item_id: str
    start: int
    read_to: int  # where the last interim reading ended
    is_reading: bool = False  # an interim reading is under way
    is_paused: bool = False  # the speaker pauses: perhaps this is the end
    is_announced: bool = False  # by `speech_started`
    num_chunks: int = 0  # whose text is final
    text: str = ""  # of those
    deltas: str = ""  # sent, joined
    agreement: Agreement = Agreement()  # about the chunk that is growing


class State(msgspec.Struct, frozen=True):
    tag: str = ""  # of this session, in the ids of its items
    interim_samples: int = 0  # between interim readings; 0: none
    shows_interim: bool = False  # readings are sent as they come
    is_detecting: bool = False
    padding: int = 0  # samples kept before speech
    num_samples: int = 0  # written so far
    uncommitted_from: int = 0  # the end of the last turn
    num_turns: int = 0
    open: Turn | None = None
    committed: tuple[Turn, ...] = ()  # without their final text
    previous_item_id: str | None = None  # the last one committed


class AudioWritten(msgspec.Struct, frozen=True):
    num_samples: int


class VoiceStarted(msgspec.Struct, frozen=True):
    at: int


class Signal(Enum):
    """An event that says no more than that it happens."""

    VOICE_PAUSED = auto()  # speech may have ended: read the turn ahead
    VOICE_RESUMED = auto()
    VOICE_STOPPED = auto()
    CLEAR_REQUESTED = auto()
    INPUT_ENDED = auto()  # the session ends; its speech is still transcribed


class CommitRequested(msgspec.Struct, frozen=True):
    event_id: str | None = None


class DetectionSet(msgspec.Struct, frozen=True):
    is_detecting: bool
    padding: int = 0


class InterimRead(msgspec.Struct, frozen=True):
    """A reading of the growing chunk; None if it was not read."""

    item_id: str
    chunk: int = 0
    text: str | None = None
    language: str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None  # None: the session did not ask for them
    words: tuple[Word, ...] = ()  # where the session asked for them; times are from the turn's start
    num_samples: int = 0  # of the turn, up to where it was read


class ChunkRead(msgspec.Struct, frozen=True):
    item_id: str
    text: str
    language: str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    words: tuple[Word, ...] = ()
    num_samples: int = 0  # of the turn, up to the chunk's end


class TurnRead(msgspec.Struct, frozen=True):
    item_id: str
    duration_s: float
    languages: tuple[str, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    segments: tuple[Segment, ...] = ()  # where speakers were asked for; times are from the turn's start


class TurnFailed(msgspec.Struct, frozen=True):
    item_id: str
    error: out.ItemError


Reading = InterimRead | ChunkRead
Result = Reading | TurnRead | TurnFailed
Event = AudioWritten | VoiceStarted | Signal | CommitRequested | DetectionSet | Result


class Send(msgspec.Struct, frozen=True):
    event: out.ServerEvent


class OpenTurn(msgspec.Struct, frozen=True):
    """Start a turn with the audio from `start` on."""

    item_id: str
    start: int


class FinishTurn(msgspec.Struct, frozen=True):
    item_id: str


class DropTurn(msgspec.Struct, frozen=True):
    item_id: str


class ReadInterim(msgspec.Struct, frozen=True):
    item_id: str


class ReadAhead(msgspec.Struct, frozen=True):
    """Read the audio as if the turn ended here."""

    item_id: str


class GoOn(msgspec.Struct, frozen=True):
    """The speaker has only paused."""

    item_id: str
    is_shown: bool  # what was read ahead, like an interim reading


class RestartDetection(msgspec.Struct, frozen=True):
    """Restart voice detection, so that continuing speech begins a new turn."""


Effect = Send | OpenTurn | FinishTurn | DropTurn | ReadInterim | ReadAhead | GoOn | RestartDetection
Step = tuple[State, list[Effect]]
