"""A new text clears what others left behind it, and touches no page that was never written."""

from __future__ import annotations

from pathlib import Path

import torch

from asr_server.model import DecoderCache, WhisperSizes
from asr_server.model.text_ends import TextEnds

BASE = WhisperSizes(51865, 80, 512, 6, 8, 2048, 6, 8, 2048)
PAGE_BYTES = 4096


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def test_a_new_text_clears_only_what_was_written_in_its_slots() -> None:
    cache = DecoderCache(BASE, 64, torch.device("cpu"), torch.float32)
    cache.begin_text([2, 3], slice(2, 4), 4)
    for _ in range(20):
        cache.text_ends.on_step(4)
    for tensor in (cache.keys, cache.values):
        tensor[:, 2:4, :, :24] = torch.nan
    before = resident_bytes()
    cache.begin_text([2], slice(2, 3), 7)
    assert cache.keys.nbytes > 300 << 20
    assert resident_bytes() - before < 10 << 20
    for tensor in (cache.keys, cache.values):
        assert not tensor[:, 2, :, 7:24].any(), "NaN is true"
        assert tensor[:, 2, :, :7].isnan().all()
        assert tensor[:, 3, :, :24].isnan().all()


def test_slots_may_come_as_a_tuple_as_other_ranks_receive_them() -> None:
    ends = TextEnds(4, 448)
    ends.extend((0, 2), 5)
    ends.on_step(2)
    assert ends.restart((0, 1, 2), 3) == 6
    ends.on_step(1)
    assert [ends.restart((slot,), 3) for slot in (0, 1, 3)] == [4, 3, 0]
    assert ends.restart((2,), 1) == 3


def test_a_text_that_is_copied_clears_what_lies_behind_it_in_its_new_slot() -> None:
    cache = DecoderCache(BASE, 4, torch.device("cpu"), torch.float32)
    cache.text_ends.extend([1], 30)
    cache.values[:, 1, :, :30] = torch.nan
    cache.values[:, 3, :, :10] = 5.0
    cache.copy_text([(3, 1)], torch.tensor([(3, 1)]), 10)
    assert (cache.values[:, 1, :, :10] == 5.0).all()
    assert not cache.values[:, 1, :, 10:30].any(), "NaN is true"
