"""Ranks add up their parts through sockets."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from asr_server.engine.ranks import BUFFER_BYTES, SocketSum


def add_up(parts: list[Tensor]) -> list[Tensor]:
    """Return what each rank has afterwards."""
    links = [socket.socketpair() for _ in parts[1:]]
    ranks = [SocketSum(0, [ours for ours, _ in links])]
    ranks += [SocketSum(rank, [theirs]) for rank, (_, theirs) in enumerate(links, 1)]
    with ThreadPoolExecutor(len(parts)) as pool:
        list(pool.map(lambda rank, part: rank(part), ranks, parts))
    for pair in links:
        for link in pair:
            link.close()
    return parts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (0, 3), (1, 7, 13), (4, 3 * BUFFER_BYTES // 7)])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_all_ranks_get_the_same_sum(shape: tuple[int, ...], dtype: torch.dtype, num_ranks: int) -> None:
    generator = torch.Generator().manual_seed(7)
    parts = [torch.randn(shape, generator=generator).to(dtype) for _ in range(num_ranks)]
    expected = parts[0].clone()
    for part in parts[1:]:
        expected += part
    for result in add_up(parts):
        assert torch.equal(result, expected)


def test_the_end_of_another_rank_is_an_error_and_no_wait() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours, pytest.raises(OSError):
        SocketSum(0, [ours])(torch.zeros(3))
