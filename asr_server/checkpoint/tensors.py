"""Find a checkpoint's tensors by reading headers, and check that they are those that config.json describes.

Every length, count and offset is checked against the file's size. A surplus layer, an own projection or a
foreign scale would change the text silently.
"""

from __future__ import annotations

import json
import math
import os
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from safetensors import SafetensorError, safe_open

from asr_server.checkpoint.files import (
    INDEX,
    MAX_SMALL_BYTES,
    PICKLED,
    SINGLE,
    STORED,
    begins_with,
    opened,
    read_json,
    reading,
)
from asr_server.checkpoint.sizes import WhisperSizes
from asr_server.errors import CheckpointError

ITEM_BYTES: Final = (
    dict.fromkeys(("F64", "I64"), 8)
    | dict.fromkeys(("F32", "I32"), 4)
    | dict.fromkeys(("F16", "BF16", "I16"), 2)
    | dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8"), 1)
)
MAX_DIMENSIONS: Final = 8
MAX_TENSORS: Final = 1 << 14  # large-v3 has 1,259
_MAX_PICKLE_BYTES: Final = 1 << 20  # large-v3's has 200 kB; read, it takes 80 times as much
_MAX_REASON_CHARS: Final = 200
_GIT_LFS: Final = b"version https://git-lfs"
_SHARD: Final = re.compile(r"[\w.-]+\.safetensors", re.ASCII)


class StoredTensor(NamedTuple):
    """A tensor's place in a file: row by row, little-endian, from the byte `offset`."""

    dtype: str  # as safetensors names them: F32, F16, BF16, I8 ...
    shape: tuple[int, ...]
    offset: int
    scale: StoredTensor | None = None  # one for each row, or one in all: the values are numbers / scale

    @property
    def end(self) -> int:
        """Return the first byte after it; its scale may lie anywhere."""
        return self.offset + math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def rows(self, first: int, count: int) -> StoredTensor:
        num_bytes = math.prod(self.shape[1:]) * ITEM_BYTES[self.dtype]
        scale = self.scale.rows(first, count) if self.scale and self.scale.shape else self.scale
        return StoredTensor(self.dtype, (count, *self.shape[1:]), self.offset + first * num_bytes, scale)


StoredTensors = dict[str, StoredTensor]


class WeightsFile(NamedTuple):
    path: Path
    tensors: StoredTensors  # by their Hugging Face names, without the leading `model.`
    names: Mapping[str, str] = MappingProxyType({})  # of openai-whisper, to those names: of a pickled file


def checked(dtype: Any, shape: Iterable[Any], offset: Any, num_bytes: int) -> StoredTensor:
    """Return the tensor. Raises ValueError if it exceeds a file of `num_bytes`."""
    sizes = tuple(shape)
    if type(dtype) is not str or dtype not in ITEM_BYTES:
        raise ValueError(f"numbers of type {str(dtype)[:20]} are not read")
    are_numbers = all(type(number) is int and 0 <= number <= num_bytes for number in (*sizes, offset))
    if len(sizes) > MAX_DIMENSIONS or not are_numbers:
        raise ValueError("a shape or a place that no tensor has")
    tensor = StoredTensor(dtype, sizes, offset)
    if tensor.end > num_bytes:
        raise EOFError
    return tensor


def find_weights(directory: Path) -> list[WeightsFile]:
    """Return the files that hold tensors, with their contents; `PICKLED` has none. Raises CheckpointError."""
    if (directory / STORED).exists():
        return [read_stored(directory)]
    if (directory / INDEX).exists():
        names = _shards(directory / INDEX)
    else:
        names = [name for name in (SINGLE, PICKLED) if (directory / name).exists()][:1]
    if not names:
        raise CheckpointError(f"{directory} has no weights: neither {SINGLE}, {INDEX} nor {PICKLED}")
    return [WeightsFile(directory / name, _check_file(directory / name)) for name in names]


