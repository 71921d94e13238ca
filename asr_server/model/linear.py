"""Matrix products with fixed weights, laid out once for the processor they run on.

On CPU the weights are reordered for oneDNN when they are loaded, instead of on every call: a decode step's
products take two thirds of the time, and float32 ones half, next to torch's default. The same layout serves
any number of rows, and a row's result does not depend on how many others there are.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asr_server.model.kernels import TORCH, Kernels

_ROWS_HINT = 8  # a layout that is good for few rows, and no worse for many


class Linear(nn.Module):
    """`y = x W^T + b`, with GELU (the exact one) on top where wanted."""

    weight: Tensor
    bias: Tensor

    def __init__(self, num_inputs: int, num_outputs: int, gelu: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_outputs, num_inputs))
        self.bias = nn.Parameter(torch.zeros(num_outputs))
        self.gelu = gelu
        self._packed: Tensor | None = None

    def pack(self) -> None:
        """To be called once the weights are in; they cannot be read or changed afterwards."""
        if can_pack(self.weight):
            self._packed = pack(self.weight)
            self.weight = nn.Parameter(torch.empty(0))

    def forward(self, x: Tensor, kernels: Kernels = TORCH) -> Tensor:
        if self.gelu and kernels.bias_gelu is not None:
            return kernels.bias_gelu(self._product(x), self.bias)
        if self._packed is not None:
            return packed_linear(x, self._packed, self.bias, self.gelu)
        y = F.linear(x, self.weight, self.bias)
        return F.gelu(y) if self.gelu else y

    def _product(self, x: Tensor) -> Tensor:
        """x W^T alone."""
        return F.linear(x, self.weight) if self._packed is None else packed_linear(x, self._packed, None)


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN multiplies in this precision here."""
    if weight.device.type != "cpu" or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32 and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


def pack(weight: Tensor) -> Tensor:
    """[outputs, inputs] in oneDNN's layout, for `packed_linear`."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS_HINT)
    return packed


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None, gelu: bool = False) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "gelu" if gelu else "none", [], "none")
    return y


def multiply(x: Tensor, y: Tensor) -> Tensor:
    """x y^T of two matrices; in float32 twice as fast as torch's own product where that is MKL's on AMD."""
    return packed_linear(x, y, None) if can_pack(y) else x @ y.t()
