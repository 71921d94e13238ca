"""One session's settings: updates, reports, and a browser's key, which carries them signed."""

import base64
import secrets
import time
from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from asr_server.annexes.realtime import client_events as client
from asr_server.annexes.realtime import server_events as out
from asr_server.api.models import Models
from asr_server.api.schemas import check_keyword
from asr_server.api.state import Caller, Keys
from asr_server.core import DecodingOptions
from asr_server.errors import InvalidApiKey, InvalidValue


class SessionConfig(msgspec.Struct, frozen=True):
    transcription: out.SessionTranscription
    format: client.AudioFormat = client.PcmFormat()
    # UNSET: the model's name decides. `vad` is the name in secrets, which last across releases.
    chosen_vad: out.SessionVad | UnsetType | None = msgspec.field(default=UNSET, name="vad")
    include: tuple[client.Include, ...] = ()
    # What OpenAI's clients cannot ask for.
    sample_rate: int | None = None  # None: the format's
    diarize: bool = False
    reads_interim: bool = True

    @property
    def vad(self) -> out.SessionVad | None:
        if isinstance(self.chosen_vad, UnsetType):
            return None if self.transcription.model in COMMITTED_BY_CLIENT else out.DEFAULT_VAD
        return self.chosen_vad

    @property
    def is_diarized(self) -> bool:
        return self.diarize or self.transcription.model in DIARIZED

    @property
    def shows_interim(self) -> bool:
        return "item.input_audio_transcription.interim" in self.include


# Clients of these names commit their turns, unless they ask for detection.
COMMITTED_BY_CLIENT: Final = frozenset(("gpt-live-transcribe", "gpt-realtime-whisper"))
# Of these names each turn's segments come with their speakers.
DIARIZED: Final = frozenset(("gpt-4o-transcribe-diarize",))
# Silence that ends a turn under `semantic_vad`: this server judges no meaning, it only waits.
SILENCE_MS: Final = {"low": 1500, "medium": 800, "auto": 800, "high": 400}
# Of the interval between readings of a growing turn.
DELAY_FACTORS: Final = {"minimal": 0.4, "low": 0.7, "": 1.0, "medium": 1.0, "high": 2.0, "xhigh": 4.0}


def default_config(model: str) -> SessionConfig:
    return SessionConfig(out.SessionTranscription(model))


def interim_interval_s(config: SessionConfig, interval_s: float) -> float:
    return interval_s * DELAY_FACTORS[config.transcription.delay] if config.reads_interim else 0.0


def update_config(config: SessionConfig, fields: client.SessionFields, models: Models) -> SessionConfig:
    """Return the settings with the given fields changed. Raises InvalidValue, ModelNotFound."""
    changed: dict[str, Any] = {}
    if not isinstance(fields.include, UnsetType):
        changed["include"] = fields.include or ()
    given = UNSET if isinstance(fields.audio, UnsetType) else fields.audio.input
    if not isinstance(given, UnsetType):
        if not isinstance(given.format, UnsetType):
            changed["format"] = given.format or client.PcmFormat()
        if not isinstance(given.transcription, UnsetType):
            changed["transcription"] = _update_transcription(config, given.transcription, models)
        if not isinstance(given.turn_detection, UnsetType):
            changed["chosen_vad"] = _update_vad(config.vad, given.turn_detection)
    return msgspec.structs.replace(config, **changed)


def with_model(config: SessionConfig, model: str) -> SessionConfig:
    transcription = msgspec.structs.replace(config.transcription, model=model)
    return msgspec.structs.replace(config, transcription=transcription)


def _update_transcription(
    config: SessionConfig, update: client.TranscriptionUpdate | None, models: Models
) -> out.SessionTranscription:
    default = out.SessionTranscription(models.default.name)
    if update is None:
        return default
    changed = _given(update, default)
    models.choose(changed.get("model", default.model))
    try:
        for term in changed.get("keywords", ()):
            check_keyword(term)
    except ValueError as error:
        raise InvalidValue(f"{error}.", "session.audio.input.transcription.keywords") from None
    return msgspec.structs.replace(config.transcription, **changed)


