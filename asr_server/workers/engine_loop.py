"""Runs an engine in a replica: commands in, steps, events out, and heartbeats beside it.

The same in every executor; `replica.py` and `inline.py` call it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from asr_server.core import Drain, Event, Failed, Heartbeat, Result
from asr_server.telemetry import working_for
from asr_server.transport.channels import EngineServer, HeartbeatSender

if TYPE_CHECKING:
    from asr_server.engine import Engine

HEARTBEAT_S = 1.0
IDLE_WAIT_S = 0.5

logger = logging.getLogger(__name__)


def run(server: EngineServer, create_engine: Callable[[], Engine]) -> None:
    """Loads the engine and serves until drained; heartbeats are sent from the first moment."""
    heartbeat = HeartbeatThread(server.heartbeat_sender())
    heartbeat.start()
    try:
        heartbeat.engine = create_engine()
        serve(heartbeat.engine, server)
    finally:
        if heartbeat.engine is not None:
            heartbeat.engine.close()
        heartbeat.stop()
        server.close()


def serve(engine: Engine, server: EngineServer) -> None:
    """Takes commands, steps the engine, sends events; returns when drained."""
    server.send(engine.initial_credit())
    draining = False
    while not (draining and not engine.has_work):
        for command in server.receive(wait_s=0.0 if engine.has_work else IDLE_WAIT_S):
            draining |= isinstance(command, Drain)
            engine.handle(command)
        for event in engine.step():
            server.send(event)
            _log(event)


def _log(event: Event) -> None:
    match event:
        case Result(id, result):
            with working_for(id):
                logger.debug(
                    "chunk %d, part %d: %d tokens at temperature %g",
                    *(id.chunk, id.part, len(result.tokens), result.temperature),
                )
        case Failed(id, message):
            with working_for(id):
                logger.warning("chunk %d, part %d failed: %s", id.chunk, id.part, message)


class HeartbeatThread(threading.Thread):
    """Sends heartbeats whatever the engine does, so that frozen and busy can be told apart."""

    def __init__(self, sender: HeartbeatSender) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self.engine: Engine | None = None
        self._sender = sender
        self._stopped = threading.Event()

    def run(self) -> None:
        self._sender.send_heartbeat(self._state())
        while not self._stopped.wait(HEARTBEAT_S):
            self._sender.send_heartbeat(self._state())
        self._sender.close()

    def _state(self) -> Heartbeat:
        engine = self.engine
        if engine is None:
            return Heartbeat(num_steps=0)
        return Heartbeat(
            engine.num_steps,
            engine.slots_in_use,
            engine.num_decode_steps,
            engine.num_decoded_tokens,
            engine.step_timer.times,
        )

    def stop(self) -> None:
        self._stopped.set()
        self.join()
