"""Writes results to standard output in the order of the inputs. Used by `run.py`, one of two `Outputs`."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence

from asr_server.core import Transcript
from asr_server.offline.inputs import Failure, Input, reason_of
from asr_server.offline.job import TranscribeJob
from asr_server.offline.outputs import OutputError
from asr_server.offline.text import printable, rendered

MAX_HELD = 256  # results that wait for one before them


class StandardOutput:
    """Prints each result as soon as those before it are printed.

    Several results stay apart: text formats by a header line, JSON as one object a line with its file's name.
    """

    def __init__(self, inputs: Sequence[Input], job: TranscribeJob) -> None:
        self._render_options = job.render_options
        self._inputs = inputs
        self._format = job.formats[0]
        self._labelled = job.has_several_inputs
        self._positions: dict[int, int] = {}  # by the input's index
        self._held: dict[int, bytes] = {}  # by position
        self._next = 0
        self._printed = asyncio.Condition()

    def is_done(self, index: int) -> bool:
        return False

    def prepare(self, index: int) -> Failure | None:
        return None

    def begin(self, indices: Sequence[int]) -> None:
        self._positions = {index: position for position, index in enumerate(indices)}

    async def write(self, index: int, transcript: Transcript) -> str:
        await self._add(index, self._content(self._inputs[index].name, transcript))
        return ""

    async def leave_out(self, index: int) -> None:
        await self._add(index, b"")

    def close(self) -> None:
        """What still waits is printed although something before it is missing."""
        _print(b"".join(content for _, content in sorted(self._held.items())))
        self._held.clear()

    async def _add(self, index: int, content: bytes) -> None:
        position = self._positions[index]
        async with self._printed:
            await self._printed.wait_for(lambda: position - self._next < MAX_HELD)
            self._held[position] = content
            while self._next in self._held:
                await asyncio.to_thread(_print, self._held.pop(self._next))
                self._next += 1
            self._printed.notify_all()

    def _content(self, name: str, transcript: Transcript) -> bytes:
        content = rendered(transcript, self._format, self._render_options)
        if not self._labelled:
            return content
        if self._format in ("json", "verbose_json", "diarized_json"):
            line = json.dumps({"file": name} | json.loads(content), ensure_ascii=False)
            return line.encode("utf-8", "backslashreplace") + b"\n"
        return f"==> {printable(name)} <==\n".encode() + content + b"\n"


def _print(content: bytes) -> None:
    if not content:
        return
    if sys.stdout is None:
        raise OutputError("cannot write to standard output: it is closed")
    try:
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()
    except OSError as error:
        raise OutputError(f"cannot write to standard output: {reason_of(error)}") from error
