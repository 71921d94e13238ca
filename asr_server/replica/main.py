"""The process of one replica: `python -m asr_server.replica.main`, started by `dispatch/processes.py`.

Its settings come by standard input, because everybody on the machine can read the arguments of a process.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING

from setproctitle import setproctitle

from asr_server.channel.spec import ReplicaSpec
from asr_server.channel.zeromq import ZmqEngineServer
from asr_server.machine import (
    be_killed_with_the_parent,
    end_with_the_parent,
    give_way,
    keep_for_good,
    leave_stopping_to_the_parent,
    pin_to,
)
from asr_server.replica.loop import load_engine, run
from asr_server.replica.ranks import Ranks
from asr_server.telemetry import configure_logging

if TYPE_CHECKING:
    from asr_server.engine import Engine


def main() -> None:
    leave_stopping_to_the_parent()
    be_killed_with_the_parent()
    spec = ReplicaSpec.from_line(sys.stdin.buffer.readline())
    pin_to(spec.cores)
    give_way(spec.niceness)
    setproctitle(f"asr-server replica {spec.index}")
    configure_logging(spec.settings.log_level, spec.settings.log_format, f"replica {spec.index}")
    end_with_the_parent()
    run(ZmqEngineServer(spec.address), lambda: _create_engine(spec))


def _create_engine(spec: ReplicaSpec) -> Engine:
    start_ranks = partial(Ranks, spec.index, spec.settings, spec.num_on_device)
    engine = load_engine(spec.settings, spec.num_on_device, start_ranks)
    keep_for_good()
    return engine


if __name__ == "__main__":
    main()
