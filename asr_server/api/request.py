"""Parse a form's text fields into typed models and decoding options. Reads no audio."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from pydantic import ValidationError

from asr_server import metrics
from asr_server.api.form import VOICE_FIELD
from asr_server.api.models import Models
from asr_server.api.schemas import (
    ARRAY_FIELDS,
    COUNT_FIELDS,
    DEFAULT_SPEAKERS,
    FREE_TEXT_FIELDS,
    LAYOUT_FIELDS,
    STREAM_FIELDS,
    AudioFields,
    TranscriptionFields,
    TranslationFields,
    loads,
)
from asr_server.api.served_model import ServedModel
from asr_server.audio.tracks import TrackChoice, parse_choice
from asr_server.config import naming
from asr_server.core import DecodingOptions
from asr_server.errors import InvalidValue
from asr_server.formats.render import RenderOptions
from asr_server.formats.subtitles import SubtitleLayout
from asr_server.speakers.clustering import SpeakerCount
from asr_server.transcription.language import ENGLISH, is_given

_NAME: Final = re.compile(r"(?P<field>[^\[\]]+)(?:\[(?P<key>[^\[\]]*)\])?")
MAX_ENTRIES: Final = 1024  # of an array, as in realtime events
_MAX_QUOTED: Final = 80  # characters of what the client sent that an error repeats

F = TypeVar("F", bound=AudioFields)


def parse_fields(pairs: Iterable[tuple[str, str]], fields_type: type[F]) -> F:
    """Raises InvalidValue for the first field that is unknown, repeated, malformed or out of range."""
    try:
        fields = fields_type.model_validate(_gather(pairs, fields_type))
    except ValidationError as error:
        raise _invalid(error) from None
    _check_stream(fields)
    _check_speakers(fields)
    _check_multilingual(fields)
    parse_choice(fields.track, fields.channels == "split")
    if isinstance(fields, TranscriptionFields):
        _check_combinations(fields)
    return fields


def split_unknown(
    pairs: Iterable[tuple[str, str]], fields_type: type[AudioFields]
) -> tuple[list[tuple[str, str]], tuple[str, ...]]:
    known: list[tuple[str, str]] = []
    unknown: dict[str, None] = {}
    for name, value in pairs:
        if name.partition("[")[0] in fields_type.model_fields:
            known.append((name, value))
        else:
            unknown[name] = None
    return known, tuple(unknown)


def _gather(pairs: Iterable[tuple[str, str]], fields_type: type[AudioFields]) -> dict[str, Any]:
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
    if field in ARRAY_FIELDS:
        is_entry = field == VOICE_FIELD or (key is not None and field in FREE_TEXT_FIELDS)
        items = gathered.setdefault(field, [])
        if len(items) + (1 if is_entry else 1 + value.count(",")) > MAX_ENTRIES:  # before it is split
            raise InvalidValue(f"'{field}[]' has more than {MAX_ENTRIES:,} entries.", f"{field}[]")
        items.extend(_items(f"{field}[]", value, is_entry))
    elif key and field == "chunking_strategy" and isinstance(gathered.setdefault(field, {}), dict):
        gathered[field][key] = value
    elif name in gathered:
        raise InvalidValue(f"'{name}' was given more than once.", name)
    else:
        gathered[name] = value


def _items(param: str, value: str, is_entry: bool) -> list[Any]:
    try:
        items = loads(value)
    except UnicodeEncodeError:
        raise InvalidValue(f"'{param}' has half a surrogate pair, which is no text.", param) from None
    except (ValueError, RecursionError):
        items = None
    if isinstance(items, list):
        return items
    return [value] if is_entry else [part.strip() for part in value.split(",") if part.strip()]


def _invalid(error: ValidationError) -> InvalidValue:
    first = error.errors(include_url=False, include_context=False)[0]
    field = str(first["loc"][0])
    param = f"{field}[]" if field in ARRAY_FIELDS else field
    if first["type"] == "extra_forbidden" and len(first["loc"]) == 1:
        message = f"Unknown field '{param[:_MAX_QUOTED]}'. {naming('unknown_fields')} can be ignore."
        return InvalidValue(message, param)
    value = str(first["input"])[:_MAX_QUOTED]
    return InvalidValue(f"Invalid value for '{param}': '{value}'. {first['msg']}.", param)


def _check_stream(fields: AudioFields) -> None:
    if fields.stream and fields.response_format in ("srt", "vtt"):
        raise InvalidValue("'stream' requires response_format json, text or diarized_json.", "stream")
    for name in STREAM_FIELDS:
        if getattr(fields, name) and not fields.stream:
            raise InvalidValue(f"'{name}' requires stream=true.", name)


def _check_multilingual(fields: AudioFields) -> None:
    if fields.multilingual and is_given(fields.language):
        raise InvalidValue(
            "'multilingual' detects the language of each chunk: not with 'language'.", "multilingual"
        )


def _check_combinations(fields: TranscriptionFields) -> None:
    with_times = fields.response_format == "verbose_json" or (
        fields.stream and fields.stream_include_segments
    )
    # Vercel's AI SDK sends `segment` beside json; words would be left out silently.
    is_harmless = fields.response_format == "json" and fields.timestamp_granularities == ["segment"]
    if fields.timestamp_granularities and not with_times and not is_harmless:
        raise InvalidValue(
            "'timestamp_granularities[]' requires response_format=verbose_json.", "timestamp_granularities[]"
        )
    for name in LAYOUT_FIELDS:
        if getattr(fields, name) and fields.response_format not in ("srt", "vtt"):
            raise InvalidValue(f"'{name}' requires response_format srt or vtt.", name)
    if fields.max_line_count and not fields.max_line_width:
        raise InvalidValue("'max_line_count' requires 'max_line_width'.", "max_line_count")
    if fields.include and fields.response_format != "json":
        raise InvalidValue("'include[]' requires response_format=json.", "include[]")
    if fields.include and fields.channels == "split":
        raise InvalidValue("'include[]' does not go with channels=split.", "include[]")
    if fields.languages and is_given(fields.language):
        raise InvalidValue("'languages[]' are candidates for detection: not with 'language'.", "languages[]")


def _check_speakers(fields: AudioFields) -> None:
    if fields.channels == "split":
        _check_split(fields)
    if not isinstance(fields, TranscriptionFields):
        if fields.known_speaker_names and fields.channels != "split":
            raise InvalidValue("'known_speaker_names[]' needs channels=split here.", "known_speaker_names[]")
        return
    counts = [name for name in COUNT_FIELDS if getattr(fields, name)]
    labels = counts + ["diarize"] * fields.diarize
    by_voice = [f"{VOICE_FIELD}[]"] * bool(fields.known_speaker_references) + labels
    if by_voice and fields.channels == "split":
        raise InvalidValue(f"'{by_voice[0]}' tells voices apart: not with channels=split.", by_voice[0])
    num_names, num_references = len(fields.known_speaker_names), len(fields.known_speaker_references)
    if fields.channels != "split" and num_names != num_references:
        raise InvalidValue(
            f"'known_speaker_names[]' needs channels=split, or as many '{VOICE_FIELD}[]' as names.",
            "known_speaker_names[]" if num_names > num_references else f"{VOICE_FIELD}[]",
        )
    if len(set(fields.known_speaker_names)) < len(fields.known_speaker_names):
        raise InvalidValue("'known_speaker_names[]' are different names.", "known_speaker_names[]")
    if labels and not _shows_segments(fields):
        raise InvalidValue(
            f"'{labels[0]}' needs a response_format that shows speakers: diarized_json, verbose_json, srt "
            "or vtt, or 'stream' with 'stream_include_segments'.",
            labels[0],
        )
    if fields.num_speakers and len(counts) > 1:
        raise InvalidValue(
            "'num_speakers' cannot be combined with min_speakers or max_speakers.", "num_speakers"
        )
    if (fields.min_speakers or 1) > (fields.max_speakers or 32):
        raise InvalidValue("'min_speakers' is more than max_speakers.", "min_speakers")


def _shows_segments(fields: AudioFields) -> bool:
    return fields.response_format not in ("json", "text") or fields.stream_include_segments


def _check_split(fields: AudioFields) -> None:
    names = fields.known_speaker_names
    if names and (len(names) != 2 or names[0] == names[1]):
        raise InvalidValue(
            "'known_speaker_names[]' are two different names: of the left and of the right channel.",
            "known_speaker_names[]",
        )


@dataclass(frozen=True)
class TranscriptionRequest:
    model: ServedModel
    fields: AudioFields  # as the client sent them, checked
    options: DecodingOptions
    ignored_fields: tuple[str, ...]  # names that the API does not have, where the settings let them pass
    render_options: RenderOptions
    count: SpeakerCount | None = None  # of voices that are told apart; None: none are

    @property
    def speakers(self) -> tuple[str, ...]:
        names = tuple(self.fields.known_speaker_names) or DEFAULT_SPEAKERS
        return names if self.fields.channels == "split" else ()

    @property
    def track_choice(self) -> TrackChoice:
        return parse_choice(self.fields.track, bool(self.speakers))


def parse_transcription_request(pairs: list[tuple[str, str]], models: Models) -> TranscriptionRequest:
    """Raises InvalidValue, ModelNotFound."""
    fields, ignored, model = _parse(pairs, TranscriptionFields, models)
    count = _speaker_count(fields)
    render_options = _render_options(fields)
    options = _decoding_options(
        fields,
        model,
        [*fields.keywords, *fields.hotwords.split(",")],
        languages=fields.languages,
        multilingual=fields.multilingual,
        token_logprobs=render_options.with_logprobs,
        word_timestamps=render_options.needs_words([fields.response_format]) or count is not None,
    )
    return TranscriptionRequest(model, fields, options, ignored, render_options, count)


def parse_translation_request(pairs: list[tuple[str, str]], models: Models) -> TranscriptionRequest:
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


def _parse(
    pairs: list[tuple[str, str]], fields_type: type[F], models: Models
) -> tuple[F, tuple[str, ...], ServedModel]:
    ignored: tuple[str, ...] = ()
    if models.default.settings.unknown_fields == "ignore":
        pairs, ignored = split_unknown(pairs, fields_type)
    fields = parse_fields(pairs, fields_type)
    metrics.current_request_stats().asked_for |= {
        "model": fields.model[:_MAX_QUOTED],
        "format": fields.response_format,
        "stream": fields.is_streamed,
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
        "streams": fields.is_streamed,
        "top_k": max(0, fields.top_k),  # vLLM's -1 is off too
        "segment_times": _shows_segments(fields) or fields.channels == "split",
        "max_new_tokens": fields.max_completion_tokens,
    }
    return model.transcriber.options(**values | own)


def _speaker_count(fields: TranscriptionFields) -> SpeakerCount | None:
    if fields.channels == "split" or not _shows_segments(fields):
        return None
    wants = fields.diarize or fields.known_speaker_references or any(getattr(fields, n) for n in COUNT_FIELDS)
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
            fields.subtitles == "raw", **{name: getattr(fields, name) for name in LAYOUT_FIELDS}
        ),
    )
