"""What is known of jobs while they run: their text so far as events, and who waits for a change."""

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

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


@dataclass
class LiveJob:
    """A job under way in this process."""

    owner: str
    task: asyncio.Task[None] | None = None
    events: list[JobEvent] = field(default_factory=list)
    done_s: float = 0.0
    is_waiting: bool = False  # for what the server lacks
    is_counted: bool = False  # as work that may end the server
    is_suspect: bool = False  # the server ended often with nothing new of it

    @property
    def num_chars(self) -> int:
        return self.events[-1].end if self.events else 0

    def add(self, text: str, data: bytes) -> None:
        if data:
            self.events.append(JobEvent(self.num_chars + len(text), text, data))

    def close(self, data: bytes) -> list[JobEvent]:
        """Return all events, and these behind the text."""
        return [*self.events, JobEvent(self.num_chars + 1, "", data)]


class Changes:
    """Wake those who wait for the next change of a job.

    An event that nobody waits for any more stays until that change: as many as there are jobs.
    """

    def __init__(self) -> None:
        self._next: dict[str, asyncio.Event] = {}

    def next(self, id: str) -> asyncio.Event:
        """Return what is set by the next change: ask before a look, so that none is missed behind it."""
        return self._next.setdefault(id, asyncio.Event())

    def notify(self, id: str) -> None:
        if change := self._next.pop(id, None):
            change.set()


async def is_set_within(change: asyncio.Event, limit_s: float) -> bool:
    try:
        async with asyncio.timeout(limit_s):
            return await change.wait()
    except TimeoutError:
        return False
