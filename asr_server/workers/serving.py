"""The life of an engine behind a channel, the same in every executor."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from asr_server.core import Drain, Heartbeat
from asr_server.transport.channels import Channel, HeartbeatSender

if TYPE_CHECKING:
    from asr_server.engine import Engine

HEARTBEAT_S = 1.0
IDLE_WAIT_S = 0.5


def run(channel: Channel, create_engine: Callable[[], Engine]) -> None:
    """Loads the engine and serves until drained; the heart beats from the first moment."""
    heart = Heart(channel.heart())
    heart.start()
    try:
        heart.engine = create_engine()
        serve(heart.engine, channel)
    finally:
        if heart.engine is not None:
            heart.engine.close()
        heart.stop()
        channel.close()


def serve(engine: Engine, channel: Channel) -> None:
    """Takes commands, steps the engine, sends events; returns when drained."""
    channel.send(engine.initial_credit())
    draining = False
    while not (draining and not engine.has_work):
        for command in channel.receive(wait_s=0.0 if engine.has_work else IDLE_WAIT_S):
            draining |= isinstance(command, Drain)
            engine.handle(command)
        for event in engine.step():
            channel.send(event)


class Heart(threading.Thread):
    """Beats whatever the engine does, so that frozen and busy can be told apart."""

    def __init__(self, sender: HeartbeatSender) -> None:
        super().__init__(name="heart", daemon=True)
        self.engine: Engine | None = None
        self._sender = sender
        self._stopped = threading.Event()

    def run(self) -> None:
        self._sender.beat(self._state())
        while not self._stopped.wait(HEARTBEAT_S):
            self._sender.beat(self._state())
        self._sender.close()

    def _state(self) -> Heartbeat:
        engine = self.engine
        if engine is None:
            return Heartbeat(num_steps=0)
        return Heartbeat(
            engine.num_steps, engine.slots_in_use, engine.num_decode_steps, engine.num_decoded_tokens
        )

    def stop(self) -> None:
        self._stopped.set()
        self.join()
