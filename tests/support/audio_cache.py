"""Read a cache's audio whole: what a slot has of its own, and the silence behind it."""

import torch
from torch import Tensor

from asr_server.model import DecoderCache


def whole_audio(cache: DecoderCache, layer: int, slot: int) -> tuple[Tensor, Tensor]:
    """Return keys [1, H, d, F] and values [1, H, F, d]."""
    keys, values = zip(*cache.audio(layer, slice(slot, slot + 1), cache.own_length(slot)), strict=True)
    return torch.cat(keys, -1), torch.cat(values, 2)
