"""8-bit floats (e4m3: three bits of mantissa, numbers up to 448) with a scale for all that share one.

Used for the audio's keys and values (`cache.py`) and by the encoder's products (`linear_fp8.py`), where asked
for. Bytes are moved as bytes: not every operation of torch that indexes knows the type.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
TINY = 1e-12  # for what is all zeros


def quantise(x: Tensor, dims: int | tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """8-bit floats and float32 scales, whose product is nearly x.

    Args:
        dims: share a scale, whose largest number becomes 448; they have length 1 in the scales.
    """
    scales = x.abs().amax(dims, keepdim=True).float().clamp_(min=TINY) / LARGEST
    return (x / scales).to(FP8), scales


def dequantise(x: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).mul_(scales)


def as_bytes(x: Tensor) -> Tensor:
    """The same memory, as numbers that all operations know; other types stay what they are."""
    return x.view(torch.uint8) if x.dtype == FP8 else x
