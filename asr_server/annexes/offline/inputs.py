"""Turn arguments into recordings, and name their results. Blocks; decodes nothing."""

import contextlib
import hashlib
import logging
import os
import shlex
import shutil
import stat
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import BinaryIO, Final

from asr_server.audio.decoder import RECORDING_FORMATS
from asr_server.errors import ChunkFailed, RequestError

logger = logging.getLogger(__name__)

STANDARD_INPUT: Final = "-"
MAX_NAME_BYTES: Final = 255  # of a file's name, on the usual file systems
_DIGEST_BYTES: Final = 10
# Of a folder's files those with such an ending are recordings; a file that is an argument itself needs none.
ENDINGS: Final = frozenset(f".{name}" for name in RECORDING_FORMATS.split(", ")) | {
    *(".aif", ".aifc", ".amr", ".au", ".caf", ".m4b", ".mka", ".w64", ".wma"),
    *(".m4v", ".mpg", ".ts"),
}


@dataclass(frozen=True)
class Input:
    name: str  # for messages: the argument, or the path within a folder that is one
    source: Path | BinaryIO  # a stream has to be `buffered` first
    relative: PurePath  # the recording's path below the folder that is an argument


@dataclass(frozen=True)
class Failure:
    name: str
    reason: str


def collect_inputs(arguments: Iterable[str], recursive: bool) -> tuple[list[Input], list[Failure]]:
    inputs: dict[str, Input] = {}
    failures: list[Failure] = []
    for argument in arguments:
        try:
            for found in _expand(argument, recursive, failures):
                inputs.setdefault(os.path.abspath(found.name), found)
        except OSError as error:
            failures.append(Failure(argument, reason_of(error)))
    return list(inputs.values()), failures


def buffered(input: Input) -> Input:
    """Return the input; copy a stream to a nameless file, since decoders seek. Raises OSError."""
    if isinstance(input.source, Path):
        return input
    with contextlib.ExitStack() as stack, input.source as stream:
        file = stack.enter_context(tempfile.TemporaryFile())
        shutil.copyfileobj(stream, file)
        file.flush()
        stack.pop_all()  # the file stays open for whoever decodes it
    return replace(input, source=file)


def require_file(path: Path) -> None:
    """Raises OSError unless the path is a readable file."""
    if not path.is_file():
        path.stat()
        raise OSError("neither a file nor a folder")
    with path.open("rb"):
        pass


def reason_of(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__


def reason_for(name: str, error: Exception) -> str:
    match error:
        case RequestError():
            return error.message
        case ChunkFailed():
            return str(error)
        case OSError():
            return reason_of(error)
    logger.error("%s: unexpected", name, exc_info=error)  # a mistake of this program, not of the file
    return f"{type(error).__name__}: {error}"


def _expand(argument: str, recursive: bool, failures: list[Failure]) -> Iterator[Input]:
    if argument.startswith(("http://", "https://")):
        raise OSError(f"addresses are not fetched: curl -L {shlex.quote(argument)} | asr-server transcribe -")
    if not argument:  # an unset variable of a script: Path("") would be the working directory
        raise OSError("the name is empty")
    path = Path(argument)
    if argument == STANDARD_INPUT:
        yield Input("standard input", _standard_input(), PurePath("stdin"))
    elif path.is_dir():
        yield from _recordings_in(path, recursive, failures)
    elif stat.S_ISFIFO(path.stat().st_mode):
        yield Input(argument, path.open("rb"), PurePath(path.name))
    else:
        yield _file(path, PurePath(path.name))


def _standard_input() -> BinaryIO:
    if sys.stdin is None or sys.stdin.closed:
        raise OSError("it is closed")
    if sys.stdin.isatty():
        raise OSError("it is a terminal: pipe a recording into it")
    return sys.stdin.buffer


def _file(path: Path, relative: PurePath) -> Input:
    require_file(path)  # whether it can be read is known now, not after hours of other work
    return Input(str(path), path, relative)


def _recordings_in(folder: Path, recursive: bool, failures: list[Failure]) -> Iterator[Input]:
    paths = list(_walk(folder, recursive, failures))
    for path in paths:
        try:
            yield _file(path, path.relative_to(folder))
        except OSError as error:
            failures.append(Failure(str(path), reason_of(error)))
    if not paths:
        hint = "" if recursive else "; --recursive looks into the folders within it too"
        failures.append(Failure(str(folder), f"no recordings in this folder{hint}"))


def _walk(folder: Path, recursive: bool, failures: list[Failure]) -> Iterator[Path]:
    def note(error: OSError) -> None:
        failures.append(Failure(str(error.filename), reason_of(error)))

    seen = {os.path.realpath(folder)}
    for directory, folders, names in os.walk(folder, onerror=note, followlinks=True):
        folders[:] = sorted(name for name in folders if recursive and not name.startswith("."))
        real = {name: os.path.realpath(os.path.join(directory, name)) for name in folders}
        folders[:] = [name for name in folders if real[name] not in seen]  # links may lead in circles
        seen.update(real.values())
        for name in sorted(names):
            if Path(name).suffix.lower() in ENDINGS and not name.startswith("."):
                yield Path(directory, name)


def result_names(inputs: Sequence[Input]) -> list[PurePath]:
    """Name each input's results below the output folder, without a format's ending.

    `talk.wav` gives `talk`; beside `talk.mp3` both keep their endings. Some disks ignore case.
    """
    short = [input.relative.with_suffix("") for input in inputs]
    counts = Counter(str(name).casefold() for name in short)
    both = zip(short, inputs, strict=True)
    return [name if counts[str(name).casefold()] == 1 else input.relative for name, input in both]


def result_path(folder: Path, name: PurePath, ending: str) -> Path:
    """Return the path of one result. A name too long for the disk is cut."""
    digest = hashlib.blake2b(os.fsencode(name), digest_size=_DIGEST_BYTES).hexdigest()
    return folder / name.parent / (cut_name(name.name, MAX_NAME_BYTES - len(ending), digest) + ending)


def cut_name(name: str, max_bytes: int, digest: str) -> str:
    encoded = os.fsencode(name)
    if len(encoded) <= max_bytes:
        return name
    return f"{encoded[: max_bytes - len(digest) - 1].decode(errors='ignore')}-{digest}"
