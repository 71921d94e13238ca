"""The published weights that benchmarks run on, in the layout that every system's format is made of."""

from __future__ import annotations

import os
from pathlib import Path

from asr_server.checkpoint import resolve_checkpoint

FOLDER = Path(os.environ.get("ASR_TEST_WEIGHTS", ".cache/weights"))


def real_checkpoint(model: str) -> Path:
    """The directory of a published model's weights, fetched if need be, or of a checkpoint at that path.

    Raises CheckpointError where there is none and none can be fetched.
    """
    kept = FOLDER / f"whisper-{model}"
    return kept if kept.exists() else Path(resolve_checkpoint(model))
