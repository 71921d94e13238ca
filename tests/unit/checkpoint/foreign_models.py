"""Writes one random model in the formats of other programs, each by that program's own code or layout."""

import shutil
import struct
import warnings
from pathlib import Path

import torch
from whisper.model import ModelDimensions
from whisper.model import Whisper as Reference

from tests.support.checkpoints import kept

SIZES = ModelDimensions(80, 1500, 128, 2, 2, 51865, 448, 128, 2, 2)


def random_reference(sizes: ModelDimensions = SIZES) -> Reference:
    """openai-whisper's own model with random weights, the same each time."""
    torch.manual_seed(3)
    model = Reference(sizes).eval()
    torch.nn.init.normal_(model.decoder.positional_embedding)  # which is left to what was in memory
    return model


def write_openai(reference: Reference, path: Path, dtype: torch.dtype = torch.float32) -> Path:
    state = {name: tensor.to(dtype) for name, tensor in reference.state_dict().items()}
    torch.save({"dims": reference.dims.__dict__, "model_state_dict": state}, path)
    return path


def write_ggml(reference: Reference, path: Path, kind: int = 0) -> Path:
    """As whisper.cpp's converter lays it out: sizes, filters, vocabulary, tensors with reversed shapes.

    `kind`: 0 is float32; 1 is float16 for matrices; others are marked as quantized, whatever they hold.
    """
    sizes = reference.dims
    numbers: tuple[int, ...] = (
        *(sizes.n_vocab, sizes.n_audio_ctx, sizes.n_audio_state, sizes.n_audio_head, sizes.n_audio_layer),
        *(sizes.n_text_ctx, sizes.n_text_state, sizes.n_text_head, sizes.n_text_layer, sizes.n_mels),
    )
    with path.open("wb") as file:
        file.write(struct.pack("<I11i", 0x67676D6C, *numbers, kind))
        file.write(struct.pack("<2i", 80, 201) + bytes(4 * 80 * 201))
        file.write(struct.pack("<i", 2) + struct.pack("<i", 3) + b"abc" + struct.pack("<i", 1) + b"d")
        for name, tensor in reference.state_dict().items():
            array = tensor.numpy()
            if name in ("encoder.conv1.bias", "encoder.conv2.bias"):
                array = array.reshape(-1, 1)
            own_kind = kind if array.ndim > 1 else 0
            file.write(struct.pack("<3i", array.ndim, len(name), own_kind))
            file.write(struct.pack(f"<{array.ndim}i", *array.shape[::-1]) + name.encode())
            file.write(array.astype("<f2" if own_kind == 1 else "<f4").tobytes())
    return path


def write_ctranslate2(checkpoint: Path, directory: Path, quantization: str = "float32") -> Path:
    """Write a checkpoint of tests/checkpoints.py as CTranslate2's own converter writes it."""
    name = f"{checkpoint.name}-ct2-{quantization}"
    converted = kept(name, lambda target: _convert(checkpoint, target, quantization))
    return shutil.copytree(converted, directory)


def _convert(checkpoint: Path, directory: Path, quantization: str) -> None:
    from ctranslate2.converters import TransformersConverter

    copied = [name for name in ("tokenizer.json", "preprocessor_config.json") if (checkpoint / name).exists()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it and transformers say of themselves
        TransformersConverter(str(checkpoint), copy_files=copied).convert(
            str(directory), quantization=quantization
        )
