"""What a GPU computes in attention, with tensors that only pretend to be there."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from asr_server.model.layers import attend_cached, attend_cached_audio
from tests.model.test_whisper import LargestOf


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
            attended = attend_cached_audio(query, values.transpose(2, 3), values, rows, None)
    assert attended.shape == (2, 3, 128)
    assert attended.dtype == dtype
    assert "aten.bmm.dtype" in made.names
    assert made.bytes[torch.float32] >= 4 * 2 * 2 * 3 * 1500, "the scores"
