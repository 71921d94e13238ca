"""A replica that fails on purpose, run in place of `asr_server.replica`.

Each of the next layers takes longer behind a chunk that begins with the mark `IS_SLOW`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from asr_server import replica
from asr_server.core import Samples
from asr_server.dispatch.executors import MultiprocessExecutor
from asr_server.transport.messages import Command, Submit
from asr_server.transport.zeromq import ReplicaSpec

if TYPE_CHECKING:
    from asr_server.engine import Engine

IS_SLOW: Final = 41.5 / 2**15  # between the levels of 16 bits
DELAYS_S: Final = [1.2] * 4


class FaultyExecutor(MultiprocessExecutor):
    module = "tests.unit.dispatch.faulty_replica"


def marked(samples: Samples) -> Samples:
    samples = samples.copy()
    samples[0] = IS_SLOW
    return samples


def main() -> None:
    create_engine = replica.create_engine

    def create_faulty_engine(spec: ReplicaSpec) -> Engine:
        engine = create_engine(spec)
        obey_marks(engine)
        return engine

    replica.create_engine = create_faulty_engine
    replica.main()


def obey_marks(engine: Engine) -> None:
    handle, delays_s = engine.handle, list[float]()

    def handle_marked(command: Command) -> None:
        if isinstance(command, Submit) and abs(command.samples[0] - IS_SLOW) < 1e-6:
            delays_s.extend(DELAYS_S)
        handle(command)

    def wait(*_: object) -> None:
        if delays_s:
            time.sleep(delays_s.pop())

    engine.handle = handle_marked  # type: ignore[method-assign]
    for layer in engine.model.encoder.layers:
        layer.register_forward_pre_hook(wait)


if __name__ == "__main__":
    main()
