"""Request fields, response bodies and headers, as OpenAI's audio API names them. Types only."""

import json
from typing import Annotated, Any, Final, Literal, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from asr_server.formats.render import Body, Logprob, ResponseFormat, TokensUsage

# -- In. What is not a field of these models is refused by name. ---------------------------------------------

FREE_TEXT_FIELDS: Final = frozenset(("keywords", "known_speaker_names"))  # entries may contain commas
STREAM_FIELDS: Final = ("stream_include_segments", "stream_continuous_usage_stats")
BACKGROUND_FIELDS: Final = ("metadata", "callback_url")
LAYOUT_FIELDS: Final = ("max_line_width", "max_line_count", "max_words_per_line", "highlight_words")
COUNT_FIELDS: Final = ("num_speakers", "min_speakers", "max_speakers")
MAX_REFERENCES: Final = 4
DEFAULT_SPEAKERS: Final = ("A", "B")  # of the left and the right channel, as OpenAI labels speakers


def loads(text: str) -> Any:
    """Parse JSON. Raises UnicodeEncodeError for half a surrogate pair, ValueError for no JSON."""
    value = json.loads(text)
    json.dumps(value, ensure_ascii=False).encode()
    return value


def _speaker_name(name: str) -> str:
    if not name.isprintable():
        raise ValueError("a name is one line of text")
    return name


SpeakerName = Annotated[str, AfterValidator(_speaker_name), Field(max_length=64)]


def check_keyword(term: str) -> str:
    if any(mark in term for mark in "<>\r\n"):
        raise ValueError("A keyword is one term, without '<', '>' or a line break")
    return term


Keyword = Annotated[str, AfterValidator(check_keyword)]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]


def _only_false(value: bool) -> bool:
    if value:
        raise ValueError("only false is taken")
    return value


OnlyFalse = Annotated[bool, AfterValidator(_only_false)]


class AudioFields(BaseModel):
    """The fields of both endpoints, except `file`."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    model: str = ""
    """A name of the model that is served, as `/v1/models` lists them; absent: that model."""
    language: str = ""
    """Of the speech: a code (`de`, `de-AT`), an English name (`german`), or `auto`. Absent: detected."""
    hotwords: str = ""
    """Words and names to listen for, separated by commas."""
    prompt: str = ""
    """Text that precedes the recording, in its language: names, spelling. Its last 223 tokens count."""
    response_format: ResponseFormat = "json"
    """The form of the answer."""
    temperature: float = Field(0.0, ge=0, le=1, allow_inf_nan=False)
    """0: the likeliest text, read again at 0.2 to 1.0 while it is implausible. Above 0: at that only."""
    subtitles: Literal["readable", "raw"] = "readable"
    """Not OpenAI's: the cues of `srt` and `vtt`: short lines, or the model's segments with `raw`."""
    stream: bool = False
    """Server-sent events with the text as it becomes final. With `json`, `text` and `diarized_json`;
    `verbose_json` is answered whole, as LiteLLM expects."""

    channels: Literal["mix", "split"] = "mix"
    """Not OpenAI's: with `split` each of two channels is a speaker; with `mix` they are one recording."""
    known_speaker_names: list[SpeakerName] = []
    """Of those in `known_speaker_references`; with `channels` split, in the left and the right channel."""
    track: str = Field("", max_length=64)
    """Not OpenAI's: the audio track to read, a number from 1 or a language (`eng`); the file's default else.
    With `channels` split, two numbers (`1,2`) are two speakers."""
    condition_on_previous_text: bool = False
    """Reads one chunk after another, each with the text so far as its prompt: slower, more even in style."""
    multilingual: bool = False
    """Not OpenAI's: what pauses part is read each in its own language. Not with `language`."""

    background: bool = False
    """Not OpenAI's here: the answer is 202 with a job, which goes on without the client. Needs a server that
    keeps jobs."""
    metadata: Metadata = {}
    """Of the job: up to 16 pairs of text, as JSON or as `metadata[name]`; with `background` only."""
    callback_url: str = Field("", max_length=2048)
    """Of the job: where its end is reported; with `background` only, and where the server allows the host."""

    # As vLLM has them
    seed: int = Field(0, ge=-(2**63), lt=2**63)
    """Of the random choices at temperatures above 0. The same seed gives the same text on the CPU in float32;
    in other precisions the requests beside it may change the text."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Above temperature 0, only the likeliest tokens that together have this probability; 1: all."""
    top_k: int = Field(0, ge=-1, lt=2**31)
    """Above temperature 0, only so many of the likeliest tokens; 0 or -1: all."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Above temperature 0, only tokens with this share of the likeliest one's probability; 0: all."""
    repetition_penalty: float = Field(1.0, gt=0, le=10)
    """Divides the scores of tokens that the text has already; 1: none."""
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    """Lowers a token's score each time the text has it; 0: none."""
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    """Lowers a token's score once the text has it; 0: none."""
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    """Most tokens of one chunk's text; absent: as many as the model has room for."""
    stream_include_usage: bool = True
    """Whether the last event of a stream has `usage`."""
    stream_continuous_usage_stats: bool = False
    """Whether every event of a stream has `usage` so far."""

    use_beam_search: bool = False
    """Changes nothing: the server's settings choose the search."""
    n: int = Field(1, ge=1, le=1)
    """1: the server's settings choose the number of hypotheses."""
    length_penalty: float = Field(1.0, ge=1, le=1)
    """1: hypotheses are compared by their mean log-probability."""
    include_stop_str_in_output: OnlyFalse = False
    """False: a text has no stop strings."""
    vllm_xargs: Literal["{}"] = "{}"
    """Empty: there are no extensions."""

    # As speaches has them
    vad_filter: bool = False
    """Changes nothing: long silences are left out anyway."""
    diarization: OnlyFalse = False
    """False: `diarize` asks for speakers."""
    without_timestamps: bool = True
    """Changes nothing: the model writes times, and `response_format` decides whether they are shown."""

    stream_include_segments: bool = False
    """Not OpenAI's: whether the last event of a stream has what `verbose_json` has too."""


