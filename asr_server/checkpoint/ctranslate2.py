"""Reads the layout of CTranslate2 models (faster-whisper): which tensors lie where in model.bin.

The layout is that of ctranslate2's `specs/model_spec.py`, version 6: numbers and the lengths of names and
contents, little-endian, then pairs of names that mean the same contents. Whisper's variables are those of
`specs/whisper_spec.py` and `specs/transformer_spec.py`.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import BinaryIO, Final

from asr_server.checkpoint.foreign import ForeignModel
from asr_server.checkpoint.weights import StoredTensor, StoredTensors
from asr_server.errors import CheckpointError

WEIGHTS: Final = "model.bin"
_VERSION: Final = 6
_SPECIFICATION: Final = "WhisperSpec"
_DTYPES: Final = ("F32", "I8", "I16", "I32", "F16", "BF16")  # by their numbers in the file
_MOST_DIMENSIONS: Final = 8

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
_PATH: Final = re.compile(r"(encoder|decoder)(?:/layer_(\d+))?/(.+)/(\w+)")


def read_ctranslate2(path: Path) -> ForeignModel:
    """The model in the file `path`, of which only names and sizes are read.

    Raises:
        CheckpointError: the file is cut short, of another version, or no Whisper model.
    """
    try:
        with path.open("rb") as file:
            variables, numbers = _read_variables(file)
    except (struct.error, EOFError, UnicodeDecodeError, IndexError) as error:
        raise CheckpointError(f"{path} is cut short or damaged: fetch it again") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
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
        if num_dimensions > _MOST_DIMENSIONS:
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
    """A text with its length before it and a zero behind it."""
    length = _number(file, "H")
    if len(text := file.read(length)) < length:
        raise EOFError
    return text[:-1].decode()


def _hugging_face_tensors(variables: StoredTensors) -> StoredTensors:
    tensors: StoredTensors = {}
    for path, stored in variables.items():
        match = _PATH.fullmatch(path)
        if match is None or match[3] not in _MODULES or match[4] not in _PARAMETERS:
            continue  # a number, a scale, or the projection, which is the embedding
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
