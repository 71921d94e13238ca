"""Holds what the readers `openai.py` and `ggml.py` give: a model in openai-whisper's own terms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor


class OpenAIModel(NamedTuple):
    sizes: Mapping[str, int]  # openai-whisper's ModelDimensions: n_mels, n_audio_ctx ...
    tensors: Mapping[str, Tensor]  # by openai-whisper's names
