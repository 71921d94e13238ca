"""The API in a thread of its own; its replica answers when the test says. For what a page shows meanwhile."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.embedded import embedded
from tests.support.fake_replica import Say
from tests.support.until import until, wait_until
from tests.unit.api.running_app import RunningApp, number_of_the_chunk, run_app


class HeldApp:
    def __init__(self, app: RunningApp, loop: asyncio.AbstractEventLoop) -> None:
        self._app, self._loop = app, loop
        self.url = f"http://{app.host}:{app.port}"
        app.replica.holding = True

    def answer_at_once(self) -> None:
        self._app.replica.holding = False

    def release_chunk(self) -> None:
        """Answer the earliest chunk that waits, once there is one."""

        async def release() -> None:
            replica = self._app.replica
            await until(lambda: replica.held)
            replica.release(replica.held[0])

        asyncio.run_coroutine_threadsafe(release(), self._loop).result()


@contextmanager
def run_held_app(
    answer: Say = number_of_the_chunk, port: int = 0, limit_s: float = 300, **settings: Any
) -> Iterator[HeldApp]:
    apps: list[HeldApp] = []
    stop = threading.Event()

    async def serve() -> None:
        async with run_app(embedded(**settings), answer, port=port) as app:
            apps.append(HeldApp(app, asyncio.get_running_loop()))
            await until(stop.is_set, limit_s=limit_s, pause_s=0.02)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    wait_until(lambda: apps or not thread.is_alive())
    try:
        yield apps[0]
    finally:
        stop.set()
        thread.join()
