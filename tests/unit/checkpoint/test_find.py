"""What a model's name means, and ways in which a directory or a file is no complete Whisper checkpoint."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from asr_server.annexes.model_sources.find import cached, checkpoint_on_disk, resolve_checkpoint, tokenizer_of
from asr_server.annexes.model_sources.names import SHORT_NAMES, Published, published, published_name
from asr_server.checkpoint.files import name_elsewhere, revision_of
from asr_server.config import EMBEDDED_MODEL
from asr_server.errors import CheckpointError


def refusal(path: Path) -> str:
    """What is said about it, which is one line."""
    with pytest.raises(CheckpointError) as caught:
        resolve_checkpoint(str(path))
    message = str(caught.value)
    assert "\n" not in message
    return message


def change_config(directory: Path, **changes: object) -> None:
    config = json.loads((directory / "config.json").read_text()) | changes
    (directory / "config.json").write_text(json.dumps(config))


def test_a_vocabulary_and_merges_do_for_a_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()
    assert resolve_checkpoint(str(directory)) == directory


@pytest.mark.parametrize(
    ("width", "vocabulary", "base"),
    [
        (384, 51865, "openai/whisper-tiny"),
        (768, 51864, "openai/whisper-small.en"),
        (1280, 51866, "openai/whisper-large-v3"),
    ],
)
def test_a_missing_tokenizer_is_named_with_the_command_that_gets_it(
    directory: Path, width: int, vocabulary: int, base: str
) -> None:
    change_config(directory, d_model=width, vocab_size=vocabulary)
    (directory / "tokenizer.json").unlink()
    (directory / "merges.txt").unlink()
    message = refusal(directory)
    assert "no tokenizer.json (nor, instead of it, merges.txt)" in message
    assert f"hf download {base} tokenizer.json --local-dir {directory}" in message


def test_a_missing_tokenizer_of_a_model_of_unknown_size_is_named_too(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()
    (directory / "vocab.json").unlink()
    assert refusal(directory).endswith("Take that of the model it was trained from")


WEIGHTS = "model.safetensors"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        (WEIGHTS, None, "has no weights: neither model.safetensors"),
        (WEIGHTS, (16).to_bytes(8, "little") + b"<!doctype html> and so on", "is no safetensors file"),
        (WEIGHTS, POINTER, "git lfs pull"),
        ("config.json", None, "has no config.json"),
        ("config.json", b'{"model_type": "wav2vec2"}', "holds a 'wav2vec2' model, not a Whisper one"),
    ],
)
def test_what_is_missing_or_something_else_is_named(
    directory: Path, name: str, content: bytes | None, reason: str
) -> None:
    (directory / name).unlink()
    if content:
        (directory / name).write_bytes(content)
    assert reason in refusal(directory)


def test_weights_that_are_cut_short_are_noticed_before_anything_starts(directory: Path) -> None:
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert refusal(directory).startswith(f"{weights} is cut short, or")


def test_every_file_of_sharded_weights_is_checked(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert "model-00002-of-00002.safetensors cannot be read: No such file" in refusal(directory)


@pytest.mark.parametrize("content", ["{", "[]", "\x00"])
@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "preprocessor_config.json", "added_tokens.json"]
)
def test_a_damaged_file_is_named(directory: Path, name: str, content: str) -> None:
    (directory / name).write_text(content)
    said = "is not what it should be (a JSON object)" if content == "[]" else "cannot be read"
    assert f"{directory / name} {said}" in refusal(directory)


def test_a_gguf_model_leads_to_the_checkpoint_it_was_made_from(tmp_path: Path) -> None:
    (tmp_path / "whisper-small.gguf").write_bytes(b"GGUF" + bytes(100))
    assert "is a GGUF model. Use the model that it was made from: small" in refusal(
        tmp_path / "whisper-small.gguf"
    )
    assert "holds GGUF models" in refusal(tmp_path)


def test_a_file_is_told_what_is_wrong_with_it(directory: Path, tmp_path: Path) -> None:
    assert f"name the directory it is in, {directory}" in refusal(directory / "model.safetensors")
    (tmp_path / "notes.txt").write_text("none")
    assert "is no model: a .pt of openai-whisper, a ggml file" in refusal(tmp_path / "notes.txt")
    assert refusal(tmp_path / "base.pt") == f"there is no file {tmp_path / 'base.pt'}"
    assert refusal(Path("base.pt")) == "there is no file base.pt"


# -- Names, and copies in the caches -------------------------------------------------------------------------

MODEL = Published("small", "someone/small", 1000, revision="published", cached=("other/small",))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the Hugging Face cache, empty."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.delenv("HUGGINGFACE_HUB_CACHE", raising=False)
    return tmp_path / "home" / "hub"


def snapshot(hub: Path, commit: str, modified_s: int = 1000, repository: str = "someone--small") -> Path:
    folder = hub / f"models--{repository}" / "snapshots" / commit
    shutil.copytree(EMBEDDED_MODEL, folder)
    os.utime(folder, (modified_s, modified_s))
    return folder


def test_a_checkpoint_of_a_cache_has_its_name_and_commit_and_another_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots = tmp_path / "models--someone--my--small" / "snapshots"
    places = {
        EMBEDDED_MODEL: ("whisper-digits", ""),
        snapshots / "abc": ("someone/my/small", "abc"),
        snapshots.with_name("blobs") / "abc": (str(snapshots.with_name("blobs") / "abc"), ""),
        tmp_path / "mine" / "snapshots" / "abc": (str(tmp_path / "mine" / "snapshots" / "abc"), "abc"),
        tmp_path / "models" / "someone--small@abc": ("someone/small", "abc"),
        tmp_path / "mine": (str(tmp_path / "mine"), ""),
    }
    assert {place: (name_elsewhere(place), revision_of(place)) for place in places} == places
    monkeypatch.chdir(tmp_path)
    assert name_elsewhere(Path("mine")) == str(tmp_path / "mine")


def test_what_was_fetched_serves_before_the_cache_of_others(hub: Path) -> None:
    snapshot(hub, "published")
    own = hub.parent / "asr-server" / "models" / "someone--small@published"
    shutil.copytree(EMBEDDED_MODEL, own)
    assert cached(MODEL) == own


def test_a_folder_is_a_model_even_with_a_short_name_if_it_has_a_configuration(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny").mkdir()
    Path("mine").mkdir()
    assert checkpoint_on_disk("tiny") is None
    with pytest.raises(CheckpointError, match="has no config"):
        checkpoint_on_disk("mine")
    Path("tiny/config.json").touch()
    with pytest.raises(CheckpointError, match=r"tiny/config\.json"):
        checkpoint_on_disk("tiny")
    assert checkpoint_on_disk("whisper-digits") == tokenizer_of("whisper-digits") == EMBEDDED_MODEL
    shutil.copytree(EMBEDDED_MODEL, tmp_path / "whisper-digits")
    assert checkpoint_on_disk("whisper-digits") == Path("whisper-digits")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert checkpoint_on_disk("~/whisper-digits") == tmp_path / "whisper-digits"


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
