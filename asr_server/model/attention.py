"""Attention, in the form that is fastest where it runs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """[..., D] to [..., H, d]."""
    return x.view(*x.shape[:-1], num_heads, -1)


def attend_audio(qkv: Tensor, num_heads: int) -> Tensor:
    """Every audio position over every other.

    Args:
        qkv: [B, F, 3 D], queries (scaled), keys and values side by side.
    Returns:
        [B, F, D].
    """
    query, key, value = qkv.view(*qkv.shape[:2], 3, num_heads, -1).permute(2, 0, 3, 1, 4)  # [B, H, F, d] each
    if qkv.is_cuda:
        return F.scaled_dot_product_attention(query, key, value, scale=1.0).transpose(1, 2).flatten(2)
    scores: Tensor = query @ key.transpose(-1, -2)
    torch.softmax(scores, -1, out=scores)
    context: Tensor = scores @ value
    return context.transpose(1, 2).flatten(2)


def attend_cached(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> Tensor:
    """A few queries over many cached positions.

    Args:
        query: [B, T, H, d], scaled.
        keys, values: [B, H, N, d].
        mask: [B, 1, T, N], added to the scores.
    Returns:
        [B, T, D].
    """
    # Plain products: on CPU scaled_dot_product_attention takes seven times as long for a single query.
    scores = query.transpose(1, 2) @ keys.transpose(-1, -2)  # [B, H, T, N]
    if mask is not None:
        scores += mask
    return (scores.softmax(-1) @ values).transpose(1, 2).flatten(2)
