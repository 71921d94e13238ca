"""What the API process knows of one replica: its credit, its work, and whether it is alive.

Two signs of life are watched. A replica is frozen when nothing comes from it any more, and hung when its
heartbeats go on but its engine takes no step. A large batch on a small machine is neither: the limit for a
step grows with the longest one seen.

All limits are counted in ticks of the watch, which this process's own event loop makes. While that loop
stands still (a paused container, a debugger, one long callback) nothing is counted, so that a pause of this
process is never taken for the silence of a replica.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from asr_server.channel.messages import FROZEN_AFTER_S, SILENT_STARTUP_LIMIT_S, Heartbeat
from asr_server.core import ChunkId
from asr_server.dispatch.executor import Replica, ReplicaGone

TICK_S = 0.5
STARTUP_LIMIT_S = 900.0  # from the launch to the first credit
HUNG_AFTER_S = 30.0
HUNG_AFTER_STEPS = 10.0  # times the longest step so far


@dataclass(eq=False)
class ReplicaState:
    """From the launch of one replica to its end."""

    replica: Replica
    ready: bool = False
    credit: int = 0
    num_slots: int = 0
    in_flight: set[ChunkId] = field(default_factory=set)
    heartbeat: Heartbeat = field(default_factory=lambda: Heartbeat(num_steps=0))
    watched_s: float = 0.0  # since the launch; the next two are moments on this clock
    heard_at_s: float = 0.0
    progress_at_s: float = 0.0
    longest_step_s: float = 0.0

    def on_event(self) -> None:
        self.heard_at_s = self.watched_s

    def on_ready(self) -> None:
        self.ready = True
        self.progress_at_s = self.watched_s

    def on_heartbeat(self, heartbeat: Heartbeat) -> None:
        """An engine without work steps too, so that a step is due at any time."""
        if self.ready and heartbeat.num_steps > self.heartbeat.num_steps:
            self.longest_step_s = max(self.longest_step_s, self.watched_s - self.progress_at_s)
            self.progress_at_s = self.watched_s
        self.heartbeat = heartbeat

    def on_tick(self) -> None:
        """Raises ReplicaGone for a replica that does not start in time, is frozen or hangs."""
        self.watched_s += TICK_S
        name, silent_s = self.replica.name, self.watched_s - self.heard_at_s
        if silent_s > (FROZEN_AFTER_S if self.ready else SILENT_STARTUP_LIMIT_S):
            raise ReplicaGone(f"{name} has been silent for {silent_s:.0f} s: frozen")
        if not self.ready and self.watched_s > STARTUP_LIMIT_S:
            raise ReplicaGone(f"{name} was not ready {self.watched_s:.0f} s after its launch")
        stalled_s = self.watched_s - self.progress_at_s
        if self.ready and stalled_s > max(HUNG_AFTER_S, HUNG_AFTER_STEPS * self.longest_step_s):
            raise ReplicaGone(f"{name} has taken no step for {stalled_s:.0f} s: hung")
