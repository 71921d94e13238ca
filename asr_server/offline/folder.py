"""Writes results as files in a folder, each whole or not at all. Used by `run.py`, one of two `Outputs`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, Final

from asr_server.core import Transcript
from asr_server.formats import ResponseFormat
from asr_server.offline.inputs import Failure, Input, reason_of
from asr_server.offline.job import TranscribeJob
from asr_server.offline.naming import result_paths
from asr_server.offline.outputs import OutputError
from asr_server.offline.text import rendered

ENDINGS: Final[dict[ResponseFormat, str]] = {
    "text": ".txt",
    "json": ".json",
    "verbose_json": ".verbose.json",
    "diarized_json": ".diarized.json",
    "srt": ".srt",
    "vtt": ".vtt",
}
MAX_NAME_BYTES = 255  # of a file's name, on the usual file systems
_numbers = itertools.count()


class FolderOutputs:
    """Writes a file for each input and format."""

    def __init__(self, folder: Path, inputs: Sequence[Input], job: TranscribeJob) -> None:
        self._inputs = inputs
        self._job = job
        self._paths = result_paths(inputs, folder, [ENDINGS[name] for name in job.formats])

    def is_done(self, index: int) -> bool:
        return self._job.existing == "skip" and all(os.path.exists(path) for path in self._paths[index])

    def prepare(self, index: int) -> Failure | None:
        reason = next(filter(None, map(self._obstacle, self._paths[index])), None)
        return Failure(self._inputs[index].name, reason) if reason else None

    def begin(self, indices: Sequence[int]) -> None:
        pass

    async def write(self, index: int, transcript: Transcript) -> str:
        return await _finished(asyncio.to_thread(self._write, self._paths[index], transcript))

    async def leave_out(self, index: int) -> None:
        pass

    def close(self) -> None:
        pass

    def _write(self, paths: Sequence[Path], transcript: Transcript) -> str:
        written = []
        for response_format, path in zip(self._job.formats, paths, strict=True):
            if self._job.existing == "overwrite" or not os.path.exists(path):
                write_whole(path, rendered(transcript, response_format, self._job.render_options))
                written.append(str(path))
        return ", ".join(written)

    def _obstacle(self, path: Path) -> str | None:
        if self._job.existing == "refuse" and os.path.exists(path):
            return f"{path} exists: --skip-existing leaves it, --overwrite replaces it"
        if len(os.fsencode(path.name)) > MAX_NAME_BYTES:
            return f"the name of its result would be too long: {path.name}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            return f"cannot make the folder {path.parent}: {reason_of(error)}"
        return None


def check_writable(folder: Path) -> None:
    """Makes the folder if need be and tries to write there: permissions alone do not tell.

    Raises:
        OutputError: it cannot be made, or not be written to.
    """
    probe = folder / f".asr-server-{os.getpid()}"
    try:
        write_whole(probe, b"?")
        probe.unlink()
    except OSError as error:
        raise OutputError(f"cannot write to the output folder {folder}: {reason_of(error)}") from error


async def _finished(write: Coroutine[Any, Any, str]) -> str:
    """Waits until the write has ended: a result that is there must be told as done, so that a cancellation
    takes effect only at the next wait.
    """
    task = asyncio.create_task(write)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,))
        current = asyncio.current_task()
        assert current is not None
        current.cancel()
        return task.result()


def write_whole(path: Path, content: bytes) -> None:
    """By way of a hidden file beside it, so that half a result never has a result's name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".asr-server-{os.getpid()}-{next(_numbers)}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
