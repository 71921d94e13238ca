"""What a GPU does differently, imitated on CPU: graphs, encodes that finish late, copies that arrive late.

Graphs compute a whole bucket of rows into memory that the next replay overwrites. A late encode has garbage
in its slots until it is done; a late copy holds garbage until it is read.
"""

import gc
import random
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from asr_server.core import Samples
from asr_server.engine import encoding, runner
from asr_server.engine.cuda import Shape
from asr_server.model.kernels import choose_token, flash_decode, layers
from harness import engine_helpers


def living_tensors() -> list[Tensor]:
    """Every tensor and parameter that Python's collector knows of, those that were frozen among them."""
    gc.collect()
    gc.unfreeze()
    objects = gc.get_objects()
    gc.freeze()
    return [each for each in objects if type(each) in (Tensor, torch.nn.Parameter)]


class StandInGraphs:
    """Computes when it is replayed, always into the same memory for each shape."""

    num_replays = 0

    def __init__(self, compute: Callable[..., Tensor], shapes: Collection[Shape]) -> None:
        self._compute = compute
        self._outputs: dict[Shape, Tensor | None] = dict.fromkeys(shapes)

    def replay(self, *shape: int) -> Tensor:
        StandInGraphs.num_replays += 1
        with torch.inference_mode():
            computed = self._compute(*shape)
            for other in self._outputs.values():
                if other is not None and other.is_floating_point():
                    other.fill_(float("nan"))  # the pool's memory is shared: another shape's output is gone
            output = self._outputs[shape]
            if output is None:
                output = self._outputs[shape] = torch.empty_like(computed)
            output.copy_(computed)
        return output


class LateEncode:
    """An encode whose audio reaches its slots only after a few questions whether it is done, or at `join`."""

    def __init__(self, finish: Callable[[], None], num_polls: int) -> None:
        self._finish, self._num_polls = finish, num_polls
        self._is_finished = False

    def is_ready(self) -> bool:
        self._num_polls -= 1
        return self._num_polls < 0

    def join(self) -> None:
        if not self._is_finished:
            self._is_finished = True
            self._finish()


class EncoderOfCopies(encoding.CpuEncoder):
    """Gives each slot the silence behind its audio, as the one on CUDA does."""

    shares_silence = False


class LateEncoder:
    """The encoder on CPU, finishing late. `batches` lists the sizes of its batches."""

    def __init__(self, choose: random.Random, *parts: Any) -> None:
        self._encoder = EncoderOfCopies(*parts[:3])
        self.window = self._encoder.window
        self._cache = parts[1]
        self._choose = choose
        self.batches: list[int] = []

    def start(self, slots: Sequence[int], chunks: Sequence[Samples]) -> LateEncode:
        self.batches.append(len(chunks))
        for slot in slots:
            for audio in (self._cache.cross_keys, self._cache.cross_values):
                audio[:, slot] = self._choose.randrange(1, 9)  # of 8-bit caches, too
        return LateEncode(lambda: self._write(slots, chunks), self._choose.randrange(6))

    def _write(self, slots: Sequence[int], chunks: Sequence[Samples]) -> None:
        self._encoder.start(slots, chunks).join()

    def close(self) -> None:
        self._encoder.close()


class LateCopy:
    """A copy to the host that takes its values at once, as the device would, but arrives late."""

    choose = random.Random(0)

    def __init__(self, tensor: Tensor) -> None:
        self._values = tensor.clone()
        self._num_polls = self.choose.randrange(4)

    def is_ready(self) -> bool:
        self._num_polls -= 1
        return self._num_polls < 0

    def array(self) -> Any:
        return self._values.numpy()


def record(compute: Callable[..., Tensor], shapes: Collection[Shape], *_: object) -> StandInGraphs:
    return StandInGraphs(compute, shapes)


def imitate_graphs(monkeypatch: Any) -> None:
    """Engines made from here on replay stand-ins of graphs and read copies of what these give."""

    monkeypatch.setattr(runner, "record_graphs", record)
    monkeypatch.setattr("asr_server.engine.cuda.HostCopy", LateCopy)


def imitate_late_device(monkeypatch: Any, seed: int = 0) -> list[LateEncoder]:
    """Graphs as above; and encoders made from here on finish late. They appear in the list. Engines of the
    tests look ahead, unless they say otherwise.
    """
    choose = random.Random(seed)
    encoders: list[LateEncoder] = []

    def make(*parts: Any) -> LateEncoder:
        encoders.append(LateEncoder(choose, *parts))
        return encoders[-1]

    imitate_graphs(monkeypatch)
    monkeypatch.setattr(runner, "make_encoder", make)
    monkeypatch.setitem(engine_helpers.DEFAULTS, "lookahead", True)
    return encoders


def take_few_programs(monkeypatch: Any) -> None:
    """Triton's interpreter takes its time for each program of a kernel, whatever its size."""
    monkeypatch.setattr(flash_decode, "_BLOCK", 512)
    monkeypatch.setattr(choose_token, "_BLOCK", 1 << 16)
    monkeypatch.setattr(layers, "_ROWS", 512)
    monkeypatch.setattr(layers, "_TILE", 1024)
    monkeypatch.setattr(layers, "_OUTPUTS", (256, 256))
    monkeypatch.setattr(layers, "_WEIGHTS", 1 << 16)
