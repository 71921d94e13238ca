"""Gives tests the published Whisper weights, or skips those that need them where they cannot be had."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

import harness.real_weights
from asr_server.annexes.model_sources.find import resolve_checkpoint
from asr_server.errors import CheckpointError
from harness.engine_helpers import Checkpoint
from harness.openai_whisper import load_openai_whisper


@cache
def _resolved(name: str) -> Path | str:
    """Where it is, or why it cannot be had: asked once a process."""
    try:
        return resolve_checkpoint(name)
    except CheckpointError as error:
        return str(error)


def real_checkpoint(name: str) -> Path:
    """The directory of the checkpoint `base` or `tiny.en` as the server finds or fetches it."""
    found = _resolved(name)
    if isinstance(found, str):
        pytest.skip(found)
    return found


def hugging_face_checkpoint(name: str) -> Path:
    """The same in Hugging Face's layout, for transformers and openai-whisper, in float16."""
    real_checkpoint(name)
    return harness.real_weights.hugging_face_checkpoint(name)


@cache
def loaded_base() -> Checkpoint:
    """Return whisper-base in float32, which all tests of a process share."""
    return Checkpoint.load(hugging_face_checkpoint("base"))


@cache
def openai_whisper_base() -> Any:
    """Return openai-whisper's own model of the same weights."""
    return load_openai_whisper(hugging_face_checkpoint("base"))
