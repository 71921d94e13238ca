"""Loads a Whisper model with the weights of a Hugging Face checkpoint. Called by `Engine.load`."""

from __future__ import annotations

from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from asr_server.checkpoint import INDEX, PICKLED, SINGLE, CheckpointError, read_json
from asr_server.model.alignment_heads import read_alignment_heads
from asr_server.model.linear import Linear
from asr_server.model.linear_fp8 import Float8Linear
from asr_server.model.shard import WHOLE, Shard
from asr_server.model.sizes import WhisperSizes
from asr_server.model.whisper import Whisper


def load_whisper(
    directory: Path,
    device: str | torch.device,
    dtype: torch.dtype,
    shard: Shard = WHOLE,
    fp8_encoder: bool = False,
) -> Whisper:
    """The model of a Hugging Face Whisper directory, or a rank's part of it, ready for inference.

    Args:
        fp8_encoder: the encoder's layers multiply in 8-bit floats.
    Raises:
        CheckpointError: weights are missing or have other shapes than config.json says.
        ValueError: config.json describes no Whisper model, or its alignment heads are not there, or
            it cannot be split among that many ranks.
    """
    try:
        sizes = WhisperSizes.from_directory(directory)
    except KeyError as error:
        raise CheckpointError(f"{directory}/config.json has no {error}") from error
    encoder_linear = Float8Linear if fp8_encoder else Linear
    model = Whisper(sizes, torch.device(device), dtype, shard, encoder_linear)
    try:
        model.load_hugging_face(_read_weights(directory))
    except (EOFError, SafetensorError, UnpicklingError) as error:  # torch's message gives dangerous advice
        raise CheckpointError(f"the weights in {directory} are damaged: fetch them again") from error
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise  # no fault of the weights, and the device may well do it at the next try
    except (KeyError, RuntimeError) as error:
        raise CheckpointError(f"the weights in {directory} do not fit its config.json: {error}") from error
    model.alignment_heads = read_alignment_heads(directory, sizes)
    return model.eval().requires_grad_(False)


def _read_weights(directory: Path) -> dict[str, Tensor]:
    """Every tensor by its Hugging Face name, without the leading `model.`."""
    if (directory / INDEX).exists():
        files = sorted(set(read_json(directory / INDEX)["weight_map"].values()))
        tensors = {name: tensor for file in files for name, tensor in load_file(directory / file).items()}
    elif (directory / SINGLE).exists():
        tensors = load_file(directory / SINGLE)
    elif (directory / PICKLED).exists():
        tensors = torch.load(directory / PICKLED, map_location="cpu", weights_only=True)
    else:
        raise CheckpointError(f"{directory} has neither {SINGLE}, {INDEX} nor {PICKLED}")
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
