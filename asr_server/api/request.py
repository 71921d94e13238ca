"""Parse a form's text fields into typed models and decoding options. Reads no audio."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from asr_server import metrics
from asr_server.api import schemas
from asr_server.api.errors import MAX_QUOTED, unknown_field
from asr_server.api.models import Models, ServedModel
from asr_server.api.schemas import AudioFields, TranscriptionFields, TranslationFields
from asr_server.api.upload import VOICE_FIELD, Pairs
from asr_server.audio.decoder import TrackChoice, parse_choice
from asr_server.core import Clip, DecodingOptions, SpeakerCount
from asr_server.errors import InvalidValue
from asr_server.formats.render import DEFAULTS, FORMATS, RenderOptions
from asr_server.formats.subtitles import SubtitleLayout
from asr_server.language_codes import ENGLISH, is_given

_NAME: Final = re.compile(r"(?P<field>[^\[\]]+)(?:\[(?P<key>[^\[\]]*)\])?")
MAX_ENTRIES: Final = 1024  # of an array, as in realtime events

M = TypeVar("M", bound=BaseModel)
F = TypeVar("F", bound=AudioFields)


@dataclass(frozen=True)
class TranscriptionRequest:
    model: ServedModel
    fields: AudioFields  # as the client sent them, checked
    options: DecodingOptions
    ignored_fields: tuple[str, ...] = ()  # names that the API does not have, where the settings let them pass
    render_options: RenderOptions = DEFAULTS
    count: SpeakerCount | None = None  # of voices that are told apart; None: none are
    clips: tuple[Clip, ...] = ()  # parts of the recording; empty: all of it

    @property
    def is_streamed(self) -> bool:
        return _is_streamed(self.fields)

    @property
    def speakers(self) -> tuple[str, ...]:
        names = tuple(self.fields.known_speaker_names) or schemas.DEFAULT_SPEAKERS
        return names if self.fields.channels == "split" else ()

    @property
    def track_choice(self) -> TrackChoice:
        return parse_choice(self.fields.track, bool(self.speakers))


def parse_request(task: str, pairs: Pairs, models: Models) -> TranscriptionRequest:
    """Raises InvalidValue, ModelNotFound."""
    parse = parse_translation_request if task == "translate" else parse_transcription_request
    return parse(pairs, models)


def parse_transcription_request(pairs: Pairs, models: Models) -> TranscriptionRequest:
    """Raises InvalidValue, ModelNotFound."""
    fields, ignored, model = _parse(pairs, TranscriptionFields, models)
    count = _speaker_count(fields)
    render_options = _render_options(fields)
    options = _decoding_options(
        fields,
        model,
        [*fields.keywords, *fields.hotwords.split(",")],
        languages=fields.languages,
        token_logprobs=render_options.with_logprobs,
        word_timestamps=render_options.needs_words([fields.response_format]) or count is not None,
    )
    return TranscriptionRequest(model, fields, options, ignored, render_options, count)


def parse_translation_request(pairs: Pairs, models: Models) -> TranscriptionRequest:
    fields, ignored, model = _parse(pairs, TranslationFields, models)
    transcriber = model.transcriber
    if not transcriber.can_translate:
        raise InvalidValue(f"The model '{fields.model}' cannot translate.", "model")
    if fields.to_language and transcriber.languages.code(fields.to_language, "to_language") != ENGLISH:
        raise InvalidValue(
            "'to_language' can be English only: Whisper translates into nothing else.", "to_language"
        )
    render_options = RenderOptions(layout=SubtitleLayout(raw=fields.subtitles == "raw"))
    options = _decoding_options(
        fields,
        model,
        fields.hotwords.split(","),
        task="translate",
        word_timestamps=render_options.needs_words([fields.response_format]),
    )
    return TranscriptionRequest(model, fields, options, ignored, render_options)


def _parse(pairs: Pairs, fields_type: type[F], models: Models) -> tuple[F, tuple[str, ...], ServedModel]:
    ignored: tuple[str, ...] = ()
    if models.default.settings.unknown_fields == "ignore":
        pairs, ignored = split_unknown(pairs, fields_type)
    fields = parse_fields(pairs, fields_type)
    metrics.current_request_stats().asked_for |= {
        "model": fields.model[:MAX_QUOTED],
        "format": fields.response_format,
        "stream": _is_streamed(fields),
    }
    model = models.choose(fields.model)
    metrics.current_request_stats().model = model.name
    return fields, ignored, model


def _decoding_options(
    fields: AudioFields, model: ServedModel, keywords: list[str], **own: Any
) -> DecodingOptions:
    same_named = AudioFields.model_fields.keys() & {*DecodingOptions.__struct_fields__}
    values: dict[str, Any] = {name: getattr(fields, name) for name in same_named} | {
        "prompt": fields.prompt,
        "keywords": keywords,
        "temperature": fields.temperature,
        "streams": _is_streamed(fields),
        "text_only": not _shows_segments(fields) and fields.channels != "split",
        "top_k": max(0, fields.top_k),  # vLLM's -1 is off too
        "max_new_tokens": fields.max_completion_tokens,
    }
    return model.transcriber.options(**values | own)


def _speaker_count(fields: TranscriptionFields) -> SpeakerCount | None:
    if fields.channels == "split" or not _shows_segments(fields):
        return None
    wants = (
        fields.diarize
        or fields.known_speaker_references
        or any(getattr(fields, n) for n in schemas.COUNT_FIELDS)
    )
    if not wants and fields.response_format != "diarized_json":
        return None
    exact = fields.num_speakers
    return SpeakerCount(exact or fields.min_speakers or 1, exact or fields.max_speakers)


def _render_options(fields: TranscriptionFields) -> RenderOptions:
    granularities = fields.timestamp_granularities or ["segment"]
    return RenderOptions(
        with_logprobs="logprobs" in fields.include,
        with_segments="segment" in granularities,
        with_words="word" in granularities,
        layout=SubtitleLayout(
            fields.subtitles == "raw", **{name: getattr(fields, name) for name in schemas.LAYOUT_FIELDS}
        ),
    )


def _shows_segments(fields: AudioFields) -> bool:
    return FORMATS[fields.response_format].shows_segments or fields.stream_include_segments


def _is_streamed(fields: AudioFields) -> bool:
    return fields.stream and fields.response_format != "verbose_json"


def read_fields(pairs: Iterable[tuple[str, str]], fields_type: type[M]) -> M:
    """Raises InvalidValue for the first field that is unknown, repeated, malformed or out of range."""
    try:
        return fields_type.model_validate(_gather(pairs, fields_type))
    except ValidationError as error:
        raise _invalid(error, fields_type) from None


def parse_fields(pairs: Iterable[tuple[str, str]], fields_type: type[F]) -> F:
    """Raises InvalidValue as `read_fields`, and for fields that exclude each other."""
    fields = read_fields(pairs, fields_type)
    for param, reason in _conflicts(fields):
        raise InvalidValue(f"'{param}' {reason}.", param)
    parse_choice(fields.track, fields.channels == "split")
    return fields


def split_unknown(pairs: Pairs, fields_type: type[BaseModel]) -> tuple[Pairs, tuple[str, ...]]:
    known: Pairs = []
    unknown: dict[str, None] = {}
    for name, value in pairs:
        if name.partition("[")[0] in fields_type.model_fields:
            known.append((name, value))
        else:
            unknown[name] = None
    return known, tuple(unknown)


def _gather(pairs: Iterable[tuple[str, str]], fields_type: type[BaseModel]) -> dict[str, Any]:
    """Join lists from `name[]`, `name`, `a,b`, `["a"]` and objects from `name[key]`; empty means absent."""
    gathered: dict[str, Any] = {}
    for name, value in pairs:
        match = _NAME.fullmatch(name)
        field, key = (match["field"], match["key"]) if match else (name, None)
        if not value.strip():
            continue
        if field in fields_type.model_fields:
            _add(gathered, name, field, key, value)
        else:
            gathered[name] = value  # refused by name, however often it was given
    return gathered


def _add(gathered: dict[str, Any], name: str, field: str, key: str | None, value: str) -> None:
    if field in schemas.ARRAY_FIELDS:
        is_entry = field == VOICE_FIELD or (key is not None and field in schemas.FREE_TEXT_FIELDS)
        items = gathered.setdefault(field, [])
        if len(items) + (1 if is_entry else 1 + value.count(",")) > MAX_ENTRIES:  # before it is split
            raise InvalidValue(f"'{field}[]' has more than {MAX_ENTRIES:,} entries.", f"{field}[]")
        items.extend(_items(f"{field}[]", value, is_entry))
    elif field == "metadata" and key:
        gathered.setdefault(field, {})[key] = value
    elif field == "metadata":
        gathered[field] = _object(value)
    elif field == "chunking_strategy":
        gathered[field] = value  # which changes nothing
    elif name in gathered:
        raise InvalidValue(f"'{name}' was given more than once.", name)
    else:
        gathered[name] = value


def _items(param: str, value: str, is_entry: bool) -> list[Any]:
    try:
        items = schemas.loads(value)
    except UnicodeEncodeError:
        raise InvalidValue(f"'{param}' has half a surrogate pair, which is no text.", param) from None
    except (ValueError, RecursionError):
        items = None
    if isinstance(items, list):
        return items
    return [value] if is_entry else [part.strip() for part in value.split(",") if part.strip()]


def _object(value: str) -> Any:
    """Return the text itself if it is no JSON: it is refused as no object."""
    try:
        return schemas.loads(value)
    except (ValueError, RecursionError):
        return value


def _invalid(error: ValidationError, fields_type: type[BaseModel]) -> InvalidValue:
    first = error.errors(include_url=False, include_context=False)[0]
    field = str(first["loc"][0])
    param = f"{field}[]" if field in schemas.ARRAY_FIELDS else field
    if first["type"] == "extra_forbidden":
        return InvalidValue(unknown_field(param, fields_type.model_fields), param)
    value = str(first["input"])[:MAX_QUOTED]
    return InvalidValue(f"Invalid value for '{param}': '{value}'. {first['msg']}.", param)


_NAMES, _VOICES, _TIMES = "known_speaker_names[]", f"{VOICE_FIELD}[]", "timestamp_granularities[]"


def _conflicts(fields: AudioFields) -> Iterator[tuple[str, str]]:
    names, is_split = fields.known_speaker_names, fields.channels == "split"
    if fields.stream and FORMATS[fields.response_format].has_cues:
        yield "stream", "requires response_format json, text or diarized_json"
    for name in schemas.STREAM_FIELDS:
        if getattr(fields, name) and not fields.stream:
            yield name, "requires stream=true"
    for name in schemas.BACKGROUND_FIELDS:
        if getattr(fields, name) and not fields.background:
            yield name, "requires background=true"
    if fields.multilingual and is_given(fields.language):
        yield "multilingual", "detects the language between pauses: not with 'language'"
    if is_split and names and len(set(names)) != 2:
        yield _NAMES, "are two different names: of the left and of the right channel"
    if isinstance(fields, TranscriptionFields):
        yield from _conflicts_of_times(fields)
        yield from _conflicts_of_voices(fields)
    elif names and not is_split:
        yield _NAMES, "needs channels=split here"


def _conflicts_of_times(fields: TranscriptionFields) -> Iterator[tuple[str, str]]:
    has_times = fields.response_format == "verbose_json" or fields.stream_include_segments
    # Vercel's AI SDK sends `segment` beside json; words would be left out silently.
    is_harmless = fields.response_format == "json" and fields.timestamp_granularities == ["segment"]
    if fields.timestamp_granularities and not has_times and not is_harmless:
        yield _TIMES, "requires response_format=verbose_json"
    if fields.include and (fields.response_format != "json" or fields.channels == "split"):
        yield "include[]", "requires response_format=json, without channels=split"
    if fields.max_line_count and not fields.max_line_width:
        yield "max_line_count", "requires 'max_line_width'"
    if fields.languages and is_given(fields.language):
        yield "languages[]", "are candidates for detection: not with 'language'"


def _conflicts_of_voices(fields: TranscriptionFields) -> Iterator[tuple[str, str]]:
    names, voices = fields.known_speaker_names, fields.known_speaker_references
    is_split = fields.channels == "split"
    labels = [name for name in ("diarize", *schemas.COUNT_FIELDS) if getattr(fields, name)]
    for name in [_VOICES] * bool(voices) + labels:
        if is_split:
            yield name, "tells voices apart: not with channels=split"
    for name in labels:
        if not _shows_segments(fields):
            yield name, f"needs a response_format that shows speakers: {_WITH_SPEAKERS}"
    if not is_split and len(names) != len(voices):
        yield (
            _NAMES if len(names) > len(voices) else _VOICES,
            f"needs channels=split, or a '{_VOICES}' a name",
        )
    if len(set(names)) < len(names):
        yield _NAMES, "are different names"
    if fields.num_speakers and (fields.min_speakers or fields.max_speakers):
        yield "num_speakers", "cannot be combined with min_speakers or max_speakers"
    if (fields.min_speakers or 1) > (fields.max_speakers or 32):
        yield "min_speakers", "is more than max_speakers"


_WITH_SPEAKERS: Final = "diarized_json, verbose_json, srt or vtt, or 'stream' with 'stream_include_segments'"


async def read_small_body(request: Request, max_bytes: int) -> bytes:
    """Return a body that is no recording. Raises InvalidValue over the limit."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > max_bytes:
            raise InvalidValue(f"The body is over the limit of {max_bytes} bytes.")
    return bytes(body)
