"""Several ranks as one engine (tensor parallelism).

Rank 0 has the engine and sends each operation before it runs it, because its choices depend on wall time.
The others call `follow`. All ranks compute the same tokens: sums give all of them the same bits. Starts
no process.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
import numpy as np
import torch
import torch.distributed
from torch import Tensor

from asr_server.core import ChunkId, ChunkResult, DecodingOptions, Samples
from asr_server.engine.active_chunk import ActiveChunk
from asr_server.engine.alignment import PendingAlignment
from asr_server.engine.config import EngineConfig, Loaded, choose_device
from asr_server.engine.cuda import HostCopy, Pending
from asr_server.engine.runner import Runner, StepPlan
from asr_server.engine.slots import SlotStart
from asr_server.model import Shard, WhisperSizes

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Begin(msgspec.Struct, frozen=True, tag=True):
    config: EngineConfig


class Encode(msgspec.Struct, frozen=True, tag=True):
    slots: tuple[int, ...]
    audio_slots: tuple[int, ...]
    samples: tuple[bytes, ...]  # float32


class Prefill(msgspec.Struct, frozen=True, tag=True):
    slots: tuple[int, ...]
    prompts: tuple[tuple[int, ...], ...]
    sot_index: int


class DetectLanguages(msgspec.Struct, frozen=True, tag=True):
    slots: tuple[int, ...]


class Start(msgspec.Struct, frozen=True, tag=True):
    starts: tuple[SlotStart, ...]


class Branch(msgspec.Struct, frozen=True, tag=True):
    sources: tuple[int, ...]
    starts: tuple[SlotStart, ...]


class Decode(msgspec.Struct, frozen=True, tag=True):
    plan: StepPlan


class FinishedSlot(msgspec.Struct, frozen=True):
    slot: int
    audio_slot: int
    num_samples: int
    options: DecodingOptions
    language: str | None
    tokens: tuple[int, ...]  # and how they ended: what is read of them decides what is aligned
    finish_reason: Literal["stop", "length"]


class Align(msgspec.Struct, frozen=True, tag=True):
    slots: tuple[FinishedSlot, ...]


class Move(msgspec.Struct, frozen=True, tag=True):
    moves: tuple[tuple[int, int], ...]
    length: int


Operation = Begin | Encode | Prefill | DetectLanguages | Start | Branch | Decode | Align | Move
Broadcast = Callable[[Operation], None]


class RanksFailed(Exception):
    """One rank failed, so all must be replaced."""


def check_ranks(config: EngineConfig) -> None:
    """Raise ValueError if the model cannot be split or devices are missing."""
    Shard(0, config.num_ranks).check(WhisperSizes.from_directory(Path(config.model)))
    if choose_device(config.device).type == "cuda" and torch.cuda.device_count() < config.num_ranks:
        raise ValueError(
            f"--tensor-parallel-size {config.num_ranks} needs as many GPUs; this replica has "
            f"{torch.cuda.device_count()}"
        )


def join(config: EngineConfig, rank: int, store: str, links: Sequence[socket.socket]) -> Shard:
    """Connect the ranks; wait for all.

    Args:
        store: an empty file that all ranks can open.
        links: from rank 0 to the others, or from a rank to rank 0.
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


