"""The parts of a layer on a CPU: products, attention head by head, and how their weights are loaded."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from asr_server.model import layers
from asr_server.model.layers import (
    Behind,
    Linear,
    attend_audio,
    attend_cached,
)

HEADS, DEPTH = 2, 4
WIDTH = HEADS * DEPTH


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def linear(num_inputs: int, num_outputs: int, gelu: bool = False) -> Linear:
    made = Linear(num_inputs, num_outputs, gelu).requires_grad_(False)
    made.weight.copy_(random(num_outputs, num_inputs))
    made.bias.copy_(random(num_outputs, seed=1))
    return made


# -- Products -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("shape", [(6,), (1, 1, 6), (3, 6), (2, 20, 6)])
def test_a_product_has_a_bias_and_where_asked_a_gelu(shape: tuple[int, ...], gelu: bool, packs: bool) -> None:
    product, x = linear(6, 5, gelu), random(*shape, seed=2)
    expected = x @ product.weight.t() + product.bias
    expected = expected * 0.5 * (1 + torch.erf(expected / 2**0.5)) if gelu else expected
    assert not product.is_packed
    if packs:
        product.pack()
        assert product.weight.numel() == (0 if product.is_packed else 30)
    torch.testing.assert_close(product(x), expected, atol=1e-5, rtol=1e-5)


# -- Attention ------------------------------------------------------------------------------------------


def expected_attention(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    """[T, H, d], [N, H, d] twice and [H, N] to [T, D]."""
    scores = torch.einsum("thd,nhd->htn", query, keys)
    scores = scores + (bias[:, None] if isinstance(bias, Tensor) else bias)
    return torch.einsum("htn,nhd->thd", scores.softmax(-1), values).flatten(1)


@pytest.mark.parametrize("num_heads", [HEADS, 4])
@pytest.mark.parametrize("has_biases", [False, True])
@pytest.mark.parametrize("num_behind", [0, 5])
@pytest.mark.parametrize("has_amx", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_audio_attends_to_all_of_itself_and_to_what_is_behind_it(
    dtype: torch.dtype,
    has_amx: bool,
    num_behind: int,
    has_biases: bool,
    num_heads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    width = num_heads * DEPTH
    monkeypatch.setattr(layers, "HAS_AMX", has_amx)
    monkeypatch.setattr(layers, "_QUERIES", 4)  # that are computed at once
    qkv = (random(2, 7, 3 * width) / 2).to(dtype)
    more = (random(num_behind, 2 * width, seed=1) / 2).to(dtype)
    biases = 2 * random(num_heads, num_behind, seed=2).to(dtype) if has_biases else None
    behind = Behind(more, biases) if num_behind else None
    found = attend_audio(qkv, num_heads, behind)
    assert (found.dtype, found.shape) == (dtype, (2, 7, width))
    for row in range(2):
        query, keys, values = qkv[row].float().view(7, 3, num_heads, DEPTH).unbind(1)
        bias: Tensor | float = 0.0
        if behind is not None:
            more_keys, more_values = more.float().view(num_behind, 2, num_heads, DEPTH).unbind(1)
            keys, values = torch.cat([keys, more_keys]), torch.cat([values, more_values])
            bias = 0.0 if biases is None else F.pad(biases.float(), (7, 0))
        expected = expected_attention(query, keys, values, bias)
        atol = 1e-5 if dtype == torch.float32 else 0.03
        torch.testing.assert_close(found[row].float(), expected, atol=atol, rtol=0)


@pytest.mark.parametrize("by_rows", [False, True])
def test_queries_attend_to_cached_text_as_far_as_the_mask_lets_them(by_rows: bool) -> None:
    query = random(2, 1, HEADS, DEPTH)
    keys, values = random(2, HEADS, 6, DEPTH, seed=1), random(2, HEADS, 6, DEPTH, seed=2)
    mask = torch.zeros(2, 1, 1, 6)
    mask[1, ..., 4:] = float("-inf")
    rows = torch.arange(2 * HEADS * 6, dtype=torch.int32).view(2 * HEADS, 6) if by_rows else None
    found = attend_cached(query, keys, values.view(-1, DEPTH) if by_rows else values, mask, rows)
    assert found.shape == (2, 1, WIDTH)
    for row, seen in enumerate((6, 4)):
        own = (each[row, :, :seen].transpose(0, 1) for each in (keys, values))
        torch.testing.assert_close(found[row], expected_attention(query[row], *own))


# -- Weights --------------------------------------------------------------------------------------------