def check_pickled(path: Path) -> None:
    """Raise CheckpointError for a damaged or compressed archive, which torch would unpack into memory."""
    damaged = (zipfile.BadZipFile, NotImplementedError, EOFError, ValueError)
    with opened(path) as file, reading(path, *damaged), zipfile.ZipFile(file) as members:
        for about in members.infolist():
            is_long = about.filename.endswith("/data.pkl") and about.file_size > _MAX_PICKLE_BYTES
            if about.compress_type != zipfile.ZIP_STORED or is_long:
                raise zipfile.BadZipFile("compressed, or with a longer description than any")


def write_stored(directory: Path, file: WeightsFile, **more: str) -> None:
    """Note in `directory` which file holds the weights, and add `more` to the note."""
    about = file.path.stat()
    note = {"path": str(file.path), "num_bytes": about.st_size, "modified_ns": about.st_mtime_ns, **more}
    note |= {"tensors": file.tensors, "names": dict(file.names)}
    (directory / STORED).write_text(json.dumps(note), encoding="utf-8")


def read_stored(directory: Path) -> WeightsFile:
    """Read the note. Raises CheckpointError if the file has changed."""
    note = read_json(directory / STORED)
    try:
        path, noted = Path(note["path"]), (note["num_bytes"], note["modified_ns"])
        with opened(path) as file:
            about = os.fstat(file.fileno())
        if (about.st_size, about.st_mtime_ns) != noted:
            raise CheckpointError(f"{path} has changed since the server was started: start it again")
        size = about.st_size
        tensors = {name: _noted(fields, size) for name, fields in note["tensors"].items()}
        return WeightsFile(path, tensors, dict(note["names"]))
    except (KeyError, TypeError, ValueError, AttributeError, EOFError, RecursionError) as error:
        raise CheckpointError(f"{directory / STORED} is damaged: remove {directory}") from error


def _noted(fields: list[Any], num_bytes: int) -> StoredTensor:
    dtype, shape, offset, scale = fields
    tensor = checked(dtype, shape, offset, num_bytes)
    return tensor._replace(scale=_noted(scale, num_bytes)) if scale else tensor


def _shards(index: Path) -> list[str]:
    places = read_json(index).get("weight_map")
    names = list(places.values()) if isinstance(places, dict) else []
    if not names or not all(type(name) is str and _SHARD.fullmatch(name) for name in names):
        raise CheckpointError(f"weight_map in {index} must name .safetensors files beside it")
    return sorted(set(names))


def _check_file(path: Path) -> StoredTensors:
    if begins_with(path, _GIT_LFS):
        raise CheckpointError(f"{path} is only a pointer to the weights: run `git lfs pull` there")
    if path.suffix != ".safetensors":
        return {}
    with opened(path) as file:
        num_bytes, begin = os.fstat(file.fileno()).st_size, 8 + int.from_bytes(file.read(8), "little")
    if MAX_SMALL_BYTES < begin < num_bytes:
        raise CheckpointError(f"the header of {path} is larger than {MAX_SMALL_BYTES} bytes")
    tensors: StoredTensors = {}
    try:
        with safe_open(path, "np") as content:  # which refuses gaps, overlaps, and shapes of other lengths
            for name in content.offset_keys():  # they lie one behind the other
                about = content.get_slice(name)
                stored = checked(about.get_dtype(), about.get_shape(), begin, num_bytes)
                tensors[name.removeprefix("model.")], begin = stored, stored.end
        return tensors
    except (SafetensorError, ValueError, EOFError, OSError) as error:
        reason = " ".join(str(error).split())[:_MAX_REASON_CHARS]
        raise CheckpointError(
            f"{path} is cut short, or is no safetensors file ({reason}): fetch it again"
        ) from error


# -- What config.json describes ------------------------------------------------------------------------------

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]  # by Hugging Face's names, without the leading `model.`

PROJECTION: Final = "proj_out.weight"
EMBEDDING: Final = "decoder.embed_tokens.weight"
_PARTS: Final = ("encoder", "decoder")
_OF_THE_MODEL: Final = ("encoder.", "decoder.", "proj_out.")  # other names are of other uses


