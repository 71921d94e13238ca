"""The kernels that are tried at load, on stand-ins and under Triton's interpreter (on a GPU: compiled)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from asr_server.checkpoint.files import AudioWindow
from asr_server.model import WhisperSizes, layers
from asr_server.model.float8 import FP8
from asr_server.model.kernels import TORCH, Kernels, candidates
from asr_server.model.kernels.candidates import (
    choose_kernels,
    decode_attention,
    encoder_layer,
    lengths_of_rows,
)
from asr_server.model.kernels.table import Candidate, choose, judge
from tests.model.kernels.test_table import candidate, kernel

SIZES = WhisperSizes(100, 80, 64, 1, 2, 128, 1, 2, 128, AudioWindow(100))
CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HAS_FP8 = DEVICE.type == "cpu" or torch.cuda.get_device_capability() >= (8, 9)


def test_a_kernel_that_is_wrong_for_one_row_is_not_used_for_many() -> None:
    shapes: list[int] = []

    def wrong_for_one(query: Tensor, keys: Tensor, values: Tensor, *_: Any, **new: Tensor) -> Tensor:
        shapes.append(len(query))
        if "new_keys" in new:
            keys[:, :, -1], values[:, :, -1] = new["new_keys"], new["new_values"]
        scores = torch.softmax(torch.einsum("bhd,bhpd->bhp", query, keys.float()), -1)
        right = torch.einsum("bhp,bhpd->bhd", scores, values)
        return right + float(len(query) == 1)

    ours = Kernels(flash_decode=wrong_for_one)
    many, one = (decode_attention(ours, SIZES, CPU, torch.float32, rows=rows) for rows in (3, 1))
    tried = list(candidates._right_for_one_row_too(many, one))
    reports = [judge(each, lambda compute: 0.0).reason for each in tried]
    assert reports == ["torch: triton differs by 1, more than 0.0001"] * len(tried)
    assert set(shapes) == {3, 1}


@torch.inference_mode()
def test_attention_that_cannot_take_a_single_window_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "HAS_AMX", True)  # then a CPU calls the same function as a GPU

    def for_several(query: Tensor, *others: Any, **scale: Any) -> Tensor:
        if len(query) == 1:
            raise RuntimeError("no plan")
        return F.scaled_dot_product_attention(query, *others, **scale)

    ours, rows = Kernels(whole_attention=for_several), 2 * SIZES.audio_positions
    tried = encoder_layer(ours, SIZES, CPU, torch.bfloat16, fp8=False, rows=rows)
    (attention,) = (each for each in tried if each.name == "whole_attention")
    assert judge(attention, lambda compute: 0.0).reason == "torch: cudnn failed with RuntimeError: no plan"


def test_on_cpu_torch_is_the_choice_and_triton_must_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_kernels("auto", SIZES, CPU, torch.float32) == (TORCH, "", None)
    assert choose_kernels("torch", SIZES, CPU, torch.float32) == (TORCH, "", None)
    assert choose_kernels("triton", SIZES, DEVICE, torch.float32).kernels.flash_decode is not None
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="needs a GPU"):
        choose_kernels("triton", SIZES, CPU, torch.float32)


@pytest.mark.parametrize("audio_dtype", [None, *([FP8] if HAS_FP8 else [])])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_attention_tried_at_load_agrees_with_torch(
    dtype: torch.dtype, audio_dtype: torch.dtype | None
) -> None:
    kernels = choose_kernels("triton", SIZES, DEVICE, dtype).kernels
    tried = list(decode_attention(kernels, SIZES, DEVICE, dtype, audio_dtype, rows=1))
    assert len(tried) > 1
    for each in tried:
        chosen = choose(kernels, [each], lambda compute, own=each: float(compute is not own.kernel))  # type: ignore[misc]
        assert chosen.kernels.flash_decode is each.implementation, chosen.report


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes how long each range of numbers is that is made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lengths: list[int] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if "arange" in str(function):
            self.lengths.append(len(made))
        return made


def test_torchs_attention_is_timed_without_making_what_the_cache_has() -> None:
    tried = next(decode_attention(Kernels(flash_decode=kernel), SIZES, CPU, torch.float32, rows=1))
    with Counting() as counting:
        tried.reference()
    assert max(counting.lengths, default=0) <= SIZES.width


class Device:
    """Takes the place of a GPU's queue and events: notes what is done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times_s: list[float], num_idle: int = 0) -> None:
        self.done: list[str] = []
        self.sleeps: list[int] = []
        self.times_s, self.num_idle = iter(times_s), num_idle
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: self)
        monkeypatch.setattr(torch.cuda, "_sleep", self.sleep)

    def sleep(self, cycles: int) -> None:
        self.done.append("sleep")
        self.sleeps.append(cycles)

    def compute(self) -> Tensor:
        self.done.append("call")
        return torch.ones(1)

    def record(self) -> None:
        self.done.append("event")

    def query(self) -> bool:
        """Whether it had nothing more to do than wait for the host."""
        self.num_idle -= 1
        return self.num_idle >= 0

    def synchronize(self) -> None:
        self.done.append("wait")

    def elapsed_time(self, end: object) -> float:
        return 1e3 * candidates._REPEATS * next(self.times_s)