class TranscriptionFields(AudioFields):
    languages: list[str] = []
    """Candidates for detection; not together with `language`."""
    keywords: list[Keyword] = []
    """Words and names to listen for: the first 64 get a bonus in decoding. They are no part of the prompt."""
    timestamp_granularities: list[Literal["word", "segment"]] = []
    """What gets times in `verbose_json`; absent: segments. `word` alone: words and no segments."""
    include: list[Literal["logprobs"]] = []
    """`logprobs`: the log-probability of each token, with `json` only."""
    known_speaker_references: list[str] = Field([], max_length=MAX_REFERENCES)
    """Data URLs of 2 to 10 s of each known speaker's voice, in the order of their names. `json` and `text`
    show no speakers, and leave them unread."""
    diarize: bool = False
    """Not OpenAI's: tells voices apart in every format with times, as `diarized_json` always does."""
    num_speakers: int | None = Field(None, ge=1, le=32)
    """Not OpenAI's: how many people speak; absent: it is found out."""
    min_speakers: int | None = Field(None, ge=1, le=32)
    """Not OpenAI's: how many people speak at least."""
    max_speakers: int | None = Field(None, ge=1, le=32)
    """Not OpenAI's: how many people speak at most."""
    # The layout of srt and vtt, as whisper's command names it
    max_line_width: int | None = Field(None, ge=1, lt=2**31)
    """Most characters of a line of `srt` or `vtt`."""
    max_line_count: int | None = Field(None, ge=1, lt=2**31)
    """Most lines of a subtitle; with `max_line_width` only."""
    max_words_per_line: int | None = Field(None, ge=1, lt=2**31)
    """Most words of a subtitle, within its segment."""
    highlight_words: bool = False
    """A subtitle for each word, which is underlined in it."""
    chunking_strategy: str = ""
    """Taken in each of OpenAI's spellings, and changes nothing: long silences are left out anyway."""


ARRAY_FIELDS: Final = frozenset(
    name for name, field in TranscriptionFields.model_fields.items() if get_origin(field.annotation) is list
)


class TranslationFields(AudioFields):
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] = "json"
    """The form of the answer."""
    to_language: str = ""
    """English in any spelling: the only language that Whisper translates into."""


# -- Out, beside the transcripts themselves (asr_server.formats). -------------------------------------------


class TextDelta(Body):
    """Final text that continues the events before."""

    type: Literal["transcript.text.delta"] = "transcript.text.delta"
    """The kind of event."""
    delta: str
    """The text, with the space before it where there is one."""
    segment_id: str | None = None
    """Of the segment that this is the text of, with `diarized_json`."""
    logprobs: list[Logprob] | None = None
    """Of the text's tokens, where they were asked for."""
    usage: TokensUsage | None = None
    """So far, with `stream_continuous_usage_stats`."""


