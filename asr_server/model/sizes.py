"""The sizes of a checkpoint, read from its config.json."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from asr_server.checkpoint import AudioWindow, read_json


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
        """Encoder positions of one window, 20 ms each."""
        return self.window.num_positions

    @property
    def num_frames(self) -> int:
        """Log-mel frames of one window, 10 ms each."""
        return 2 * self.audio_positions

    @classmethod
    def from_directory(cls, directory: Path) -> WhisperSizes:
        """Raises ValueError where config.json describes something other than a Whisper model, CheckpointError
        where there is none, or the audio window is not the one of its encoder.
        """
        config = read_json(directory / "config.json")
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
            window=AudioWindow.from_directory(directory),
            text_positions=config.get("max_target_positions", 448),
            scale_embedding=config.get("scale_embedding", False),
        )
