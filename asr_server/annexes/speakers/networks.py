"""Load the networks that tell speakers apart, written by `tools/make_speaker_networks.py`."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from asr_server.audio.voice import load_onnx

if TYPE_CHECKING:
    from onnxruntime import InferenceSession  # type: ignore[import-untyped]

FOLDER: Final = Path(__file__).parents[2] / "models" / "speakers"
FILTERS, CONVOLUTIONS, LSTM = "filters.onnx", "convolutions.onnx", "lstm.onnx"  # of the segmentation
EMBEDDING: Final = "embedding.onnx"


@cache
def load(name: str) -> InferenceSession:
    return load_onnx(FOLDER / name)
