"""Gives tests the published Whisper weights, or skips those that need them where they cannot be had."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("ASR_TEST_WEIGHTS", ".cache/weights"))


def real_checkpoint(name: str) -> Path:
    """The directory of the checkpoint `base` or `tiny.en`, in Hugging Face's layout."""
    directory = FOLDER / f"whisper-{name}"
    if not (directory / "model.safetensors").exists():
        pytest.skip(f"the weights of whisper-{name} are not here")
    return directory
