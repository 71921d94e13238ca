"""The files that are written for other systems hold the checkpoint's own tensors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from harness import checkpoint_formats
from harness.checkpoint_formats import as_ctranslate2, as_ggml
from tests.support.checkpoints import pocket_directory

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_formats, "FOLDER", tmp_path / "formats")


@pytest.mark.trial
def test_whisper_cpp_reads_the_ggml_file() -> None:
    model = pytest.importorskip("pywhispercpp.model")
    read = model.Model(str(as_ggml(pocket_directory())), redirect_whispercpp_logs_to=None, n_threads=1)
    brief = {"language": "en", "max_tokens": 5, "temperature_inc": 0.0}  # one try at a few random words
    assert isinstance(read.transcribe(np.zeros(16_000, np.float32), **brief), list)


@pytest.mark.trial
def test_faster_whisper_reads_the_directory() -> None:
    faster_whisper = pytest.importorskip("faster_whisper")
    model = faster_whisper.WhisperModel(str(as_ctranslate2(pocket_directory())), device="cpu", cpu_threads=1)
    segments, _ = model.transcribe(np.zeros(16_000, np.float32), language="en", max_new_tokens=5)
    assert isinstance(list(segments), list)


def test_a_file_is_written_once() -> None:
    first = as_ggml(pocket_directory())
    written = first.stat().st_mtime_ns
    assert as_ggml(pocket_directory()) == first
    assert first.stat().st_mtime_ns == written
