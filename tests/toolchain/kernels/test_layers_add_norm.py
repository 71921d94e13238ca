"""The kernel under Triton's interpreter (on a GPU: compiled) against torch's addition and layer norm."""

import pytest
import torch
from torch import nn

from asr_server.model.kernels import TORCH, Kernels, layers
from asr_server.model.whisper import add_norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Of numbers up to 4: some roundings. The interpreter cuts bfloat16 off, where a GPU rounds.
ERROR = {torch.float32: 2e-6 if DEVICE == "cpu" else 1e-5, torch.bfloat16: 2**-5, torch.float16: 2**-9}


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize(
    ("shape", "of_change"), [((2, 7, 128), (2, 7, 128)), ((3, 5, 80), (5, 80)), ((1, 1, 1280), (1, 1, 1280))]
)
@torch.inference_mode()
def test_the_sum_and_its_norm_are_torchs(
    shape: tuple[int, ...], of_change: tuple[int, ...], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    norm = nn.LayerNorm(shape[-1], device=DEVICE, dtype=dtype)
    norm.weight.copy_(torch.rand(shape[-1]) + 0.5)
    norm.bias.copy_(torch.randn(shape[-1]))
    x = torch.randn(shape, device=DEVICE).to(dtype)
    change = (torch.randn(of_change, device=DEVICE) * 3 + 1).to(dtype)
    before = x.clone()
    total, normed = add_norm(x, change, norm, Kernels(add_norm=layers.add_norm))
    expected_total, expected_normed = add_norm(x, change, norm, TORCH)
    torch.testing.assert_close(total, expected_total, atol=0, rtol=2**-7 if dtype == torch.bfloat16 else 0)
    torch.testing.assert_close(normed, expected_normed, atol=ERROR[dtype], rtol=0)
    assert torch.equal(x, before), "a graph computes it again from the same memory"


@pytest.mark.parametrize("kernels", [TORCH, Kernels(add_norm=layers.add_norm)])
@torch.inference_mode()
def test_what_leaves_float16_is_kept_within_it(kernels: Kernels) -> None:
    norm = nn.LayerNorm(16, device=DEVICE, dtype=torch.float16)
    large = torch.full((1, 3, 16), 60_000.0, device=DEVICE, dtype=torch.float16)
    large[..., ::2] *= -1
    total, normed = add_norm(large, large, norm, kernels)
    assert total.abs().max() == torch.tensor(torch.finfo(torch.float16).max - 1000).half()
    assert torch.isfinite(normed).all()


@pytest.mark.parametrize("num_rows", [3, 4])
@torch.inference_mode()
def test_programs_may_have_two_rows_the_last_missing(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "_ROWS", 2)
    norm = nn.LayerNorm(80, device=DEVICE)
    x, change = torch.randn(2, num_rows, 80, device=DEVICE)
    for found, expected in zip(
        add_norm(x, change, norm, Kernels(add_norm=layers.add_norm)),
        add_norm(x, change, norm, TORCH),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
