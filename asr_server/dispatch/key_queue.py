"""The order that chunks are sent in: fair between keys first, then between one key's requests.

Keys take turns by start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996): next is the key that was
served least since it has had chunks waiting. Requests without a named key count as one key.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from asr_server.checkpoint.files import AudioWindow
from asr_server.dispatch.queue import FairQueue, PendingChunk, RequestHandle


@dataclass
class _Share:
    queue: FairQueue
    start_tag: float = 0.0  # grows by the cost of each chunk served


class KeyQueue:
    def __init__(self, window: AudioWindow) -> None:
        self._window = window
        # Never removed: keys' names come from a file, so they are few.
        self._shares: defaultdict[str, _Share] = defaultdict(self._new_share)
        self._virtual_time = 0.0  # the start tag that was served last
        self._in_order = False

    def _new_share(self) -> _Share:
        return _Share(FairQueue(self._window, self._in_order))

    def _queue_of(self, request: RequestHandle) -> FairQueue:
        return self._shares["" if self._in_order else request.key].queue

    def _start_tag(self, share: _Share) -> float:
        """Save nothing up for a key that had no chunks waiting."""
        return max(self._virtual_time, share.start_tag)

    def set_finish_tag(self, chunk: PendingChunk) -> None:
        self._queue_of(chunk.request).set_finish_tag(chunk)

    def push(self, chunk: PendingChunk) -> None:
        self._queue_of(chunk.request).push(chunk)

    def pop(self, max_in_flight: float) -> PendingChunk | None:
        """Return the next chunk; pass over requests with `max_in_flight` chunks until `release`."""
        for share in sorted(self._shares.values(), key=self._start_tag):
            if (chunk := share.queue.pop(max_in_flight)) is not None:
                self._virtual_time = self._start_tag(share)
                share.start_tag = self._virtual_time + chunk.cost
                return chunk
        return None

    def release(self, request: RequestHandle) -> None:
        self._queue_of(request).release(request)

    def serve_in_order(self) -> None:
        """Give the oldest request all it can use; live speech goes first.

        Before a stop, some finished requests are better than many halves.
        """
        chunks = [chunk for share in self._shares.values() for chunk in share.queue.take_all()]
        self._in_order = True
        self._shares.clear()
        for chunk in chunks:
            self.push(chunk)

    def remove(self, request: RequestHandle) -> None:
        self._queue_of(request).remove(request)

    def clear(self) -> None:
        for share in self._shares.values():
            share.queue.clear()
