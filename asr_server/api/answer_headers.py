"""Headers of a transcript's reply that OpenAI does not have. Used by `response.py` and the realtime route."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from urllib.parse import quote

from asr_server.config import Settings

MODEL_LIMIT: Final = "x-model-limit"
IGNORED_FIELDS: Final = "x-ignored-fields"
_MAX_NAMED: Final = 32  # fields
_MAX_NAME: Final = 80  # characters of a field's name


def answer_headers(settings: Settings, ignored_fields: Sequence[str] = ()) -> dict[str, str]:
    """What the model cannot do, where that is not to be expected, and the fields that were left out."""
    headers = {}
    if settings.model_limit:
        headers[MODEL_LIMIT] = settings.model_limit
    if ignored_fields:
        headers[IGNORED_FIELDS] = ", ".join(map(_quoted, ignored_fields[:_MAX_NAMED]))
    return headers


def _quoted(name: str) -> str:
    """A field's name is up to the client: what is no plain character is written as in an address."""
    return quote(name[:_MAX_NAME], safe="[]")
