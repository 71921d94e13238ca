"""The kernel under Triton's interpreter (on a GPU: compiled) against torch's operations."""

from __future__ import annotations

import pytest
import torch

from asr_server.model.float8 import FP8, quantise
from asr_server.model.kernels import elementwise

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


@pytest.mark.skipif(
    ON_GPU and torch.cuda.get_device_capability() < (8, 9), reason="the GPU has no 8-bit floats"
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [64, 144])
def test_rows_have_torchs_numbers_and_scales(width: int, dtype: torch.dtype) -> None:
    """Of numbers that 8 bits can say: Triton's interpreter errs where rounding carries (1.99 becomes 1)."""
    torch.manual_seed(0)
    exact = (torch.randn(7, width, device=DEVICE) * 40).to(FP8).float()
    exact[:, 5] = -448
    exact[2] = 0.0
    x = (exact * 2.0 ** torch.arange(-6, 1, device=DEVICE)[:, None]).to(dtype)
    quantised, scales = elementwise.quantise_rows(x)
    expected, expected_scales = quantise(x, -1)
    torch.testing.assert_close(scales, expected_scales)
    assert torch.equal(quantised.float(), expected.float())
    assert torch.equal(quantised.float(), exact)


@pytest.mark.skipif(
    ON_GPU and torch.cuda.get_device_capability() < (8, 9), reason="the GPU has no 8-bit floats"
)
def test_programs_may_have_two_rows_of_which_the_last_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elementwise, "_ROWS", 2)
    x = torch.tensor([[448.0, 1.0], [-224.0, 2.0], [0.5, 448.0]], device=DEVICE)
    for found, expected in zip(elementwise.quantise_rows(x), quantise(x, -1), strict=True):
        assert torch.equal(found.float(), expected.float())


@pytest.mark.skipif(not ON_GPU or torch.cuda.get_device_capability() < (8, 9), reason="needs a GPU")
def test_a_gpu_rounds_as_torch_does() -> None:
    x = torch.randn(300, 5120, device=DEVICE, dtype=torch.bfloat16)
    quantised, _ = elementwise.quantise_rows(x)
    off = quantised.float() != quantise(x, -1)[0].float()
    assert off.float().mean() < 1e-3, "only where a quotient lies between two numbers"
