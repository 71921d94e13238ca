"""Checkpoints loaded once a session, and the engine's tests as on a GPU: --late-device SEED."""

from __future__ import annotations

import pytest

from asr_server.config import EMBEDDED_MODEL
from asr_server.core import ChunkResult
from harness.engine_helpers import Checkpoint, transcribe
from tests.support.checkpoints import pocket_directory, tiny_directory
from tests.unit.engine.device_stand_ins import imitate_late_device


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--late-device",
        type=int,
        metavar="SEED",
        help="tests/unit/engine: graphs that overwrite their memory, encodes and copies late by chance",
    )


@pytest.fixture(autouse=True)
def late_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = request.config.getoption("--late-device", default=None)
    if seed is not None:
        imitate_late_device(monkeypatch, seed)


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
