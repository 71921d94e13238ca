"""The process of one rank other than 0: `python -m asr_server.replica.rank`, started by `ranks.py`.

It does what rank 0 says, in that order, and ends with it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, BinaryIO

import msgspec
from setproctitle import setproctitle

from asr_server.channel.messages import HEARTBEAT_S
from asr_server.machine import (
    be_killed_with_the_parent,
    end_with_the_parent,
    keep_for_good,
    leave_stopping_to_the_parent,
)
from asr_server.replica.ranks import BEAT, LENGTH_BYTES, READY, RankSpec, store_path
from asr_server.telemetry import configure_logging

if TYPE_CHECKING:
    from asr_server.engine.ranks import Operation


def main() -> None:
    leave_stopping_to_the_parent()
    be_killed_with_the_parent()
    spec = RankSpec.from_line(sys.stdin.buffer.readline())
    name = f"replica {spec.replica} rank {spec.rank}"
    setproctitle(f"asr-server {name}")
    configure_logging(spec.settings.log_level, spec.settings.log_format, name)
    end_with_the_parent()
    threading.Thread(target=_beat, name="heartbeat", daemon=True).start()
    run(spec)


def run(spec: RankSpec) -> None:
    from asr_server.engine.config import EngineConfig  # torch: seconds, while the heartbeat already beats
    from asr_server.engine.loading import load
    from asr_server.engine.ranks import Operation, follow, join

    config = EngineConfig.from_settings(spec.settings, spec.num_on_device)
    join(config, spec.rank, store_path(spec.store_fd))
    loaded = load(config, spec.rank)
    keep_for_good()
    _tell(READY)
    with os.fdopen(spec.operations_fd, "rb") as pipe:
        follow(loaded, _receiver(pipe, msgspec.msgpack.Decoder(Operation)))


def _receiver(pipe: BinaryIO, decoder: msgspec.msgpack.Decoder[Operation]) -> Callable[[], Operation | None]:
    def receive() -> Operation | None:
        length = pipe.read(LENGTH_BYTES)
        message = pipe.read(int.from_bytes(length, "little")) if length else b""
        return decoder.decode(message) if message else None

    return receive


def _beat() -> None:
    while True:
        _tell(BEAT)
        time.sleep(HEARTBEAT_S)


def _tell(sign: bytes) -> None:
    os.write(sys.stdout.fileno(), sign)


if __name__ == "__main__":
    main()
