"""Reads a checkpoint's files: its JSON, how much audio its encoder takes at once, and where its tensors lie.

Only the header of each file of weights is read, so that a wrong size gives an error of one line before an
engine is started. Runs in every process. Used by `checkpoint`, `api`, `dispatch`, `audio`, `offline`,
`engine` and `model`; imports no torch and loads no weights.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

from asr_server.core import POSITIONS_PER_S, SAMPLE_RATE
from asr_server.errors import CheckpointError

# The largest, tokenizer.json, has 4 MB at most. Parsed, JSON takes up to 25 times its bytes.
MAX_SMALL_BYTES: Final = 6 << 20


@contextmanager
def reading(path: Path, *damaged: type[Exception]) -> Iterator[None]:
    """Raises CheckpointError, which names the file, for OSError and for the errors that say it is damaged."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except damaged as error:
        raise CheckpointError(f"{path} is cut short or damaged: fetch it again") from error


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file to read. A pipe or a device, which could be read without end, raises CheckpointError."""
    with reading(path), open(path, "rb", opener=_without_waiting) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise CheckpointError(f"{path} is no regular file")
        yield file


def _without_waiting(path: str, flags: int) -> int:
    """Open a pipe that nobody writes into at once."""
    return os.open(path, flags | os.O_NONBLOCK)


def begins_with(path: Path, *beginnings: bytes) -> bool:
    """Whether the file's first bytes are one of these. Raises CheckpointError where it cannot be read."""
    with opened(path) as file:
        return file.read(max(map(len, beginnings))).startswith(beginnings)


def read_small(path: Path) -> bytes:
    """Raises CheckpointError where the file cannot be read, or is larger than any of a Whisper model."""
    with opened(path) as file:
        content = file.read(MAX_SMALL_BYTES + 1)
    if len(content) > MAX_SMALL_BYTES:
        raise CheckpointError(f"{path} is larger than {MAX_SMALL_BYTES} bytes")
    return content


def read_json(path: Path) -> dict[str, Any]:
    """Raises CheckpointError where there is no such file, or no JSON object in it."""
    try:
        content = json.loads(read_small(path).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): fetch it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not what it should be (a JSON object): fetch it again")
    return content


def read_optional_json(path: Path) -> dict[str, Any]:
    """The same, but empty where there is no such file."""
    return read_json(path) if path.exists() else {}


# How preprocessor_config.json describes the log-mel frames of every Whisper model.
FEATURES: Final = {"sampling_rate": SAMPLE_RATE, "n_fft": 400, "hop_length": 160}
# Lengths below a whole window in which chunks are encoded, in positions: every half second up to 6 s, then
# every two, and beyond 20 s, where attention costs the most, every second. For each length that occurs oneDNN
# compiles kernels and keeps them: 4 MB for whisper-base.
SHORT_LENGTHS: Final = (*range(25, 300, 25), *range(300, 1000, 100), *range(1000, 1500, 50))
# Of silence that are always encoded after a chunk, where its window has them: 1.5 s. Of half a second too
# little hears that somebody has spoken: whisper-base then says the last sentence of several twice.
MARGIN_POSITIONS: Final = 75


@dataclass(frozen=True)
class AudioWindow:
    """How much audio the checkpoint's encoder takes at once, and how much of it one chunk should fill."""

    num_positions: int = 1500  # of the encoder
    max_chunk_s: float = 0.0  # what the checkpoint itself asks for; 0: nothing, its chunks fill the window
    short_lengths: tuple[int, ...] = ()  # in which chunks are encoded, but for the whole window
    padding: str = "silence"  # what follows a chunk in its window: silence, or zeros in the spectrogram

    @property
    def num_samples(self) -> int:
        return self.num_positions * SAMPLE_RATE // POSITIONS_PER_S

    @property
    def duration_s(self) -> float:
        return self.num_positions / POSITIONS_PER_S

    def chunk_s(self, max_chunk_s: float) -> float:
        """The longest chunk to cut. 0 leaves it to the checkpoint; the window bounds it either way."""
        return min(max_chunk_s or self.max_chunk_s or self.duration_s, self.duration_s)

    def for_short_audio(self, mode: str, lengths: tuple[int, ...] = SHORT_LENGTHS) -> AudioWindow:
        """The same window; `tail`: chunks are encoded in the least of these lengths that holds them."""
        if mode == "exact":
            return self
        return replace(self, short_lengths=tuple(n for n in lengths if n < self.num_positions))

    def positions_for(self, num_samples: int) -> int:
        """Returns in how many positions of the encoder a chunk of `num_samples` is encoded."""
        least = -(-num_samples * POSITIONS_PER_S // SAMPLE_RATE) + MARGIN_POSITIONS
        return next((length for length in self.short_lengths if length >= least), self.num_positions)

    @classmethod
    def from_directory(cls, directory: Path) -> AudioWindow:
        """Reads config.json's `max_source_positions` and, where there is a preprocessor_config.json, two
        keys of this server's own: `max_chunk_s`, for a checkpoint that errs less in shorter chunks, and
        `padding` ("zeros"), for one that is to be read as openai-whisper reads it, to the digit.

        Raises:
            CheckpointError: the two files contradict each other, or ask for other features than Whisper's.
        """
        config = read_json(directory / "config.json")
        path = directory / "preprocessor_config.json"
        preprocessor = read_optional_json(path)
        window = cls(
            int(config.get("max_source_positions", cls.num_positions)),
            float(preprocessor.get("max_chunk_s", cls.max_chunk_s)),
            padding=str(preprocessor.get("padding", cls.padding)),
        )
        if window.padding not in ("silence", "zeros"):
            raise CheckpointError(f"padding in {path} is {window.padding!r}: silence or zeros")
        expected = {**FEATURES, "chunk_length": window.duration_s}
        for key, value in expected.items():
            if preprocessor.get(key, value) != value:
                raise CheckpointError(
                    f"{key} in {path} is {preprocessor[key]!r}; its encoder needs {value:g}"
                )
        return window


SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = "pytorch_model.bin"
STORED = "stored_tensors.json"  # this server's own: where tensors lie in another program's file
CTRANSLATE2 = "model.bin"

_GIT_LFS = b"version https://git-lfs"
ITEM_BYTES: Final = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1}