def test_the_device_is_kept_busy_until_all_that_is_timed_lies_in_its_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device(monkeypatch, [3.0, 1.0, 2.0])
    assert candidates._time_s(device.compute) == 1.0, "the best: others may use the GPU meanwhile"
    busy = device.done.index("sleep")
    assert "call" in device.done[:busy], "what is compiled or allocated at first is not timed"
    timed = ["sleep", "event", *["call"] * candidates._REPEATS, "event", "wait"]
    assert device.done[busy:] == 3 * timed


def test_a_device_that_waited_for_the_host_is_timed_again_with_a_longer_head_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head_start = candidates._HEAD_START_CYCLES
    device = Device(monkeypatch, [3.0, 4.0, 5.0], num_idle=2)
    assert candidates._time_s(device.compute) == 3.0
    assert device.sleeps[:3] == [head_start, 2 * head_start, 4 * head_start]
    assert len(device.sleeps) == 5
    slow = Device(monkeypatch, [3.0, 4.0, 5.0], num_idle=1000)
    assert candidates._time_s(slow.compute) == 3.0
    assert max(slow.sleeps) == candidates._LONGEST_HEAD_START * head_start


@pytest.mark.parametrize("noticed_at_once", [False, True])
def test_a_kernel_that_leaves_the_gpu_unusable_is_said_in_one_line(
    noticed_at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After it every call of torch's fails too, so that it cannot be a reason to use torch."""

    def fail() -> Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with ...")

    def tried() -> Iterator[Candidate]:
        yield candidate(fail)
        if noticed_at_once:
            yield candidate(fail())  # as making its data would

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    with pytest.raises(ValueError, match=r"illegal memory access was encountered\): --kernels torch"):
        candidates._try_on_gpu(Kernels(flash_decode=kernel), tried())


def test_the_rows_tried_at_load_agree_with_torchs() -> None:
    (tried,) = lengths_of_rows(choose_kernels("triton", SIZES, DEVICE, torch.float32).kernels, DEVICE)
    verdict = judge(tried, lambda compute: float(compute is not tried.kernel))
    assert verdict.seconds == 0, verdict.reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_the_encoders_kernels_tried_at_load_agree_with_torch(dtype: torch.dtype) -> None:
    kernels = choose_kernels("triton", SIZES, DEVICE, dtype).kernels
    tried = encoder_layer(kernels, SIZES, DEVICE, dtype, fp8=True, rows=3)
    names = []
    for each in tried:
        names.append(each.name)
        if each.name != "quantise_rows":  # the interpreter rounds in its own way
            verdict = judge(each, lambda compute, own=each: float(compute is not own.kernel))  # type: ignore[misc]
            assert verdict.seconds == 0, verdict.reason
    in_16_bits = ["linear_gelu", "whole_attention"] if dtype == torch.bfloat16 else []
    assert names == ["add_norm", *in_16_bits, "quantise_rows"]
    assert [each.name for each in encoder_layer(kernels, SIZES, CPU, dtype, fp8=False, rows=3)] == names[:-1]