class LeadingRunner:
    """Rank 0's runner: send each operation to the other ranks, then run it."""

    def __init__(self, runner: Runner, broadcast: Broadcast) -> None:
        self.model = runner.model
        self.kernels_report, self.window = runner.kernels_report, runner.window
        self.row_sizes = runner.row_sizes
        self._runner = runner
        self._broadcast = broadcast

    def launching(self) -> AbstractContextManager[object]:
        return self._runner.launching()

    def encode(self, slots: Sequence[int], audio_slots: Sequence[int], chunks: Sequence[Samples]) -> Pending:
        operation = Encode(tuple(slots), tuple(audio_slots), tuple(chunk.tobytes() for chunk in chunks))
        return self._together(operation, lambda: self._runner.encode(slots, audio_slots, chunks))

    def prefill(self, slots: Sequence[int], prompts: list[list[int]], sot_index: int) -> None:
        operation = Prefill(tuple(slots), tuple(map(tuple, prompts)), sot_index)
        self._together(operation, lambda: self._runner.prefill(slots, prompts, sot_index))

    def language_probabilities(self, slots: Sequence[int]) -> HostCopy:
        operation = DetectLanguages(tuple(slots))
        return self._together(operation, lambda: self._runner.language_probabilities(slots))

    def start(self, starts: Sequence[SlotStart]) -> None:
        self._together(Start(tuple(starts)), lambda: self._runner.start(starts))

    def branch(self, sources: Sequence[int], starts: Sequence[SlotStart]) -> None:
        operation = Branch(tuple(sources), tuple(starts))
        self._together(operation, lambda: self._runner.branch(sources, starts))

    def decode(self, plan: StepPlan) -> HostCopy:
        return self._together(Decode(plan), lambda: self._runner.decode(plan))

    def align(self, finished: Sequence[tuple[ActiveChunk, ChunkResult]]) -> list[PendingAlignment]:
        operation = Align(tuple(_finished(*each) for each in finished))
        return self._together(operation, lambda: self._runner.align(finished))

    def move(self, moves: Sequence[tuple[int, int]], length: int) -> None:
        self._together(Move(tuple(moves), length), lambda: self._runner.move(moves, length))

    def close(self) -> None:
        self._runner.close()

    def _together(self, operation: Operation, compute: Callable[[], T]) -> T:
        """Tell the other ranks first. Any error ends the replica: the others may not share it."""
        self._broadcast(operation)
        try:
            return compute()
        except (torch.OutOfMemoryError, MemoryError, ValueError) as error:
            raise RanksFailed(f"{type(operation).__name__} failed on rank 0: {error}") from error


def follow(loaded: Loaded, receive: Callable[[], Operation | None]) -> None:
    """Run another rank until None arrives. Every error ends the replica."""
    begin = receive()
    if not isinstance(begin, Begin):
        return
    runner = Runner(loaded.model, loaded.rules, loaded.tokenizer, begin.config)
    with runner.launching():
        while (operation := receive()) is not None:
            _do(runner, operation)
    runner.close()


def _do(runner: Runner, operation: Operation) -> None:
    match operation:
        case Encode(slots, audio_slots, samples):
            runner.encode(slots, audio_slots, [np.frombuffer(each, np.float32) for each in samples]).join()
        case Prefill(slots, prompts, sot_index):
            runner.prefill(slots, [list(prompt) for prompt in prompts], sot_index)
        case DetectLanguages(slots):
            runner.language_probabilities(slots)
        case Start(starts):
            runner.start(starts)
        case Branch(sources, starts):
            runner.branch(sources, starts)
        case Decode(plan):
            runner.decode(plan)
        case Align(finished):
            runner.align([(_chunk(each), _result(each)) for each in finished])
        case Move(moves, length):
            runner.move(moves, length)
        case Begin():
            raise RanksFailed("a second beginning")


def _finished(chunk: ActiveChunk, result: ChunkResult) -> FinishedSlot:
    return FinishedSlot(
        chunk.slot,
        chunk.audio_slot,
        len(chunk.samples),
        chunk.options,
        chunk.language,
        result.tokens,
        result.finish_reason,
    )


def _chunk(finished: FinishedSlot) -> ActiveChunk:
    samples = np.broadcast_to(np.float32(0), finished.num_samples)
    slots, audio_slot = [finished.slot], finished.audio_slot
    return ActiveChunk(ChunkId("", 0), samples, finished.options, finished.language, slots, audio_slot)


def _result(finished: FinishedSlot) -> ChunkResult:
    return ChunkResult(finished.tokens, (), 0.0, 0.0, 0.0, 0.0, None, finished.finish_reason)


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
