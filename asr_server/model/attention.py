"""Attention over audio and over cached text, in the fastest form for each device. Used by the layers."""

from __future__ import annotations

import platform

import torch
import torch.nn.functional as F
from torch import Tensor

from asr_server.model.kernels import TORCH, Kernels
from asr_server.model.linear import multiply


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """[..., D] to [..., H, d]."""
    return x.view(*x.shape[:-1], num_heads, -1)


def attend_audio(qkv: Tensor, num_heads: int, kernels: Kernels = TORCH) -> Tensor:
    """Every audio position over every other.

    Args:
        qkv: [B, F, 3 D], queries (scaled), keys and values side by side.
    Returns:
        [B, F, D].
    """
    if qkv.is_cuda:
        query, key, value = split_heads(qkv, 3 * num_heads).transpose(1, 2).chunk(3, dim=1)  # [B, H, F, d]
        if kernels.encoder_attention is not None:
            attended = kernels.encoder_attention(query, key, value)
        else:
            attended = F.scaled_dot_product_attention(query, key, value, scale=1.0)
        return attended.transpose(1, 2).flatten(2)
    return torch.stack([_attend_head_by_head(each, num_heads) for each in qkv])


def _attend_head_by_head(qkv: Tensor, num_heads: int) -> Tensor:
    """[F, 3 D] to [F, D] on CPU: the scores of one head at a time, which the cache can hold.

    Twice as fast as scaled_dot_product_attention, which multiplies bfloat16 at the rate of float32.
    """
    heads = split_heads(qkv, 3 * num_heads).transpose(0, 1).contiguous()  # [3 H, F, d]
    query, key, value = heads.chunk(3)
    context = qkv.new_empty(len(qkv), num_heads, heads.shape[-1])
    for head in range(num_heads):
        scores = multiply(query[head], key[head])  # [F, F]
        torch.softmax(scores, -1, out=scores)
        context[:, head] = multiply(scores, value[head].t().contiguous())
    return context.flatten(1)


def attend_cached(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """A few queries over the cached text positions.

    Args:
        query: [B, T, H, d], scaled.
        keys, values: [B, H, N, d].
        mask: [B, 1, T, N], added to the scores.
    Returns:
        [B, T, D].
    """
    # Plain products: on CPU scaled_dot_product_attention takes seven times as long for a single query.
    scores = _scores(query, keys.transpose(-1, -2)) + mask  # [B, H, T, N]
    return _weighted_sums(scores, values)


def attend_cached_audio(
    query: Tensor, keys: Tensor, values: Tensor, rows: Tensor, mask: Tensor | None
) -> Tensor:
    """A few queries over all cached audio positions.

    Args:
        query: [B, T, H, d], scaled.
        keys: [B, H, d, F].
        values: [B, H, F, d].
        rows: 0, 1, 2 ... up to B H F at least.
        mask: [B, 1, 1, F], added to the scores; None: every sequence has all positions.
    Returns:
        [B, T, D].
    """
    if query.shape[1] > 1 or query.is_cuda or not _WEIGHTED_ROWS:
        scores = _scores(query, keys)  # [B, H, T, F]
        return _weighted_sums(scores if mask is None else scores + mask, values)
    scores = sum_weighted_rows(query[:, 0].flatten(0, 1), keys.flatten(0, 2), rows)  # [B H, F]
    if mask is not None:
        scores = (scores.view(len(query), -1, scores.shape[-1]) + mask[:, 0]).flatten(0, 1)
    context = sum_weighted_rows(scores.softmax(-1), values.flatten(0, 2), rows)  # [B H, d]
    return context.view(len(query), 1, -1)


def _scores(query: Tensor, keys: Tensor) -> Tensor:
    """Queries [B, T, H, d] times keys [B, H, d, N]: [B, H, T, N].

    On a GPU straight to float32: rounded to bfloat16, a score of 20 would be off by up to 0.06.
    """
    query = query.transpose(1, 2)
    if not query.is_cuda or query.dtype == torch.float32:
        return query @ keys
    products = torch.bmm(query.flatten(0, 1), keys.flatten(0, 1), out_dtype=torch.float32)
    return products.view(*query.shape[:3], -1)


def _weighted_sums(scores: Tensor, values: Tensor) -> Tensor:
    """Values [B, H, N, d], weighted by the softmax of scores [B, H, T, N]: [B, T, H d]."""
    weights = scores.softmax(-1).to(values.dtype)
    return (weights @ values).transpose(1, 2).flatten(2)


def sum_weighted_rows(weights: Tensor, matrix: Tensor, rows: Tensor) -> Tensor:
    """Products of many vectors, each with a matrix of its own: [G, n], [G n, m] to [G, m].

    The layer made for looking up embeddings reads its rows at close to the memory's speed, 2.5 times as fast
    as a batched matrix product with one row on the left.
    """
    bags = rows[: len(matrix)].view(weights.shape)
    return F.embedding_bag(bags, matrix, mode="sum", per_sample_weights=weights)


# On x86 torch carries kernels written for it (FBGEMM); elsewhere matrix products are the better.
_WEIGHTED_ROWS = platform.machine() in ("x86_64", "AMD64")
