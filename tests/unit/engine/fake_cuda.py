"""An engine whose tensors are on a GPU that is not there: torch's fake tensors, which have all but numbers.

Shapes, types and layouts are checked by the rules that torch has for its operations on CUDA, and operands on
different devices are refused. What comes of a step is made up.
"""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from asr_server.core import Samples
from asr_server.engine import Engine, EngineConfig, cuda
from asr_server.engine.beam import NUM_NAMED
from asr_server.engine.tokens import GenerationRules
from asr_server.model import load_whisper, weights
from asr_server.model.features import LogMel
from asr_server.model.kernels import Kernels, choose_token, flash_decode, layers, triton_kernels
from tests.support.checkpoints import kept_tokenizer
from tests.unit.engine.stream_stand_ins import StandInEvent, StandInStream, entered

DEVICE = torch.device("cuda", 0)
KERNELS = triton_kernels()
_GUARDS = "_ZN3c104impl26device_guard_impl_registryE"  # c10::impl::device_guard_impl_registry
_CUDA, _META, _NUM_DEVICE_TYPES = 1, 14, 15  # of c10::DeviceType


class Launched:
    """A kernel of Triton: launches nothing, and checks what it is handed."""

    count = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert all(isinstance(each, int) and each > 0 for each in grid)
        return self._launch

    def _launch(self, *arguments: Any, **_: Any) -> None:
        Launched.count += 1
        tensors = [each for each in arguments if isinstance(each, Tensor)]
        assert tensors
        assert {each.device for each in tensors} == {DEVICE}


class FakeCapture:
    """torch.cuda.graph"""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class FakeGraph:
    """torch.cuda.CUDAGraph"""

    num_made = num_replays = 0

    def __init__(self) -> None:
        FakeGraph.num_made += 1

    def replay(self) -> None:
        FakeGraph.num_replays += 1


@contextmanager
def fake_cuda(monkeypatch: Any) -> Iterator[None]:
    StandInStream.made, StandInStream.host = [], {}
    StandInStream.current = StandInStream()
    Launched.count = FakeGraph.num_replays = FakeGraph.num_made = 0
    for name, stand_in in {
        "Stream": StandInStream,
        "Event": StandInEvent,
        "stream": entered,
        "current_stream": lambda: StandInStream.current,
        "synchronize": lambda: None,
        "graph_pool_handle": lambda: None,
        "CUDAGraph": FakeGraph,
        "graph": FakeCapture,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setattr(cuda.Transfers, "_copied", lambda _, tensor: _copied(tensor))
    monkeypatch.setattr(cuda.HostCopy, "array", _made_up)
    monkeypatch.setattr(LogMel, "gather", _gathered)
    monkeypatch.setattr(LogMel, "forward", _log_mel)
    for module, name in (
        (flash_decode, "_attend"),
        (flash_decode, "_combine"),
        (flash_decode, "_row_lengths"),
        (choose_token, "_choose"),
        (layers, "_add_norm"),
        (choose_token, "_advance"),
        (layers, "_store_audio"),
        (layers, "_product"),
    ):
        monkeypatch.setattr(module, name, Launched())
    with _device_guard(), FakeTensorMode(allow_non_fake_inputs=True):
        yield


@contextmanager
def _device_guard() -> Iterator[None]:
    """Lets a build of torch that knows no CUDA take its devices for granted, as it does the device "meta"."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * _NUM_DEVICE_TYPES).in_dll(library, _GUARDS)
    before = guards[_CUDA]
    guards[_CUDA] = before or guards[_META]
    try:
        yield
    finally:
        guards[_CUDA] = before


def _copied(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=DEVICE)


def _gathered(_: LogMel, chunks: Sequence[Samples], num_samples: int, *__: Any) -> Tensor:
    return torch.zeros(len(chunks), num_samples)


def _log_mel(own: LogMel, chunks: Sequence[Samples]) -> Tensor:
    """Of a window without sound; all else is copied in other ways."""
    return own.of_samples(_copied(own.gather(chunks, own.num_gathered())), _copied(own.lengths(chunks)))


class MadeUp:
    """What the host reads of a step: tokens that are text, none likely. For the rest anything will do."""

    lead = 0.0  # of the likeliest candidate, by its log-probability
    num_in_doubt = 0  # of the first rows, in which it has none


def _made_up(copy: cuda.HostCopy) -> Any:
    copy.is_ready()
    values = np.ones(copy._host.shape)
    if values.ndim == 2 and len(values) >= 3:
        values[1:3] = [[-1], [0]]
        count = (len(values) - 3) // 2 - NUM_NAMED  # of likeliest candidates
        values[3 : 3 + count] += np.arange(count)[:, None]
        values[3 + count :] = -1 - MadeUp.lead
        values[4 + count :, : MadeUp.num_in_doubt] = -1
        values[3 + count : 4 + count] = -1
    return values


def _shapes(path: Path) -> dict[str, list[int]]:
    with safe_open(path, "pt") as weights:
        names: list[str] = weights.keys()
        return {name: weights.get_slice(name).get_shape() for name in names}


def fake_engine(
    monkeypatch: Any, directory: Path, dtype: torch.dtype, kernels: Kernels, **config: Any
) -> Engine:
    """An engine on that checkpoint, loaded as on a GPU. To be used within the mode."""
    monkeypatch.setattr("asr_server.engine.engine.choose", lambda *_: (kernels, ""))
    shapes = _shapes(directory / "model.safetensors")
    fakes = {name.removeprefix("model."): torch.empty(shape) for name, shape in shapes.items()}
    monkeypatch.setattr(weights, "read_weights", lambda _: fakes)
    model = load_whisper(directory, DEVICE, dtype)
    tokenizer, rules = kept_tokenizer(directory), GenerationRules.from_directory(directory)
    return Engine(model, tokenizer, rules, EngineConfig(**{"num_slots": 3, "encode_batch": 2} | config))
