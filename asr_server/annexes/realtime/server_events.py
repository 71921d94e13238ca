"""Server events, as OpenAI's realtime API names them, and the bodies of client secrets. Types only."""

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from asr_server.annexes.realtime.client_events import AudioFormat, SessionFields
from asr_server.api.schemas import ErrorDetail
from asr_server.core import TokenLogprob

_TRANSCRIPTION: Final = "conversation.item.input_audio_transcription"


class DurationUsage(msgspec.Struct, frozen=True, tag_field="type", tag="duration"):
    """The turn's length to the millisecond, unlike `formats.render.DurationUsage`."""

    seconds: float


class LanguageCode(msgspec.Struct, frozen=True):
    code: str


class ItemError(msgspec.Struct, frozen=True):
    type: str
    code: str | None
    message: str
    param: str | None


class EventError(ItemError, frozen=True):
    event_id: str | None  # of the client's event


class InputAudio(msgspec.Struct, frozen=True, tag_field="type", tag="input_audio"):
    transcript: str | None = None


class UserMessage(msgspec.Struct, frozen=True, tag_field="type", tag="message"):
    id: str
    object: Literal["realtime.item"] = "realtime.item"
    status: Literal["completed"] = "completed"
    role: Literal["user"] = "user"
    content: tuple[InputAudio, ...] = (InputAudio(),)


class SessionTranscription(msgspec.Struct, frozen=True, omit_defaults=True):
    model: str
    language: str = ""
    languages: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    prompt: str = ""
    delay: str = ""


class SessionVad(msgspec.Struct, frozen=True):
    type: Literal["server_vad", "semantic_vad"]
    threshold: float
    prefix_padding_ms: int
    silence_duration_ms: int
    eagerness: str | UnsetType = UNSET


DEFAULT_VAD: Final = SessionVad("server_vad", 0.5, 300, 500)  # OpenAI's
SEMANTIC_VAD: Final = SessionVad("semantic_vad", 0.5, 300, 800, "auto")


class SessionInput(msgspec.Struct, frozen=True):
    format: AudioFormat
    noise_reduction: None
    transcription: SessionTranscription
    turn_detection: SessionVad | None


class SessionAudio(msgspec.Struct, frozen=True):
    input: SessionInput


class Session(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["realtime.transcription_session"] = "realtime.transcription_session"
    type: Literal["transcription"] = "transcription"
    expires_at: int
    include: tuple[str, ...] | None
    audio: SessionAudio


class ServerEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    event_id: str = ""


class _OfItem(ServerEvent, frozen=True, kw_only=True):
    item_id: str


class _OfContent(_OfItem, frozen=True, kw_only=True):
    content_index: int = 0


class SessionCreated(ServerEvent, frozen=True, kw_only=True, tag="session.created"):
    session: Session


class SessionUpdated(ServerEvent, frozen=True, kw_only=True, tag="session.updated"):
    session: Session


class OldSessionUpdated(ServerEvent, frozen=True, kw_only=True, tag="transcription_session.updated"):
    session: dict[str, Any]


class SpeechStarted(_OfItem, frozen=True, kw_only=True, tag="input_audio_buffer.speech_started"):
    audio_start_ms: int


class SpeechStopped(_OfItem, frozen=True, kw_only=True, tag="input_audio_buffer.speech_stopped"):
    audio_end_ms: int


class Committed(_OfItem, frozen=True, kw_only=True, tag="input_audio_buffer.committed"):
    previous_item_id: str | None


class Cleared(ServerEvent, frozen=True, kw_only=True, tag="input_audio_buffer.cleared"):
    pass


class ItemAdded(ServerEvent, frozen=True, kw_only=True, tag="conversation.item.added"):
    item: UserMessage
    previous_item_id: str | None


class ItemDone(ServerEvent, frozen=True, kw_only=True, tag="conversation.item.done"):
    item: UserMessage
    previous_item_id: str | None


class Delta(_OfContent, frozen=True, kw_only=True, tag=f"{_TRANSCRIPTION}.delta"):
    delta: str
    logprobs: tuple[TokenLogprob, ...] | UnsetType = UNSET


class LiveWord(msgspec.Struct, frozen=True):
    """Times are seconds from the session's start; `confidence` is the probability that it was said."""

    word: str
    start: float
    end: float
    confidence: float | None


class Interim(_OfContent, frozen=True, kw_only=True, tag=f"{_TRANSCRIPTION}.interim"):
    """A reading of the audio behind the item's final chunks, for sessions that include it; not OpenAI's."""

    text: str
    tail: str  # of the text, behind the deltas: it may change
    words: tuple[LiveWord, ...]
    audio_end_ms: int  # of the audio that was read, from the session's start
    is_final: bool  # the last reading of this audio


class SpokenSegment(_OfContent, frozen=True, kw_only=True, tag=f"{_TRANSCRIPTION}.segment"):
    """Times are seconds from the session's start, like those of `speech_started`."""

    id: str
    speaker: str
    start: float
    end: float
    text: str


class Completed(_OfContent, frozen=True, kw_only=True, tag=f"{_TRANSCRIPTION}.completed"):
    transcript: str
    usage: DurationUsage
    languages: tuple[LanguageCode, ...] | UnsetType = UNSET
    logprobs: tuple[TokenLogprob, ...] | UnsetType = UNSET


class Failed(_OfContent, frozen=True, kw_only=True, tag=f"{_TRANSCRIPTION}.failed"):
    error: ItemError


class Error(ServerEvent, frozen=True, kw_only=True, tag="error"):
    error: EventError


def error_event(detail: ErrorDetail, client_event_id: str | None = None) -> Error:
    return Error(error=EventError(**dict(detail), event_id=client_event_id))


class ExpiresAfter(msgspec.Struct, forbid_unknown_fields=True):
    seconds: Annotated[int, Meta(ge=10, le=7200)] = 600
    anchor: Literal["created_at"] = "created_at"


class ClientSecretRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The settings allowed to a browser; all are optional."""

    expires_after: ExpiresAfter = msgspec.field(default_factory=ExpiresAfter)
    session: SessionFields = SessionFields()


class ClientSecret(msgspec.Struct):
    value: str
    expires_at: int
    session: Session
