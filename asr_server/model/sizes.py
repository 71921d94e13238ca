"""A checkpoint's sizes and alignment heads, and each rank's share.

Tensor parallelism follows Megatron-LM (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053): attention
is split by heads, the feed-forward by inner columns. Norms, convolutions, positions and vocabulary are
whole on every rank, so all ranks choose the same token. Loads no weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from asr_server.checkpoint.files import AudioWindow, read_json, read_optional_json


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
    def from_directory(cls, directory: Path) -> WhisperSizes:
        """Read a checked config.json. Raises ValueError for an unknown activation."""
        config = read_json(directory / "config.json")
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


AlignmentHeads = dict[int, list[int]]  # decoder layer to its heads, both from 0 and in order

logger = logging.getLogger(__name__)


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


@dataclass(frozen=True)
class Shard:
    """Share `rank` of `count`."""

    rank: int = 0
    count: int = 1
    add_up: Callable[[Tensor], object] = lambda part: part
    """Replaces a rank's part by the sum over all ranks, the same to the last bit."""

    def check(self, sizes: WhisperSizes) -> None:
        parts = {
            "encoder_attention_heads": sizes.encoder_heads,
            "decoder_attention_heads": sizes.decoder_heads,
            "encoder_ffn_dim": sizes.encoder_hidden,
            "decoder_ffn_dim": sizes.decoder_hidden,
        }
        for name, number in parts.items():
            if number % self.count:
                raise ValueError(
                    f"--tensor-parallel-size {self.count} does not divide the model's {name}, {number}"
                )

    def outputs(self, weight: Tensor) -> Tensor:
        return weight.chunk(self.count)[self.rank]

    def inputs(self, weight: Tensor) -> Tensor:
        return weight.chunk(self.count, dim=1)[self.rank]

    def once(self, bias: Tensor) -> Tensor:
        return bias if self.rank == 0 else bias.new_zeros(bias.shape)

    def heads(self, heads: list[int], num_heads: int) -> list[int]:
        share = num_heads // self.count
        first = self.rank * share
        return [head - first for head in heads if first <= head < first + share]

    def sum(self, part: Tensor) -> Tensor:
        """Sum over all ranks. May overwrite `part`."""
        if self.count > 1:
            self.add_up(part)
        return part


WHOLE = Shard()
