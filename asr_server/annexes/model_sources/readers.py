"""Find the tensors in models of CTranslate2 and whisper.cpp (ggml), by their headers.

CTranslate2's `model.bin` follows its `specs/model_spec.py`, version 6: counts and lengths, little-endian,
then pairs of names of the same contents. Variables follow `specs/whisper_spec.py` and
`transformer_spec.py`.

ggml follows whisper.cpp's `convert-pt-to-ggml.py`: eleven sizes, mel filters and vocabulary, then tensors
under openai-whisper's names.
"""

import json
import os
import re
import struct
import subprocess  # nosec B404 # arguments are lists, and no shell is started
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

from asr_server.annexes.model_sources.foreign import GGML, ForeignModel, hugging_face_name
from asr_server.checkpoint.files import opened, reading
from asr_server.checkpoint.tensors import (
    MAX_DIMENSIONS,
    MAX_TENSORS,
    PROJECTION,
    StoredTensor,
    StoredTensors,
    check_pickled,
    checked,
)
from asr_server.errors import CheckpointError

_VERSION: Final = 6
_SPECIFICATION: Final = "WhisperSpec"
_DTYPES: Final = ("F32", "I8", "I16", "I32", "F16", "BF16")  # by their numbers in the file

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
    """Read names and sizes. Raises CheckpointError: cut short, of another version, or no Whisper model."""
    with opened(path) as file, reading(path, struct.error, EOFError, ValueError, IndexError):
        variables, numbers = _read_variables(file)
        tensors = _hugging_face_tensors(variables)
    heads = [numbers.get(f"{part}/num_heads", 0) for part in ("encoder", "decoder")]
    return ForeignModel(path, tensors, {}, *heads)


def _read_variables(file: BinaryIO) -> tuple[StoredTensors, dict[str, int]]:
    if (version := _number(file, "I")) != _VERSION:
        raise CheckpointError(
            f"{file.name} is of version {version} of CTranslate2's layout, or of another program; "
            f"version {_VERSION} is read"
        )
    if (specification := _text(file)) != _SPECIFICATION:
        raise CheckpointError(f"{file.name} holds a {specification} model, not a Whisper one")
    _number(file, "I")  # the specification's own revision: 3; those before it lack nothing that is read here
    num_bytes = _size(file)
    tensors: StoredTensors = {}
    numbers: dict[str, int] = {}
    for _ in range(_count(file)):
        name, num_dimensions = _text(file), _number(file, "B")
        if num_dimensions > MAX_DIMENSIONS:
            raise EOFError
        shape = _numbers(file, f"{num_dimensions}I")
        dtype, length = _DTYPES[_number(file, "B")], _number(file, "I")
        tensor = checked(dtype, shape, file.tell(), num_bytes)
        if tensor.end != tensor.offset + length:
            raise EOFError
        tensors[name] = tensor
        if not shape and dtype.startswith("I"):
            numbers[name] = int.from_bytes(file.read(length), "little", signed=True)
        file.seek(tensor.end)
    for _ in range(_count(file)):
        alias, name = _text(file), _text(file)
        if name in tensors:
            tensors[alias] = tensors[name]
            numbers |= {alias: numbers[name]} if name in numbers else {}
    return tensors, numbers


def _numbers(file: BinaryIO, layout: str) -> tuple[int, ...]:
    return struct.unpack(f"<{layout}", file.read(struct.calcsize(f"<{layout}")))


def _number(file: BinaryIO, kind: str) -> int:
    return _numbers(file, kind)[0]


def _count(file: BinaryIO) -> int:
    if (count := _number(file, "I")) > MAX_TENSORS:
        raise EOFError
    return count


def _text(file: BinaryIO) -> str:
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
        scale = variables.get(f"{path}_scale")
        if scale is not None and scale.shape not in ((), stored.shape[:1]):
            raise ValueError("a scale that fits no row")
        scaled, names = stored._replace(scale=scale), _MODULES[module]
        num_rows = scaled.shape[0] // len(names)
        for place, name in enumerate(names):
            if name.endswith("k_proj") and parameter == "bias":
                continue  # zeros: Whisper's keys have no bias
            tensors[f"{prefix}{name}.{_PARAMETERS[parameter]}"] = scaled.rows(place * num_rows, num_rows)
    return tensors


