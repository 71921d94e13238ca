"""The order in which waiting chunks are sent to replicas.

Fairness between requests is self-clocked fair queueing (Golestani, INFOCOM 1994): each chunk gets, as it
comes, a finish tag: the virtual time at which it would be finished if every request had an equal share. The
smallest tag goes first. A short request so passes a long one of the same age, and none starves, because tags
never change. A chunk costs a padded encode plus what it is expected to decode, not its seconds alone.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict

from asr_server.checkpoint import AudioWindow
from asr_server.core import Submit
from asr_server.workers.request_handle import PendingChunk, RequestHandle

ENCODE_COST = 1.0  # of a whole window, which most chunks are padded to
DECODE_COST = 1.0  # the tokens of a full window of speech


class FairQueue:
    def __init__(self, window: AudioWindow) -> None:
        self._window = window
        self._heap: list[tuple[float, int, PendingChunk]] = []
        self._throttled: defaultdict[RequestHandle, list[PendingChunk]] = defaultdict(list)
        self._sequence = itertools.count()
        self._virtual_time = 0.0  # the finish tag that was served last
        self._in_order = False

    def finish_tag(self, request: RequestHandle, submit: Submit) -> float:
        """For a new chunk; one that is sent again keeps its own."""
        window, num_samples = self._window, len(submit.samples)
        cost = ENCODE_COST * window.positions_for(num_samples) / window.num_positions
        cost += DECODE_COST * num_samples / window.num_samples
        request.last_finish_tag = max(self._virtual_time, request.last_finish_tag) + cost
        return request.last_finish_tag

    def push(self, chunk: PendingChunk) -> None:
        tag = chunk.request.number if self._in_order else chunk.finish_tag
        heapq.heappush(self._heap, (tag, next(self._sequence), chunk))

    def pop(self, max_in_flight: float) -> PendingChunk | None:
        """The next chunk. A request with `max_in_flight` chunks on replicas is passed over, so that a
        newcomer finds a free slot; its chunks come back with `release`.
        """
        while self._heap:
            chunk = heapq.heappop(self._heap)[2]
            if chunk.request.num_in_flight >= max_in_flight and not self._in_order:
                self._throttled[chunk.request].append(chunk)
                continue
            self._virtual_time = max(self._virtual_time, chunk.finish_tag)
            return chunk
        return None

    def release(self, request: RequestHandle) -> None:
        """The request has one chunk less on replicas."""
        for chunk in self._throttled.pop(request, ()):
            self.push(chunk)

    def serve_in_order(self) -> None:
        """From now on the oldest request gets all it can use: before a stop, some requests that finish are
        better than all of them half done.
        """
        chunks = [chunk for _, _, chunk in sorted(self._heap)]
        self._in_order = True
        self._heap.clear()
        for chunk in itertools.chain(chunks, *self._throttled.values()):
            self.push(chunk)
        self._throttled.clear()

    def remove(self, request: RequestHandle) -> None:
        """Frees the request's samples at once."""
        self._throttled.pop(request, None)
        self._heap = [item for item in self._heap if item[2].request is not request]
        heapq.heapify(self._heap)

    def clear(self) -> None:
        self._heap.clear()
        self._throttled.clear()
