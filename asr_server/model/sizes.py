"""The sizes of a checkpoint, read from its config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


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
    audio_positions: int = 1500  # encoder positions, 20 ms each
    text_positions: int = 448
    scale_embedding: bool = False

    @property
    def num_frames(self) -> int:
        """Log-mel frames of one window, 10 ms each."""
        return 2 * self.audio_positions

    @classmethod
    def from_directory(cls, directory: Path) -> WhisperSizes:
        """Raises ValueError where config.json describes something other than a Whisper model."""
        config = json.loads((directory / "config.json").read_text())
        if config.get("model_type") != "whisper":
            raise ValueError(
                f"{directory} holds a {config.get('model_type')!r} model, not a Whisper checkpoint"
            )
        if config.get("activation_function", "gelu") != "gelu":
            raise ValueError(f"activation {config['activation_function']!r} is not known; Whisper uses gelu")
        return cls(
            vocabulary=config["vocab_size"],
            num_mels=config["num_mel_bins"],
            width=config["d_model"],
            encoder_layers=config["encoder_layers"],
            encoder_heads=config["encoder_attention_heads"],
            encoder_hidden=config["encoder_ffn_dim"],
            decoder_layers=config["decoder_layers"],
            decoder_heads=config["decoder_attention_heads"],
            decoder_hidden=config["decoder_ffn_dim"],
            audio_positions=config.get("max_source_positions", 1500),
            text_positions=config.get("max_target_positions", 448),
            scale_embedding=config.get("scale_embedding", False),
        )
