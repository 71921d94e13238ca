"""Read a manifest of JSON lines; transcribe and report its lines. Imports no Ray.

Results lie at paths that follow from ids alone, so another run finds them. Errors go to a file.
"""

import asyncio
import hashlib
import os
import re
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
import numpy as np

from asr_server.annexes.offline.inputs import cut_name, reason_for, reason_of, require_file
from asr_server.annexes.offline.local import LocalTranscriber, TranscribeJob
from asr_server.annexes.offline.outputs import OutputError, write_results
from asr_server.annexes.offline.progress import ProgressBars
from asr_server.core import Transcript
from asr_server.errors import EngineUnavailable
from asr_server.formats.render import FORMATS


class _Line(msgspec.Struct):
    audio: Annotated[str, msgspec.Meta(min_length=1)]
    id: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    language: str | None = None
    prompt: str | None = None


Outcome = Literal["transcribed", "skipped", "failed"]


class LineReport(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    offset: int  # of the line in the manifest, in bytes
    outcome: Outcome
    id: str = ""
    audio: str = ""
    error: str = ""  # of a line that failed
    duration_s: float = 0.0  # of a recording that was transcribed


@dataclass(frozen=True)
class Entry:
    offset: int  # of its line in the manifest, in bytes
    id: str  # names its results
    audio: Path
    language: str | None = None  # None: as for the whole job
    prompt: str | None = None

    def report(self, outcome: Outcome, error: str = "", duration_s: float = 0.0) -> LineReport:
        return LineReport(self.offset, outcome, self.id, str(self.audio), error, duration_s)


def read_entries(manifest: Path, start: int = 0, stop: int | None = None) -> Iterator[Entry | LineReport]:
    """Yield the lines that begin in bytes `start` to `stop`, without blank ones. Raises OSError."""
    decoder = msgspec.json.Decoder(_Line)
    for offset, text in _lines(manifest, start, stop):
        if not text.strip():
            continue
        try:
            line = decoder.decode(text)
            if "\0" in line.audio:
                raise ValueError("'audio' has a null character")
        except (msgspec.DecodeError, ValueError) as error:
            yield LineReport(offset, "failed", error=f"not a line of a manifest: {error}")
        else:
            audio = manifest.parent / line.audio
            yield Entry(offset, line.id or line.audio, audio, line.language, line.prompt)


def survey(manifest: Path) -> tuple[int, dict[int, int]]:
    """Read all lines and keep 16 bytes of each. Raises OutputError.

    Return their number, and the offset of each line that would replace an earlier one's result, with that
    one's offset.
    """
    num_bad_lines = 0
    offsets, keys = array("q"), array("q")
    try:
        for line in read_entries(manifest):
            if isinstance(line, LineReport):
                num_bad_lines += 1
            else:
                offsets.append(line.offset)
                keys.append(hash(result_name(line.id).casefold()))
    except OSError as error:
        raise OutputError(f"cannot read the manifest {manifest}: {reason_of(error)}") from error
    return num_bad_lines + len(offsets), _repeats(np.asarray(offsets), np.asarray(keys))


def _repeats(offsets: np.ndarray, keys: np.ndarray) -> dict[int, int]:
    _, first_places, numbers = np.unique(keys, return_index=True, return_inverse=True)
    first = first_places[numbers]  # with the same key, for each line
    repeats = np.flatnonzero(first != np.arange(len(keys)))
    return dict(zip(offsets[repeats].tolist(), offsets[first[repeats]].tolist(), strict=True))


def _lines(manifest: Path, start: int, stop: int | None) -> Iterator[tuple[int, bytes]]:
    with manifest.open("rb") as file:
        if start > 0:  # the line that `start` lies within belongs to the bytes before, unless it begins there
            file.seek(start - 1)
            file.readline()
        while stop is None or file.tell() < stop:
            offset = file.tell()
            if not (line := file.readline()):
                return
            yield offset, line


_MAX_NAME_BYTES: Final = 200  # without the ending
_SHARD_DIGITS: Final = 3  # 4096 folders: a listing of one stays short where there are millions of results
_UNFIT: Final = re.compile(r"[%/\x00-\x1f\x7f]")


def result_name(id: str) -> str:
    """Return the id with %XX for invalid characters; ids never share a name."""
    digest = hashlib.blake2b(id.encode(), digest_size=10).hexdigest()
    name = _UNFIT.sub(lambda found: f"%{ord(found[0]):02X}", id)
    return f"{digest[:_SHARD_DIGITS]}/{cut_name(name, _MAX_NAME_BYTES, digest)}"


ERROR_FILE: Final = "errors.jsonl"
_LINE_EVERY_S: Final = 60.0  # where there is no terminal for a bar


class JobStopped(msgspec.Struct, frozen=True, tag=True):
    reason: str


class Reports:
    def __init__(self, folder: Path, num_lines: int, quiet: bool) -> None:
        self.counts: dict[Outcome, int] = {"transcribed": 0, "skipped": 0, "failed": 0}
        self._audio_s = 0.0
        self._path = folder / ERROR_FILE
        self._num_lines = num_lines
        self.bars = ProgressBars(num_lines, quiet, "lines")
        self._printed_at = time.monotonic()
        self._write_errors("wb", b"")

    def add(self, report: LineReport) -> None:
        self.counts[report.outcome] += 1
        self._audio_s += report.duration_s
        if report.outcome == "failed":
            names = ("offset", "id", "audio", "error")
            fields = {name: getattr(report, name) for name in names}
            self._write_errors("ab", msgspec.json.encode(fields) + b"\n")
        self.bars.count()
        if self.bars.progress.disable and time.monotonic() - self._printed_at >= _LINE_EVERY_S:
            self._printed_at = time.monotonic()
            self.bars.say(self.numbers())

    def numbers(self) -> str:
        counted = ", ".join(f"{count} {outcome}" for outcome, count in self.counts.items() if count)
        left = self._num_lines - sum(self.counts.values())
        return f"{counted or 'nothing done'}, {self._audio_s / 3600:.1f} h of audio" + (
            f", {left} lines not begun or not finished" if left > 0 else ""
        )

    def _write_errors(self, mode: Literal["wb", "ab"], lines: bytes) -> None:
        try:
            with self._path.open(mode) as file:
                file.write(lines)
        except OSError as error:
            raise OutputError(f"cannot write {self._path}: {reason_of(error)}") from error


class LineTranscriber:
    def __init__(self, transcriber: LocalTranscriber, job: TranscribeJob, repeats: Mapping[int, int]) -> None:
        assert job.output_dir is not None
        self._transcriber, self._repeats = transcriber, repeats
        self._folder, self._job = job.output_dir, job

    def sorted_out(self, lines: Iterable[Entry | LineReport]) -> Iterator[Entry | LineReport]:
        for line in lines:
            if isinstance(line, LineReport):
                yield line
            elif (first := self._repeats.get(line.offset)) is not None:
                own = "give each an 'id' of its own"
                yield line.report(
                    "failed", f"its result would replace that of the line at byte {first}: {own}"
                )
            elif self.is_done(line.id):
                yield line.report("skipped")
            else:
                yield line

    async def transcribe(self, entry: Entry | LineReport) -> LineReport:
        """Return what becomes of a line. Raises EngineUnavailable, OutputError: no entry can continue."""
        if isinstance(entry, LineReport):
            return entry
        transcriber = self._transcriber
        try:
            options = transcriber.options_for(entry.language, entry.prompt)
            await asyncio.to_thread(require_file, entry.audio)
            transcript = await transcriber.transcribe(entry.audio, lambda done_s, total_s: None, options)
            await asyncio.to_thread(self.write, entry.id, transcript)
        except (EngineUnavailable, OutputError):
            raise
        except Exception as error:
            return entry.report("failed", reason_for(str(entry.audio), error))
        return entry.report("transcribed", duration_s=transcript.duration_s)

    def is_done(self, id: str) -> bool:
        return self._job.existing != "overwrite" and all(map(os.path.exists, self._paths(id)))

    def write(self, id: str, transcript: Transcript) -> None:
        """Raises OSError for this result, OutputError for all."""
        write_results(self._paths(id), transcript, self._job)

    def _paths(self, id: str) -> list[Path]:
        return [self._folder / f"{result_name(id)}{FORMATS[name].ending}" for name in self._job.formats]
