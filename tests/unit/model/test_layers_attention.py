"""Attention over the cache: what a GPU computes, with tensors that only pretend to be there, and a CPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from asr_server.model import layers
from asr_server.model.layers import (
    attend_cached,
    attend_cached_audio,
)
from tests.unit.model.test_whisper import LargestOf


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
            attended = attend_cached_audio(query, values.transpose(2, 3), values, rows)
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
from asr_server.engine.config import keep_freed_memory
from asr_server.model.layers import attend_cached

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
