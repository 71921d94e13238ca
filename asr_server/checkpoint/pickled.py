"""Find the tensors in files of `torch.save`, such as a `.pt` of openai-whisper.

These are uncompressed zip archives with a pickle and a member for each tensor. The unpickler knows only
dictionaries and tensors, so no code runs. It extends Python's: five bytes can make C's reserve gigabytes.
"""

from __future__ import annotations

import io
import math
import os
import pickle  # nosec B403 # read by an Unpickler that makes nothing but tensors
import struct
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

from asr_server.checkpoint.files import opened, reading
from asr_server.checkpoint.foreign import ForeignModel, hugging_face_name
from asr_server.checkpoint.tensors import ITEM_BYTES, MAX_DIMENSIONS, StoredTensors, checked
from asr_server.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

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
# Of the pickle and of the list of members, which have 200 kB for large-v3. Read, they take 80 times as much.
_MAX_DESCRIPTION_BYTES: Final = 1 << 20
_MAX_NAME_LETTERS: Final = 256
_NOT_TORCH: Final = (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError)


class _Storage(NamedTuple):
    dtype: str
    member: str


class _Tensor(NamedTuple):
    storage: _Storage
    first: int  # of the storage's numbers
    shape: tuple[int, ...]


class _Archive(NamedTuple):
    file: _LimitedFile
    members: zipfile.ZipFile
    content: Any  # what was saved
    folder: str  # in which the tensors' numbers are

    def member(self, tensor: _Tensor) -> zipfile.ZipInfo:
        about = self.members.getinfo(self.folder + tensor.storage.member)
        if about.compress_type != zipfile.ZIP_STORED:
            raise ValueError("compressed")
        return about


class _LimitedFile(io.FileIO):
    """Refuse reads of more than `max_bytes` at once, such as `zipfile`'s of its list."""

    max_bytes = _MAX_DESCRIPTION_BYTES

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > self.max_bytes:
            raise EOFError
        return super().read(size) or b""


def read_openai(path: Path) -> ForeignModel:
    """Read the descriptions of the tensors in `path`.

    Raises:
        CheckpointError: it is cut short, damaged or of another kind.
    """
    with _archive(path, "checkpoint of openai-whisper") as archive:
        tensors = {
            hugging_face_name(name): tensor
            for name, tensor in _stored(archive, archive.content["model_state_dict"]).items()
        }
        names = ("n_audio_head", "n_text_head", "n_audio_layer", "n_text_layer")
        sizes = (archive.content["dims"][name] for name in names)
        return ForeignModel(path, tensors, *map(int, sizes))


def check_pickled(path: Path) -> None:
    """Raises CheckpointError for a damaged or compressed archive: torch then reads no more than the file."""
    with (
        opened(path) as opened_file,
        _damaged_is_refused(path),
        zipfile.ZipFile(_LimitedFile(opened_file.fileno(), closefd=False)) as members,
    ):
        _check_members(members)


def read_torch(path: Path, key: str | None = None) -> dict[str, npt.NDArray[np.float32]]:
    """Read the float32 tensors of a saved dictionary, or of its entry `key`. Ignore other objects.

    Raises:
        CheckpointError: it is cut short, damaged or of another kind.
    """
    import numpy as np

    with _archive(path, "file of torch", _LenientUnpickler) as archive:
        tensors = {}
        for name, tensor in (archive.content[key] if key else archive.content).items():
            if tensor.storage.dtype == "F32":
                numbers = np.frombuffer(archive.members.read(archive.member(tensor)), "<f4")
                end = tensor.first + math.prod(tensor.shape)
                tensors[name] = numbers[tensor.first : end].reshape(tensor.shape)
        return tensors


@contextmanager
def _archive(path: Path, kind: str, unpickler: type[_Unpickler] | None = None) -> Iterator[_Archive]:
    """Open an archive and read its pickle. Raises CheckpointError, also for errors within the `with`
    block.
    """
    with opened(path) as opened_file, _damaged_is_refused(path):
        try:
            with _LimitedFile(opened_file.fileno(), closefd=False) as file, zipfile.ZipFile(file) as members:
                file.max_bytes = sys.maxsize
                yield _Archive(file, members, *_unpickle(members, unpickler or _Unpickler))
        except _NOT_TORCH as error:
            raise CheckpointError(f"{path} is no {kind}") from error


@contextmanager
def _damaged_is_refused(path: Path) -> Iterator[None]:
    damaged = (zipfile.BadZipFile, pickle.UnpicklingError, EOFError, struct.error, NotImplementedError)
    with reading(path, *damaged, RuntimeError, OverflowError):
        yield


