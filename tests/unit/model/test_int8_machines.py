"""On which machines there are products in 8-bit integers."""

import pytest
import torch

from asr_server.model import products as int8


@pytest.mark.parametrize(
    ("flags", "has_products", "can"),
    [({"avx2", "fma"}, True, True), ({"sse4_2"}, True, False), ({"avx2"}, False, False)],
)
def test_products_in_8_bits_need_avx2_and_a_torch_that_has_them(
    flags: set[str], has_products: bool, can: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Products:
        pass

    if has_products:
        Products.qlinear_prepack = None  # type: ignore[attr-defined]
    monkeypatch.setattr(int8, "cpu_flags", lambda: frozenset(flags))
    monkeypatch.setattr(torch.ops, "onednn", Products)
    assert int8.can_multiply_in_int8() == can
