"""Numbers and products in 8-bit floats, next to float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from asr_server.model.float8 import (
    FP8,
    Float8Linear,
    as_bytes,
    dequantise,
    quantise,
    quantise_rows,
    scaled_product,
)
from asr_server.model.kernels import Kernels
from asr_server.model.layers import Linear
from tests.model.test_whisper import LargestOf

HAS_FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
DEVICE = "cuda" if HAS_FP8 else "cpu"
ROUNDING = 1 / 16  # half of the last of three bits, next to a mantissa of 1


@pytest.mark.parametrize("size", [1e-9, 1.0, 1e6])
def test_numbers_keep_three_bits_whatever_their_size(size: float) -> None:
    torch.manual_seed(0)
    x = (torch.rand(4, 3, 50) + 0.1) * size * torch.tensor([1, 100, 0.01])[:, None]
    quantised, scales = quantise(x, -1)
    assert quantised.dtype == FP8
    assert scales.shape == (4, 3, 1)
    found = dequantise(quantised, scales, torch.float32)
    assert ((found - x).abs() / x).max() <= ROUNDING
    torch.testing.assert_close(found.amax(-1), x.amax(-1))  # the largest is exact


def test_zeros_stay_zeros() -> None:
    assert not dequantise(*quantise(torch.zeros(2, 3), -1), torch.float32).any()


def test_8_bit_floats_are_seen_as_bytes_and_others_as_they_are() -> None:
    numbers = torch.tensor([1.0, -2.0])
    assert as_bytes(numbers) is numbers
    assert as_bytes(numbers.to(FP8)).tolist() == [0x38, 0xC0]


def products(gelu: bool) -> tuple[Linear, Float8Linear]:
    torch.manual_seed(1)
    exact, rounded = Linear(64, 32, gelu), Float8Linear(64, 32, gelu)
    torch.nn.init.normal_(exact.weight)
    torch.nn.init.normal_(exact.bias)
    rounded.load_state_dict(exact.state_dict())
    return exact, rounded


@torch.inference_mode()
@pytest.mark.parametrize("gelu", [False, True])
def test_a_product_in_8_bits_is_near_the_one_in_float32(gelu: bool) -> None:
    exact, rounded = products(gelu)
    x = torch.randn(2, 100, 64) * torch.logspace(-3, 3, 100)[:, None]  # each row has a scale of its own
    with torch.no_grad():
        exact.pack()
        rounded.pack()
    expected, found = exact(x), rounded(x)
    errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert 0.001 < errors.max() < 0.08


@torch.inference_mode()
def test_the_product_for_gpus_is_the_one_that_the_cpu_imitates() -> None:
    _, linear = products(gelu=False)
    weight, scales = quantise(linear.weight, -1)
    x = torch.randn(2, 5, 64)
    rows, row_scales = quantise(x.flatten(0, 1), -1)
    on_device = [each.to(DEVICE) for each in (rows, row_scales, weight, scales, linear.bias)]
    try:
        found = scaled_product(*on_device).cpu().float().view(2, 5, -1)
    except RuntimeError as error:
        if DEVICE == "cuda" or "only supports per-tensor" not in str(error):
            raise
        pytest.skip("this torch multiplies with scales by row on GPUs alone")
    with torch.no_grad():
        linear.pack()
    torch.testing.assert_close(found, linear(x), atol=0.02, rtol=0.01)  # its result is rounded to bfloat16


@torch.inference_mode()
def test_a_kernel_quantises_the_rows_of_all_chunks_at_once() -> None:
    shapes: list[tuple[int, ...]] = []

    def kernel(x: Tensor) -> tuple[Tensor, Tensor]:
        shapes.append(tuple(x.shape))
        return quantise_rows(x, Kernels())

    _, linear = products(gelu=False)
    with torch.no_grad():
        linear.pack()
    x = torch.randn(2, 5, 64)
    assert torch.equal(linear(x, Kernels(quantise_rows=kernel)), linear(x))
    assert shapes == [(10, 64)]


@pytest.mark.parametrize("gelu", [None, False, True])
def test_on_a_gpu_the_product_itself_is_in_8_bits(gelu: bool | None) -> None:
    """With tensors that only pretend to be there."""
    with torch.no_grad(), FakeTensorMode():
        linear = Float8Linear(64, 32) if gelu is None else Float8Linear(64, 32, gelu)
        linear.weight = torch.nn.Parameter(torch.zeros(32, 64, device="cuda"))
        linear.bias = torch.nn.Parameter(torch.zeros(32, device="cuda"))
        linear.pack()
        assert (linear.weight.dtype, linear.weight.shape) == (FP8, (32, 64))
        assert not linear.weight.requires_grad
        assert not linear.is_packed
        with LargestOf() as made:
            found = linear(torch.zeros(2, 5, 64, device="cuda", dtype=torch.float16))
    assert (found.dtype, found.shape) == (torch.float16, (2, 5, 32))
    assert "aten._scaled_mm.default" in made.names
    assert ("aten.gelu.default" in made.names) is (gelu is True)


def test_on_a_cpu_rounded_weights_are_packed_where_others_are() -> None:
    exact, rounded = products(gelu=False)
    with torch.no_grad():
        exact.pack()
        rounded.pack()
    assert rounded.is_packed is exact.is_packed


def test_sums_are_made_within_the_tensor_cores_and_rounded_to_bfloat16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def product(
        x: Tensor, y: Tensor, scale_x: Tensor, scale_y: Tensor, bias: Tensor, **options: Any
    ) -> Tensor:
        assert options == {"out_dtype": torch.bfloat16, "use_fast_accum": True}
        return ((x.float() @ y.float()) * scale_x * scale_y + bias).bfloat16()

    monkeypatch.setattr(torch, "_scaled_mm", product)
    _, linear = products(gelu=False)
    x = torch.randn(10, 64)
    found = scaled_product(*quantise(x, -1), *quantise(linear.weight.detach(), -1), linear.bias.detach())
    with torch.no_grad():
        linear.pack()
        torch.testing.assert_close(found.float(), linear(x), atol=0.02, rtol=0.01)
