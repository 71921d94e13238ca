"""Start a replica in a process of this host: `python -m asr_server.replica.main`.

Settings come by standard input: everybody can read a process's arguments.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING

from setproctitle import setproctitle

from asr_server.channel.zeromq import ReplicaSpec, ZmqEngineServer
from asr_server.machine import freeze_gc, gc_paused, lower_priority, never_interrupt_others
from asr_server.process import be_killed_with_the_parent, end_with_the_parent, leave_stopping_to_the_parent
from asr_server.replica.loop import load_engine, run
from asr_server.replica.ranks import Ranks
from asr_server.telemetry import configure_logging

if TYPE_CHECKING:
    from asr_server.engine import Engine


def main() -> None:
    leave_stopping_to_the_parent()
    be_killed_with_the_parent()
    spec = ReplicaSpec.from_line(sys.stdin.buffer.readline())
    if spec.computes_on_cpu:  # it uses every core, and the API process must get one at once
        lower_priority(spec.settings.replica_niceness)
        never_interrupt_others()
    setproctitle(f"asr-server replica {spec.index}")
    configure_logging(spec.settings.log_level, spec.settings.log_format, f"replica {spec.index}")
    end_with_the_parent()
    run(ZmqEngineServer(spec.address), lambda: create_engine(spec))


def create_engine(spec: ReplicaSpec) -> Engine:
    start_ranks = partial(Ranks, spec.index, spec.settings, spec.num_on_device)
    with gc_paused():
        engine = load_engine(spec.settings, spec.num_on_device, start_ranks)
        freeze_gc()
    return engine


if __name__ == "__main__":
    main()
