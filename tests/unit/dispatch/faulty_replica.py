"""A replica that fails on purpose, run in place of `asr_server.replica.main`.

It obeys the mark that a chunk begins with. `DIES`: it ends at once. `IS_SLOW`: each of its next layers takes
longer. `HANGS`: its next layer never ends. While there is the file that STALL names, a start removes it and
then never ends, although heartbeats go on.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from asr_server.channel.messages import Command, Submit
from asr_server.channel.zeromq import ReplicaSpec
from asr_server.config import Settings
from asr_server.core import Samples
from asr_server.dispatch.processes import MultiprocessExecutor
from asr_server.replica import main as replica

if TYPE_CHECKING:
    from asr_server.engine import Engine

DIES, IS_SLOW, HANGS = 40.5 / 2**15, 41.5 / 2**15, 42.5 / 2**15  # between the levels of 16 bits
DELAYS_S: Final = {DIES: [], IS_SLOW: [1.2] * 4, HANGS: [1000.0]}


class FaultyExecutor(MultiprocessExecutor):
    module = "tests.unit.dispatch.faulty_replica"

    def __init__(self, settings: Settings, stall: str = "") -> None:
        super().__init__(settings)
        self._stall = stall

    def device_of(self, index: int) -> dict[str, str]:
        return {"STALL": self._stall}


def marked(samples: Samples, mark: float) -> Samples:
    samples = samples.copy()
    samples[0] = mark
    return samples


def main() -> None:
    create_engine = replica.create_engine
    stall = os.environ["STALL"]

    def create_faulty_engine(spec: ReplicaSpec) -> Engine:
        if stall and Path(stall).exists():
            Path(stall).unlink()
            time.sleep(1000)
        engine = create_engine(spec)
        obey_marks(engine)
        return engine

    replica.create_engine = create_faulty_engine
    replica.main()


def obey_marks(engine: Engine) -> None:
    handle, delays_s = engine.handle, list[float]()

    def handle_marked(command: Command) -> None:
        for mark, more_s in DELAYS_S.items():
            if isinstance(command, Submit) and abs(command.samples[0] - mark) < 1e-6:
                if mark == DIES:
                    os.kill(os.getpid(), signal.SIGKILL)
                delays_s.extend(more_s)
        handle(command)

    def wait(*_: object) -> None:
        if delays_s:
            time.sleep(delays_s.pop())

    engine.handle = handle_marked  # type: ignore[method-assign]
    for layer in engine.model.encoder.layers:
        layer.register_forward_pre_hook(wait)


if __name__ == "__main__":
    main()
