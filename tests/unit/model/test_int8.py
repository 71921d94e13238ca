"""Products in 8-bit integers, next to float32."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from asr_server.machine import VNNI_FLAGS, cpu_flags
from asr_server.model import products as int8
from asr_server.model.products import (
    Int8EncoderLinear,
    Int8EncoderWeight,
    Int8Linear,
    Int8Weight,
    Linear,
    can_multiply_in_int8,
    pack_rows,
    packed_row_bytes,
    sum_weighted_packed_rows,
    unpack_rows,
)

pytestmark = pytest.mark.skipif(not can_multiply_in_int8(), reason="oneDNN has no such products here")


def products(gelu: bool) -> tuple[Linear, Int8Linear]:
    torch.manual_seed(1)
    exact, rounded = Linear(64, 32, gelu), Int8Linear(64, 32, gelu)
    nn.init.normal_(exact.weight)
    nn.init.normal_(exact.bias)
    rounded.load_state_dict(exact.state_dict())
    rounded.pack()
    return exact, rounded


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@torch.inference_mode()
@pytest.mark.parametrize("gelu", [False, True])
def test_a_layer_is_near_the_one_in_float32(gelu: bool) -> None:
    exact, rounded = products(gelu)
    x = torch.randn(2, 100, 64) * torch.logspace(-3, 3, 100)[:, None]  # each row has a scale of its own
    expected, found = exact(x), rounded(x)
    assert found.shape == expected.shape
    errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert 0.001 < errors.max() < 0.05


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gelu", [False, True])
def test_an_encoders_layer_is_near_the_one_in_float32(gelu: bool, dtype: torch.dtype) -> None:
    exact, by_row = products(gelu)
    rounded = Int8EncoderLinear(64, 32, gelu).to(dtype)
    rounded.load_state_dict(exact.state_dict())
    rounded.pack()
    x = torch.randn(1, 3000, 64) - 0.3  # more rows than are rounded at once
    found = rounded(x.to(dtype))
    assert (found.dtype, found.shape) == (dtype, (1, 3000, 32))
    assert 0.001 < error(found.float(), exact(x)) < 0.02
    if not gelu and dtype == torch.float32:
        assert torch.equal(found, by_row(x))


@torch.inference_mode()
@pytest.mark.parametrize("strange", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_is_seen_where_all_rows_have_one_scale(strange: float) -> None:
    layer = Int8EncoderLinear(64, 32, gelu=True)
    nn.init.normal_(layer.weight)
    layer.pack()
    assert not layer(torch.zeros(1, 8, 64)).any()
    x = torch.randn(1, 8, 64)
    x[0, 3, 7] = strange
    assert not layer(x).isfinite().all()


@torch.inference_mode()
def test_a_row_gives_the_same_whoever_is_beside_it() -> None:
    _, linear = products(gelu=True)
    x = torch.randn(16, 64)
    x[3] *= 1000
    assert torch.equal(linear(x)[5:6], linear(x[5:6]))


_WITHOUT_VNNI = """
import torch
from asr_server.model import products as int8
int8.cpu_flags = lambda: {"avx2"}
torch.manual_seed(0)
weight, x = torch.rand(32, 64) + 1, torch.rand(8, 64) + 1
expected = x @ weight.t()
print(float((int8.Int8Weight(weight).product(x) - expected).norm() / expected.norm()))
"""


@pytest.mark.slow
def test_sums_do_not_overflow_where_pairs_are_added_in_16_bits() -> None:
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    command = [sys.executable, "-c", _WITHOUT_VNNI]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert float(printed) < 0.01


@torch.inference_mode()
def test_zeros_stay_zeros_and_numbers_that_are_none_are_seen() -> None:
    weight = torch.randn(32, 64)
    weight[0] = 0
    matrix = Int8Weight(weight)
    x = torch.randn(2, 64)
    assert not matrix.product(x)[:, 0].any()
    assert not matrix.product(torch.zeros(2, 64)).any()
    x[1, 7] = float("nan")
    found = matrix.product(x)
    assert found[0].isfinite().all()
    assert found[1].isnan().all()


@torch.inference_mode()
def test_packed_rows_are_summed_where_they_are() -> None:
    torch.manual_seed(3)
    matrix = torch.randn(40, 50) * torch.logspace(-2, 2, 40)[:, None]
    packed = pack_rows(matrix.view(2, 20, 50))
    assert packed.shape == (2, 20, packed_row_bytes(50))
    steps = (matrix.amax(1) - matrix.amin(1)) / 255
    unpacked = unpack_rows(packed, torch.float32)
    assert unpacked.shape == (2, 20, 50)
    unpacked = unpacked.flatten(0, 1)
    assert ((unpacked - matrix).abs() <= 0.51 * steps[:, None]).all()
    rows = torch.tensor([[3, 4, 5], [20, 21, 22], [3, 4, 5], [37, 38, 39]], dtype=torch.int32)
    weights = torch.randn(4, 3)
    expected = torch.einsum("gn,gnm->gm", weights, unpacked[rows.long()])
    starts = torch.tensor([0, 3, 6, 9], dtype=torch.int32)
    found = sum_weighted_packed_rows(weights.flatten(), packed.flatten(0, 1), rows.flatten(), starts)
    torch.testing.assert_close(found, expected)


@torch.inference_mode()
@pytest.mark.parametrize("size", [1e-9, 1e-3, 1.0, 1e6])
def test_products_are_as_near_whatever_the_size_of_the_numbers(size: float) -> None:
    torch.manual_seed(4)
    weight, x = torch.randn(32, 64) * size, torch.randn(20, 64) * size
    assert 0.001 < error(Int8Weight(weight).product(x), x @ weight.t()) < 0.03
    found = Int8EncoderWeight(torch.eye(64)).product(x, torch.zeros(64), gelu=True)
    assert error(found, torch.nn.functional.gelu(x)) < 0.03


def test_weights_have_a_bit_less_on_processors_without_vnni(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = torch.randn(200, 64), torch.eye(64)
    has_vnni, errors = bool(cpu_flags() & VNNI_FLAGS), []
    for flags in (frozenset({"avx2"}), VNNI_FLAGS):
        monkeypatch.setattr(int8, "cpu_flags", lambda flags=flags: flags)
        errors.append(error(Int8Weight(weight).product(x), weight.t()))
    assert 0.011 < errors[0] < 0.013
    if has_vnni:  # without it, sums of two such products overflow
        assert 1.7 < errors[0] / errors[1] < 2.3
