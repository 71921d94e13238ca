from __future__ import annotations

import re

import pytest

from asr_server.checkpoint.find import resolve_checkpoint
from asr_server.checkpoint.names import (
    SHORT_NAMES,
    Published,
    base_model,
    check_hub_name,
    published,
    published_heads,
    published_name,
)
from asr_server.config import EMBEDDED_MODEL
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


@pytest.mark.parametrize(
    ("name", "copies"),
    [
        ("small.en", ("Systran/faster-whisper-small.en",)),
        ("distil-small.en", ("Systran/faster-distil-whisper-small.en",)),
        ("base", ("openai/whisper-base",)),
    ],
)
def test_a_copy_that_other_programs_fetched_is_the_same_model(name: str, copies: tuple[str, ...]) -> None:
    assert published(name).cached == copies
    assert all(model.cached for model in SHORT_NAMES.values())


def test_a_repository_of_somebody_else_is_taken_as_it_is() -> None:
    model = published("Systran/faster-whisper-small")
    assert (model.repository, model.revision, model.sha256) == ("Systran/faster-whisper-small", "main", {})


def test_the_embedded_model_goes_by_its_name() -> None:
    assert resolve_checkpoint("whisper-digits") == EMBEDDED_MODEL


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


# The published sizes: width, decoder layers, vocabulary.
SIZES = {
    "tiny": (384, 4, 51_865),
    "tiny.en": (384, 4, 51_864),
    "base": (512, 6, 51_865),
    "base.en": (512, 6, 51_864),
    "small": (768, 12, 51_865),
    "small.en": (768, 12, 51_864),
    "medium": (1024, 24, 51_865),
    "medium.en": (1024, 24, 51_864),
    "large-v2": (1280, 32, 51_865),
    "large-v3": (1280, 32, 51_866),
    "large-v3-turbo": (1280, 4, 51_866),
}


def config_of(width: int, num_layers: int, vocabulary: int) -> dict[str, int]:
    return {"d_model": width, "decoder_layers": num_layers, "vocab_size": vocabulary}


@pytest.mark.parametrize("name", SIZES)
def test_a_published_size_tells_the_model_and_its_alignment_heads(name: str) -> None:
    width, num_layers, vocabulary = SIZES[name]
    config = config_of(width, num_layers, vocabulary)
    assert base_model(config) == name
    heads = published_heads(config, None)
    assert len(heads) == len(set(heads)) >= 5
    assert all(num_layers // 4 - 1 <= layer < num_layers for layer, _ in heads), "the upper layers align"
    assert all(0 <= head < width // 64 for _, head in heads)
    assert published_heads(config | {"decoder_layers": num_layers - 1}, None) == []


def test_large_v1_differs_from_large_v2_by_its_name_alone() -> None:
    config = config_of(*SIZES["large-v2"])
    assert published_heads(config, "large-v1") != published_heads(config, "other")
    assert published_heads(config, "other") == published_heads(config, None)
    assert published_heads(config_of(*SIZES["tiny"]), "large-v1") == published_heads(
        config_of(*SIZES["tiny"]), None
    )


def test_another_size_is_no_published_model() -> None:
    config = config_of(128, 2, 51_865)
    assert base_model(config) is None
    assert published_heads(config, None) == []
    assert base_model({}) is None


def test_published_models_have_round_sizes_and_their_languages() -> None:
    models = set(SHORT_NAMES.values())
    assert all(model.num_bytes % 1000 == 0 for model in models)
    assert {model.name for model in models if model.num_languages == 1} == {
        *("tiny.en", "base.en", "small.en", "medium.en"),
        *(name for name in SHORT_NAMES if name.startswith("distil-")),
    }
    assert {model.name for model in models if model.num_languages == 100} == {"large-v3", "large-v3-turbo"}
    assert {model.num_languages for model in models} == {1, 99, 100}
    named = published("someone/else")
    assert (named.num_bytes, named.num_languages, named.revision) == (0, 0, "main")
    assert Published("a", "b", 1).num_languages == 99


@pytest.mark.parametrize("name", ["model.pt", "some/model.bin", "x.gguf"])
def test_a_file_that_is_not_there_is_named_as_one(name: str) -> None:
    with pytest.raises(CheckpointError, match=f"there is no file {name}"):
        check_hub_name(name)


@pytest.mark.parametrize("name", ["base", "someone/model", "some.one/my-model_2"])
def test_a_name_that_the_hub_may_have_is_right(name: str) -> None:
    check_hub_name(name)


@pytest.mark.parametrize("name", [".hidden/model", "a/b/c", "~user"])
def test_a_path_is_no_name_on_the_hub(name: str) -> None:
    with pytest.raises(CheckpointError, match=f"there is no directory {name}"):
        check_hub_name(name)


def test_a_name_that_resembles_none_gets_no_proposal() -> None:
    with pytest.raises(CheckpointError) as caught:
        check_hub_name("zzz")
    assert "no model's name. Known short names: tiny, tiny.en, " in str(caught.value)
