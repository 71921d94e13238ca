"""What the layers of encoder and decoder have in common: the feed-forward, and how weights are taken.

Queries, keys and values of a layer are one packed product, and the queries' 1/sqrt(d) lies in the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from asr_server.model.kernels import TORCH, Kernels
from asr_server.model.linear import Linear
from asr_server.model.shard import Shard

Weights = Mapping[str, Tensor]

SELF_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


class FeedForward(nn.Module):
    def __init__(self, width: int, hidden: int, shard: Shard, linear: type[Linear] = Linear) -> None:
        super().__init__()
        self.shard = shard
        self.norm = nn.LayerNorm(width)
        self.up = linear(width, hidden // shard.count, gelu=True)
        self.down = linear(hidden // shard.count, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.change(self.norm(x))

    def change(self, normed: Tensor, kernels: Kernels = TORCH) -> Tensor:
        """What is to be added to that of which `normed` is the norm."""
        return self.shard.sum(self.down(self.up(normed, kernels), kernels))

    def load(self, weights: Weights) -> None:
        load_weights(self.norm, weights, "final_layer_norm")
        load_packed(self.up, weights, ("fc1",), self.shard)
        load_summed(self.down, weights, "fc2", self.shard)


class Within(Mapping[str, Tensor]):
    """The weights whose names begin with `prefix`, by what follows it, each read when it is asked for."""

    def __init__(self, weights: Weights, prefix: str) -> None:
        self._weights = weights
        self._prefix = prefix

    def __getitem__(self, name: str) -> Tensor:
        return self._weights[self._prefix + name]

    def __contains__(self, name: object) -> bool:
        return f"{self._prefix}{name}" in self._weights

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(self._prefix) for name in self._weights if name.startswith(self._prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def load_weights(module: Linear | nn.LayerNorm, weights: Weights, name: str) -> None:
    module.weight.copy_(weights[f"{name}.weight"])
    module.bias.copy_(weights[f"{name}.bias"])


def load_packed(
    linear: Linear, weights: Weights, names: tuple[str, ...], shard: Shard, scale: float = 1.0
) -> None:
    """Stacks the rank's part of projections; the first is multiplied by `scale`. Whisper's key has no bias:
    zeros.
    """
    rows = [shard.outputs(weights[f"{name}.weight"]).float() for name in names]
    biases = [
        shard.outputs(weights[f"{name}.bias"]).float() if f"{name}.bias" in weights else torch.zeros(len(row))
        for name, row in zip(names, rows, strict=True)
    ]
    linear.weight.copy_(torch.cat([rows[0] * scale, *rows[1:]]))
    linear.bias.copy_(torch.cat([biases[0] * scale, *biases[1:]]))


def load_summed(linear: Linear, weights: Weights, name: str, shard: Shard) -> None:
    """A projection of what is split among the ranks: its results are to be summed."""
    linear.weight.copy_(shard.inputs(weights[f"{name}.weight"]))
    linear.bias.copy_(shard.once(weights[f"{name}.bias"]))


def query_scale(qkv: Linear, num_heads: int) -> float:
    """1/sqrt(d), from a layer of `num_heads` queries, keys and values."""
    return float((len(qkv.bias) // (3 * num_heads)) ** -0.5)
