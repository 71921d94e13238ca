"""Describe a setting's values for error messages. Imports no torch."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from asr_server.config import FIELDS, Settings, extra


def takes_empty_text(setting: str) -> bool:
    values: dict[str, Any] = {setting: ""}
    try:
        Settings(**values)
    except ValidationError:
        return False
    return True


def allowed_values(setting: str) -> str:
    """Describe a setting's values: `a whole number from 0 to 65535`."""
    kind = FIELDS[setting].annotation
    if words := extra(setting)["allowed"]:
        return words
    if get_origin(kind) is Literal:
        *others, last = get_args(kind)
        return f"{', '.join(others)} or {last}"
    if kind is bool:
        return "true or false"
    if kind is str:
        return "some text"
    return ("a whole number" if kind is int else "a number") + _range_in_words(FIELDS[setting])


def _range_in_words(field: FieldInfo) -> str:
    bounds = {type(bound): bound for bound in field.metadata}
    match bounds.get(Ge), bounds.get(Gt), bounds.get(Le):
        case Ge(ge), _, Le(le):
            return f" from {ge:g} to {le:g}"
        case Ge(ge), _, _:
            return f" of at least {ge:g}"
        case _, Gt(gt), _:
            return f" above {gt:g}"
    return ""
