"""An event loop's clock that stands still until a test moves it: for waits of seconds in milliseconds."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

ROUNDS = 50  # of the event loop, in which whoever was woken goes on


class LoopClock:
    def __init__(self, now: float) -> None:
        self.now = now

    async def advance(self, seconds: float) -> None:
        """Let time pass, and then all that was waiting for it."""
        for passed in (0.0, seconds):
            self.now += passed
            for _ in range(ROUNDS):
                await asyncio.sleep(0)


@contextmanager
def loop_clock() -> Iterator[LoopClock]:
    """Stop the clock of the running loop. Real sockets and threads must not be waited for meanwhile."""
    loop = asyncio.get_running_loop()
    clock = LoopClock(loop.time())
    loop.time = lambda: clock.now  # type: ignore[method-assign]
    try:
        yield clock
    finally:
        del loop.time