def _check_members(members: zipfile.ZipFile) -> None:
    for about in members.infolist():
        if about.compress_type != zipfile.ZIP_STORED:
            raise zipfile.BadZipFile("compressed")
        if about.filename.endswith("/data.pkl") and about.file_size > _MAX_DESCRIPTION_BYTES:
            raise zipfile.BadZipFile("a description that is longer than any")


def _unpickle(members: zipfile.ZipFile, unpickler: type[_Unpickler]) -> tuple[Any, str]:
    _check_members(members)
    (pickled,) = (name for name in members.namelist() if name.endswith("/data.pkl"))
    content = unpickler(io.BytesIO(members.read(pickled))).load()
    return content, pickled.removesuffix("data.pkl") + "data/"


def _stored(archive: _Archive, described: dict[str, _Tensor]) -> StoredTensors:
    num_bytes = os.fstat(archive.file.fileno()).st_size
    tensors = {}
    for name, tensor in described.items():
        about, dtype = archive.member(tensor), tensor.storage.dtype
        offset = _data_offset(archive.file, about) + tensor.first * ITEM_BYTES[dtype]
        stored = checked(dtype, tensor.shape, offset, num_bytes)
        if stored.end > offset + about.file_size or len(name) > _MAX_NAME_LETTERS:
            raise ValueError("larger than its numbers")
        tensors[name] = stored
    return tensors


def _data_offset(file: io.FileIO, member: zipfile.ZipInfo) -> int:
    file.seek(member.header_offset)
    lengths = struct.unpack("<2H", file.read(_LOCAL_HEADER_BYTES)[_NAME_LENGTHS])
    return int(member.header_offset) + _LOCAL_HEADER_BYTES + int(sum(lengths))


class _Unpickler(pickle._Unpickler):
    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)
    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _TORCH_DTYPES:
            return _TORCH_DTYPES[name]
        known = {
            ("torch._utils", "_rebuild_tensor_v2"): _contiguous,
            ("torch._utils", "_rebuild_parameter"): _without_gradient,
            ("collections", "OrderedDict"): _empty,
        }
        if (module, name) not in known:
            raise ValueError(f"the file asks for {module}.{name}")
        return known[module, name]

    def persistent_load(self, reference: Any) -> _Storage:
        _, dtype, member, *_ = reference
        if dtype not in _TORCH_DTYPES.values() or type(member) is not str:
            raise ValueError("a storage that is none")
        return _Storage(dtype, member)

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set({key: value} if type(key) in (str, int) else None)

    def load_setitems(self) -> None:
        items = self.pop_mark()
        keys = items[::2]
        plain = all(type(key) in (str, int) for key in keys)  # to hash tuples in tuples may take for ever
        self._set(dict(zip(keys, items[1::2], strict=True)) if plain else None)

    def _set(self, items: dict[Any, Any] | None) -> None:
        if items is None or not isinstance(self.stack[-1], dict):
            raise ValueError("keys that are no names")
        self.stack[-1].update(items)

    def load_build(self) -> None:
        self.stack.pop()

    def refuse(self) -> None:
        raise ValueError("a pickle with more than dictionaries and tensors")

    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems
    dispatch[pickle.BUILD[0]] = load_build
    # Sets hash what is in them; the others make objects, or take memory by a length alone.
    for _code in (pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET, pickle.BYTEARRAY8, pickle.DICT):
        dispatch[_code[0]] = refuse
    for _code in (pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.INST, pickle.OBJ, pickle.NEWOBJ_EX):
        dispatch[_code[0]] = refuse


class _Ignored(dict[Any, Any]):
    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def append(self, _: Any) -> None:
        pass


class _LenientUnpickler(_Unpickler):
    """Replace unknown objects by `_Ignored`; no code runs."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return super().find_class(module, name)
        except ValueError:
            return _Ignored


def _empty(*_: Any) -> dict[Any, Any]:
    return {}


def _contiguous(
    storage: _Storage, first: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any
) -> _Tensor:
    numbers = (first, *shape, *strides)
    if len(shape) > MAX_DIMENSIONS or not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError("a shape that no tensor has")
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if stride != expected and size != 1:
            raise ValueError("a tensor is not stored row by row")
        expected *= size
    return _Tensor(storage, first, tuple(shape))


def _without_gradient(tensor: _Tensor, *_: Any) -> _Tensor:
    return tensor
