"""Checkpoints loaded once a session."""

import pytest

from asr_server.config import EMBEDDED_MODEL
from asr_server.core import ChunkResult
from harness.engine_helpers import Checkpoint, transcribe
from tests.support.checkpoints import pocket_directory, tiny_directory


@pytest.fixture(scope="session")
def pocket() -> Checkpoint:
    return Checkpoint.load(pocket_directory())


@pytest.fixture(scope="session")
def tiny() -> Checkpoint:
    return Checkpoint.load(tiny_directory())


@pytest.fixture(scope="session")
def embedded() -> Checkpoint:
    return Checkpoint.load(EMBEDDED_MODEL)


@pytest.fixture(scope="session")
def alone(pocket: Checkpoint) -> list[ChunkResult]:
    """Each clip of `test_engine.py` with its options, and nobody else in the engine."""
    from tests.unit.engine.test_engine import CLIPS, MIXED

    return [
        transcribe(pocket.engine(num_slots=1), [clip], options)[0]
        for clip, options in zip(CLIPS, MIXED, strict=True)
    ]
