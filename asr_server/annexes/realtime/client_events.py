"""Client events, as OpenAI's realtime API names them. Other fields are refused by name.

Absent (UNSET) fields stay; null restores a default or turns off.
"""

import contextlib
import re
from typing import Annotated, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from asr_server.config import MIB
from asr_server.errors import InvalidValue

MAX_APPEND_BYTES: Final = 3 * MIB
MAX_MESSAGE_BYTES: Final = 4 * MIB + 4096  # an append of that size in base64, and its frame
MAX_QUOTED_CHARS: Final = 400
MAX_SESSION_CHARS: Final = 65_536  # of a prompt or a list of words

_PATH: Final = re.compile(r"(?P<what>.*?)(?: - at `(?:key in )?\$\.?(?P<path>.*)`)?", re.DOTALL)
_FIELD: Final = re.compile(r"Object (?:contains (unknown)|missing required) field `(.*)`", re.DOTALL)
_DETECTION: Final = "it can be 'server_vad' or 'semantic_vad', and turn_detection itself null"
# By path, where msgspec says only that a value is wrong, and clients of other servers often send one.
_ALLOWED: Final = {
    "type": "this server transcribes, and takes the events of a transcription session only",
    "session.type": "it can be 'transcription'",
    "session.audio.input.format.type": "it can be 'audio/pcm', 'audio/pcmu' or 'audio/pcma'",
    "session.audio.input.format.rate": "audio/pcm has 24000 samples a second",
    "session.audio.input.turn_detection.type": _DETECTION,
    "session.turn_detection.type": _DETECTION,
}

Include = Literal["item.input_audio_transcription.logprobs", "item.input_audio_transcription.interim"]
Text = Annotated[str, Meta(max_length=MAX_SESSION_CHARS)]
Words = Annotated[tuple[Annotated[str, Meta(max_length=1024)], ...], Meta(max_length=1024)]


class _Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class PcmFormat(_Part, tag_field="type", tag="audio/pcm", frozen=True, kw_only=True):
    """Signed 16 bits, little-endian, mono."""

    rate: Literal[24000] = 24000


class UlawFormat(_Part, tag_field="type", tag="audio/pcmu", frozen=True, kw_only=True):
    """G.711 at 8 kHz, North America and Japan."""


class AlawFormat(_Part, tag_field="type", tag="audio/pcma", frozen=True, kw_only=True):
    """G.711 at 8 kHz, elsewhere."""


AudioFormat = PcmFormat | UlawFormat | AlawFormat
OLD_FORMATS: Final[dict[str, AudioFormat]] = {
    "pcm16": PcmFormat(),
    "g711_ulaw": UlawFormat(),
    "g711_alaw": AlawFormat(),
}


class NoiseReduction(_Part, frozen=True, kw_only=True):
    """Checked and reported as null: this server reduces no noise."""

    type: Literal["near_field", "far_field"] | None = None
    strength: float | None = None


class TranscriptionUpdate(_Part, frozen=True, kw_only=True):
    model: Text | UnsetType | None = UNSET
    language: Text | UnsetType | None = UNSET
    languages: Words | UnsetType | None = UNSET
    keywords: Words | UnsetType | None = UNSET
    prompt: Text | UnsetType | None = UNSET
    # How often a growing turn is read.
    delay: Literal["minimal", "low", "medium", "high", "xhigh"] | UnsetType | None = UNSET


class VadUpdate(_Part, frozen=True, kw_only=True):
    type: Literal["server_vad", "semantic_vad"] | UnsetType = UNSET
    threshold: Annotated[float, Meta(ge=0, le=1)] | UnsetType | None = UNSET
    prefix_padding_ms: Annotated[int, Meta(ge=0, le=5000)] | UnsetType | None = UNSET
    silence_duration_ms: Annotated[int, Meta(ge=20, le=10_000)] | UnsetType | None = UNSET
    # There are no responses in a transcription session.
    idle_timeout_ms: Annotated[int, Meta(ge=1000, le=600_000)] | UnsetType | None = UNSET
    create_response: bool | UnsetType | None = UNSET
    interrupt_response: bool | UnsetType | None = UNSET
    # Of `semantic_vad`: how soon silence ends a turn.
    eagerness: Literal["low", "medium", "high", "auto"] | UnsetType | None = UNSET


