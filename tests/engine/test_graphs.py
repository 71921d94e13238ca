"""Buckets of decode graphs. The graphs themselves need a GPU: benchmarks/gpu.sh checks them there."""

from __future__ import annotations

import pytest

from asr_server.engine.graphs import buckets


@pytest.mark.parametrize("num_slots", [1, 3, 8, 50, 128, 256])
def test_every_number_of_rows_has_a_bucket_within_the_slots(num_slots: int) -> None:
    sizes = buckets(num_slots)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == num_slots
    for rows in range(1, num_slots + 1):
        assert min(size for size in sizes if size >= rows) <= max(2 * rows, rows + 31)
