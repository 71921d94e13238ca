"""The process of one replica: `python -m asr_server.workers.replica SPEC`, started by `multiprocess`."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import TYPE_CHECKING

import msgspec
from setproctitle import setproctitle

from asr_server.config import Settings
from asr_server.telemetry import configure_logging
from asr_server.transport.channels import ZmqEngineServer
from asr_server.workers.engine_loop import run

if TYPE_CHECKING:
    from asr_server.engine import Engine


class ReplicaSpec(msgspec.Struct, frozen=True):
    index: int
    address: str
    settings: Settings


def main() -> None:
    spec = msgspec.json.decode(sys.argv[1], type=ReplicaSpec)
    setproctitle(f"asr-server replica {spec.index}")
    configure_logging(spec.settings.log_level, process=f"replica {spec.index}")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    run(ZmqEngineServer(spec.address), lambda: _create_engine(spec.settings))


def _create_engine(settings: Settings) -> Engine:
    from asr_server.engine import Engine, EngineConfig  # torch: seconds, while the heartbeat already beats

    return Engine.load(EngineConfig.from_settings(settings))


def _end_with_parent() -> None:
    """Standard input is a pipe that the parent holds open and never writes to: its end is the parent's."""
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


if __name__ == "__main__":
    main()
