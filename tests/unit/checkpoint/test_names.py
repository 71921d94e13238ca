from __future__ import annotations

import re

import pytest

from asr_server.annexes.model_sources.find import resolve_checkpoint
from asr_server.annexes.model_sources.names import (
    SHORT_NAMES,
    published,
    published_name,
)
from asr_server.errors import CheckpointError


@pytest.mark.parametrize(
    ("short", "full"),
    [
        ("tiny", "openai/whisper-tiny"),
        ("tiny.en", "openai/whisper-tiny.en"),
        ("large-v3", "openai/whisper-large-v3"),
        ("whisper-large-v3", "openai/whisper-large-v3"),
        ("large", "openai/whisper-large-v3"),
        ("large-v1", "openai/whisper-large"),
        ("turbo", "openai/whisper-large-v3-turbo"),
        ("distil-large-v3.5", "distil-whisper/distil-large-v3.5"),
    ],
)
def test_a_short_name_means_a_model_on_the_hub(short: str, full: str) -> None:
    assert full in (published(short).repository, *published(short).cached)
    assert published(full) == published(short)


def test_every_published_model_has_one_name_and_sums_of_sha256() -> None:
    for name, model in SHORT_NAMES.items():
        assert published(name) is published(model.repository) is model
        assert all(re.fullmatch("[0-9a-f]{64}", sum) for sum in model.sha256.values())
        assert re.fullmatch("main|[0-9a-f]{40}", model.revision)
        assert bool(model.sha256) == (model.revision != "main")
        assert model.wheels is None or set(model.wheels.members) == set(model.sha256)


def test_a_repository_of_somebody_else_is_taken_as_it_is() -> None:
    model = published("Systran/faster-whisper-small")
    assert (model.repository, model.revision, model.sha256) == ("Systran/faster-whisper-small", "main", {})


def test_an_unknown_name_without_organisation_is_refused_without_asking_the_hub() -> None:
    with pytest.raises(CheckpointError, match=r"did you mean large-v3\?.*tiny, tiny\.en"):
        resolve_checkpoint("lage-v3")


@pytest.mark.parametrize("path", ["./nothing", "/nothing/at/all", "some/where/deep", "../whisper", "~/x"])
def test_what_is_written_as_a_path_is_never_looked_for_on_the_hub(path: str) -> None:
    with pytest.raises(CheckpointError, match=f"there is no directory {path}"):
        resolve_checkpoint(path)


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("ggml-large-v3-q5_0.bin", "large-v3"),
        ("ggml-medium.en.bin", "medium.en"),
        ("faster-distil-whisper-large-v3", "distil-large-v3"),
        ("whisper-large-v3-turbo-ct2", "large-v3-turbo"),
        ("ggml-model.bin", None),
        ("tinycorp.bin", None),
    ],
)
def test_the_name_of_a_converted_model_tells_which_one_it_was(file: str, name: str | None) -> None:
    assert published_name(file) == name
