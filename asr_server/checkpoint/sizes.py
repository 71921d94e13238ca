"""The sizes that a checkpoint's JSON states: of its audio window and its layers, and its alignment heads."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Self

from asr_server.checkpoint.files import read_json, read_optional_json
from asr_server.core import SAMPLE_RATE, AudioWindow
from asr_server.errors import CheckpointError

# How preprocessor_config.json describes the log-mel frames of every Whisper model.
FEATURES: Final = {"sampling_rate": SAMPLE_RATE, "n_fft": 400, "hop_length": 160}
_MAX_CHUNK_S: Final = 3600.0  # the window bounds it further
_DEFAULTS: Final = {"max_source_positions": 1500, "max_target_positions": 448}

logger = logging.getLogger(__name__)


def short_audio_mode(setting: str, dtype: str) -> str:
    """Resolve auto: exact for float32, so that its text equals the reference."""
    if setting != "auto":
        return setting
    return "exact" if dtype == "float32" else "tail"


def read_window(directory: Path) -> AudioWindow:
    """Read `max_source_positions`, and two keys of ours in preprocessor_config.json.

    `max_chunk_s` is for checkpoints that err less in shorter chunks; `padding` ("zeros") pads as
    openai-whisper. Raises CheckpointError for contradictions, and features that Whisper lacks.
    """
    config = read_json(directory / "config.json")
    path = directory / "preprocessor_config.json"
    preprocessor = read_optional_json(path)
    num_positions = _size(config, "max_source_positions", directory)
    max_chunk_s = preprocessor.get("max_chunk_s", AudioWindow.max_chunk_s)
    if type(max_chunk_s) not in (int, float) or not 0 <= max_chunk_s <= _MAX_CHUNK_S:
        raise _wrong("max_chunk_s", path, max_chunk_s, f": must be from 0 to {_MAX_CHUNK_S:g}")
    window = AudioWindow(
        num_positions, float(max_chunk_s), padding=str(preprocessor.get("padding", AudioWindow.padding))
    )
    if window.padding not in ("silence", "zeros"):
        raise _wrong("padding", path, window.padding, ": silence or zeros")
    expected = {**FEATURES, "chunk_length": window.duration_s}
    for key, value in expected.items():
        if preprocessor.get(key, value) != value:
            raise _wrong(key, path, preprocessor[key], f"; its encoder needs {value:g}")
    return window


@dataclass(frozen=True)
class WhisperSizes:
    vocabulary: int
    num_mels: int
    width: int
    encoder_layers: int
    encoder_heads: int
    encoder_hidden: int
    decoder_layers: int
    decoder_heads: int
    decoder_hidden: int
    window: AudioWindow = field(default_factory=AudioWindow)
    text_positions: int = 448
    scale_embedding: bool = False

    @property
    def audio_positions(self) -> int:
        """Encoder positions of a window, 20 ms each."""
        return self.window.num_positions

    @property
    def num_frames(self) -> int:
        """Log-mel frames of a window, 10 ms each."""
        return 2 * self.audio_positions

    @classmethod
    def from_directory(cls, directory: Path) -> Self:
        """Raises CheckpointError as `from_config`, and for an unknown activation."""
        config = read_json(directory / "config.json")
        if config.get("activation_function", "gelu") != "gelu":
            raise CheckpointError(
                f"activation {config['activation_function']!r} is not known; Whisper uses gelu"
            )
        sizes = cls.from_config(config, directory)
        window, scales = read_window(directory), config.get("scale_embedding", False)
        return replace(sizes, window=window, scale_embedding=scales)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], directory: Path) -> Self:
        """Read the config.json of this directory. Raises CheckpointError for what no Whisper model has."""
        sizes: dict[str, Any] = {name: _size(config, key, directory) for name, key in _KEYS.items()}
        for part in ("encoder", "decoder"):
            if sizes["width"] % (num_heads := sizes[f"{part}_heads"]):
                why = f": must divide d_model, {sizes['width']}"
                raise _wrong(f"{part}_attention_heads", directory / "config.json", num_heads, why)
        return cls(**sizes, window=AudioWindow(_size(config, "max_source_positions", directory)))

    def why_not_shared_by(self, num_ranks: int) -> str:
        """Return why so many ranks cannot share out a model of these sizes, else an empty text."""
        for name, key in _KEYS.items():
            if name.endswith(("_heads", "_hidden")) and getattr(self, name) % num_ranks:
                return f"must divide the model's {key}, {getattr(self, name)}"
        return ""


# Of config.json.
_KEYS: Final = {
    "vocabulary": "vocab_size",
    "num_mels": "num_mel_bins",
    "width": "d_model",
    "encoder_layers": "encoder_layers",
    "encoder_heads": "encoder_attention_heads",
    "encoder_hidden": "encoder_ffn_dim",
    "decoder_layers": "decoder_layers",
    "decoder_heads": "decoder_attention_heads",
    "decoder_hidden": "decoder_ffn_dim",
    "text_positions": "max_target_positions",
}


def _size(config: Mapping[str, Any], key: str, directory: Path) -> int:
    path, size = directory / "config.json", config.get(key, _DEFAULTS.get(key))
    if size is None and key not in config:
        raise CheckpointError(f"{path} lacks {key!r}")
    if type(size) is not int or size < 1:
        raise _wrong(key, path, size, ": must be a whole number from 1 on")
    return size


def _wrong(key: str, path: Path, value: object, why: str) -> CheckpointError:
    return CheckpointError(f"{key} in {path} is {repr(value)[:80]}{why}")


AlignmentHeads = dict[int, list[int]]  # decoder layer to its heads, both from 0 and in order


def read_alignment_heads(directory: Path, sizes: WhisperSizes) -> AlignmentHeads:
    """Read generation_config.json's `[[layer, head], ...]`, or openai/whisper's default.

    Raises ValueError: the model lacks a head.
    """
    path = directory / "generation_config.json"
    pairs = read_optional_json(path).get("alignment_heads")
    if not pairs:
        logger.info(
            "%s names no alignment heads: word times come from all heads of the upper half of its decoder",
            directory,
        )
        return upper_half(sizes)
    heads: AlignmentHeads = {}
    for layer, head in sorted(pairs):
        if not (0 <= layer < sizes.decoder_layers and 0 <= head < sizes.decoder_heads):
            raise ValueError(f"{path} names the alignment head {[layer, head]}, which this model has not")
        heads.setdefault(layer, []).append(head)
    return heads


def upper_half(sizes: WhisperSizes) -> AlignmentHeads:
    """Return all heads of the decoder's upper half, openai/whisper's default."""
    layers = range(sizes.decoder_layers // 2, sizes.decoder_layers)
    return {layer: list(range(sizes.decoder_heads)) for layer in layers}
