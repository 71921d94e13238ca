"""docs/formats.md shows each JSON answer with the fields that a server gives."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.conftest import Server
from tests.contract.test_documentation import ROOT, blocks_of
from tests.support.speech import say
from tests.unit.api.sample_files import sound_file

SHOWN = [json.loads(block) for block in blocks_of(ROOT / "docs" / "formats.md", "json")]
ASKED: tuple[dict[str, Any], ...] = (
    {"response_format": "json"},
    {"response_format": "json", "include[]": "logprobs"},
    {"response_format": "verbose_json", "timestamp_granularities[]": ["segment", "word"]},
    {"response_format": "diarized_json"},
)
OPTIONAL = {"language_probability", "dropped", "truncated", "tracks"}


def shape_of(value: object) -> object:
    """Return its fields and those of the first entry of each list."""
    if isinstance(value, dict):
        return {name: shape_of(each) for name, each in value.items() if name not in OPTIONAL}
    return [shape_of(each) for each in value[:1]] if isinstance(value, list) else None


@pytest.mark.parametrize(
    ("shown", "fields"),
    list(zip(SHOWN, ASKED, strict=True)),
    ids=["json", "logprobs", "verbose_json", "diarized_json"],
)
def test_each_json_shown_has_the_fields_of_a_real_answer(
    server: Server, shown: object, fields: dict[str, Any]
) -> None:
    file = sound_file(say("314159", gap_s=0.2).samples)
    answer = httpx.post(
        f"{server.url}/v1/audio/transcriptions", files={"file": file}, data=fields, timeout=100
    )
    assert shape_of(shown) == shape_of(answer.json())
