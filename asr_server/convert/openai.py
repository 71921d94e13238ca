"""Reads the `.pt` files of openai-whisper. Used by `convert`; runs no code that may be in the file."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch

from asr_server.checkpoint import CheckpointError
from asr_server.convert.model import OpenAIModel


def read_openai(path: Path) -> OpenAIModel:
    """Raises CheckpointError where the file is another one. Runs no code that may be in it."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        return OpenAIModel(content["dims"], content["model_state_dict"])
    except (RuntimeError, pickle.UnpicklingError, EOFError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is no checkpoint of openai-whisper, nor a ggml model of whisper.cpp"
        ) from error
