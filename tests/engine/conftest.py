"""Checkpoints made once a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from asr_server.config import EMBEDDED_MODEL
from benchmarks.checkpoints import SHAPES, Shape, make_checkpoint
from tests.engine.driving import Checkpoint

LARGE_V3_SHORT = Shape(1280, 20, 1, 2, num_mels=128, num_languages=100)


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """whisper-tiny's layout, random weights."""
    return make_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny", SHAPES["tiny"], lively=True)


@pytest.fixture(scope="session")
def large_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """large-v3's layout with fewer layers, random weights."""
    return make_checkpoint(tmp_path_factory.mktemp("checkpoints") / "large", LARGE_V3_SHORT, lively=True)


@pytest.fixture(scope="session")
def tiny(tiny_directory: Path) -> Checkpoint:
    return Checkpoint.load(tiny_directory)


@pytest.fixture(scope="session")
def embedded() -> Checkpoint:
    return Checkpoint.load(EMBEDDED_MODEL)
