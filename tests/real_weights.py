"""Gives tests the published Whisper weights, or skips those that need them where they cannot be had."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest

from asr_server.checkpoint import (
    CheckpointError,
    is_ctranslate2,
    own_cache,
    resolve_checkpoint,
    source_of,
)
from asr_server.convert import convert


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
    """The same with the weights in Hugging Face's layout, for transformers, in float16.

    Made once and kept in the cache.
    """
    target = own_cache() / "tests" / f"whisper-{name}"
    source = source_of(real_checkpoint(name))
    if not is_ctranslate2(source):
        return source
    if not target.exists():
        made = target.with_name(f"{target.name}-{os.getpid()}")
        convert(source, made)
        with suppress(OSError):  # another process was sooner
            made.rename(target)
    return target
