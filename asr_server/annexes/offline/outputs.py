"""Write results whole to files in a folder, or to standard output in order. Writes in threads."""

import asyncio
import contextlib
import errno
import json
import os
import re
import secrets
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from asr_server.annexes.offline.inputs import Failure, Input, reason_of, result_names, result_path
from asr_server.annexes.offline.local import TranscribeJob
from asr_server.core import Transcript
from asr_server.formats.render import DEFAULTS, FORMATS, JSON, FileFormat, RenderOptions, render
from asr_server.telemetry import printable


class OutputError(Exception):
    """No result can be written there any more."""


class Outputs(ABC):
    def is_done(self, index: int) -> bool:
        return False

    def prepare(self, index: int) -> Failure | None:
        return None

    def begin(self, indices: Sequence[int]) -> None: ...  # noqa: B027

    @abstractmethod
    async def write(self, index: int, transcript: Transcript) -> str:
        """Write the result; return its files. Raises OSError for this one, OutputError for all."""

    async def leave_out(self, index: int) -> None: ...  # noqa: B027

    def close(self) -> None: ...  # noqa: B027


def rendered(transcript: Transcript, response_format: FileFormat, options: RenderOptions = DEFAULTS) -> bytes:
    return (render(transcript, response_format, options).rstrip("\n") + "\n").encode()


PARTIAL_PREFIX: Final = ".asr-server-"
MAX_WRITE_S: Final = 3600.0  # a partial result older than this is of a run that was killed
_FOR_EVERY_RESULT: Final = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}


class FolderOutputs(Outputs):
    def __init__(self, folder: Path, inputs: Sequence[Input], job: TranscribeJob) -> None:
        self._inputs = inputs
        self._job = job
        names = result_names(inputs)
        self._paths = [
            [result_path(folder, name, FORMATS[kind].ending) for kind in job.formats] for name in names
        ]
        self._conflicts = dict(self._find_conflicts())

    def _find_conflicts(self) -> Iterator[tuple[int, str]]:
        def key(path: Path) -> str:
            return os.path.abspath(path).casefold()

        owners = {key(i.source): "a recording" for i in self._inputs if isinstance(i.source, Path)}
        for index, (input, paths) in enumerate(zip(self._inputs, self._paths, strict=True)):
            for path in paths:
                if owner := owners.get(key(path)):
                    yield index, f"its result {path} is {owner}: give it an output folder of its own"
            owners |= {key(path): f"the result of {input.name}" for path in paths}

    def is_done(self, index: int) -> bool:
        if self._job.existing != "skip" or index in self._conflicts:
            return False
        return all(os.path.exists(path) for path in self._paths[index])

    def prepare(self, index: int) -> Failure | None:
        obstacles = (self._conflicts.get(index), *map(self._obstacle, self._paths[index]))
        reason = next(filter(None, obstacles), None)
        return Failure(self._inputs[index].name, reason) if reason else None

    async def write(self, index: int, transcript: Transcript) -> str:
        return await _finished(asyncio.to_thread(write_results, self._paths[index], transcript, self._job))

    def _obstacle(self, path: Path) -> str | None:
        if self._job.existing == "refuse" and os.path.exists(path):
            return f"{path} exists: --skip-existing leaves it, --overwrite replaces it"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            return f"cannot make the folder {path.parent}: {reason_of(error)}"
        return None


def check_writable(folder: Path) -> None:
    """Make the folder and try to write: permissions alone do not tell. Raises OutputError."""
    probe = folder / _unique_name("probe")
    try:
        write_whole(probe, b"?")
        probe.unlink()
        _sweep(folder)
    except OSError as error:
        raise OutputError(f"cannot write to the output folder {folder}: {reason_of(error)}") from error


async def _finished(write: Coroutine[Any, Any, str]) -> str:
    task = asyncio.create_task(write)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,))
        current = asyncio.current_task()
        assert current is not None
        current.cancel()
        return task.result()


def write_results(paths: Sequence[Path], transcript: Transcript, job: TranscribeJob) -> str:
    """Write what is not there, or all with --overwrite; return the files.

    Raises OSError for this result, OutputError for one that all results would meet, as a full disk.
    """
    written = []
    for response_format, path in zip(job.formats, paths, strict=True):
        if job.existing == "overwrite" or not os.path.exists(path):
            try:
                write_whole(path, rendered(transcript, response_format, job.render_options))
            except OSError as error:
                if error.errno in _FOR_EVERY_RESULT:
                    raise OutputError(f"cannot write to {path.parent}: {reason_of(error)}") from error
                raise
            written.append(str(path))
    return ", ".join(written)


def write_whole(path: Path, content: bytes) -> None:
    """Write a hidden file and rename it, so that half a result has no name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(_unique_name("partial"))
    try:
        with partial.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def _unique_name(ending: str) -> str:
    return f"{PARTIAL_PREFIX}{secrets.token_hex(16)}.{ending}"


def _sweep(folder: Path) -> None:
    before = time.time() - MAX_WRITE_S
    for partial in folder.rglob(f"{PARTIAL_PREFIX}*.partial"):
        with contextlib.suppress(OSError):  # another run sweeps too
            if partial.stat().st_mtime < before:
                partial.unlink()


_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # but line breaks and tabs
MAX_HELD = 256  # results that wait for one before them


class StandardOutput(Outputs):
    """Print each result after those before it: several with header lines, or JSON with the file's name."""

    def __init__(self, inputs: Sequence[Input], job: TranscribeJob) -> None:
        self._render_options = job.render_options
        self._inputs = inputs
        self._format = job.formats[0]
        # By arguments, not files, so that a script's output keeps its shape.
        self._labelled = len(job.arguments) > 1 or Path(job.arguments[0]).is_dir()
        self._positions: dict[int, int] = {}  # by the input's index
        self._held: dict[int, bytes] = {}  # by position
        self._next = 0
        self._printed = asyncio.Condition()

    def begin(self, indices: Sequence[int]) -> None:
        self._positions = {index: position for position, index in enumerate(indices)}

    async def write(self, index: int, transcript: Transcript) -> str:
        await self._add(index, self._content(self._inputs[index].name, transcript))
        return ""

    async def leave_out(self, index: int) -> None:
        await self._add(index, b"")

    def close(self) -> None:
        """Print waiting results, although one before them is missing."""
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
        text = rendered(transcript, self._format, self._render_options).decode()
        # A terminal's commands in another server's text; what stands for them is valid in JSON too.
        content = _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text).encode()
        if not self._labelled:
            return content
        if FORMATS[self._format].media_type == JSON:
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
