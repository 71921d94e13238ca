"""Reads where the tensors lie in models of CTranslate2, openai-whisper (`.pt`) and whisper.cpp (ggml).

Only headers are read, and neither torch nor numpy is imported. Used by `adopt.py`, in the first process or a
replica.

CTranslate2's `model.bin` (faster-whisper) has the layout of its `specs/model_spec.py`, version 6: numbers and
the lengths of names and contents, little-endian, then pairs of names that mean the same contents. Whisper's
variables are those of `specs/whisper_spec.py` and `specs/transformer_spec.py`.

A `.pt` file is what `torch.save` writes since torch 1.6: a zip archive, not compressed, with a pickle that
describes the tensors and a member for each tensor's numbers. The pickle is read by an unpickler that knows
nothing but dictionaries and the descriptions of tensors: no code that may be inside runs.

A ggml file has the layout of whisper.cpp's `convert-pt-to-ggml.py`: eleven little-endian sizes, mel filters
and vocabulary, which are not needed, then tensors under openai-whisper's names until the file ends.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import re
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NamedTuple

from asr_server.checkpoint.files import ITEM_BYTES, StoredTensor, StoredTensors, reading
from asr_server.checkpoint.foreign import GGML, ForeignModel, hugging_face_name
from asr_server.checkpoint.layout import PROJECTION
from asr_server.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_VERSION: Final = 6
_SPECIFICATION: Final = "WhisperSpec"
_DTYPES: Final = ("F32", "I8", "I16", "I32", "F16", "BF16")  # by their numbers in the file
_MAX_DIMENSIONS: Final = 8

# What a variable's path says is Hugging Face's module; several where CTranslate2 stacks their rows.
_MODULES: Final = {
    "self_attention/linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention/linear_1": ("self_attn.out_proj",),
    "self_attention/layer_norm": ("self_attn_layer_norm",),
    "attention/linear_0": ("encoder_attn.q_proj",),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "attention/linear_2": ("encoder_attn.out_proj",),
    "attention/layer_norm": ("encoder_attn_layer_norm",),
    "ffn/layer_norm": ("final_layer_norm",),
    "ffn/linear_0": ("fc1",),
    "ffn/linear_1": ("fc2",),
    "layer_norm": ("layer_norm",),
    "conv1": ("conv1",),
    "conv2": ("conv2",),
    "embeddings": ("embed_tokens",),
    "position_encodings": ("embed_positions",),
}
_PARAMETERS: Final = {
    "weight": "weight",
    "gamma": "weight",
    "encodings": "weight",
    "bias": "bias",
    "beta": "bias",
}
_PROJECTION: Final = "decoder/projection/weight"
_UNKNOWN: Final = {_PROJECTION: PROJECTION}  # those that Hugging Face's layout has a name for
_PATH: Final = re.compile(r"(encoder|decoder)(?:/layer_(\d+))?/(.+)/(\w+)")


def read_ctranslate2(path: Path) -> ForeignModel:
    """The model in the file `path`, of which only names and sizes are read.

    Raises:
        CheckpointError: the file is cut short, of another version, or no Whisper model.
    """
    with reading(path, struct.error, EOFError, UnicodeDecodeError, IndexError), path.open("rb") as file:
        variables, numbers = _read_variables(file)
    heads = [numbers.get(f"{part}/num_heads", 0) for part in ("encoder", "decoder")]
    return ForeignModel(path, _hugging_face_tensors(variables), *heads)


def _read_variables(file: BinaryIO) -> tuple[StoredTensors, dict[str, int]]:
    """The tensors by CTranslate2's names, and the numbers that are stored among them."""
    if (version := _number(file, "I")) != _VERSION:
        raise CheckpointError(
            f"{file.name} is of version {version} of CTranslate2's layout, or of another program; "
            f"version {_VERSION} is read"
        )
    if (specification := _text(file)) != _SPECIFICATION:
        raise CheckpointError(f"{file.name} holds a {specification} model, not a Whisper one")
    _number(file, "I")  # the specification's own revision: 3; those before it lack nothing that is read here
    num_bytes = Path(file.name).stat().st_size
    tensors: StoredTensors = {}
    numbers: dict[str, int] = {}
    for _ in range(_number(file, "I")):
        name, num_dimensions = _text(file), _number(file, "B")
        if num_dimensions > _MAX_DIMENSIONS:
            raise EOFError
        shape = tuple(_number(file, "I") for _ in range(num_dimensions))
        dtype, length = _DTYPES[_number(file, "B")], _number(file, "I")
        tensor = StoredTensor(dtype, shape, file.tell())
        if tensor.end != tensor.offset + length or tensor.end > num_bytes:
            raise EOFError
        tensors[name] = tensor
        if not shape and dtype.startswith("I"):
            numbers[name] = int.from_bytes(file.read(length), "little", signed=True)
        file.seek(tensor.end)
    for _ in range(_number(file, "I")):
        alias, name = _text(file), _text(file)
        if name in tensors:
            tensors[alias] = tensors[name]
            numbers |= {alias: numbers[name]} if name in numbers else {}
    return tensors, numbers


