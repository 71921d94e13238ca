"""Read a checkpoint's weights from mapped files, each tensor on demand. Fetches nothing."""

import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from pickle import UnpicklingError  # nosec B403 # an error alone
from typing import Final

import torch
from torch import Tensor

from asr_server.checkpoint.files import begins_with, opened, read_json
from asr_server.checkpoint.sizes import WhisperSizes, read_alignment_heads
from asr_server.checkpoint.tensors import (
    EMBEDDING,
    PROJECTION,
    StoredTensor,
    WeightsFile,
    check_layout,
    check_pickled,
    find_weights,
)
from asr_server.errors import CheckpointError
from asr_server.model.layers import HAS_AMX, WHOLE, Shard
from asr_server.model.products import Int8EncoderLinear, Int8Linear, Linear
from asr_server.model.whisper import Whisper

_DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}
_FLOAT8: Final = (torch.float8_e4m3fn, torch.float8_e5m2)


def load_whisper(
    directory: Path, device: str | torch.device, dtype: torch.dtype, shard: Shard = WHOLE, int8: bool = False
) -> Whisper:
    """Load a resolved Whisper directory, or a rank's part, ready for inference.

    Args:
        int8: on the CPU, multiply in 8-bit integers where faster: the output projection, the encoder without
            AMX, and beside float32 the decoder.
    Raises:
        CheckpointError: weights are missing or do not match config.json, or the activation is unknown.
        ValueError: an alignment head is unknown.
    """
    sizes = WhisperSizes.from_directory(directory)
    weights = _checked_weights(directory)
    decoder_linear = Int8Linear if int8 and dtype == torch.float32 else Linear
    encoder_linear = Int8EncoderLinear if int8 and not (HAS_AMX and dtype == torch.bfloat16) else Linear
    model = Whisper(sizes, torch.device(device), dtype, shard, encoder_linear, decoder_linear, int8)
    model.load_hugging_face(weights)
    model.alignment_heads = read_alignment_heads(directory, sizes)
    return model.eval().requires_grad_(False)


def _checked_weights(directory: Path) -> Mapping[str, Tensor]:
    try:
        weights = read_weights(directory)
    except (EOFError, UnpicklingError, RuntimeError) as error:  # torch's message gives dangerous advice
        raise CheckpointError(f"the weights in {directory} are damaged: fetch them again") from error
    shapes = (
        weights.shapes()
        if isinstance(weights, StoredWeights)
        else {name: each.shape for name, each in weights.items()}
    )
    check_layout(shapes, read_json(directory / "config.json"), directory)
    projection = weights.get(PROJECTION)
    if projection is not None and not torch.equal(projection, weights[EMBEDDING].to(projection.dtype)):
        raise CheckpointError(
            f"the weights in {directory} have an output projection of their own ({PROJECTION}): only models "
            "that project by their embedding can be served"
        )
    return weights


def read_weights(directory: Path) -> Mapping[str, Tensor]:
    """Return each tensor by its Hugging Face name, without `model.`.

    Raises CheckpointError, and for a damaged pickled file EOFError, UnpicklingError or RuntimeError.
    """
    return open_weights(find_weights(directory))


def open_weights(files: list[WeightsFile]) -> Mapping[str, Tensor]:
    return StoredWeights(files) if any(file.tensors for file in files) else _load_pickled(files[0])


def _load_pickled(file: WeightsFile) -> dict[str, Tensor]:
    if is_zip := begins_with(file.path, b"PK"):
        check_pickled(file.path)
    # torch cannot map files of its versions before 1.6 into memory
    content = torch.load(file.path, map_location="cpu", weights_only=True, mmap=is_zip)
    if file.names:  # of openai-whisper
        return {name: content["model_state_dict"][theirs] for theirs, name in file.names.items()}
    return {name.removeprefix("model."): tensor for name, tensor in content.items()}


class StoredWeights(Mapping[str, Tensor]):
    """Tensors in mapped files, read on demand, so nothing is in memory twice."""

    def __init__(self, files: list[WeightsFile]) -> None:
        self._stored = {name: tensor for file in files for name, tensor in file.tensors.items()}
        self._bytes: dict[str, mmap.mmap] = {}
        for path, tensors, _ in files:
            with opened(path) as file:  # a private mapping, because torch warns of memory it may not write
                content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            self._bytes |= dict.fromkeys(tensors, content)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: stored.shape for name, stored in self._stored.items()}

    def __getitem__(self, name: str) -> Tensor:
        stored, content = self._stored[name], self._bytes[name]
        tensor = _read(content, stored)
        if stored.scale is None:
            return tensor
        scale = _read(content, stored.scale).float()
        return tensor.float() / scale.reshape(-1, *(1 for _ in stored.shape[1:]))

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def _read(content: mmap.mmap, stored: StoredTensor) -> Tensor:
    dtype = _DTYPES[stored.dtype]
    raw = torch.frombuffer(content, dtype=torch.uint8, offset=stored.offset, count=stored.end - stored.offset)
    aligned = raw if stored.offset % dtype.itemsize == 0 else raw.clone()
    tensor = aligned.view(dtype).reshape(stored.shape)
    return tensor.bfloat16() if dtype in _FLOAT8 else tensor  # which has all their numbers
