"""The bodies as the API's documentation shows them."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from asr_server.formats.render import DiarizedJson, Json, TokensUsage, VerboseJson


@pytest.mark.parametrize("body", [Json, VerboseJson, DiarizedJson, TokensUsage])
def test_each_field_is_described(body: type[BaseModel]) -> None:
    schema = body.model_json_schema()
    for model in (schema, *schema.get("$defs", {}).values()):
        assert all(field.get("description") for field in model["properties"].values())