def check_weights(directory: Path, config: Mapping[str, Any]) -> None:
    """Raise CheckpointError if a file is missing or cut short, or the weights are another model's."""
    tensors = {
        name: tensor.shape for file in find_weights(directory) for name, tensor in file.tensors.items()
    }
    if tensors:
        check_layout(tensors, config, directory)
    else:
        WhisperSizes.from_config(config, directory)  # pickled: only loading shows the tensors


def check_layout(shapes: Shapes, config: Mapping[str, Any], directory: Path) -> None:
    """Raise CheckpointError if a tensor is missing, surplus or of another shape."""
    sizes = WhisperSizes.from_config(config, directory)
    is_tied = config.get("tie_word_embeddings", True) is not False
    if problem := next(_contradictions(shapes, sizes, is_tied), None):
        raise CheckpointError(f"the weights in {directory} do not fit its config.json: {problem}")


def _contradictions(shapes: Shapes, sizes: WhisperSizes, is_tied: bool) -> Iterator[str]:
    for part in _PARTS:
        found, stated = count_layers(shapes, part), getattr(sizes, f"{part}_layers")
        if found != stated:
            yield f"they have {found} {part} layers, {part}_layers is {stated}"
    expected = dict(_expected(sizes))
    for name, shape in expected.items():
        if name not in shapes:
            yield f"{name} is missing, not {list(shape)}"
        elif tuple(shapes[name]) != shape:
            yield f"{name} is {list(shapes[name])}, not {list(shape)}"
    for name in shapes:
        if name.startswith(_OF_THE_MODEL) and name not in expected and name != PROJECTION:
            yield f"{name[:200]} is no part of a Whisper model"
    if not is_tied and PROJECTION not in shapes:
        yield f"tie_word_embeddings is false, and {PROJECTION} is missing"


def count_layers(names: Iterable[str], part: str) -> int:
    matches = (re.match(rf"{part}\.layers\.(\d+)\.", name) for name in names)
    return len({match[1] for match in matches if match})


def _expected(sizes: WhisperSizes) -> Iterator[tuple[str, Shape]]:
    width = sizes.width
    yield from _linear("encoder.conv1", width, sizes.num_mels, 3)
    yield from _linear("encoder.conv2", width, width, 3)
    yield "encoder.embed_positions.weight", (sizes.audio_positions, width)
    yield EMBEDDING, (sizes.vocabulary, width)
    yield "decoder.embed_positions.weight", (sizes.text_positions, width)
    for part in _PARTS:
        yield from _norm(f"{part}.layer_norm", width)
        attentions = ("self_attn",) if part == "encoder" else ("self_attn", "encoder_attn")
        for layer in range(getattr(sizes, f"{part}_layers")):
            yield from _layer(f"{part}.layers.{layer}", attentions, width, getattr(sizes, f"{part}_hidden"))


def _layer(prefix: str, attentions: tuple[str, ...], width: int, hidden: int) -> Iterator[tuple[str, Shape]]:
    for attention in attentions:
        for name in ("q_proj", "v_proj", "out_proj"):
            yield from _linear(f"{prefix}.{attention}.{name}", width, width)
        yield f"{prefix}.{attention}.k_proj.weight", (width, width)  # keys have no bias
        yield from _norm(f"{prefix}.{attention}_layer_norm", width)
    yield from _linear(f"{prefix}.fc1", hidden, width)
    yield from _linear(f"{prefix}.fc2", width, hidden)
    yield from _norm(f"{prefix}.final_layer_norm", width)


def _linear(prefix: str, *shape: int) -> Iterator[tuple[str, Shape]]:
    yield f"{prefix}.weight", shape
    yield f"{prefix}.bias", shape[:1]


def _norm(prefix: str, width: int) -> Iterator[tuple[str, Shape]]:
    yield f"{prefix}.weight", (width,)
    yield f"{prefix}.bias", (width,)
