"""Weights in the layout of the library that multiplies by them, next to torch's own product."""

import pytest
import torch
import torch.nn.functional as F

from asr_server.machine import cpu_flags
from asr_server.model import products as module
from asr_server.model.products import HalfWeight, OneDnnWeight, can_pack, in_float16, multiply, pack

NEEDS_FBGEMM = pytest.mark.skipif(
    "avx2" not in cpu_flags() or not hasattr(torch.ops.quantized, "linear_prepack_fp16"),
    reason="FBGEMM has no such products here",
)


def published(num_outputs: int, num_inputs: int) -> torch.Tensor:
    """Float32 weights that float16 has, too."""
    torch.manual_seed(1)
    return (torch.randn(num_outputs, num_inputs) * 0.05).half().float()


def queries() -> torch.Tensor:
    """Such weights by 8, of which float16 lacks the smallest."""
    weight = published(96, 64) / 8
    assert not torch.equal(weight.half().float(), weight)
    return weight


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("shape", [(64,), (1, 64), (7, 64), (2, 25, 64)])
def test_a_packed_product_is_that_of_the_weight(shape: tuple[int, ...], gelu: bool) -> None:
    weight, bias, x = published(96, 64), torch.randn(96), torch.randn(2, *shape)
    packed = pack(weight)
    assert packed is not None
    expected = F.linear(x, weight, bias)
    torch.testing.assert_close(packed.product(x, bias, gelu), F.gelu(expected) if gelu else expected)
    torch.testing.assert_close(packed.product(x), F.linear(x, weight))


@pytest.mark.parametrize("weight", [published(96, 64), queries()], ids=["published", "queries"])
def test_a_row_gives_the_same_however_many_others_there_are(weight: torch.Tensor) -> None:
    packed, rows = pack(weight), torch.randn(150, 64)
    assert packed is not None
    whole = packed.product(rows)
    for count in range(1, len(rows)):
        assert torch.equal(packed.product(rows[:count]), whole[:count]), count


@NEEDS_FBGEMM
@pytest.mark.parametrize("weight", [published(96, 64), queries()], ids=["published", "queries"])
def test_float16_loses_nothing_of_published_weights(weight: torch.Tensor) -> None:
    half = in_float16(weight)
    assert isinstance(half, HalfWeight)
    assert torch.equal(half.product(torch.eye(64)), weight.t())


@NEEDS_FBGEMM
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("weight", [published(96, 64), queries()], ids=["published", "queries"])
@pytest.mark.parametrize("count", [*range(1, 9), 50])
def test_products_in_float16_are_those_of_the_weight(count: int, weight: torch.Tensor, gelu: bool) -> None:
    half, x, bias = in_float16(weight), torch.randn(count, 1, 64), torch.randn(96)
    assert half is not None
    expected = F.linear(x, weight, bias)
    torch.testing.assert_close(half.product(x, bias, gelu), F.gelu(expected) if gelu else expected)
    torch.testing.assert_close(half.product(x), F.linear(x, weight))


@NEEDS_FBGEMM
@pytest.mark.parametrize(
    ("numbers", "is_exact"), [((65504.0, 2**-24), True), ((8188.0, 2**-27), True), ((8188.0, 2**-28), False)]
)
def test_weights_are_exact_in_float16_or_times_8(numbers: tuple[float, float], is_exact: bool) -> None:
    half = in_float16(torch.tensor([numbers]).expand(16, 2).repeat(1, 8).contiguous())
    assert (half is not None) is is_exact
    if half is not None:
        assert half.product(torch.eye(16))[:2, 0].tolist() == list(numbers)


@NEEDS_FBGEMM
@pytest.mark.parametrize(
    ("flags", "dtype", "expected"),
    [
        ({"avx2"}, torch.float32, HalfWeight),
        ({"avx2", "avx512f"}, torch.float32, OneDnnWeight),
        ({"sse4_2"}, torch.float32, OneDnnWeight),
        ({"avx2"}, torch.bfloat16, OneDnnWeight),
        ({"avx2"}, torch.float64, None),
    ],
)
def test_float16_is_for_float32_on_processors_with_avx2_and_no_more(
    flags: set[str], dtype: torch.dtype, expected: type | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "cpu_flags", lambda: frozenset(flags))
    weight = published(96, 64).to(dtype)
    found = pack(weight)
    if found is not None or expected is None or can_pack(weight):
        assert type(found) is (expected or type(None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("has_bias", [False, True])
def test_two_matrices_are_multiplied_in_any_precision(has_bias: bool, dtype: torch.dtype) -> None:
    x, y = torch.randn(12, 64, dtype=dtype), torch.randn(96, 64, dtype=dtype)
    bias = torch.randn(96, dtype=dtype) if has_bias else None
    torch.testing.assert_close(multiply(x, y, bias), F.linear(x, y, bias), atol=1e-4, rtol=1e-5)