class InputUpdate(_Part, frozen=True, kw_only=True):
    format: AudioFormat | UnsetType | None = UNSET
    noise_reduction: NoiseReduction | UnsetType | None = UNSET
    transcription: TranscriptionUpdate | UnsetType | None = UNSET
    turn_detection: VadUpdate | UnsetType | None = UNSET  # null: the client commits


class AudioUpdate(_Part, frozen=True, kw_only=True):
    input: InputUpdate | UnsetType = UNSET


class SessionFields(_Part, frozen=True, kw_only=True):
    type: Literal["transcription"] = "transcription"
    audio: AudioUpdate | UnsetType = UNSET
    include: tuple[Include, ...] | UnsetType | None = UNSET  # what events have besides, or one more event


class OldSessionFields(_Part, frozen=True, kw_only=True):
    input_audio_format: Literal["pcm16", "g711_ulaw", "g711_alaw"] | UnsetType = UNSET
    input_audio_transcription: TranscriptionUpdate | UnsetType | None = UNSET
    input_audio_noise_reduction: NoiseReduction | UnsetType | None = UNSET
    turn_detection: VadUpdate | UnsetType | None = UNSET
    include: tuple[Include, ...] | UnsetType | None = UNSET
    modalities: list[Literal["text", "audio"]] | UnsetType = UNSET
    client_secret: dict[str, object] | UnsetType | None = UNSET

    def renamed(self) -> SessionFields:
        given = self.input_audio_format
        update = InputUpdate(
            format=UNSET if given is UNSET else OLD_FORMATS[given],
            transcription=self.input_audio_transcription,
            turn_detection=self.turn_detection,
        )
        return SessionFields(audio=AudioUpdate(input=update), include=self.include)


class _ClientEvent(_Part, tag_field="type", frozen=True, kw_only=True):
    event_id: Annotated[str, Meta(max_length=512)] | None = None


class SessionUpdate(_ClientEvent, tag="session.update", frozen=True, kw_only=True):
    session: SessionFields


class OldSessionUpdate(_ClientEvent, tag="transcription_session.update", frozen=True, kw_only=True):
    session: OldSessionFields


class AppendAudio(_ClientEvent, tag="input_audio_buffer.append", frozen=True, kw_only=True):
    audio: Annotated[bytes, Meta(max_length=MAX_APPEND_BYTES)]  # base64 on the wire


class CommitAudio(_ClientEvent, tag="input_audio_buffer.commit", frozen=True, kw_only=True):
    pass


class ClearAudio(_ClientEvent, tag="input_audio_buffer.clear", frozen=True, kw_only=True):
    pass


ClientEvent = SessionUpdate | OldSessionUpdate | AppendAudio | CommitAudio | ClearAudio

_decoder: Final[msgspec.json.Decoder[ClientEvent]] = msgspec.json.Decoder(ClientEvent)


class _EventId(msgspec.Struct):
    event_id: str


def parse_client_event(message: str | bytes) -> ClientEvent:
    """Raises InvalidValue with the field."""
    try:
        return _decoder.decode(message)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise as_invalid_value(error) from None


def event_id_of(message: str | bytes) -> str | None:
    with contextlib.suppress(msgspec.DecodeError, RecursionError, UnicodeError):
        return msgspec.json.decode(message, type=_EventId).event_id[:512]
    return None


def _cut(text: str) -> str:
    return text if len(text) <= 2 * MAX_QUOTED_CHARS else text[:MAX_QUOTED_CHARS] + text[-MAX_QUOTED_CHARS:]


def as_invalid_value(error: Exception, subject: str = "event") -> InvalidValue:
    text = _cut(str(error))
    match = _PATH.fullmatch(text)
    what, path = (match["what"], match["path"] or "") if match else (text, "")
    what = _ALLOWED.get(path, what)
    if found := _FIELD.fullmatch(what):
        path = f"{path}.{found[2]}".lstrip(".")
        what = "unknown parameter" if found[1] else "required"
    at = f" at {path[:200]!r}" if path else ""
    return InvalidValue(f"Invalid {subject}{at}: {what[:400]}.", path or None)
