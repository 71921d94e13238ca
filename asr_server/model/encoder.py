"""Whisper's encoder: log-mel to what the decoder attends to. Shapes as in `whisper.py`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asr_server.model.attention import attend_audio
from asr_server.model.blocks import (
    SELF_ATTENTION,
    FeedForward,
    Weights,
    Within,
    load_packed,
    load_summed,
    load_weights,
    query_scale,
)
from asr_server.model.kernels import TORCH, Kernels
from asr_server.model.linear import Linear
from asr_server.model.shard import Shard
from asr_server.model.sizes import WhisperSizes

_FLOAT16_LIMIT = torch.finfo(torch.float16).max - 1000


class Encoder(nn.Module):
    def __init__(self, sizes: WhisperSizes, shard: Shard, linear: type[Linear] = Linear) -> None:
        super().__init__()
        self.conv1 = Convolution(sizes.num_mels, sizes.width, stride=1)
        self.conv2 = Convolution(sizes.width, sizes.width, stride=2)
        self.positions = nn.Parameter(torch.empty(sizes.audio_positions, sizes.width))
        self.layers = nn.ModuleList(EncoderLayer(sizes, shard, linear) for _ in range(sizes.encoder_layers))
        self.norm = nn.LayerNorm(sizes.width)

    def forward(self, mel: Tensor, kernels: Kernels = TORCH) -> Tensor:
        """[B, num_mels, 2 F] to [B, F, D]; F is the window's number of positions, or less."""
        x = mel.to(self.positions.dtype).transpose(1, 2)
        x = self.conv2(self.conv1(x, kernels), kernels)
        change = self.positions[: x.shape[1]]
        for layer in self.layers:
            x, change = layer(x, change, kernels)
        return add_norm(x, change, self.norm, kernels)[1]

    def load(self, weights: Weights) -> None:
        self.conv1.load(weights, "conv1")
        self.conv2.load(weights, "conv2")
        self.positions.copy_(weights["embed_positions.weight"])
        for i, layer in enumerate(self.layers):
            layer.load(Within(weights, f"layers.{i}."))  # type: ignore[operator]
        load_weights(self.norm, weights, "layer_norm")


class EncoderLayer(nn.Module):
    def __init__(self, sizes: WhisperSizes, shard: Shard, linear: type[Linear]) -> None:
        super().__init__()
        share = sizes.width // shard.count
        self.shard = shard
        self.num_heads = sizes.encoder_heads // shard.count
        self.norm = nn.LayerNorm(sizes.width)
        self.qkv = linear(sizes.width, 3 * share)
        self.out = linear(share, sizes.width)
        self.feed_forward = FeedForward(sizes.width, sizes.encoder_hidden, shard, linear)

    def forward(self, x: Tensor, change: Tensor, kernels: Kernels) -> tuple[Tensor, Tensor]:
        """What comes in, [B, F, D], and what is still to be added to it; the same of what goes out.

        So that each addition is one computation with the norm behind it, which may be in the next layer.
        """
        x, normed = add_norm(x, change, self.norm, kernels)
        attended = attend_audio(self.qkv(normed, kernels), self.num_heads, kernels)
        x, normed = add_norm(x, self.shard.sum(self.out(attended, kernels)), self.feed_forward.norm, kernels)
        return x, self.feed_forward.change(normed, kernels)

    def load(self, weights: Weights) -> None:
        load_weights(self.norm, weights, "self_attn_layer_norm")
        load_packed(self.qkv, weights, SELF_ATTENTION, self.shard, query_scale(self.qkv, self.num_heads))
        load_summed(self.out, weights, "self_attn.out_proj", self.shard)
        self.feed_forward.load(weights)


def add_norm(x: Tensor, change: Tensor, norm: nn.LayerNorm, kernels: Kernels) -> tuple[Tensor, Tensor]:
    """x + change, and its norm: [B, F, D] each; `change` may be [F, D]."""
    # Large checkpoints leave float16's range; transformers clamps each layer's output in the same way.
    limit = _FLOAT16_LIMIT if x.dtype == torch.float16 else None
    if kernels.add_norm is not None:
        return kernels.add_norm(x, change, norm.weight, norm.bias, norm.eps, limit)
    x = x + change
    if limit is not None:
        x = x.clamp(-limit, limit)
    return x, norm(x)


class Convolution(Linear):
    """A convolution of width 3 over time, and GELU, as one product: [B, N, C] to [B, N / stride, D]."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__(3 * channels, width, gelu=True)
        self.stride = stride

    def forward(self, x: Tensor, kernels: Kernels = TORCH) -> Tensor:
        padded = F.pad(x, (0, 0, 1, 1))
        windows = padded.unfold(1, 3, self.stride).transpose(2, 3)  # [B, N / stride, 3, C]
        return super().forward(windows.flatten(2), kernels)

    def load(self, weights: Weights, name: str) -> None:
        self.weight.copy_(weights[f"{name}.weight"].transpose(1, 2).flatten(1))  # [D, C, 3] to [D, 3 C]
        self.bias.copy_(weights[f"{name}.bias"])
