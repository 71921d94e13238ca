"""The engine of one replica: takes commands, emits events, one step at a time.

Driven by `replica`. Knows slots and chunks, not HTTP or files.
"""

import os

# Before torch loads OpenMP. Threads that wait by spinning hold the very core that the thread they wait for
# needs, as soon as anything else runs on it (the API process, decoding). They spin for some 30 us, in which
# the wait usually ends where nothing else runs, and then sleep (benchmarks/results/engine-on-cpu.md).
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

from asr_server.engine.config import EngineConfig
from asr_server.engine.engine import Engine

__all__ = ["Engine", "EngineConfig"]