def _number(file: BinaryIO, kind: str) -> int:
    (number,) = struct.unpack(f"<{kind}", file.read(struct.calcsize(f"<{kind}")))
    return int(number)


def _text(file: BinaryIO) -> str:
    """Reads a text with its length before it and a zero after it."""
    length = _number(file, "H")
    if len(text := file.read(length)) < length:
        raise EOFError
    return text[:-1].decode()


def _hugging_face_tensors(variables: StoredTensors) -> StoredTensors:
    tensors: StoredTensors = {}
    for path, stored in variables.items():
        match = _PATH.fullmatch(path)
        if match is None or match[3] not in _MODULES or match[4] not in _PARAMETERS:
            if _is_unknown(path, stored, variables):
                tensors[_UNKNOWN.get(path, path.replace("/", "."))] = stored
            continue
        part, layer, module, parameter = match.groups()
        prefix = f"{part}.layers.{layer}." if layer else f"{part}."
        scaled = stored._replace(scale=variables.get(f"{path}_scale"))
        names = _MODULES[module]
        num_rows = scaled.shape[0] // len(names)
        for place, name in enumerate(names):
            if name.endswith("k_proj") and parameter == "bias":
                continue  # zeros: Whisper's keys have no bias
            tensors[f"{prefix}{name}.{_PARAMETERS[parameter]}"] = scaled.rows(place * num_rows, num_rows)
    return tensors


def _is_unknown(path: str, stored: StoredTensor, variables: StoredTensors) -> bool:
    """Whether it is neither a number, a scale, nor the embedding under its second name."""
    is_scale = path.removesuffix("_scale") in variables and path.endswith("_scale")
    is_tied = path == _PROJECTION and stored == variables.get("decoder/embeddings/weight")
    return bool(stored.shape) and not is_scale and not is_tied


