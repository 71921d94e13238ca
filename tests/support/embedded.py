"""Settings for tests that run on the embedded model in their own process."""

from __future__ import annotations

from typing import Any

from asr_server.config import EMBEDDED_MODEL, Settings


def embedded(**values: Any) -> Settings:
    """With these values, and the embedded model unless `values` name another."""
    return Settings(**{"model": str(EMBEDDED_MODEL)} | values)
