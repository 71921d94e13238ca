"""Deepgram's shapes: the query of `/v1/listen` as fields of this server's, and its answers."""

import unicodedata
import uuid
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from statistics import fmean
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, BeforeValidator, Field

from asr_server import __version__
from asr_server.annexes.realtime.client_events import AlawFormat, AudioFormat, PcmFormat, UlawFormat
from asr_server.annexes.realtime.config import SessionConfig
from asr_server.annexes.realtime.server_events import SessionTranscription, SessionVad
from asr_server.api.models import Models, ServedModel
from asr_server.api.request import read_fields
from asr_server.api.schemas import check_keyword
from asr_server.api.upload import Pairs
from asr_server.errors import InvalidValue, ModelNotFound

TERMS: Final = ("keyterm", "keywords")
# Taken, because answers are right without them.
WITHOUT_EFFECT: Final = frozenset(
    (
        *("dictation", "extra", "filler_words", "language_hint", "measurements", "mip_opt_out", "no_delay"),
        *("numerals", "punctuate", "smart_format", "tag", "utt_split", "version"),
    )
)
# Refused where they are asked for: whoever asks counts on them.
NOT_OFFERED: Final = frozenset(
    (
        *("alternatives", "callback", "callback_method", "custom_intent", "custom_intent_mode"),
        *("custom_topic", "custom_topic_mode", "detect_entities", "intents", "profanity_filter", "redact"),
        *("replace", "search", "sentiment", "summarize", "topics", "translate"),
    )
)
OFF: Final = ("", "false", "False", "0")
FAMILIES: Final = ("nova", "enhanced", "base", "whisper", "general", "flux")  # Deepgram's names begin so
SEVERAL: Final = "multi"  # the language of a recording in several
SHORTEST_ENDPOINT_MS: Final = 360  # of silence: less parts words
DEFAULT_ENDPOINT_MS: Final = 500
FORMATS: Final[dict[str, AudioFormat]] = {
    "linear16": PcmFormat(),
    "mulaw": UlawFormat(),
    "alaw": AlawFormat(),
}

F = TypeVar("F", bound="Query")


def _endpoint_ms(value: object) -> object:
    return {"true": DEFAULT_ENDPOINT_MS, "false": None, "0": None}.get(str(value).lower(), value)


class Query(BaseModel, extra="forbid"):
    model: str = ""
    language: str = ""
    diarize: bool = False
    diarize_model: str = ""
    sample_rate: int | None = Field(None, ge=8000, le=192_000)
    channels: int = Field(1, ge=1, le=2)
    multichannel: bool = False

    @property
    def is_diarized(self) -> bool:
        return self.diarize or bool(self.diarize_model)


class WholeQuery(Query):
    encoding: Literal["", "linear16"] = ""  # of samples without a header
    detect_language: str = ""
    paragraphs: bool = False
    utterances: bool = False


class LiveQuery(Query):
    encoding: Literal["linear16", "mulaw", "alaw"] | None = None
    interim_results: bool = False
    vad_events: bool = False
    utterance_end_ms: int | None = Field(None, ge=1000, le=60_000)
    endpointing: Annotated[int | None, BeforeValidator(_endpoint_ms)] = Field(
        DEFAULT_ENDPOINT_MS, ge=0, le=10_000
    )

    @property
    def format(self) -> AudioFormat:
        """Raises InvalidValue."""
        if self.encoding is None:
            raise InvalidValue(
                "Live audio comes as samples: 'encoding' is linear16, mulaw or alaw, with 'sample_rate'.",
                "encoding",
            )
        if self.encoding == "linear16" and self.sample_rate is None:
            raise InvalidValue("'encoding=linear16' needs a 'sample_rate'.", "sample_rate")
        if self.multichannel or self.channels > 1:
            raise InvalidValue("Live audio has one channel here.", "channels")
        if self.utterance_end_ms is not None and self.endpointing is None:
            raise InvalidValue("'utterance_end_ms' needs 'endpointing'.", "endpointing")
        return FORMATS[self.encoding]


