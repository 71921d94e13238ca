"""Stand between a job and the dispatcher: keep what the engine reports, and answer what was kept.

A job that goes on after a crash is read again from its first byte. Chunks with a kept report need no engine:
they report the same languages, early results and result, in the same order, so that the text is the same.
"""

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final, TypeVar

import msgspec

from asr_server.core import ChunkResult
from asr_server.dispatch.dispatcher import Dispatcher
from asr_server.dispatch.queue import PendingChunk, RequestHandle
from asr_server.transport.messages import Submit

SAMPLED: Final = 61  # of so many samples, one is part of a digest: a chunk of 30 s has two megabytes


class Report(msgspec.Struct, array_like=True):
    """The engine's reports of one part of a chunk."""

    digest: bytes  # of what was asked
    probabilities: list[dict[str, float]]  # of languages
    early_results: list[ChunkResult]
    result: ChunkResult | None = None


T = TypeVar("T")
R = TypeVar("R")
Keep = Callable[[int, int, bytes], Awaitable[None]]  # chunk, part, report


class KnownResults:
    """Take the chunks of one job. A report holds for one engine: another model or version reads again."""

    def __init__(
        self, dispatcher: Dispatcher, engine: str, reports: dict[tuple[int, int], bytes], keep: Keep
    ) -> None:
        self._dispatcher, self._engine, self._keep = dispatcher, engine.encode(), keep
        self._reports = reports  # those kept, by chunk and part

    def open(self, handle_id: str) -> RequestHandle:
        return replace(self._dispatcher.open(handle_id), dispatcher=self, is_background=True)

    async def enqueue(self, chunk: PendingChunk) -> ChunkResult:
        key, digest = (chunk.submit.id.chunk, chunk.submit.id.part), self._digest(chunk.submit)
        if (data := self._reports.pop(key, None)) is not None:
            report = msgspec.msgpack.decode(data, type=Report)
            if report.digest == digest and report.result is not None:
                chunk.request.num_moves += 1
                for probabilities in report.probabilities:
                    chunk.choose_language(probabilities)
                for early_result in report.early_results:
                    chunk.report_early(early_result)
                chunk.resolve(report.result, None)
                return await chunk.future
        report = Report(digest, [], [])
        chunk.on_language = _kept(chunk.on_language, report.probabilities)
        chunk.on_early_result = _kept(chunk.on_early_result, report.early_results)
        report.result = await self._dispatcher.enqueue(chunk)
        await self._keep(*key, msgspec.msgpack.encode(report))
        return report.result

    def _digest(self, submit: Submit) -> bytes:
        digest = hashlib.blake2b(self._engine, digest_size=16)
        digest.update(msgspec.msgpack.encode((submit.options, len(submit.samples))))
        digest.update(submit.samples[::SAMPLED].tobytes())
        return digest.digest()

    def steps_in_flight(self, request: RequestHandle) -> int:
        return self._dispatcher.steps_in_flight(request)

    def cancel(self, request: RequestHandle) -> None:
        self._dispatcher.cancel(request)


def _kept(callback: Callable[[T], R] | None, values: list[T]) -> Callable[[T], R] | None:
    """Return a callback that keeps each value too."""
    if callback is None:
        return None

    def keep_and_call(value: T) -> R:
        values.append(value)
        return callback(value)

    return keep_and_call
