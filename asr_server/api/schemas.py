"""The request fields and response bodies of the routes, as OpenAI's audio API names them.

The bodies of transcripts are in `asr_server.formats`, because the command line writes them too.
"""

from __future__ import annotations

import contextlib
import json
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from asr_server.core import VoiceChunking
from asr_server.formats import ResponseFormat
from asr_server.formats.bodies import Language, Logprob, TokensUsage, VerboseSegment, VerboseWord

# -- In. What is not a field of these models is refused by name. ---------------------------------------------

ARRAY_FIELDS: Final = frozenset(
    ("include", "keywords", "known_speaker_names", "languages", "timestamp_granularities")
)
LAYOUT_FIELDS: Final = ("max_line_width", "max_line_count", "max_words_per_line", "highlight_words")
NOT_SERVED: Final = {
    "known_speaker_references": "voices are not recognised here; channels=split makes each channel a speaker"
}
DEFAULT_SPEAKERS: Final = ("A", "B")  # of the left and the right channel, as OpenAI labels speakers
# Sentences rather than words: faster-whisper's numbers.
AUTO_CHUNKING: Final = VoiceChunking(threshold=0.5, prefix_padding_ms=400, silence_duration_ms=2000)


def _chunking_from_wire(value: Any) -> Any:
    """`auto`, or a JSON string of it or of an object; flattened fields have become an object before."""
    if not isinstance(value, str):
        return value
    with contextlib.suppress(ValueError, RecursionError):  # not JSON: a bare word
        value = json.loads(value)
    return {"type": value} if isinstance(value, str) else value


class Chunking(BaseModel):
    """How to cut: where speech begins and ends. Without it, chunks are full and cut at quiet points."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["auto", "server_vad"]
    threshold: float = Field(0.5, ge=0, le=1)
    prefix_padding_ms: int = Field(300, ge=0)
    silence_duration_ms: int = Field(200, ge=0)

    @model_validator(mode="after")
    def _check_type(self) -> Chunking:
        if self.type == "auto" and len(self.model_fields_set) > 1:
            raise ValueError("threshold, prefix_padding_ms and silence_duration_ms go with server_vad only")
        return self

    def voice_chunking(self) -> VoiceChunking:
        if self.type == "auto":
            return AUTO_CHUNKING
        return VoiceChunking(self.threshold, self.prefix_padding_ms, self.silence_duration_ms)


def _speaker_name(name: str) -> str:
    if not name.isprintable():
        raise ValueError("a name is one line of text")
    return name


SpeakerName = Annotated[str, AfterValidator(_speaker_name), Field(max_length=64)]


class AudioFields(BaseModel):
    """What both endpoints take, the uploaded `file` apart."""

    model_config = ConfigDict(extra="forbid")

    model: str
    prompt: str = ""
    response_format: ResponseFormat = "json"
    temperature: float = Field(0.0, ge=0, le=1, allow_inf_nan=False)
    stream: bool = False

    condition_on_previous_text: bool = False

    # As vLLM has them
    seed: int = Field(0, ge=-(2**63), lt=2**63)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, lt=2**31)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0, le=10)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    stream_include_usage: bool = True
    stream_continuous_usage_stats: bool = False

    # Ours: the last event of a stream carries what verbose_json has too
    stream_include_segments: bool = False


class TranscriptionFields(AudioFields):
    channels: Literal["mix", "split"] = "mix"  # ours; split: each of two channels is a speaker
    known_speaker_names: list[SpeakerName] = []  # of the left and the right channel
    language: str = ""
    languages: list[str] = []
    keywords: list[str] = []
    hotwords: str = ""
    timestamp_granularities: list[Literal["word", "segment"]] = []
    include: list[Literal["logprobs"]] = []
    # The layout of srt and vtt, as whisper's command names it
    max_line_width: int | None = Field(None, ge=1, lt=2**31)
    max_line_count: int | None = Field(None, ge=1, lt=2**31)
    max_words_per_line: int | None = Field(None, ge=1, lt=2**31)
    highlight_words: bool = False
    chunking_strategy: Annotated[Chunking | None, BeforeValidator(_chunking_from_wire)] = None


class TranslationFields(AudioFields):
    to_language: str = ""


# -- Out, beside the transcripts themselves (asr_server.formats). -------------------------------------------


class TextDelta(BaseModel):
    type: Literal["transcript.text.delta"] = "transcript.text.delta"
    delta: str
    segment_id: str | None = None  # with diarized_json
    logprobs: list[Logprob] | None = None
    usage: TokensUsage | None = None


class TextDone(BaseModel):
    type: Literal["transcript.text.done"] = "transcript.text.done"
    text: str
    languages: list[Language] = []
    logprobs: list[Logprob] | None = None
    usage: TokensUsage | None = None
    language: str | None = None  # this and what follows: with `stream_include_segments`
    duration: float | None = None
    segments: list[VerboseSegment] | None = None
    words: list[VerboseWord] | None = None
    truncated: bool | None = None  # the recording is damaged, and this is what could be read


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorDetail


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "asr-server"
    root: str
    description: str
    languages: list[str]
    tasks: list[Literal["transcribe", "translate"]]


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]