def read_query(pairs: Pairs, query_type: type[F]) -> tuple[F, list[str], tuple[str, ...]]:
    """Return the fields, the keywords, and the names that have no effect. Raises InvalidValue."""
    own: Pairs = []
    ignored: dict[str, None] = {}
    for name, value in pairs:
        if name in NOT_OFFERED and value not in OFF:
            raise InvalidValue(f"This server does not offer '{name}': leave it out.", name)
        if name in WITHOUT_EFFECT:
            ignored[name] = None
        elif name not in TERMS and name not in NOT_OFFERED:
            own.append((name, value))
    return read_fields(own, query_type), [_term(*pair) for pair in pairs if pair[0] in TERMS], tuple(ignored)


def _term(name: str, value: str) -> str:
    term = value.rpartition(":")[0] or value if name == "keywords" else value  # without its boost
    try:
        return check_keyword(term)
    except ValueError as error:
        raise InvalidValue(f"{error}.", name) from None


def model_name(query: Query, models: Models) -> str:
    """Return the model's name here; Deepgram's own names mean the first model. Raises ModelNotFound."""
    try:
        models.choose(query.model)
    except ModelNotFound:
        if query.model.partition("-")[0] not in FAMILIES:
            raise
        return ""
    return query.model


def form_pairs(query: WholeQuery, terms: Sequence[str], models: Models) -> Pairs:
    """Return the fields of the API's own form."""
    pairs = [
        ("response_format", "verbose_json"),
        ("timestamp_granularities", "word"),
        ("timestamp_granularities", "segment"),
        ("model", model_name(query, models)),
        *((f"keywords[{number}]", term) for number, term in enumerate(terms)),
    ]
    if query.language == SEVERAL:
        pairs.append(("multilingual", "true"))
    elif not is_detecting(query):
        pairs.append(("language", query.language))
    if query.multichannel:
        pairs.append(("channels", "split"))
    elif query.is_diarized:
        pairs.append(("diarize", "true"))
    return pairs


def is_detecting(query: WholeQuery) -> bool:
    return query.detect_language not in OFF


def session_config(query: LiveQuery, terms: Sequence[str], models: Models) -> SessionConfig:
    """Raises InvalidValue, ModelNotFound."""
    name = model_name(query, models) or models.default.name
    language = "" if query.language == SEVERAL else query.language
    vad = None
    if query.endpointing is not None:
        vad = SessionVad("server_vad", 0.5, 300, max(SHORTEST_ENDPOINT_MS, query.endpointing))
    return SessionConfig(
        SessionTranscription(name, language, keywords=tuple(terms)),
        query.format,
        vad,
        include=("item.input_audio_transcription.interim",),
        sample_rate=query.sample_rate,
        diarize=query.is_diarized,
        reads_interim=query.interim_results,
    )


# -- Answers -------------------------------------------------------------------------------------------------

Json = dict[str, Any]


class Spoken(NamedTuple):
    """A word; times are seconds from the start of the audio."""

    text: str
    start_s: float
    end_s: float
    confidence: float
    speaker: int | None = None


def word_of(spoken: Spoken) -> Json:
    """Return it as written and as spoken: small, without the signs around it."""
    letters = spoken.text.casefold()
    signs = "".join(letter for letter in letters if unicodedata.category(letter).startswith("P"))
    times = {"start": round(spoken.start_s, 3), "end": round(spoken.end_s, 3)}
    word = {"word": letters.strip(signs) or letters, **times, "confidence": spoken.confidence}
    if spoken.speaker is not None:
        word["speaker"] = spoken.speaker
    return word | {"punctuated_word": spoken.text}


def alternative(text: str, words: Sequence[Spoken]) -> Json:
    return {"transcript": text.strip(), "confidence": confidence_of(words), "words": [*map(word_of, words)]}


def confidence_of(words: Iterable[Spoken]) -> float:
    return round(fmean([word.confidence for word in words] or [0.0]), 4)


def model_facts(model: ServedModel) -> tuple[str, Json]:
    """Return the model's identifier, and what Deepgram tells of a model."""
    facts = {"name": model.name, "version": __version__, "arch": "whisper"}
    return str(uuid.uuid5(uuid.NAMESPACE_URL, model.name)), facts


def metadata(model: ServedModel, request_id: str, sha256: str, duration_s: float, channels: int) -> Json:
    model_uuid, facts = model_facts(model)
    return {
        "transaction_key": "deprecated",
        "request_id": request_id,
        "sha256": sha256,
        "created": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "duration": round(duration_s, 3),
        "channels": channels,
        "models": [model_uuid],
        "model_info": {model_uuid: facts},
    }
