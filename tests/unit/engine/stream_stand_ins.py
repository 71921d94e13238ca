"""A GPU's streams and events, imitated on CPU, and a watch on who may use which memory when.

Every operation belongs to the stream that is current. A stream knows how far each other stream is certain to
have come: it learns that by waiting. Where an operation reads or writes memory that another stream wrote, or
writes what another one reads, without being certain that it is behind, it is a race.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from asr_server.engine import cuda as engine_cuda
from asr_server.engine import encoding, runner
from tests.unit.engine.device_stand_ins import living_tensors, record

Clock = dict[int, int]  # by stream: how many of its operations are certain to be done


def merge(known: Clock, learned: Clock) -> None:
    for stream, count in learned.items():
        known[stream] = max(known.get(stream, 0), count)


class StandInStream:
    made: list[StandInStream]  # in this test
    current: StandInStream
    host: Clock  # what the host is certain of

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.priority = priority
        self.number = len(StandInStream.made)
        self.clock: Clock = {self.number: 0}
        StandInStream.made.append(self)

    def launch(self) -> None:
        merge(self.clock, StandInStream.host)
        self.clock[self.number] += 1

    def wait_stream(self, other: StandInStream) -> None:
        merge(self.clock, other.clock)

    def wait_event(self, event: StandInEvent) -> None:
        merge(self.clock, event.clock)


class StandInEvent:
    def __init__(self) -> None:
        self.clock: Clock = {}
        self._num_polls = random.Random(len(StandInStream.made)).randrange(4)

    def record(self) -> None:
        self.clock = dict(StandInStream.current.clock)

    def query(self) -> bool:
        self._num_polls -= 1
        if self._num_polls < 0:
            self.synchronize()
        return self._num_polls < 0

    def synchronize(self) -> None:
        merge(StandInStream.host, self.clock)


class StandInHostCopy(engine_cuda.HostCopy):
    """A copy to the host that is there once its event has come."""

    def __init__(self, tensor: Tensor) -> None:
        arrived: Any = StandInEvent()
        self._host, self._event = tensor.clone(), arrived
        arrived.record()


@dataclass
class Block:
    """What is known of some memory."""

    owner: int | None  # the stream that it was allocated on; None: it was there before, and stays
    written: tuple[int, int] = (0, 0)  # by which stream, and the how manieth of its operations that was
    read: Clock = field(default_factory=dict)
    recorded: set[int] = field(default_factory=set)  # streams told to the allocator by `record_stream`
    shared: dict[int, str] = field(default_factory=dict)  # streams that have used it, but for its owner

    def check(self) -> None:
        for stream, name in self.shared.items():
            assert stream in self.recorded, f"{name} uses memory that may be given away meanwhile"


class WatchMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fails on a race, and on memory used on a stream that the allocator does not know of.

    Args:
        exempt: memory that streams share on purpose.
    """

    def __init__(self, exempt: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._exempt = {address(each) for each in exempt}
        self._blocks = {address(each): Block(None) for each in living_tensors()}
        self.num_shared = 0  # uses of memory by another stream than the one it was allocated on

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        stream = StandInStream.current
        stream.launch()
        inputs = tensors_of((args, kwargs))
        if function is torch.ops.aten.lift_fresh.default:
            self.forget(*inputs)
        output = function(*args, **(kwargs or {}))
        before, written = (
            {address(each) for each in inputs},
            {address(each) for each in _written(function, args)},
        )
        outputs = {address(each) for each in tensors_of(output)}
        if outputs <= before and outputs and not written:
            return output  # a view, which touches no memory
        for each in before:
            self._use(str(function), each, stream, each in written)
        for each in outputs - before:
            self._blocks.get(each, Block(None)).check()
            self._blocks[each] = Block(stream.number, (stream.number, stream.clock[stream.number]))
        return output

    def _use(self, name: str, where: int, stream: StandInStream, writes: bool) -> None:
        block = self._blocks.get(where)
        if block is None or where in self._exempt:
            return  # memory of the host
        writer, count = block.written
        assert stream.clock.get(writer, 0) >= count, f"{name} does not wait for what stream {writer} writes"
        if block.owner not in (None, stream.number):
            self.num_shared += 1
            block.shared.setdefault(stream.number, name)
        if writes:
            late = [other for other, count in block.read.items() if stream.clock.get(other, 0) < count]
            assert not late, f"{name} overwrites what stream {late} may still read"
            block.written, block.read = (stream.number, stream.clock[stream.number]), {}
        else:
            block.read[stream.number] = stream.clock[stream.number]

    def record_stream(self, tensor: Tensor, stream: StandInStream) -> None:
        self._blocks[address(tensor)].recorded.add(stream.number)

    def check(self) -> None:
        """At the end: of what is still in use."""
        for block in self._blocks.values():
            block.check()

    def forget(self, *tensors: Tensor) -> None:
        """They are the host's own."""
        for tensor in tensors:
            self._blocks.pop(address(tensor), None)


def address(tensor: Tensor) -> int:
    """Of its memory. Only strided tensors show theirs; nobody writes to others, as oneDNN's weights."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else id(tensor)


def tensors_of(tree: object) -> list[Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, Tensor)]


def _written(function: Any, args: Any) -> list[Tensor]:
    return [
        tensor
        for argument, value in zip(function._schema.arguments, args, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
        for tensor in tensors_of(value)
    ]


@contextmanager
def entered(stream: StandInStream) -> Iterator[None]:
    before, StandInStream.current = StandInStream.current, stream
    try:
        yield
    finally:
        StandInStream.current = before


def imitate_streams(monkeypatch: Any, copy_overlap: bool) -> None:
    """Engines made from here on encode, decode and copy as on CUDA, on streams that are stand-ins."""
    StandInStream.made, StandInStream.host = [], {}
    StandInStream.current = StandInStream()  # the device's default stream
    for name, stand_in in (
        ("Stream", StandInStream),
        ("Event", StandInEvent),
        ("stream", entered),
        ("current_stream", lambda: StandInStream.current),
        ("synchronize", lambda: None),
    ):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setattr(engine_cuda, "HostCopy", StandInHostCopy)
    monkeypatch.setattr(engine_cuda.Transfers, "_copied", lambda _, tensor: tensor.clone())
    monkeypatch.setattr(runner, "Transfers", lambda *_: engine_cuda.Transfers(cuda, copy_overlap))
    monkeypatch.setattr(runner, "decode_stream", lambda _: engine_cuda.decode_stream(cuda))
    monkeypatch.setattr(runner, "make_encoder", encoding.CudaEncoder)
    monkeypatch.setattr(runner, "record_graphs", record)
    monkeypatch.setattr(encoding, "record_graphs", record)


@contextmanager
def watching(monkeypatch: Any, exempt: list[Tensor]) -> Iterator[WatchMemory]:
    watch = WatchMemory(exempt)

    def copy(_: engine_cuda.Transfers, tensor: Tensor) -> Tensor:
        watch.forget(tensor)
        return tensor.clone()

    monkeypatch.setattr(engine_cuda.Transfers, "_copied", copy)
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, stream: watch.record_stream(tensor, stream)
    )
    from_numpy = torch.from_numpy

    def of_the_host(array: Any) -> Tensor:
        tensor = from_numpy(array)
        watch.forget(tensor)
        return tensor

    monkeypatch.setattr(torch, "from_numpy", of_the_host)
    with watch:
        yield watch
    watch.check()
