"""What the server sends, as OpenAI's realtime API names it. The writer gives each event its id."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from asr_server.api.schemas import ErrorDetail


class Logprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: tuple[int, ...]


class DurationUsage(msgspec.Struct, frozen=True, tag_field="type", tag="duration"):
    seconds: float


class LanguageCode(msgspec.Struct, frozen=True):
    code: str


class ItemError(msgspec.Struct, frozen=True):
    type: str
    code: str | None
    message: str
    param: str | None

    @classmethod
    def from_detail(cls, detail: ErrorDetail) -> ItemError:
        return cls(detail.type, detail.code, detail.message, detail.param)


class EventError(msgspec.Struct, frozen=True):
    type: str
    code: str | None
    message: str
    param: str | None
    event_id: str | None  # of the client's event


class InputAudio(msgspec.Struct, frozen=True, tag_field="type", tag="input_audio"):
    transcript: str | None = None


class UserMessage(msgspec.Struct, frozen=True, tag_field="type", tag="message"):
    """A turn as an item of the conversation."""

    id: str
    object: Literal["realtime.item"] = "realtime.item"
    status: Literal["completed"] = "completed"
    role: Literal["user"] = "user"
    content: tuple[InputAudio, ...] = (InputAudio(),)


class ServerEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    is_last: ClassVar[bool] = False  # of its item
    event_id: str = ""


class SessionCreated(ServerEvent, frozen=True, kw_only=True, tag="session.created"):
    session: dict[str, Any]


class SessionUpdated(ServerEvent, frozen=True, kw_only=True, tag="session.updated"):
    session: dict[str, Any]


class OldSessionUpdated(ServerEvent, frozen=True, kw_only=True, tag="transcription_session.updated"):
    session: dict[str, Any]


class SpeechStarted(ServerEvent, frozen=True, kw_only=True, tag="input_audio_buffer.speech_started"):
    item_id: str
    audio_start_ms: int


class SpeechStopped(ServerEvent, frozen=True, kw_only=True, tag="input_audio_buffer.speech_stopped"):
    item_id: str
    audio_end_ms: int


class TimeoutTriggered(ServerEvent, frozen=True, kw_only=True, tag="input_audio_buffer.timeout_triggered"):
    item_id: str
    audio_start_ms: int
    audio_end_ms: int


class Committed(ServerEvent, frozen=True, kw_only=True, tag="input_audio_buffer.committed"):
    item_id: str
    previous_item_id: str | None


class Cleared(ServerEvent, frozen=True, kw_only=True, tag="input_audio_buffer.cleared"):
    pass


class ItemAdded(ServerEvent, frozen=True, kw_only=True, tag="conversation.item.added"):
    item: UserMessage
    previous_item_id: str | None


class ItemDone(ServerEvent, frozen=True, kw_only=True, tag="conversation.item.done"):
    item: UserMessage
    previous_item_id: str | None


class Delta(ServerEvent, frozen=True, kw_only=True, tag="conversation.item.input_audio_transcription.delta"):
    item_id: str
    content_index: int = 0
    delta: str


class Completed(
    ServerEvent, frozen=True, kw_only=True, tag="conversation.item.input_audio_transcription.completed"
):
    is_last: ClassVar[bool] = True
    item_id: str
    content_index: int = 0
    transcript: str
    usage: DurationUsage
    languages: tuple[LanguageCode, ...] | UnsetType = UNSET
    logprobs: tuple[Logprob, ...] | UnsetType = UNSET


class Failed(
    ServerEvent, frozen=True, kw_only=True, tag="conversation.item.input_audio_transcription.failed"
):
    is_last: ClassVar[bool] = True
    item_id: str
    content_index: int = 0
    error: ItemError


class Error(ServerEvent, frozen=True, kw_only=True, tag="error"):
    error: EventError


def error_event(detail: ErrorDetail, client_event_id: str | None = None) -> Error:
    return Error(
        error=EventError(detail.type, detail.code, detail.message, detail.param, event_id=client_event_id)
    )
