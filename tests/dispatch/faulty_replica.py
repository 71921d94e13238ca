"""A replica that fails on purpose, run in place of `asr_server.replica.main`. FAULT says how.

`die`: it ends at once when it is sent a chunk that begins with `POISON`. `stall FILE`: while there is such a
file, a start removes it and then never ends, although heartbeats go on. `slow SECONDS`: each of its first
layers takes so much longer. `hang`: its first layer never ends.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from asr_server.channel.messages import Command, Submit
from asr_server.channel.zeromq import ReplicaSpec
from asr_server.core import Samples
from asr_server.dispatch.processes import MultiprocessExecutor
from asr_server.replica import main as replica

if TYPE_CHECKING:
    from asr_server.engine import Engine

POISON: Final = 0.987654321
NUM_SLOW_LAYERS: Final = 4


class FaultyExecutor(MultiprocessExecutor):
    module = "tests.dispatch.faulty_replica"

    def device_of(self, index: int) -> dict[str, str]:
        return {"FAULT": os.environ["FAULT"]}


def poisoned(samples: Samples) -> Samples:
    samples = samples.copy()
    samples[0] = POISON
    return samples


def main() -> None:
    create_engine = replica.create_engine
    fault, _, argument = os.environ["FAULT"].partition(" ")

    def create_faulty_engine(spec: ReplicaSpec) -> Engine:
        if fault == "stall" and Path(argument).exists():
            Path(argument).unlink()
            time.sleep(1000)
        engine = create_engine(spec)
        if fault == "die":
            die_of_poison(engine)
        if fault in ("slow", "hang"):
            delay_layers(engine, float(argument or 1000))
        return engine

    replica.create_engine = create_faulty_engine
    replica.main()


def die_of_poison(engine: Engine) -> None:
    handle = engine.handle

    def handle_or_die(command: Command) -> None:
        if isinstance(command, Submit) and abs(command.samples[0] - POISON) < 1e-6:
            os.kill(os.getpid(), signal.SIGKILL)
        handle(command)

    engine.handle = handle_or_die  # type: ignore[method-assign]


def delay_layers(engine: Engine, delay_s: float) -> None:
    delays_s = [delay_s] * NUM_SLOW_LAYERS

    def wait(*_: object) -> None:
        if delays_s:
            time.sleep(delays_s.pop())

    for layer in engine.model.encoder.layers:
        layer.register_forward_pre_hook(wait)


if __name__ == "__main__":
    main()
