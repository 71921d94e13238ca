"""What is known of jobs while they run: their text so far as events, and who waits for a change."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Iterator

import msgspec

from asr_server.api.events import event
from asr_server.api.schemas import TextDelta


class JobEvent(msgspec.Struct, frozen=True, array_like=True):
    """Server-sent events of a stretch of the text.

    Its id is where the text ends, in characters: after a crash the same text may come in other pieces.
    """

    end: int
    text: str
    data: bytes


def events_after(events: Iterable[JobEvent], last_id: int) -> Iterator[JobEvent]:
    """Yield what follows an id; of a piece that it lies in, the rest of the text."""
    for each in events:
        num_missing = each.end - last_id
        if 0 < num_missing < len(each.text):
            text = each.text[-num_missing:]
            yield JobEvent(each.end, text, event(TextDelta(delta=text)))
        elif num_missing > 0:
            yield each


class LiveJob:
    """A job under way in this process."""

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.begin(None)

    def begin(self, duration_s: float | None) -> None:
        self.events: list[JobEvent] = []
        self.done_s, self.duration_s = 0.0, duration_s
        self.num_chars = 0

    def add(self, text: str, data: bytes) -> None:
        self.num_chars += len(text)
        if data:
            self.events.append(JobEvent(self.num_chars, text, data))


class Changes:
    """Wake those who wait for a change of a job."""

    def __init__(self) -> None:
        self._waiting: defaultdict[str, set[asyncio.Event]] = defaultdict(set)

    def notify(self, id: str) -> None:
        for waiter in self._waiting.pop(id, ()):
            waiter.set()

    def expect(self, id: str) -> Change:
        """Note changes from now on, so that none is missed between a look and the wait."""
        waiter = asyncio.Event()
        self._waiting[id].add(waiter)
        return Change(self._waiting, id, waiter)


class Change:
    def __init__(self, waiting: defaultdict[str, set[asyncio.Event]], id: str, waiter: asyncio.Event) -> None:
        self._waiting, self._id, self._waiter = waiting, id, waiter

    async def wait(self, limit_s: float) -> bool:
        """Return whether there was one."""
        try:
            async with asyncio.timeout(limit_s):
                await self._waiter.wait()
        except TimeoutError:
            return False
        return True

    def __enter__(self) -> Change:
        return self

    def __exit__(self, *_: object) -> None:
        waiters = self._waiting.get(self._id, set())
        waiters.discard(self._waiter)
        if not waiters:
            self._waiting.pop(self._id, None)