def _is_unknown(path: str, stored: StoredTensor, variables: StoredTensors) -> bool:
    is_scale = path.removesuffix("_scale") in variables and path.endswith("_scale")
    is_tied = path == _PROJECTION and stored == variables.get("decoder/embeddings/weight")
    return bool(stored.shape) and not is_scale and not is_tied


_NUM_SIZES: Final = 11
_AUDIO_HEADS, _AUDIO_LAYERS, _TEXT_HEADS, _TEXT_LAYERS = 3, 4, 7, 8  # places of some of the sizes
_GGML_DTYPES: Final = {0: "F32", 1: "F16"}
_MAX_NAME_BYTES: Final = 256
_MAX_WORDS: Final = 1 << 17


def read_ggml(path: Path) -> ForeignModel:
    """Read names and sizes. Raises CheckpointError: it is quantized, cut short or damaged."""
    with opened(path) as file, reading(path, struct.error, ValueError, EOFError):
        file.seek(len(GGML))
        sizes = _numbers(file, f"{_NUM_SIZES}i")
        rows, columns = _numbers(file, "2i")
        _skip(file, 4 * rows * columns)
        if (num_words := _number(file, "i")) > _MAX_WORDS:
            raise ValueError("more words than a vocabulary has")
        for _ in range(num_words):
            _skip(file, _number(file, "i"))
        tensors = {hugging_face_name(name): tensor for name, tensor in _tensors(file, path)}
    places = (_AUDIO_HEADS, _TEXT_HEADS, _AUDIO_LAYERS, _TEXT_LAYERS)
    return ForeignModel(path, tensors, {}, *(sizes[place] for place in places))


def _skip(file: BinaryIO, num_bytes: int) -> None:
    if not 0 <= num_bytes <= _size(file) - file.tell():
        raise EOFError
    file.seek(num_bytes, os.SEEK_CUR)


def _size(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size


def _tensors(file: BinaryIO, path: Path) -> Iterator[tuple[str, StoredTensor]]:
    num_bytes = _size(file)
    for _ in range(MAX_TENSORS):
        if file.tell() == num_bytes:
            return
        num_dimensions, name_length, kind = _numbers(file, "3i")
        if kind not in _GGML_DTYPES:
            raise CheckpointError(
                f"{path} is quantized: use the one with 16-bit weights, or the model by its name, such as "
                "base"
            )
        if not (0 < num_dimensions <= MAX_DIMENSIONS and 0 < name_length <= _MAX_NAME_BYTES):
            raise ValueError("no tensor begins here")
        shape = _numbers(file, f"{num_dimensions}i")[::-1]
        name = file.read(name_length).decode("ascii")
        if name.endswith(".bias") and len(shape) > 1:
            shape = shape[:1]  # those of convolutions are written as [n, 1]
        stored = checked(_GGML_DTYPES[kind], shape, file.tell(), num_bytes)
        yield name, stored
        file.seek(stored.end)
    raise ValueError("more tensors than a model has")


READ_LIMIT_S: Final = 120.0  # torch's import takes a second or two, reading the descriptions less


def read_openai(path: Path) -> ForeignModel:
    """Read sizes and the tensors' shapes; their numbers stay in the file until the model is loaded.

    Raises CheckpointError: it is cut short, damaged or of another kind.
    """
    check_pickled(path)
    command = [sys.executable, "-m", __spec__.name, str(path)]
    try:
        process = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=READ_LIMIT_S,
            stdin=subprocess.DEVNULL,
            check=True,
        )
        about = json.loads(process.stdout)
        dims, shapes = about["dims"], about["shapes"]
        sizes = [int(dims[name]) for name in ("n_audio_head", "n_text_head", "n_audio_layer", "n_text_layer")]
        names = {name: hugging_face_name(name) for name in shapes}
        tensors = {names[name]: StoredTensor("F32", tuple(shape), 0) for name, shape in shapes.items()}
        return ForeignModel(path, tensors, names, *sizes)
    except (subprocess.SubprocessError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is no checkpoint of openai-whisper, or it is damaged") from error


def main(path: str) -> None:
    import torch

    content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    shapes = {name: list(tensor.shape) for name, tensor in content["model_state_dict"].items()}
    print(json.dumps({"dims": dict(content["dims"]), "shapes": shapes}))


if __name__ == "__main__":
    main(*sys.argv[1:])
