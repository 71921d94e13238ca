"""Reads where the tensors lie in openai-whisper's `.pt` files and in whisper.cpp's ggml files made from them.

A `.pt` file is what `torch.save` writes since torch 1.6: a zip archive, not compressed, with a pickle that
describes the tensors and a member for each tensor's numbers. The pickle is read by an unpickler that knows
nothing but dictionaries and the descriptions of tensors: no code that may be inside runs.

A ggml file has the layout of whisper.cpp's `convert-pt-to-ggml.py`: eleven little-endian sizes, mel filters
and vocabulary, which are not needed, then tensors under openai-whisper's names until the file ends.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

from asr_server.checkpoint.foreign import ForeignModel, hugging_face_name
from asr_server.checkpoint.weights import ITEM_BYTES, StoredTensor
from asr_server.errors import CheckpointError

_DTYPES: Final = {
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "DoubleStorage": "F64",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ByteStorage": "U8",
}
_LOCAL_HEADER_BYTES: Final = 30  # of a zip member, before its name and extra field
_NAME_LENGTHS: Final = slice(26, 30)


class _Storage(NamedTuple):
    dtype: str
    member: str


class _Tensor(NamedTuple):
    storage: _Storage
    first: int  # of the storage's numbers
    shape: tuple[int, ...]


def read_openai(path: Path) -> ForeignModel:
    """The model in the file `path`, of which only the descriptions of its tensors are read.

    Raises:
        CheckpointError: the file is cut short or damaged, or another one.
    """
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            return _read(path, file, archive)
    except (zipfile.BadZipFile, pickle.UnpicklingError, EOFError, struct.error) as error:
        raise CheckpointError(f"{path} is cut short or damaged: fetch it again") from error
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{path} is no checkpoint of openai-whisper") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def _read(path: Path, file: io.BufferedReader, archive: zipfile.ZipFile) -> ForeignModel:
    (pickled,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
    folder = pickled.removesuffix("data.pkl")
    content = _Unpickler(io.BytesIO(archive.read(pickled))).load()
    tensors = {}
    for name, tensor in content["model_state_dict"].items():
        about = archive.getinfo(f"{folder}data/{tensor.storage.member}")
        dtype = tensor.storage.dtype
        offset = _data_offset(file, about) + tensor.first * ITEM_BYTES[dtype]
        stored = StoredTensor(dtype, tensor.shape, offset)
        if about.compress_type != zipfile.ZIP_STORED or stored.end > offset + about.file_size:
            raise ValueError("compressed, or larger than its numbers")
        tensors[hugging_face_name(name)] = stored
    sizes = content["dims"]
    return ForeignModel(path, tensors, int(sizes["n_audio_head"]), int(sizes["n_text_head"]))


def _data_offset(file: io.BufferedReader, member: zipfile.ZipInfo) -> int:
    file.seek(member.header_offset)
    lengths = struct.unpack("<2H", file.read(_LOCAL_HEADER_BYTES)[_NAME_LENGTHS])
    return int(member.header_offset) + _LOCAL_HEADER_BYTES + int(sum(lengths))


class _Unpickler(pickle.Unpickler):
    """Takes descriptions of tensors for what they are, and refuses everything else that has a name."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        known = {
            ("torch._utils", "_rebuild_tensor_v2"): _contiguous,
            ("torch._utils", "_rebuild_parameter"): _without_gradient,
            ("collections", "OrderedDict"): OrderedDict,
        }
        if (module, name) not in known:
            raise ValueError(f"the file asks for {module}.{name}")
        return known[module, name]

    def persistent_load(self, reference: Any) -> _Storage:
        _, dtype, member, *_ = reference
        return _Storage(dtype, member)


def _contiguous(
    storage: _Storage, first: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any
) -> _Tensor:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if stride != expected and size != 1:
            raise ValueError("a tensor is not stored row by row")
        expected *= size
    return _Tensor(storage, first, tuple(shape))


def _without_gradient(tensor: _Tensor, *_: Any) -> _Tensor:
    return tensor


MAGIC: Final = b"lmgg"
_NUM_SIZES: Final = 11
_AUDIO_HEADS, _TEXT_HEADS = 3, 7  # places of two of the sizes
_GGML_DTYPES: Final = {0: "F32", 1: "F16"}
_MAX_DIMENSIONS: Final = 4
_MAX_NAME_BYTES: Final = 256


def read_ggml(path: Path) -> ForeignModel:
    """The model in the file `path`, of which only names and sizes are read.

    Raises:
        CheckpointError: the weights are quantized, or the file is cut short or damaged.
    """
    try:
        with path.open("rb") as file:
            file.seek(len(MAGIC))
            sizes = _integers(file, _NUM_SIZES)
            rows, columns = _integers(file, 2)
            file.seek(4 * rows * columns, os.SEEK_CUR)
            for _ in range(_integers(file, 1)[0]):
                file.seek(_integers(file, 1)[0], os.SEEK_CUR)
            tensors = {hugging_face_name(name): tensor for name, tensor in _tensors(file, path)}
    except (struct.error, ValueError) as error:
        raise CheckpointError(f"{path} is cut short or damaged: fetch it again") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    return ForeignModel(path, tensors, sizes[_AUDIO_HEADS], sizes[_TEXT_HEADS])


def _tensors(file: BinaryIO, path: Path) -> Iterator[tuple[str, StoredTensor]]:
    num_bytes = path.stat().st_size
    while file.tell() != num_bytes:
        num_dimensions, name_length, kind = _integers(file, 3)
        if kind not in _GGML_DTYPES:
            raise CheckpointError(
                f"{path} is quantized: use the one with 16-bit weights, or the model by its name, such as "
                "--model base"
            )
        if not (0 < num_dimensions <= _MAX_DIMENSIONS and 0 < name_length <= _MAX_NAME_BYTES):
            raise ValueError("no tensor begins here")
        shape = _integers(file, num_dimensions)[::-1]
        name = file.read(name_length).decode("ascii")
        if name.endswith(".bias") and len(shape) > 1:
            shape = shape[:1]  # those of convolutions are written as [n, 1]
        stored = StoredTensor(_GGML_DTYPES[kind], shape, file.tell())
        if not stored.offset < stored.end <= num_bytes:
            raise ValueError("it ends before its numbers do")
        yield name, stored
        file.seek(stored.end)


def _integers(file: BinaryIO, count: int) -> tuple[int, ...]:
    return struct.unpack(f"<{count}i", file.read(4 * count))
