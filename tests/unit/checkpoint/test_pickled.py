"""Files of `torch.save`, read without running what they ask for."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from asr_server.annexes.model_sources import readers
from asr_server.annexes.model_sources.readers import read_openai
from asr_server.errors import CheckpointError

DIMS = {"n_audio_head": 2, "n_text_head": 3, "n_audio_layer": 4, "n_text_layer": 5, "n_mels": 80}
ROWS = torch.arange(24.0).view(6, 4)


class Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def save(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    "content",
    [
        {"weights": {"a": ROWS}},
        {"dims": DIMS | {"n_audio_head": "x"}, "model_state_dict": {"a": ROWS}},
        *(
            pytest.param(content, marks=pytest.mark.trial)
            for content in (
                {"dims": DIMS, "model_state_dict": {"a": "no tensor"}},
                {"dims": [], "model_state_dict": {"a": ROWS}},
                [ROWS],
            )
        ),
    ],
)
def test_another_programs_file_is_refused_in_a_line(tmp_path: Path, content: Any) -> None:
    with pytest.raises(
        CheckpointError, match=r"^.*x\.pt is no checkpoint of openai-whisper, or it is damaged$"
    ):
        read_openai(save(tmp_path / "x.pt", content))


@pytest.mark.slow
def test_code_in_a_file_is_not_run(tmp_path: Path) -> None:
    path = save(tmp_path / "x.pt", {"dims": DIMS, "model_state_dict": {"a": Trap(tmp_path / "sprung")}})
    with pytest.raises(CheckpointError, match="is no checkpoint of openai-whisper"):
        read_openai(path)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.slow
def test_a_file_that_is_read_for_ever_is_refused_after_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tuple of two that are one tuple of two, and so on: 2 ** 200 to who hashes it."""
    monkeypatch.setattr(readers, "READ_LIMIT_S", 5.0)
    nested = b")" + b"".join(b"q" + bytes([n]) + b"h" + bytes([n]) + b"\x86" for n in range(200))
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as members:
        members.writestr("x/data.pkl", b"\x80\x02}" + nested + b"Ns.")
        members.writestr("x/version", b"3\n")
    with pytest.raises(CheckpointError, match="is no checkpoint of openai-whisper"):
        read_openai(tmp_path / "x.pt")
