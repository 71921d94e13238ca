"""Finds every tensor of a checkpoint by the headers of its files, and checks them against its config.json.

Used by `find.py`, so that a wrong size is told in a line rather than by an engine that cannot start, and by
the model's loading, which reads the tensors where they lie.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from asr_server.checkpoint.config_files import read_json
from asr_server.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = "pytorch_model.bin"
STORED = (
    "stored_tensors.json"  # this server's own: where the tensors lie in a file of another program's format
)

_GIT_LFS = b"version https://git-lfs"
ITEM_BYTES: Final = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1}


class StoredTensor(NamedTuple):
    """Where a file has a tensor: its numbers row by row, little-endian, from the byte `offset` on."""

    dtype: str  # as safetensors names them: F32, F16, BF16, I8 ...
    shape: tuple[int, ...]
    offset: int
    scale: StoredTensor | None = None  # one for each row, or one in all: the values are numbers / scale

    @property
    def end(self) -> int:
        """The first byte behind it; its scale may lie anywhere."""
        return self.offset + math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def rows(self, first: int, count: int) -> StoredTensor:
        """A tensor of its rows from `first` on."""
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


def check_weights(directory: Path, config: Mapping[str, Any]) -> None:
    """Raises CheckpointError where a file is missing or cut short, or the weights are of other sizes."""
    tensors = {name: tensor for file in find_weights(directory) for name, tensor in file.tensors.items()}
    if not tensors:
        return  # pickled: only loading tells what is in it
    for name, expected in _expected_shapes(config, directory):
        shape = list(tensors[name].shape) if name in tensors else None
        if shape != expected:
            found = f"is {shape}" if shape else "is missing"
            raise CheckpointError(
                f"the weights in {directory} do not fit its config.json: {name} {found}, not {expected}"
            )


def write_stored(directory: Path, path: Path, tensors: StoredTensors, **more: str) -> None:
    """Notes in `directory` that the file at `path` holds its tensors. `more` goes into the note as it is."""
    about = path.stat()
    note = {"path": str(path), "num_bytes": about.st_size, "modified_ns": about.st_mtime_ns, **more}
    (directory / STORED).write_text(json.dumps(note | {"tensors": tensors}), encoding="utf-8")


def read_stored(directory: Path) -> WeightsFile:
    """Raises CheckpointError where the file is no longer the one that was noted."""
    note = read_json(directory / STORED)
    path = Path(note["path"])
    try:
        about = path.stat()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
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
    try:
        with path.open("rb") as file:
            if file.read(len(_GIT_LFS)) == _GIT_LFS:
                raise CheckpointError(f"{path} is only a pointer to the weights: run `git lfs pull` there")
        return _read_header(path) if path.suffix == ".safetensors" else {}
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def _read_header(path: Path) -> StoredTensors:
    """Of a safetensors file: eight bytes of length, a JSON object, the tensors."""
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


def _expected_shapes(config: Mapping[str, Any], directory: Path) -> Iterator[tuple[str, list[int]]]:
    """A few weights that together tell every size."""
    try:
        width = config["d_model"]
        yield "encoder.conv1.weight", [width, config["num_mel_bins"], 3]
        yield "decoder.embed_tokens.weight", [config["vocab_size"], width]
        yield "encoder.embed_positions.weight", [config.get("max_source_positions", 1500), width]
        yield "decoder.embed_positions.weight", [config.get("max_target_positions", 448), width]
        for part in ("encoder", "decoder"):
            last = f"{part}.layers.{config[f'{part}_layers'] - 1}"
            yield f"{last}.fc1.weight", [config[f"{part}_ffn_dim"], width]
    except KeyError as error:
        raise CheckpointError(f"{directory / 'config.json'} lacks {error}") from error
    except TypeError as error:
        raise CheckpointError(f"{directory / 'config.json'} has a size that is no number") from error