def _update_vad(vad: out.SessionVad | None, update: client.VadUpdate | None) -> out.SessionVad | None:
    if update is None:
        return None
    kind = update.type if update.type is not UNSET else (vad or out.DEFAULT_VAD).type
    default = out.SEMANTIC_VAD if kind == "semantic_vad" else out.DEFAULT_VAD
    changed = _given(update, default)
    if "eagerness" in changed:
        eagerness = changed["eagerness"]
        if kind == "semantic_vad":
            changed = {"silence_duration_ms": SILENCE_MS[eagerness]} | changed
        elif eagerness is not UNSET:
            path = "session.audio.input.turn_detection.eagerness"
            raise InvalidValue("'eagerness' requires turn_detection type 'semantic_vad'.", path)
    return msgspec.structs.replace(vad if vad and vad.type == kind else default, **changed)


def _given(update: msgspec.Struct, default: msgspec.Struct) -> dict[str, Any]:
    values = {name: getattr(update, name) for name in default.__struct_fields__}
    return {
        name: getattr(default, name) if value is None else value
        for name, value in values.items()
        if not isinstance(value, UnsetType)
    }


def decoding_options(session: SessionConfig, models: Models) -> DecodingOptions:
    """Make a session's decoding options. Raises InvalidValue for an unknown language."""
    config = session.transcription
    model = models.choose(config.model)
    at = "session.audio.input.transcription"
    shows_times = session.is_diarized or session.shows_interim
    return model.transcriber.options(
        language=config.language,
        languages=config.languages,
        params=(f"{at}.language", f"{at}.languages"),
        prompt=config.prompt,
        keywords=config.keywords,
        word_timestamps=shows_times,
        text_only=not shows_times,
        token_logprobs="item.input_audio_transcription.logprobs" in session.include,
    )


def describe(config: SessionConfig, session_id: str, expires_at: int) -> out.Session:
    return out.Session(
        id=session_id,
        expires_at=expires_at,
        include=config.include or None,
        audio=out.SessionAudio(out.SessionInput(config.format, None, config.transcription, config.vad)),
    )


def described_for_beta_clients(session: out.Session) -> dict[str, Any]:
    old_names = {format: name for name, format in client.OLD_FORMATS.items()}
    given = session.audio.input
    return {name: getattr(session, name) for name in ("id", "object", "expires_at", "include")} | {
        "input_audio_format": old_names[given.format],
        "input_audio_noise_reduction": None,
        "input_audio_transcription": given.transcription,
        "turn_detection": given.turn_detection,
    }


PREFIX: Final = "ek_"
_SIGNATURE_BYTES: Final = 32


class _Grant(msgspec.Struct, frozen=True):
    expires_at: int  # Unix seconds
    config: SessionConfig
    nonce: bytes


def make_secret(api_keys: Keys, caller: Caller, config: SessionConfig, expires_at: int) -> str:
    grant = msgspec.json.encode(_Grant(expires_at, config, secrets.token_bytes(12)))
    return PREFIX + base64.urlsafe_b64encode(api_keys.sign(grant, caller) + grant).decode().rstrip("=")


def open_secret(api_keys: Keys, secret: str) -> tuple[Caller, SessionConfig]:
    """Return a secret's settings, and who made it. Raises InvalidApiKey if expired or not ours."""
    try:
        raw = base64.urlsafe_b64decode(secret.removeprefix(PREFIX) + "==")
    except ValueError:
        raise InvalidApiKey("Incorrect client secret.") from None
    signature, encoded = raw[:_SIGNATURE_BYTES], raw[_SIGNATURE_BYTES:]
    if (caller := api_keys.signer_of(encoded, signature)) is None:
        raise InvalidApiKey("Incorrect client secret.")
    grant = msgspec.json.decode(encoded, type=_Grant)
    if grant.expires_at < time.time():
        raise InvalidApiKey("The client secret has expired.")
    return caller, grant.config
