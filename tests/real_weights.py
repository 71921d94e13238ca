"""Gives tests the published Whisper weights, or skips those that need them where they cannot be had."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

import benchmarks.real_weights
from asr_server.checkpoint.find import resolve_checkpoint
from asr_server.errors import CheckpointError


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
    return benchmarks.real_weights.hugging_face_checkpoint(name)
