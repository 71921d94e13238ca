"""Where the models lie, and what is said where they are missing."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants

from asr_server.errors import CheckpointError, SpeakersUnavailable
from asr_server.speakers import campplus, models, pyannet
from asr_server.speakers.models import (
    CONVOLUTIONS,
    EMBEDDING,
    FILTERS,
    LSTM,
    fetch_speaker_models,
    require_speaker_models,
    speaker_models,
)


def test_without_the_models_the_one_command_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(SpeakersUnavailable, match="`asr-server models fetch speakers`"):
        require_speaker_models()


def test_offline_the_folder_that_they_are_copied_into_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No flag names them, as --model does others."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError) as refused:
        fetch_speaker_models()
    assert str(refused.value).endswith(f"prints to this machine: into {tmp_path / 'asr-server' / 'models'}")


def test_a_folder_without_all_files_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    folder = tmp_path / "asr-server" / "models" / "speakers@1"
    folder.mkdir(parents=True)
    for name in (FILTERS, CONVOLUTIONS, LSTM, EMBEDDING):
        assert speaker_models() is None
        (folder / name).touch()
    assert speaker_models() == folder


def test_each_file_is_made_once_of_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in (
        (pyannet, "convert_filters"),
        (pyannet, "convert_convolutions"),
        (pyannet, "convert_lstm"),
        (campplus, "convert_embedding"),
    ):
        monkeypatch.setattr(module, name, lambda source, name=name: f"{name} {source.name}".encode())
    monkeypatch.setattr(models, "fetch", lambda model: tmp_path)
    (tmp_path / LSTM).write_bytes(b"made before")
    assert fetch_speaker_models() == tmp_path
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        FILTERS: b"convert_filters pytorch_model.bin",
        CONVOLUTIONS: b"convert_convolutions pytorch_model.bin",
        LSTM: b"made before",
        EMBEDDING: b"convert_embedding campplus_cn_en_common.pt",
    }
