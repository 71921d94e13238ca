"""Attention on a CPU, head by head, and what a GPU and half a precision make of it."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from asr_server.model import layers
from asr_server.model.layers import Behind, attend_audio, attend_cached, attend_cached_audio
from tests.unit.model.test_whisper import LargestOf

HEADS, DEPTH = 2, 4
WIDTH = HEADS * DEPTH


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


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


@pytest.mark.parametrize("over", ["text", "audio"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_gpus_attention_scores_are_never_rounded_to_a_half_precision(dtype: torch.dtype, over: str) -> None:
    with FakeTensorMode(), LargestOf() as made:
        query = torch.zeros(2, 3, 2, 64, device="cuda", dtype=dtype)
        values = torch.zeros(2, 2, 1500, 64, device="cuda", dtype=dtype)
        if over == "text":
            attended = attend_cached(query, values, values, torch.zeros(2, 1, 3, 1500, device="cuda"))
        else:
            rows = torch.zeros(0, device="cuda")
            attended = attend_cached_audio(query, [(values.transpose(2, 3), values)], rows)
    assert attended.shape == (2, 3, 128)
    assert attended.dtype == dtype
    assert "aten.bmm.dtype" in made.names
    assert made.bytes[torch.float32] >= 4 * 2 * 2 * 3 * 1500, "the scores"


@pytest.mark.parametrize("has_amx", [False, True])
@pytest.mark.parametrize("num_queries", [1, 3])
def test_a_cpus_bfloat16_attends_nearly_as_float32_does(
    num_queries: int, has_amx: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "HAS_AMX", has_amx)
    torch.manual_seed(0)
    query = torch.randn(3, num_queries, 2, 64, dtype=torch.bfloat16)
    keys, values = torch.randn(2, 4, 2, 50, 64, dtype=torch.bfloat16)[:, :3, :, :40]
    mask = torch.zeros(3, 1, num_queries, 40, dtype=torch.bfloat16)
    mask[:, :, :, 30:] = float("-inf")
    expected = attend_cached(query.float(), keys.float(), values.float(), mask.float())
    found = attend_cached(query, keys, values, mask)
    assert found.shape == (3, num_queries, 128)
    assert found.dtype == torch.bfloat16
    assert (found - expected).norm() / expected.norm() < (0.005 if has_amx else 0.05)


_MANY_SHAPES = """
import psutil, torch
from asr_server.model.layers import attend_cached
from asr_server.process import keep_freed_memory

def attend(rows, context):
    heads = torch.ones(rows, 8, context, 64, dtype=torch.bfloat16)
    mask = torch.zeros(rows, 1, 1, context, dtype=torch.bfloat16)
    attend_cached(heads[:, :, :1].transpose(1, 2), heads, heads, mask)

keep_freed_memory()
with torch.inference_mode():
    attend(40, 200)
    before = psutil.Process().memory_info().rss
    for rows in range(1, 41):
        for context in range(4, 200, 12):
            attend(rows, context)
print((psutil.Process().memory_info().rss - before) // 2**20)
"""


@pytest.mark.slow
def test_no_memory_is_kept_for_each_number_of_rows_and_positions_of_text() -> None:
    command = [sys.executable, "-c", _MANY_SHAPES]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert int(printed) < 100, "MiB"
