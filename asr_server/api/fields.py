"""Parses the form's text fields into typed models; checks which fields go together. Used by `request.py`."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable
from typing import Any, Final, TypeVar

from pydantic import ValidationError

from asr_server.api.schemas import ARRAY_FIELDS, LAYOUT_FIELDS, NOT_SERVED, AudioFields, TranscriptionFields
from asr_server.config import naming
from asr_server.errors import InvalidValue
from asr_server.transcription.language import is_given

_NAME: Final = re.compile(r"(?P<field>[^\[\]]+)(?:\[(?P<key>[^\[\]]*)\])?")
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
    if isinstance(fields, TranscriptionFields):
        _check_combinations(fields)
    elif fields.response_format == "diarized_json":
        raise InvalidValue("response_format diarized_json is for transcriptions only.", "response_format")
    return fields


def split_unknown(
    pairs: Iterable[tuple[str, str]], fields_type: type[AudioFields]
) -> tuple[list[tuple[str, str]], tuple[str, ...]]:
    """The fields that `fields_type` has or that are refused by name, and the names of all others."""
    known: list[tuple[str, str]] = []
    unknown: dict[str, None] = {}
    for name, value in pairs:
        if name.partition("[")[0] in fields_type.model_fields.keys() | NOT_SERVED.keys():
            known.append((name, value))
        else:
            unknown[name] = None
    return known, tuple(unknown)


def _gather(pairs: Iterable[tuple[str, str]], fields_type: type[AudioFields]) -> dict[str, Any]:
    """Lists of `name[]`, `name`, `a,b`, `["a"]`; objects of `name[key]`; an empty value is an absent one."""
    gathered: dict[str, Any] = {}
    for name, value in pairs:
        match = _NAME.fullmatch(name)
        field, key = (match["field"], match["key"]) if match else (name, None)
        if field in NOT_SERVED:
            raise InvalidValue(f"'{name}' is not supported: {NOT_SERVED[field]}.", name)
        if not value.strip():
            continue
        if field in fields_type.model_fields:
            _add(gathered, name, field, key, value)
        else:
            gathered[name] = value  # refused by name, however often it was given
    return gathered


def _add(gathered: dict[str, Any], name: str, field: str, key: str | None, value: str) -> None:
    if field in ARRAY_FIELDS:
        gathered.setdefault(field, []).extend(_items(value))
    elif key and field == "chunking_strategy" and isinstance(gathered.setdefault(field, {}), dict):
        gathered[field][key] = value
    elif name in gathered:
        raise InvalidValue(f"'{name}' was given more than once.", name)
    else:
        gathered[name] = value


def _items(value: str) -> list[Any]:
    """The entries of an array's text: JSON, or separated by commas."""
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(items := json.loads(value), list):
            return items
    return [part.strip() for part in value.split(",") if part.strip()]


def _invalid(error: ValidationError) -> InvalidValue:
    first = error.errors(include_url=False, include_context=False)[0]
    field = str(first["loc"][0])
    param = _on_the_wire(field)
    if first["type"] == "missing" and len(first["loc"]) == 1:
        return InvalidValue(f"'{param}' is required.", param)
    if first["type"] == "extra_forbidden" and len(first["loc"]) == 1:
        message = f"Unknown field '{param[:_MAX_QUOTED]}'. {naming('unknown_fields')} can be ignore."
        return InvalidValue(message, param)
    value = str(first["input"])[:_MAX_QUOTED]
    return InvalidValue(f"Invalid value for '{param}': '{value}'. {first['msg']}.", param)


def _on_the_wire(field: str) -> str:
    return f"{field}[]" if field in ARRAY_FIELDS else field


def _check_stream(fields: AudioFields) -> None:
    if fields.stream and fields.response_format not in ("json", "text", "diarized_json"):
        raise InvalidValue("'stream' goes with response_format json, text or diarized_json only.", "stream")


def _check_multilingual(fields: AudioFields) -> None:
    if fields.multilingual and is_given(getattr(fields, "language", "")):
        raise InvalidValue(
            "'multilingual' detects the language of each chunk: not with 'language'.", "multilingual"
        )


def _check_combinations(fields: TranscriptionFields) -> None:
    with_times = fields.response_format == "verbose_json" or (
        fields.stream and fields.stream_include_segments
    )
    if fields.timestamp_granularities and not with_times:
        raise InvalidValue(
            "'timestamp_granularities[]' goes with response_format verbose_json only.",
            "timestamp_granularities[]",
        )
    for name in LAYOUT_FIELDS:
        if getattr(fields, name) and fields.response_format not in ("srt", "vtt"):
            raise InvalidValue(f"'{name}' goes with response_format srt or vtt only.", name)
    if fields.max_line_count and not fields.max_line_width:
        raise InvalidValue("'max_line_count' goes with 'max_line_width' only.", "max_line_count")
    if fields.include and fields.response_format != "json":
        raise InvalidValue("'include[]' goes with response_format json only.", "include[]")
    if fields.include and fields.channels == "split":
        raise InvalidValue("'include[]' does not go with channels=split.", "include[]")
    if fields.languages and is_given(fields.language):
        raise InvalidValue("'languages[]' are candidates for detection: not with 'language'.", "languages[]")


def _check_speakers(fields: AudioFields) -> None:
    """Channels alone tell speakers apart."""
    if fields.channels == "split":
        _check_split(fields)
        return
    needs = (
        "needs channels=split, a stereo file with a speaker in each channel: voices are not told apart here"
    )
    if fields.response_format == "diarized_json":
        raise InvalidValue(f"response_format 'diarized_json' {needs}.", "response_format")
    if fields.known_speaker_names:
        raise InvalidValue(f"'known_speaker_names[]' {needs}.", "known_speaker_names[]")


def _check_split(fields: AudioFields) -> None:
    names = fields.known_speaker_names
    if names and (len(names) != 2 or names[0] == names[1]):
        raise InvalidValue(
            "'known_speaker_names[]' are two different names: of the left and of the right channel.",
            "known_speaker_names[]",
        )
