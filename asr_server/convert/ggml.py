"""Reads the ggml files of whisper.cpp whose weights are floats, as its `convert-pt-to-ggml.py` writes them.

All numbers are little-endian. Eleven sizes, mel filters and vocabulary, which are not needed; then tensors
under openai-whisper's names until the file ends.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import torch
from torch import Tensor

from asr_server.checkpoint import CheckpointError
from asr_server.convert.model import OpenAIModel

MAGIC: Final = b"lmgg"
_SIZES = (
    *("n_vocab", "n_audio_ctx", "n_audio_state", "n_audio_head", "n_audio_layer"),
    *("n_text_ctx", "n_text_state", "n_text_head", "n_text_layer", "n_mels"),
)
_DTYPES: Final[dict[int, Any]] = {0: np.dtype("<f4"), 1: np.dtype("<f2")}
MAX_DIMENSIONS: Final = 4
MAX_NAME_BYTES: Final = 256


def read_ggml(path: Path) -> OpenAIModel:
    """Raises CheckpointError where the weights are quantized or the file is damaged."""
    with path.open("rb") as file:
        file.seek(len(MAGIC))
        sizes = dict(zip(_SIZES, _integers(file, len(_SIZES)), strict=True))
        _integers(file, 1)  # which kind of number most tensors have; each tells it itself
        rows, columns = _integers(file, 2)
        file.seek(4 * rows * columns, os.SEEK_CUR)
        for _ in range(_integers(file, 1)[0]):
            file.seek(_integers(file, 1)[0], os.SEEK_CUR)
        return OpenAIModel(sizes, dict(_tensors(file, path)))


def _tensors(file: BinaryIO, path: Path) -> Iterator[tuple[str, Tensor]]:
    while head := file.read(12):
        num_dimensions, name_length, kind = struct.unpack("<3i", head.ljust(12, b"\0"))
        if kind not in _DTYPES:
            raise CheckpointError(f"{path} is quantized: convert the one with 16-bit weights")
        if not (0 < num_dimensions <= MAX_DIMENSIONS and 0 < name_length <= MAX_NAME_BYTES):
            raise _damaged(path)
        shape = _integers(file, num_dimensions)[::-1]
        name = file.read(name_length).decode("ascii", "replace")
        array: Any = np.fromfile(file, _DTYPES[kind], math.prod(shape))
        if len(array) < math.prod(shape):
            raise _damaged(path)
        is_bias = name.endswith(".bias")  # those of convolutions are written as [n, 1]
        yield name, torch.from_numpy(array.reshape(-1) if is_bias else array.reshape(shape))


def _integers(file: BinaryIO, count: int) -> tuple[int, ...]:
    content = file.read(4 * count)
    if len(content) < 4 * count:
        raise CheckpointError(f"{file.name} is cut short")
    return struct.unpack(f"<{count}i", content)


def _damaged(path: Path) -> CheckpointError:
    return CheckpointError(f"{path} is cut short or damaged")