class ErrorDetail(Body):
    message: str
    """What is wrong, and what can be done: for people."""
    type: str
    """The kind of error, such as `invalid_request_error`."""
    param: str | None
    """The field at fault, if one is."""
    code: str | None
    """The error, for programs."""


class ErrorBody(Body):
    """The body of every error."""

    error: ErrorDetail
    """The error."""


class Model(Body):
    id: str
    """The name to ask for it by."""
    object: Literal["model"] = "model"
    """Always `model`."""
    created: int
    """When the server started, in Unix seconds."""
    owned_by: str = "asr-server"
    """Always `asr-server`."""
    shutdown_date: None = None
    """Always null: it is served as long as the server runs."""
    root: str
    """The model's own name."""
    state: Literal["unloaded", "loading", "ready", "draining"]
    """Whether its replicas run; those of an unloaded one are launched by the next request."""
    description: str
    """What it is, and what it cannot do."""
    languages: list[str]
    """Codes of the languages that it knows."""
    max_upload_bytes: int
    """Of a recording: larger ones are refused."""
    tasks: list[Literal["transcribe", "translate"]]
    """What it can do with them; it translates into English."""
    background: bool
    """Whether it takes jobs: requests with `background`."""


class ModelList(Body):
    object: Literal["list"] = "list"
    """Always `list`."""
    data: list[Model]
    """The model under each of its names, its own first."""


class Status(Body):
    status: Literal["ok", "ready"]
    """Of the server."""


class Version(Body):
    version: str
    """Of asr-server."""


class ReplicaLoad(Body):
    """A replica's work at its last heartbeat."""

    model: str
    """The first name of its model."""
    name: str
    """`replica 0`, `replica 1` ..."""
    ready: bool
    """Whether it takes work."""
    chunks_in_flight: int
    """Chunks sent to it that have no result yet."""
    num_steps: int
    """Steps of its engine since its start."""
    slots_in_use: int
    """Chunks that it is decoding."""
    num_decode_steps: int
    """Steps that decoded."""
    num_decoded_tokens: int
    """Tokens; divided by the steps, the mean batch."""


class Load(Body):
    server_load: int
    """Requests in flight."""
    chunks: int
    """Chunks waiting and in flight."""
    rejected: int
    """Requests refused with 429 so far."""
    replicas: list[ReplicaLoad]
    """The engines."""


# -- The headers of answers: documented, and shown to pages of other origins. --------------------------------
#
# `api.transcribe.answer_headers` and `recording_headers` set those of a transcript, `api.errors` an error's.

REQUEST_ID: Final = "x-request-id"
MODEL_LIMIT: Final = "x-model-limit"
IGNORED_FIELDS: Final = "x-ignored-fields"
TRUNCATED: Final = "x-truncated"
TRACKS: Final = "x-audio-tracks"
DROPPED: Final = "x-dropped-segments"
RETRY_AFTER: Final = "retry-after"
RETRY_AFTER_MS: Final = "retry-after-ms"
SHOULD_RETRY: Final = "x-should-retry"
LIMIT_UNITS: Final = ("requests", "audio-seconds")
LIMIT_HEADERS: Final = tuple(
    f"x-ratelimit-{part}-{unit}" for part in ("limit", "remaining", "reset") for unit in LIMIT_UNITS
)
HEADERS: Final = {
    REQUEST_ID: "The request's id: the one that was sent, or a new one. The server's log names it.",
    MODEL_LIMIT: "What the embedded model cannot do; absent with any other model.",
    IGNORED_FIELDS: "The fields that were left out, where the server ignores unknown ones.",
    TRUNCATED: "`true`: the recording is damaged or cut short. A stream says it in its last event.",
    TRACKS: "The numbers of the audio tracks that were read, of a file that has several; not with a stream.",
    DROPPED: "How many segments that the model wrote are left out; not with a stream.",
    RETRY_AFTER: "Seconds to wait before the next try.",
    RETRY_AFTER_MS: "The same in milliseconds.",
    "www-authenticate": "How to send a key.",
    SHOULD_RETRY: "`false`: another try would fail as well.",
    "connection": "`close`: this server is about to stop.",
    "x-accel-buffering": "With a stream `no`: a proxy is not to hold the events back.",
} | dict.fromkeys(LIMIT_HEADERS, "Of a key with a limit, as OpenAI has it.")
# Of replies that have no others: browsers guess no type, show them in no frame and run nothing in them.
SAFE_HEADERS: Final = {
    "x-content-type-options": "nosniff",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
}
