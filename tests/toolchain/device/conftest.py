"""The checkpoints of the engine's tests."""

from tests.unit.engine.conftest import alone, embedded, pocket, tiny  # noqa: F401
