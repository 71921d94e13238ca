"""The engine of one replica: commands in, events out, one step at a time. Knows no HTTP."""

import os

# Before torch loads OpenMP. Threads that wait by spinning hold the very core that the thread they wait for
# needs, as soon as anything else runs on it (the API process, decoding): ten times slower, measured. Asleep
# they cost nothing noticeable on an idle machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from asr_server.engine.config import EngineConfig
from asr_server.engine.engine import Engine

__all__ = ["Engine", "EngineConfig"]
