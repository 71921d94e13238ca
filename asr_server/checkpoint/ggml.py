"""Reads the layout of whisper.cpp's ggml files whose weights are floats: which tensors lie where.

The layout is that of its `convert-pt-to-ggml.py`. All numbers are little-endian: eleven sizes, mel filters
and vocabulary, which are not needed; then tensors under openai-whisper's names until the file ends.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

from asr_server.checkpoint.error import CheckpointError
from asr_server.checkpoint.foreign_model import ForeignModel, hugging_face_name
from asr_server.checkpoint.weights import StoredTensor

MAGIC: Final = b"lmgg"
_NUM_SIZES: Final = 11
_AUDIO_HEADS, _TEXT_HEADS = 3, 7  # places of two of the sizes
_DTYPES: Final = {0: "F32", 1: "F16"}
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
        if kind not in _DTYPES:
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
        stored = StoredTensor(_DTYPES[kind], shape, file.tell())
        if not stored.offset < stored.end <= num_bytes:
            raise ValueError("it ends before its numbers do")
        yield name, stored
        file.seek(stored.end)


def _integers(file: BinaryIO, count: int) -> tuple[int, ...]:
    return struct.unpack(f"<{count}i", file.read(4 * count))
