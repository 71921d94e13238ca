"""Weights in the layout of the library that multiplies by them, next to torch's own product."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from asr_server.machine import cpu_flags
from asr_server.model.packed import HalfWeight, in_float16, pack

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
@pytest.mark.parametrize("number", [1 + 2**-12, 1e5, float("nan")])
def test_weights_that_float16_lacks_keep_their_precision(number: float) -> None:
    weight = published(96, 64)
    weight[5, 7] = number
    assert in_float16(weight) is None
    packed, unit = pack(weight), torch.eye(64)[7:8]
    if packed is not None and number == number:
        assert packed.product(unit)[0, 5] == number
