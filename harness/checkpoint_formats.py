"""Writes one checkpoint, in Hugging Face's layout, in the formats that other systems read: the same tensors.

What is written is kept in `.cache/formats` and made anew when the checkpoint's weights change.
"""

import base64
import fcntl
import hashlib
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

FOLDER = Path(".cache/formats")
_MAGIC = 0x67676D6C
_HALF = 1


def as_ctranslate2(directory: Path) -> Path:
    """The directory for faster-whisper: 16-bit weights, as the published ones are."""
    from ctranslate2.converters import TransformersConverter

    def write(path: Path) -> None:
        files = ["tokenizer.json", "preprocessor_config.json"]
        TransformersConverter(str(directory), copy_files=files).convert(str(path), quantization="float16")

    return _kept(directory, "ct2", write)


def as_ggml(directory: Path) -> Path:
    """The file for whisper.cpp, as its `convert-pt-to-ggml.py` writes it: matrices in 16 bits."""
    return _kept(directory, "ggml.bin", lambda path: _write_ggml(directory, path))


def _write_ggml(directory: Path, path: Path) -> None:
    import whisper

    from harness.openai_whisper import load_openai_whisper

    model = load_openai_whisper(directory)
    assets = Path(whisper.__file__).with_name("assets")
    dims = model.dims
    vocabulary = assets / ("multilingual.tiktoken" if model.is_multilingual else "gpt2.tiktoken")
    filters = np.load(assets / "mel_filters.npz")[f"mel_{dims.n_mels}"].astype("<f4")
    with path.open("wb") as file:
        _integers(
            file,
            _MAGIC,
            *(dims.n_vocab, dims.n_audio_ctx, dims.n_audio_state, dims.n_audio_head, dims.n_audio_layer),
            *(dims.n_text_ctx, dims.n_text_state, dims.n_text_head, dims.n_text_layer, dims.n_mels),
            _HALF,
            *filters.shape,
        )
        file.write(filters.tobytes())
        tokens = [base64.b64decode(line.split()[0]) for line in vocabulary.read_bytes().splitlines() if line]
        _integers(file, len(tokens))
        for token in tokens:
            _integers(file, len(token))
            file.write(token)
        for name, tensor in model.state_dict().items():
            _write_tensor(file, name, tensor.numpy())


def _write_tensor(file: BinaryIO, name: str, array: Any) -> None:
    if name in ("encoder.conv1.bias", "encoder.conv2.bias"):
        array = array[:, None]
    is_half = array.ndim >= 2 and "bias" not in name and "positional_embedding" not in name
    _integers(file, array.ndim, len(name), int(is_half), *reversed(array.shape))
    file.write(name.encode())
    file.write(np.ascontiguousarray(array, "<f2" if is_half else "<f4").tobytes())


def _integers(file: BinaryIO, *numbers: int) -> None:
    file.write(struct.pack(f"<{len(numbers)}i", *numbers))


def _kept(directory: Path, suffix: str, write: Callable[[Path], None]) -> Path:
    weights = (directory / "model.safetensors").stat()
    version = hashlib.sha256(f"{directory.resolve()} {weights.st_size} {weights.st_mtime_ns}".encode())
    path = FOLDER / f"{directory.name}-{version.hexdigest()[:8]}-{suffix}"
    FOLDER.mkdir(parents=True, exist_ok=True)
    with FOLDER.joinpath("lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several systems of a benchmark ask at once
        if not path.exists():
            part = path.with_name(f"{path.name}.part")
            write(part)
            part.replace(path)
    return path
