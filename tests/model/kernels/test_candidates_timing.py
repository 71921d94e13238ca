"""How long a kernel takes, on a stand-in for a GPU's queue and events."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from asr_server.model.kernels import candidates


class Device:
    """Takes the place of a GPU's queue and events: notes what is done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times_s: list[float], num_idle: int = 0) -> None:
        self.done: list[str] = []
        self.sleeps: list[int] = []
        self.times_s, self.num_idle = iter(times_s), num_idle
        monkeypatch.setattr(torch.cuda, "Event", self.event)
        monkeypatch.setattr(torch.cuda, "_sleep", self.sleep)

    def event(self, enable_timing: bool) -> Device:
        assert enable_timing
        return self

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
