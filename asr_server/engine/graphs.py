"""CUDA graphs: a step is hundreds of kernels, and launching them takes longer than running them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_WARM_UPS = 2  # cuBLAS and the allocator settle before anything is recorded


class Graphs:
    """One graph for each number of rows, in one memory pool; the largest first, so that the others fit in."""

    def __init__(self, step: Callable[[int], Tensor], sizes: list[int]) -> None:
        """
        Args:
            step: computes that many rows; always the same tensors in.
            sizes: numbers of rows, rising.
        """
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        for rows in reversed(sizes):
            self._graphs[rows] = self._capture(step, rows)

    def _capture(self, step: Callable[[int], Tensor], rows: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(_WARM_UPS):
                step(rows)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = step(rows)
        return graph, output

    def replay(self, num_rows: int) -> Tensor:
        """Computes at least that many rows. The result is overwritten by the next replay."""
        bucket = min(rows for rows in self._graphs if rows >= num_rows)
        graph, output = self._graphs[bucket]
        graph.replay()
        return output


def buckets(num_slots: int) -> list[int]:
    """Of a decode step: 1, 2, 4, 8, then steps of 8 up to 64, steps of 32 beyond, and all slots."""
    sizes = {1, 2, 4, *range(8, 65, 8), *range(96, num_slots, 32), num_slots}
    return sorted(size for size in sizes if size <= num_slots)
