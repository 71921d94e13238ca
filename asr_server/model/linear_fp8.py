"""The encoder's products in 8-bit floats: a scale for each row of the input and each output."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asr_server.model.float8 import dequantise, quantise
from asr_server.model.linear import Linear


class Float8Linear(Linear):
    """Weights are rounded once and inputs in every call.

    The CPU multiplies what was rounded in float32: it shows the error, and is slower than without.
    """

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

    def forward(self, x: Tensor) -> Tensor:
        if self._scales is None:
            y: Tensor = super().forward(dequantise(*quantise(x, -1), torch.float32))
            return y.to(x.dtype)
        y = scaled_product(x, self.weight, self._scales, self.bias)
        return F.gelu(y) if self.gelu else y


def scaled_product(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor) -> Tensor:
    """x W^T + b, of x [..., inputs] and 8-bit weight [outputs, inputs] with scales [outputs, 1].

    Both lengths are multiples of 16. torch gives bfloat16 for scales by row.
    """
    rows, row_scales = quantise(x.flatten(0, -2), -1)
    bias = bias.to(torch.bfloat16)
    y = torch._scaled_mm(rows, weight.t(), row_scales, scales.t(), bias, out_dtype=torch.bfloat16)
    return y.view(*x.shape[:-1], -1).to(x.dtype)
