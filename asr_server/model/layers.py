"""The parts of encoder and decoder layers: attention, and how weights are shared out and loaded.

Queries, keys and values are one product, with 1/sqrt(d) in the weights.

The silence after a short chunk is encoded once for all chunks; a chunk's effect on it is ignored. On the
CPU, the encoder reads silence beyond half a second in means (`SilentLayer`).

Tensor parallelism follows Megatron-LM (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053): attention
is split by heads, the feed-forward by inner columns. Norms, convolutions, positions and vocabulary are
whole on every rank, so all ranks choose the same token.
"""

import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from asr_server.machine import cpu_flags
from asr_server.model.products import Linear, can_pack, multiply


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    return x.view(*x.shape[:-1], num_heads, -1)


class Behind(NamedTuple):
    keys_values: Tensor  # [M, 2 D]
    biases: Tensor | None  # [H, M], to be added to the scores; None: nothing


_MEAN_POSITIONS = 25  # half a second, which divides all lengths in which chunks are encoded
_EACH_QUERY = 5  # of so many, for the weights: neighbours hardly differ


class SilentLayer(NamedTuple):
    """One encoder layer's keys and values for a silent window."""

    keys_values: Tensor  # [F, 2 D / ranks]
    means: Tensor  # [G, 2 D / ranks], of 25 positions each; empty: all positions are read
    biases: Tensor  # [H, G]

    @classmethod
    def of(cls, qkv: Tensor, num_heads: int) -> Self:
        """Split queries (scaled), keys and values, [F, 3 D / ranks].

        25 positions act like one: mean key and value, weighted by the silence's own attention, with a
        score raised by what the 25 have together. Plain means plus log 25 are twice as far off.
        """
        keys_values = qkv[:, qkv.shape[-1] // 3 :].clone()
        if qkv.is_cuda:  # where biases would keep attention from its fastest kernel
            return cls(keys_values, keys_values[:0], keys_values.new_empty(num_heads, 0))
        heads = qkv.float().view(len(qkv), 3 * num_heads, -1).transpose(0, 1)  # [3 H, F, d]
        query = heads[:num_heads, ::_EACH_QUERY]
        means, biases = [], []
        groups = heads[num_heads:].split(_MEAN_POSITIONS, 1)  # type: ignore[no-untyped-call]
        for keys, values in (group.chunk(2) for group in groups):
            scores = query @ keys.transpose(1, 2)  # [H, queries, 25]
            weights = scores.softmax(-1).mean(1, keepdim=True)  # [H, 1, 25]
            mean_key = weights @ keys
            means.append(torch.cat([mean_key, weights @ values]).flatten())
            biases.append((scores.logsumexp(-1) - (query @ mean_key.transpose(1, 2))[..., 0]).mean(1))
        return cls(keys_values, torch.stack(means).to(qkv.dtype), torch.stack(biases, 1).to(qkv.dtype))

    def behind(self, length: int) -> Behind:
        """Return what follows `length` positions: 25 as they are, then means."""
        first_mean = -(-length // _MEAN_POSITIONS) + 1
        near = self.keys_values[length : first_mean * _MEAN_POSITIONS]
        means = self.means[first_mean:]
        if not len(means):
            return Behind(self.keys_values[length:], None)
        biases = F.pad(self.biases[:, first_mean:], (len(near), 0))
        return Behind(torch.cat([near, means]), biases)


class Silence(NamedTuple):
    layers: tuple[SilentLayer, ...]
    audio: Tensor  # [1, F, D]


def attend_audio(qkv: Tensor, num_heads: int, behind: Behind | None = None) -> Tensor:
    """Attend between all audio positions and to those behind: [B, F, 3 D], queries scaled, to [B, F, D]."""
    if qkv.is_cuda or (HAS_AMX and qkv.dtype == torch.bfloat16):
        query, key, value = split_heads(qkv, 3 * num_heads).transpose(1, 2).chunk(3, dim=1)  # [B, H, F, d]
        mask = None
        if behind is not None:
            more = split_heads(behind.keys_values, 2 * num_heads).transpose(0, 1).expand(len(qkv), -1, -1, -1)
            key, value = (
                torch.cat(each, dim=2) for each in zip((key, value), more.chunk(2, dim=1), strict=True)
            )
            mask = _biases(behind, qkv.shape[1])
        if mask is not None:
            mask = mask[None, :, None].expand(len(qkv), -1, qkv.shape[1], -1)
        # cuDNN, which torch takes on Hopper, plans each shape for 25 to 70 ms: for whole windows alone.
        with sdpa_kernel(_WITHOUT_PLANS) if qkv.is_cuda and behind is not None else nullcontext():
            attended = F.scaled_dot_product_attention(query, key, value, mask, scale=1.0)
        return attended.transpose(1, 2).flatten(2)
    return torch.stack([_attend_head_by_head(each, num_heads, behind) for each in qkv])


_WITHOUT_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def _biases(behind: Behind, length: int) -> Tensor | None:
    return None if behind.biases is None else F.pad(behind.biases, (length, 0))


def _attend_head_by_head(qkv: Tensor, num_heads: int, behind: Behind | None) -> Tensor:
    """Attend one head at a time, [F, 3 D] to [F, D]: its scores fit the CPU's cache.

    Twice as fast as torch's attention without AMX, half as fast with it.
    """
    heads = split_heads(qkv, 3 * num_heads).transpose(0, 1).contiguous()  # [3 H, F, d]
    query, key, value = heads.chunk(3)
    biases = None
    if behind is not None:
        more = split_heads(behind.keys_values, 2 * num_heads).transpose(0, 1)  # [2 H, M, d]
        key, value = torch.cat([heads[num_heads:], more], dim=1).chunk(2)
        biases = _biases(behind, len(qkv))
    context = qkv.new_empty(len(qkv), num_heads, heads.shape[-1])
    in_onednn = _IS_X86 and qkv.dtype == torch.bfloat16 and can_pack(qkv)
    for head in range(num_heads):
        keys, values = key[head], value[head].t().contiguous()  # [F + M, d], [d, F + M]
        bias = None if biases is None else biases[head]
        if in_onednn:
            blocks = (query[head, start : start + _QUERIES] for start in range(0, len(qkv), _QUERIES))
            context[:, head] = torch.cat([_attend_in_onednn(block, keys, values, bias) for block in blocks])
            continue
        scores = multiply(query[head], keys, bias)  # [F, F + M]
        torch.softmax(scores, -1, out=scores)
        context[:, head] = multiply(scores, values)
    return context.flatten(1)


_QUERIES = 500  # whose scores are computed at once


def _attend_in_onednn(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
    """Attend [F, d] to [F, d]; oneDNN's softmax takes two thirds of torch's time."""
    scores = F.linear(query.to_mkldnn(), keys, bias)
    return F.linear(scores.softmax(-1), values).to_dense()


def attend_cached(
    query: Tensor,  # [B, T, H, d], scaled
    keys: Tensor,  # [B, H, N, d]
    values: Tensor,  # the same, or rows of d
    mask: Tensor,  # [B, 1, T, N], added to the scores
    value_rows: Tensor | None = None,  # int32 [B H, N], a single query's rows
) -> Tensor:
    """Attend from a few queries to cached text, to [B, T, D]."""
    dtype = query.dtype
    if dtype == torch.bfloat16 and not query.is_cuda:
        if HAS_AMX:
            # Plain products of bfloat16 copy the keys and values first, and round the scores.
            attended = F.scaled_dot_product_attention(query.transpose(1, 2), keys, values, mask, scale=1.0)
            return attended.transpose(1, 2).flatten(2)
        # Of bfloat16's products oneDNN compiles and keeps one for each B and N: a gigabyte in 500 recordings.
        query, keys = query.float(), keys.float()
    # Elsewhere on CPU these are the faster: scaled_dot_product_attention takes up to seven times as long.
    scores = _scores(query, keys.transpose(-1, -2)) + mask  # [B, H, T, N]
    if value_rows is None:
        return _weighted_sums(scores, values.to(query.dtype)).to(dtype)
    weights = scores.softmax(-1).flatten(0, 2).to(dtype)  # [B H, N]
    return sum_weighted_rows(weights, values, value_rows).view(len(query), 1, -1)


def attend_cached_audio(query: Tensor, audio: Sequence[tuple[Tensor, Tensor]], rows: Tensor) -> Tensor:
    """Attend from a few scaled queries [B, T, H, d] to all cached audio, to [B, T, D].

    Of each stretch of positions, keys are [B, H, d, N], values [B, H, N, d]; rows 0, 1, 2 ... up to B H F.
    """
    if len(audio) == 2:
        (keys, values), (silent_keys, silent_values) = audio
        scores = torch.cat([_scores(query, keys), _scores(query, silent_keys)], -1)
        own, silent = torch.tensor_split(scores.softmax(-1), [keys.shape[-1]], -1)
        return (own @ values + silent @ silent_values).transpose(1, 2).flatten(2)
    ((keys, values),) = audio
    if query.shape[1] > 1 or query.is_cuda or not _IS_X86:
        return _weighted_sums(_scores(query, keys), values)  # scores [B, H, T, F]
    weights, keys, values = query[:, 0].flatten(0, 1), keys.flatten(0, 2), values.flatten(0, 2)
    scores = sum_weighted_rows(weights, keys, rows[: len(keys)].view(weights.shape))  # [B H, F]
    weights = scores.softmax(-1)
    context = sum_weighted_rows(weights, values, rows[: len(values)].view(weights.shape))  # [B H, d]
    return context.view(len(query), 1, -1)


def _scores(query: Tensor, keys: Tensor) -> Tensor:
    """Multiply [B, T, H, d] by [B, H, d, N] to [B, H, T, N].

    A GPU writes float32: in bfloat16, a score of 20 is off by up to 0.06.
    """
    query = query.transpose(1, 2)
    if not query.is_cuda or query.dtype == torch.float32:
        return query @ keys
    products = torch.bmm(query.flatten(0, 1), keys.flatten(0, 1), out_dtype=torch.float32)
    return products.view(*query.shape[:3], -1)


def _weighted_sums(scores: Tensor, values: Tensor) -> Tensor:
    weights = scores.softmax(-1).to(values.dtype)
    return (weights @ values).transpose(1, 2).flatten(2)


def sum_weighted_rows(weights: Tensor, matrix: Tensor, rows: Tensor) -> Tensor:
    """Weight [G, n] rows of [any, m] to [G, m].

    The embedding layer reads rows near memory speed, 2.5 times as fast as a batched product.
    """
    return F.embedding_bag(rows, matrix, mode="sum", per_sample_weights=weights)


# There torch carries kernels for sums of weighted rows (FBGEMM); elsewhere matrix products are the better.
_IS_X86 = platform.machine() in ("x86_64", "AMD64")
HAS_AMX = "amx_bf16" in cpu_flags()


def sums_text_rows(values: Tensor) -> bool:
    """Return whether cached values are fastest by rows: in bfloat16."""
    return _IS_X86 and values.dtype == torch.bfloat16 and not (values.is_cuda or HAS_AMX)


Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Shard:
    """Share `rank` of `count`."""

    rank: int = 0
    count: int = 1
    add_up: Callable[[Tensor], object] = lambda part: part
    """Replaces a rank's part by the sum over all ranks, the same to the last bit."""

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


def load_weights(module: Linear | nn.LayerNorm, weights: Weights, name: str) -> None:
    module.weight.copy_(weights[f"{name}.weight"])
    module.bias.copy_(weights[f"{name}.bias"])


def load_packed(
    linear: Linear, weights: Weights, names: Sequence[str], shard: Shard, scale: float = 1.0
) -> None:
    """Stack the rank's projections; scale the first. Keys get a bias of zeros."""
    rows = [shard.outputs(weights[f"{name}.weight"]).float() for name in names]
    biases = [
        shard.outputs(weights[f"{name}.bias"]).float() if f"{name}.bias" in weights else torch.zeros(len(row))
        for name, row in zip(names, rows, strict=True)
    ]
    linear.weight.copy_(torch.cat([rows[0] * scale, *rows[1:]]))
    linear.bias.copy_(torch.cat([biases[0] * scale, *biases[1:]]))


def load_summed(linear: Linear, weights: Weights, name: str, shard: Shard) -> None:
    """Load a projection with split inputs: ranks sum their results."""
    linear.weight.copy_(shard.inputs(weights[f"{name}.weight"]))
    linear.bias.copy_(shard.once(weights[f"{name}.bias"]))


def query_scale(qkv: Linear, num_heads: int) -> float:
    return float((len(qkv.bias) // (3 * num_heads)) ** -0.5)
