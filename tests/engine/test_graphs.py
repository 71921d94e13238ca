"""Which graph serves which step. The graphs themselves need a GPU: test_cuda.py has them there."""

from __future__ import annotations

import pytest

from asr_server.engine.graphs import context_buckets, row_buckets, smallest


@pytest.mark.parametrize("num_slots", [1, 3, 8, 50, 128, 256])
def test_every_number_of_rows_has_a_bucket_within_the_slots(num_slots: int) -> None:
    sizes = row_buckets(num_slots)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == num_slots
    for rows in range(1, num_slots + 1):
        assert min(size for size in sizes if size >= rows) <= max(2 * rows, rows + 31)


@pytest.mark.parametrize("num_positions", [32, 64, 448])
def test_every_context_has_a_bucket_within_the_positions(num_positions: int) -> None:
    assert context_buckets(num_positions)[-1] == num_positions


def test_the_smallest_shape_that_covers_a_step_is_taken() -> None:
    shapes = [(1, 64), (8, 64), (1, 448), (8, 448)]
    assert smallest(shapes, (1, 64)) == (1, 64)
    assert smallest(shapes, (2, 10)) == (8, 64)
    assert smallest(shapes, (1, 65)) == (1, 448)
    with pytest.raises(ValueError):
        smallest(shapes, (9, 1))
