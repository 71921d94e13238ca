"""Which model a request gets by its name."""

from __future__ import annotations

import pytest

from asr_server.api.models import ModelRegistry
from asr_server.config import Settings
from asr_server.errors import ModelNotFound
from tests.api.running_app import served


def test_a_name_or_alias_chooses_its_model_and_no_name_the_first() -> None:
    first, second = (
        served(Settings(served_model_name=name, model_alias=alias))
        for name, alias in (("base", "whisper-1"), ("turbo", ""))
    )
    models = ModelRegistry([first, second])
    assert models.names == ("base", "whisper-1", "turbo")
    asked = {name: models.choose(name) for name in ("", "base", "whisper-1", "turbo")}
    assert asked == {"": first, "base": first, "whisper-1": first, "turbo": second}
    with pytest.raises(ModelNotFound, match="base, whisper-1, turbo"):
        models.choose("large")
    with pytest.raises(ModelNotFound, match=f"The model '{'x' * 200}' does not exist"):
        models.choose("x" * 201)


def test_a_star_among_the_aliases_takes_any_name() -> None:
    model = served(Settings(model_alias="whisper-1,*"))
    assert ModelRegistry([model]).choose("Systran/faster-whisper-large-v3") is model
    with pytest.raises(ModelNotFound, match=r"'\*' takes any"):
        ModelRegistry([served(Settings())]).choose("Systran/faster-whisper-large-v3")
