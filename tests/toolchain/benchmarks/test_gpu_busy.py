"""How busy a GPU is, with a stand-in of NVIDIA's library."""

from __future__ import annotations

import time
from typing import Any

import pytest

from benchmarks.gpu_busy import (
    KERNEL_RUNNING,
    SM_ACTIVE,
    MultiprocessorsActive,
    Nvml,
    measure_of,
    watching_the_gpu,
)


class StandInNvml:
    """Two samples, between which 37 % of the multiprocessors were active."""

    def __init__(self, status: int = 0) -> None:
        self._status = status
        self.num_samples = 0

    def __getattr__(self, name: str) -> Any:
        if name == "nvmlGpmSampleGet":
            self.num_samples += 1
        return lambda *_: self._status

    def nvmlGpmMetricsGet(self, reference: Any) -> int:  # noqa: N802  NVML's name
        asked = reference._obj
        assert (asked.version, asked.numMetrics, asked.metrics[0].metricId) == (1, 1, 2)
        asked.metrics[0].value = 37.0
        return self._status


def test_the_share_is_that_of_the_multiprocessors_between_two_samples() -> None:
    library = StandInNvml()
    active = MultiprocessorsActive(Nvml(library))
    assert active() == active() == 0.37
    assert library.num_samples == 3


def test_a_gpu_that_does_not_tell_is_an_error() -> None:
    with pytest.raises(OSError, match="nvmlInit_v2: status 3"):
        Nvml(StandInNvml(status=3))


class WithoutGpm(StandInNvml):
    """A GPU older than Hopper, or a container without the right to ask."""

    def nvmlGpmSampleGet(self, *_: Any) -> int:  # noqa: N802
        return 3

    def nvmlDeviceGetUtilizationRates(self, device: Any, reference: Any) -> int:  # noqa: N802
        reference._obj.gpu = 64
        return 0


def test_the_drivers_own_utilisation_stands_in_where_the_other_cannot_be_had() -> None:
    measure = measure_of(Nvml(WithoutGpm()))
    assert (measure(), measure.source) == (0.64, KERNEL_RUNNING)
    assert measure_of(Nvml(StandInNvml())).source == SM_ACTIVE


def test_without_a_gpu_there_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(_: str) -> None:
        raise OSError("no such library")

    monkeypatch.setattr("ctypes.CDLL", nothing)
    with watching_the_gpu() as busy:
        assert busy.share_since(time.perf_counter()) is None
        assert busy.source == ""
