"""CTranslate2's models from a hub and out of the Hugging Face cache, as its own converter writes them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from asr_server.checkpoint.adopt import source_of
from asr_server.checkpoint.find import name_elsewhere, resolve_checkpoint, revision_of
from asr_server.checkpoint.tensors import find_weights
from tests.checkpoint.fake_hub import COMMIT, FakeHub, running_hub
from tests.checkpoint.foreign_models import write_ctranslate2
from tests.checkpoint.test_sources_hub import contents, home, snapshot
from tests.checkpoints import pocket_directory

__all__ = ["home"]  # a fixture


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with running_hub(write_ctranslate2(pocket_directory(), tmp_path / "ct2", "float16")) as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        yield running


def test_a_ctranslate2_repository_is_fetched_and_read_as_it_is(fake: FakeHub) -> None:
    directory = resolve_checkpoint("Systran/faster-whisper-small")
    assert contents(source_of(directory)) == contents(fake.folder)
    assert (revision_of(directory), name_elsewhere(directory)) == (COMMIT, "Systran/faster-whisper-small")


@pytest.mark.parametrize(
    ("name", "repository"),
    [
        ("small", "Systran/faster-whisper-small"),
        ("distil-large-v3", "Systran/faster-distil-whisper-large-v3"),
        ("turbo", "mobiuslabsgmbh/faster-whisper-large-v3-turbo"),
        ("Systran/faster-whisper-medium", "Systran/faster-whisper-medium"),
    ],
)
def test_what_faster_whisper_has_fetched_serves_too(home: Path, name: str, repository: str) -> None:
    kept = write_ctranslate2(pocket_directory(), snapshot(home, repository, "1" * 40), "int8")
    directory = resolve_checkpoint(name)
    assert source_of(directory) == kept
    assert [file.path for file in find_weights(directory)] == [kept / "model.bin"]
    assert (revision_of(directory), name_elsewhere(directory)) == ("1" * 40, repository)
