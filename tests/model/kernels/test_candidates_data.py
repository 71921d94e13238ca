"""The data that kernels are tried on shows what they leave out; what was chosen before is found again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from asr_server.model.kernels import Kernels, candidates
from asr_server.model.kernels.candidates import encoder_layer, products_of_one_row
from asr_server.model.kernels.table import NUM_WARPS
from tests.model.kernels.test_candidates import CPU, SIZES, reason_of


@torch.inference_mode()
def test_products_without_their_bias_are_not_used() -> None:
    def gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.gelu(F.linear(x, weight, bias * has_bias))

    def row_product(x: Tensor, weight: Tensor, bias: Tensor, gelu: bool) -> Tensor:
        return F.linear(x, weight, bias * has_bias)

    ours = Kernels(linear_gelu=gelu, row_product=row_product)
    for has_bias in (True, False):
        _, up = encoder_layer(ours, SIZES, CPU, torch.float32, fp8=False, rows=3)
        _, products = products_of_one_row(ours, SIZES, CPU, torch.float32, layers=1)
        for tried in (up, products):
            assert ("differs by" in reason_of(tried)) is not has_bias


@torch.inference_mode()
@pytest.mark.parametrize("wrong", range(3))
def test_a_norm_and_product_that_is_wrong_in_one_layer_is_not_used(wrong: int) -> None:
    calls: list[Tensor] = []

    def norm_product(
        x: Tensor, change: Tensor, weight: Tensor, bias: Tensor, eps: float, _: Any, *product: Any
    ) -> tuple[Tensor, Tensor]:
        own, own_bias, gelu = product
        found = F.linear(F.layer_norm(x + change, (64,), weight, bias, eps), own, own_bias)
        calls.append(own)
        return x + change, (F.gelu(found) if gelu else found) + (len(calls) - 1 == wrong)

    ours = Kernels(norm_product=norm_product)
    tried, _ = products_of_one_row(ours, SIZES, CPU, torch.float32, layers=1)
    assert "differs by" in reason_of(tried)
    assert len(calls) == 3


def test_forms_that_won_before_are_found_by_their_names() -> None:
    def plain(**options: int) -> dict[str, int]:
        return options

    ours = Kernels(flash_decode=plain, add_norm=plain, row_product=plain, advance=plain)  # type: ignore[arg-type]
    for count in NUM_WARPS:
        forms = {"flash_decode": f" of {count} warps", "add_norm": None, "row_product": ""}
        found = candidates._in_forms(ours, forms)
        assert found.flash_decode is not None
        assert found.flash_decode() == {"num_warps": count}
        assert [found.add_norm, found.row_product, found.advance] == [None, plain, plain]  # type: ignore[comparison-overlap]
