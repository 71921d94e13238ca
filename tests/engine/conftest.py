"""Checkpoints loaded once a session."""

from __future__ import annotations

import pytest

from asr_server.config import EMBEDDED_MODEL
from tests.checkpoints import pocket_directory, tiny_directory
from tests.engine.engine_helpers import Checkpoint


@pytest.fixture(scope="session")
def pocket() -> Checkpoint:
    return Checkpoint.load(pocket_directory())


@pytest.fixture(scope="session")
def tiny() -> Checkpoint:
    return Checkpoint.load(tiny_directory())


@pytest.fixture(scope="session")
def embedded() -> Checkpoint:
    return Checkpoint.load(EMBEDDED_MODEL)
