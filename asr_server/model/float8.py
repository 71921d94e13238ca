"""8-bit floats (e4m3, up to 448); each group of numbers has a common scale.

Used for the audio's keys and values and, on request, the encoder's products. Indexed as bytes, because
some torch operations do not know the type.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asr_server.model.kernels import TORCH, Kernels
from asr_server.model.layers import Linear

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
TINY = 1e-12  # for what is all zeros


def quantise(x: Tensor, dims: int | tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return 8-bit floats and float32 scales; their product is nearly x.

    Args:
        dims: the numbers along these share a scale.
    """
    scales = x.abs().amax(dims, keepdim=True).float().clamp_(min=TINY) / LARGEST
    return (x / scales).to(FP8), scales


def dequantise(x: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).mul_(scales)


def as_bytes(x: Tensor) -> Tensor:
    """View 8-bit floats as bytes; return other types unchanged."""
    return x.view(torch.uint8) if x.dtype == FP8 else x


class Float8Linear(Linear):
    """A product in 8-bit floats. The CPU multiplies the rounded numbers in float32, to show the error."""

    def __init__(self, num_inputs: int, num_outputs: int, gelu: bool = False) -> None:
        super().__init__(num_inputs, num_outputs, gelu)
        self._scales: Tensor | None = None  # [outputs, 1], on CUDA

    def pack(self) -> None:
        weight, scales = quantise(self.weight, -1)
        if weight.is_cuda:
            self.weight, self._scales = nn.Parameter(weight, requires_grad=False), scales
        else:
            self.weight = nn.Parameter(dequantise(weight, scales, torch.float32))
            self.bias = nn.Parameter(self.bias.float())
            super().pack()

    def forward(self, x: Tensor, kernels: Kernels = TORCH) -> Tensor:
        rows, row_scales = quantise_rows(x.flatten(0, -2), kernels)
        if self._scales is None:
            y = super().forward(dequantise(rows, row_scales, torch.float32), kernels)
        else:
            y = scaled_product(rows, row_scales, self.weight, self._scales, self.bias)
            y = F.gelu(y) if self.gelu else y
        return y.view(*x.shape[:-1], -1).to(x.dtype)


def quantise_rows(x: Tensor, kernels: Kernels) -> tuple[Tensor, Tensor]:
    """Quantise [rows, inputs] with one scale a row."""
    return quantise(x, -1) if kernels.quantise_rows is None else kernels.quantise_rows(x)


def scaled_product(rows: Tensor, row_scales: Tensor, weight: Tensor, scales: Tensor, bias: Tensor) -> Tensor:
    """Return x W^T + b for 8-bit [rows, inputs] and [outputs, inputs], both multiples of 16.

    torch returns bfloat16 for scales by row.
    """
    bias = bias.to(torch.bfloat16)
    # Fast: Hopper then sums within its tensor cores, to fewer digits, more than enough for inputs of
    # three bits. Else sums are taken out of there again and again.
    return torch._scaled_mm(
        rows, weight.t(), row_scales, scales.t(), bias, out_dtype=torch.bfloat16, use_fast_accum=True
    )