_TORCH_DTYPES: Final = {
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
    with reading(path, zipfile.BadZipFile, pickle.UnpicklingError, EOFError, struct.error):
        try:
            with path.open("rb") as file, zipfile.ZipFile(file) as archive:
                return _read(path, file, archive)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise CheckpointError(f"{path} is no checkpoint of openai-whisper") from error


def _read(path: Path, file: io.BufferedReader, archive: zipfile.ZipFile) -> ForeignModel:
    content, folder = _unpickle(archive, _Unpickler)
    tensors = {}
    for name, tensor in content["model_state_dict"].items():
        about = archive.getinfo(folder + tensor.storage.member)
        dtype = tensor.storage.dtype
        offset = _data_offset(file, about) + tensor.first * ITEM_BYTES[dtype]
        stored = StoredTensor(dtype, tensor.shape, offset)
        if about.compress_type != zipfile.ZIP_STORED or stored.end > offset + about.file_size:
            raise ValueError("compressed, or larger than its numbers")
        tensors[hugging_face_name(name)] = stored
    sizes = content["dims"]
    names = ("n_audio_head", "n_text_head", "n_audio_layer", "n_text_layer")
    return ForeignModel(path, tensors, *(int(sizes[name]) for name in names))


def read_torch(path: Path, key: str | None = None) -> dict[str, npt.NDArray[np.float32]]:
    """The float32 tensors that `torch.save` wrote as one dictionary of names, or as entry `key` of another.

    Other objects in the file are not made: in their places stands nothing of use.

    Raises:
        CheckpointError: the file is cut short or damaged, or holds something else.
    """
    import numpy as np

    damaged = (zipfile.BadZipFile, pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError)
    with reading(path, *damaged), path.open("rb") as file, zipfile.ZipFile(file) as archive:
        content, folder = _unpickle(archive, _LenientUnpickler)
        tensors = {}
        for name, tensor in (content[key] if key else content).items():
            if tensor.storage.dtype == "F32":
                numbers = np.frombuffer(archive.read(folder + tensor.storage.member), "<f4")
                end = tensor.first + math.prod(tensor.shape)
                tensors[name] = numbers[tensor.first : end].reshape(tensor.shape)
        return tensors


def _unpickle(archive: zipfile.ZipFile, unpickler: type[_Unpickler]) -> tuple[Any, str]:
    """Returns what was saved, and the folder in the archive with the tensors' numbers."""
    (pickled,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
    content = unpickler(io.BytesIO(archive.read(pickled))).load()
    return content, pickled.removesuffix("data.pkl") + "data/"


def _data_offset(file: io.BufferedReader, member: zipfile.ZipInfo) -> int:
    file.seek(member.header_offset)
    lengths = struct.unpack("<2H", file.read(_LOCAL_HEADER_BYTES)[_NAME_LENGTHS])
    return int(member.header_offset) + _LOCAL_HEADER_BYTES + int(sum(lengths))


class _Unpickler(pickle.Unpickler):
    """Takes descriptions of tensors for what they are, and refuses everything else that has a name."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _TORCH_DTYPES:
            return _TORCH_DTYPES[name]
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


class _Ignored(dict[Any, Any]):
    """Stands for an object of a class that is not needed, whatever is done to it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def __setstate__(self, _: Any) -> None:
        pass

    def append(self, _: Any) -> None:
        pass


class _LenientUnpickler(_Unpickler):
    """Puts `_Ignored` in the place of what is unknown, which so runs no code either."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return super().find_class(module, name)
        except ValueError:
            return _Ignored


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


_NUM_SIZES: Final = 11
_AUDIO_HEADS, _AUDIO_LAYERS, _TEXT_HEADS, _TEXT_LAYERS = 3, 4, 7, 8  # places of some of the sizes
_GGML_DTYPES: Final = {0: "F32", 1: "F16"}
_MAX_NAME_BYTES: Final = 256


def read_ggml(path: Path) -> ForeignModel:
    """The model in the file `path`, of which only names and sizes are read.

    Raises:
        CheckpointError: the weights are quantized, or the file is cut short or damaged.
    """
    with reading(path, struct.error, ValueError), path.open("rb") as file:
        file.seek(len(GGML))
        sizes = _integers(file, _NUM_SIZES)
        rows, columns = _integers(file, 2)
        file.seek(4 * rows * columns, os.SEEK_CUR)
        for _ in range(_integers(file, 1)[0]):
            file.seek(_integers(file, 1)[0], os.SEEK_CUR)
        tensors = {hugging_face_name(name): tensor for name, tensor in _tensors(file, path)}
    places = (_AUDIO_HEADS, _TEXT_HEADS, _AUDIO_LAYERS, _TEXT_LAYERS)
    return ForeignModel(path, tensors, *(sizes[place] for place in places))


def _tensors(file: BinaryIO, path: Path) -> Iterator[tuple[str, StoredTensor]]:
    num_bytes = path.stat().st_size
    while file.tell() != num_bytes:
        num_dimensions, name_length, kind = _integers(file, 3)
        if kind not in _GGML_DTYPES:
            raise CheckpointError(
                f"{path} is quantized: use the one with 16-bit weights, or the model by its name, such as "
                "base"
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
