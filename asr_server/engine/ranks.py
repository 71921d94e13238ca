"""Several ranks as one engine (tensor parallelism).

Rank 0 has the engine and sends each operation before it runs it, because its choices depend on wall time.
The others call `follow`. All ranks compute the same tokens: sums give all of them the same bits. Starts
no process.
"""

import logging
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch
import torch.distributed
from torch import Tensor

from asr_server.engine.alignment import AlignedText
from asr_server.engine.config import EngineConfig, Loaded, choose_device
from asr_server.engine.runner import Runner, StepPlan, Tell
from asr_server.engine.slots import SlotStart
from asr_server.model import Shard, WhisperSizes

logger = logging.getLogger(__name__)


Broadcast = Callable[[bytes], None]


# What the runner's methods take, as it crosses to another rank.
_ARGUMENTS: Final = {
    "encode": tuple[list[int], list[int], list[bytes]],  # float32
    "prefill": tuple[list[int], list[list[int]], int],
    "language_probabilities": tuple[list[int]],
    "start": tuple[list[SlotStart]],
    "check_draft": tuple[SlotStart, list[int]],
    "branch": tuple[list[int], list[SlotStart]],
    "decode": tuple[StepPlan],
    "attend": tuple[list[AlignedText]],
    "move": tuple[list[tuple[int, int]], int],
}


def check_ranks(config: EngineConfig) -> None:
    """Raise ValueError if the model cannot be split or devices are missing."""
    if reason := WhisperSizes.from_directory(Path(config.model)).why_not_shared_by(config.num_ranks):
        raise ValueError(f"--tensor-parallel-size {config.num_ranks} {reason}")
    if choose_device(config.device).type == "cuda" and torch.cuda.device_count() < config.num_ranks:
        raise ValueError(
            f"--tensor-parallel-size {config.num_ranks} needs as many GPUs; this replica has "
            f"{torch.cuda.device_count()}"
        )


def join(config: EngineConfig, rank: int, store: str, links: Sequence[socket.socket]) -> Shard:
    """Connect the ranks; wait for all.

    `store` is an empty file that all can open; links go from rank 0 to the others, or from a rank to rank 0.
    """
    if choose_device(config.device).type == "cpu":
        add_up = SocketSum(rank, links)
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


def lead(broadcast: Broadcast, config: EngineConfig) -> Tell:
    """Let the other ranks begin; return what tells them each method to call."""
    broadcast(msgspec.msgpack.encode(config))

    def tell(method: str, arguments: tuple[Any, ...]) -> None:
        broadcast(msgspec.msgpack.encode((method, arguments), enc_hook=np.ndarray.tobytes))

    return tell


def follow(loaded: Loaded, receive: Callable[[], bytes | None]) -> None:
    """Run another rank until None arrives. Every error ends the replica."""
    begin = receive()
    if begin is None:
        return
    config = msgspec.msgpack.decode(begin, type=EngineConfig)
    runner = Runner(loaded.model, loaded.rules, loaded.tokenizer, config)
    with runner.launching():
        while (message := receive()) is not None:
            _do(runner, message)
    runner.close()


def _do(runner: Runner, message: bytes) -> None:
    method, raw = msgspec.msgpack.decode(message, type=tuple[str, msgspec.Raw])
    arguments: tuple[Any, ...] = msgspec.msgpack.decode(raw, type=_ARGUMENTS[method])
    if method == "encode":
        slots, audio_slots, samples = arguments
        runner.encode(slots, audio_slots, [np.frombuffer(each, np.float32) for each in samples]).join()
    else:
        getattr(runner, method)(*arguments)


BUFFER_BYTES = 1 << 20


class SocketSum:
    """Rank 0 adds the parts in order and returns the sum, so all have the same bits."""

    def __init__(self, rank: int, links: Sequence[socket.socket]) -> None:
        self._leads, self._links = rank == 0, links
        for link in links:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)

    def __call__(self, part: Tensor) -> None:
        if self._leads:
            self._add_up(part)
        else:
            self._links[0].sendall(_bytes_of(part))
            _receive(self._links[0], part)

    def _add_up(self, part: Tensor) -> None:
        received = torch.empty_like(part)
        for link in self._links:
            _receive(link, received)
            part += received
        for link in self._links:
            link.sendall(_bytes_of(part))


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data


def _receive(link: socket.socket, tensor: Tensor) -> None:
    view = _bytes_of(tensor)
    while view:
        if not (received := link.recv_into(view, 0, socket.MSG_WAITALL)):
            raise ConnectionAbortedError("a rank has ended")
        view = view[received:]
