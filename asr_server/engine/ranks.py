"""Several ranks as one engine (tensor parallelism).

Rank 0 has the engine and sends each operation before it runs it, because its choices depend on wall time.
The others call `follow`. All ranks compute the same tokens: sums give all of them the same bits. Starts
no process. Connections pickle: both their ends are processes of one replica, and nobody else has them.
"""

import contextlib
import logging
import os
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed
from torch import Tensor

from asr_server.engine.config import EngineConfig, Loaded, choose_device
from asr_server.engine.runner import Runner
from asr_server.model import Shard, WhisperSizes

logger = logging.getLogger(__name__)


def check_ranks(config: EngineConfig) -> None:
    """Raise ValueError if the model cannot be split or devices are missing."""
    if reason := WhisperSizes.from_directory(Path(config.model)).why_not_shared_by(config.num_ranks):
        raise ValueError(f"--tensor-parallel-size {config.num_ranks} {reason}")
    if choose_device(config.device).type == "cuda" and torch.cuda.device_count() < config.num_ranks:
        raise ValueError(
            f"--tensor-parallel-size {config.num_ranks} needs as many GPUs; this replica has "
            f"{torch.cuda.device_count()}"
        )


def join(config: EngineConfig, rank: int, store: str, links: Sequence[Connection]) -> Shard:
    """Connect the ranks; wait for all.

    `store` is an empty file that all can open; links go from rank 0 to the others, or from a rank to rank 0.
    """
    if choose_device(config.device).type == "cpu":
        add_up = LinkSum(rank, links)
        add_up(torch.zeros(1))
        return Shard(rank, config.num_ranks, add_up)
    if rank == 0:
        logger.warning("--tensor-parallel-size has not been run on GPUs yet; one GPU a replica is the faster")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # the ranks of a replica are on one machine
    torch.distributed.init_process_group(
        "nccl",
        store=torch.distributed.FileStore(store, config.num_ranks),  # type: ignore[attr-defined]
        rank=rank,
        world_size=config.num_ranks,
    )
    return Shard(rank, config.num_ranks, torch.distributed.all_reduce)


def follow(loaded: Loaded, link: Connection) -> None:
    """Run another rank until rank 0 ends. Every error ends the replica."""
    with contextlib.suppress(EOFError):
        runner = Runner(loaded.model, loaded.rules, loaded.tokenizer, link.recv())
        with runner.launching():
            while True:
                method, arguments = link.recv()
                begun = getattr(runner, method)(*arguments)
                if method == "encode":
                    begun.join()


class LinkSum:
    """Rank 0 adds the parts in order and returns the sum, so all have the same bits."""

    def __init__(self, rank: int, links: Sequence[Connection]) -> None:
        self._leads, self._links = rank == 0, links

    def __call__(self, part: Tensor) -> None:
        """Raises EOFError or OSError when a rank has ended."""
        if self._leads:
            received = torch.empty_like(part)
            for link in self._links:
                link.recv_bytes_into(_bytes_of(received))
                part += received
            for link in self._links:
                link.send_bytes(_bytes_of(part))
        else:
            self._links[0].send_bytes(_bytes_of(part))
            self._links[0].recv_bytes_into(_bytes_of(part))


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data
