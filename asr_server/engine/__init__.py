"""The engine of one replica: commands in, events out, one step at a time. Knows no HTTP."""

from asr_server.engine.config import EngineConfig
from asr_server.engine.engine import Engine

__all__ = ["Engine", "EngineConfig"]
