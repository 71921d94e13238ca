"""The bodies of `POST /v1/realtime/client_secrets`, for its route and for the API's document."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from asr_server.api.realtime.client_events import AudioFormat, SessionFields


class ExpiresAfter(msgspec.Struct, forbid_unknown_fields=True):
    """How long sessions can be opened with the secret."""

    seconds: Annotated[int, Meta(ge=10, le=7200, description="From now on.")] = 600
    anchor: Annotated[Literal["created_at"], Meta(description="Always `created_at`.")] = "created_at"


class ClientSecretRequest(msgspec.Struct, forbid_unknown_fields=True):
    """What a browser is to be allowed. Everything can be left out."""

    expires_after: Annotated[ExpiresAfter, Meta(description="The secret's end.")] = msgspec.field(
        default_factory=ExpiresAfter
    )
    session: Annotated[SessionFields, Meta(description="Settings of the session.")] = SessionFields()


class SessionTranscription(msgspec.Struct):
    """How the session is transcribed. What was not given is left out."""

    model: Annotated[str, Meta(description="The model's name.")]
    language: Annotated[str, Meta(description="Of the speech.")] = ""
    languages: Annotated[list[str], Meta(description="Candidates for detection.")] = []
    keywords: Annotated[list[str], Meta(description="Words to listen for.")] = []
    prompt: Annotated[str, Meta(description="Text that precedes the speech.")] = ""
    delay: Annotated[str, Meta(description="As given; it has no effect here.")] = ""


class SessionVad(msgspec.Struct):
    """What begins and ends a turn."""

    type: Annotated[Literal["server_vad"], Meta(description="Always `server_vad`.")]
    threshold: Annotated[float, Meta(description="How sure of speech the detector must be.")]
    prefix_padding_ms: Annotated[int, Meta(description="Audio kept before speech.")]
    silence_duration_ms: Annotated[int, Meta(description="Silence that ends a turn.")]
    idle_timeout_ms: Annotated[
        int | None, Meta(description="Silence after which an empty turn is committed.")
    ]


class SessionInput(msgspec.Struct):
    """The audio that comes in."""

    format: Annotated[AudioFormat, Meta(description="Its encoding.")]
    noise_reduction: Annotated[None, Meta(description="Always null: none is done.")]
    transcription: Annotated[SessionTranscription, Meta(description="How it is transcribed.")]
    turn_detection: Annotated[SessionVad | None, Meta(description="Null: the client commits.")]


class SessionAudio(msgspec.Struct):
    """The session's audio."""

    input: Annotated[SessionInput, Meta(description="What comes in.")]


class Session(msgspec.Struct):
    """The whole session, as it is in force."""

    id: Annotated[str, Meta(description="`sess_...`")]
    object: Annotated[Literal["realtime.transcription_session"], Meta(description="The kind of object.")]
    type: Annotated[Literal["transcription"], Meta(description="The kind of session.")]
    expires_at: Annotated[int, Meta(description="In Unix seconds.")]
    include: Annotated[list[str] | None, Meta(description="What `completed` events have besides.")]
    audio: Annotated[SessionAudio, Meta(description="Its audio.")]


class ClientSecret(msgspec.Struct):
    """A key for one browser."""

    value: Annotated[str, Meta(description="The key: `ek_...`.")]
    expires_at: Annotated[int, Meta(description="Its end, in Unix seconds.")]
    session: Annotated[Session, Meta(description="What it opens.")]
