"""Settings for tests that run on the embedded model in their own process."""

from typing import Any

from asr_server.config import EMBEDDED_MODEL
from asr_server.server.settings import ServerSettings


def embedded(**values: Any) -> ServerSettings:
    """With these values, and the embedded model unless `values` name another."""
    return ServerSettings(**{"model": str(EMBEDDED_MODEL)} | values)
