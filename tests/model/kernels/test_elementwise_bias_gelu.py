"""The kernel under Triton's interpreter (on a GPU: compiled) against torch's GELU in float32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from asr_server.model.kernels import Kernels, elementwise
from asr_server.model.layers import Linear

pytestmark = pytest.mark.slow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ERROR = {torch.float32: 2e-6 if DEVICE == "cpu" else 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("shape", [(2, 5, 96), (1, 1100)])  # 10 rows and 1100 columns are several blocks
def test_the_bias_is_added_and_gelu_taken_in_place(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, bias = (torch.randn(size, device=DEVICE).to(dtype) * 2 for size in (shape, shape[-1:]))
    expected = F.gelu(x.float() + bias.float())
    found = elementwise.bias_gelu(x, bias)
    assert found is x
    torch.testing.assert_close(found.float(), expected, atol=2 * ERROR[dtype], rtol=2 * ERROR[dtype])


@pytest.mark.parametrize("is_packed", [False, True])
@torch.inference_mode()
def test_a_product_with_the_kernel_behind_it_is_the_product_with_bias_and_gelu(is_packed: bool) -> None:
    torch.manual_seed(0)
    linear = Linear(48, 80, gelu=True).to(DEVICE)
    linear.weight.copy_(torch.randn(80, 48) * 0.2)
    linear.bias.copy_(torch.randn(80))
    if is_packed:
        linear.pack()
    x = torch.randn(2, 3, 48, device=DEVICE)
    found = linear(x, Kernels(bias_gelu=elementwise.bias_gelu))
    torch.testing.assert_close(found, linear(x), atol=ERROR[torch.float32], rtol=1e-5)