class StoredTensor(NamedTuple):
    """The place of a tensor in a file: its numbers row by row, little-endian, from the byte `offset` on."""

    dtype: str  # as safetensors names them: F32, F16, BF16, I8 ...
    shape: tuple[int, ...]
    offset: int
    scale: StoredTensor | None = None  # one for each row, or one in all: the values are numbers / scale

    @property
    def end(self) -> int:
        """The first byte after it; its scale may lie anywhere."""
        return self.offset + math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def rows(self, first: int, count: int) -> StoredTensor:
        """Returns a tensor of its rows from `first` on."""
        num_bytes = math.prod(self.shape[1:]) * ITEM_BYTES[self.dtype]
        scale = self.scale.rows(first, count) if self.scale and self.scale.shape else self.scale
        return StoredTensor(self.dtype, (count, *self.shape[1:]), self.offset + first * num_bytes, scale)


StoredTensors = dict[str, StoredTensor]


class WeightsFile(NamedTuple):
    path: Path
    tensors: StoredTensors  # by their Hugging Face names, without the leading `model.`


def find_weights(directory: Path) -> list[WeightsFile]:
    """The files that hold the checkpoint's tensors, with what is in each.

    A pickled file has no header: `PICKLED` comes with no tensors.

    Raises:
        CheckpointError: there are none, or one is missing, cut short, or another one than it was.
    """
    if (directory / STORED).exists():
        return [read_stored(directory)]
    files = [directory / name for name in _weight_files(directory)]
    return [WeightsFile(path, _check_file(path)) for path in files]


def write_stored(directory: Path, path: Path, tensors: StoredTensors, **more: str) -> None:
    """Notes in `directory` that the file at `path` holds its tensors. `more` goes into the note as it is."""
    about = path.stat()
    note = {"path": str(path), "num_bytes": about.st_size, "modified_ns": about.st_mtime_ns, **more}
    (directory / STORED).write_text(json.dumps(note | {"tensors": tensors}), encoding="utf-8")


def read_stored(directory: Path) -> WeightsFile:
    """Raises CheckpointError where the file is no longer the one that was noted."""
    note = read_json(directory / STORED)
    path = Path(note["path"])
    with reading(path):
        about = path.stat()
    if (about.st_size, about.st_mtime_ns) != (note["num_bytes"], note["modified_ns"]):
        raise CheckpointError(f"{path} has changed since the server was started: start it again")
    return WeightsFile(path, {name: _from_json(fields) for name, fields in note["tensors"].items()})


def _from_json(fields: list[Any]) -> StoredTensor:
    dtype, shape, offset, scale = fields
    return StoredTensor(dtype, tuple(shape), offset, _from_json(scale) if scale else None)


def _weight_files(directory: Path) -> list[str]:
    if (directory / INDEX).exists():
        return sorted(set(read_json(directory / INDEX).get("weight_map", {}).values()))
    for name in (SINGLE, PICKLED):
        if (directory / name).exists():
            return [name]
    raise CheckpointError(f"{directory} has no weights: neither {SINGLE}, {INDEX} nor {PICKLED}")


def _check_file(path: Path) -> StoredTensors:
    """Its tensors; none for a pickled file, which has no header."""
    if begins_with(path, _GIT_LFS):
        raise CheckpointError(f"{path} is only a pointer to the weights: run `git lfs pull` there")
    with reading(path):
        return _read_header(path) if path.suffix == ".safetensors" else {}


def _read_header(path: Path) -> StoredTensors:
    """Reads the header of a safetensors file: eight bytes of length, a JSON object; the tensors follow."""
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(length)) if length < num_bytes else None
            if header is not None:
                header.pop("__metadata__", None)
                tensors = {
                    name.removeprefix("model."): StoredTensor(
                        about["dtype"], tuple(about["shape"]), 8 + length + about["data_offsets"][0]
                    )
                    for name, about in header.items()
                }
                ends = [tensor.end for tensor in tensors.values()]
        except (ValueError, TypeError, KeyError, AttributeError, LookupError) as error:
            raise CheckpointError(f"{path} is no safetensors file: fetch it again") from error
    if header is None or num_bytes < max(ends, default=0):
        raise CheckpointError(f"{path} is cut short: fetch it again")
    return tensors
