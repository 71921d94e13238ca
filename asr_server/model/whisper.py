"""Whisper (Radford et al. 2022, https://arxiv.org/abs/2212.04356), for inference.

Shapes: B sequences, T positions of one call, F audio positions (1500), D width, H heads, d = D / H.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from asr_server.model.alignment_heads import upper_half
from asr_server.model.blocks import Weights, Within
from asr_server.model.cache import DecoderCache
from asr_server.model.decoder import Decoder
from asr_server.model.encoder import Encoder
from asr_server.model.features import LogMel
from asr_server.model.kernels import TORCH, Kernels
from asr_server.model.linear import Linear
from asr_server.model.shard import WHOLE, Shard
from asr_server.model.sizes import WhisperSizes


class Whisper(nn.Module):
    """Encoder and decoder of one checkpoint, with the log-mel that feeds them."""

    def __init__(
        self,
        sizes: WhisperSizes,
        device: torch.device,
        dtype: torch.dtype,
        shard: Shard = WHOLE,
        encoder_linear: type[Linear] = Linear,
    ) -> None:
        """
        Args:
            encoder_linear: computes the products of the encoder's layers.
        Raises:
            ValueError: the model cannot be split among that many ranks.
        """
        super().__init__()
        shard.check(sizes)
        self.sizes = sizes
        self.shard = shard
        self.device = device
        self.dtype = dtype
        self.alignment_heads = upper_half(sizes)
        with torch.device(device):
            zeros = sizes.window.padding == "zeros"
            self.log_mel = LogMel(sizes.num_mels, sizes.num_frames, zeros).to(device)
            with _default_dtype(dtype):  # never in float32 first, which would take twice the memory
                self.encoder = Encoder(sizes, shard, encoder_linear)
                self.decoder = Decoder(sizes, shard)

    def new_cache(
        self,
        num_slots: int,
        short_audio: bool = False,
        kernels: Kernels = TORCH,
        audio_dtype: torch.dtype | None = None,
    ) -> DecoderCache:
        ranks = self.shard.count
        return DecoderCache(
            self.sizes, num_slots, self.device, self.dtype, short_audio, ranks, kernels, audio_dtype
        )

    def load_hugging_face(self, weights: Weights) -> None:
        """Takes every weight from `weights`, named as Hugging Face names them without `model.`.

        Raises:
            KeyError: one is missing.
            RuntimeError: one has another shape.
        """
        with torch.no_grad():
            self.encoder.load(Within(weights, "encoder."))
            self.decoder.load(Within(weights, "decoder."))
            for module in self.modules():
                if isinstance(module, Linear):
                    module.pack()


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
