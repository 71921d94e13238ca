"""How busy a GPU is, with a stand-in of NVIDIA's library."""

from __future__ import annotations

import time
from typing import Any

import pytest

from benchmarks.gpu_busy import MultiprocessorsActive, watching_the_gpu


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
    active = MultiprocessorsActive(library)
    assert active() == active() == 0.37
    assert library.num_samples == 3


def test_a_gpu_that_does_not_tell_is_an_error() -> None:
    with pytest.raises(OSError, match="nvmlInit_v2: status 3"):
        MultiprocessorsActive(StandInNvml(status=3))


def test_without_a_gpu_there_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with watching_the_gpu() as busy:
        assert busy.share_since(time.perf_counter()) is None
        assert busy.source == ""
