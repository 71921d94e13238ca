"""How busy the GPU is: the share of its multiprocessors that work, sampled by NVML.

The driver's own utilisation, which nvidia-smi shows, is the share of the time in which any kernel ran at all,
and stands in only where the GPU or the container does not give the other (NVML's GPM: Hopper and later).
"""

from __future__ import annotations

import ctypes
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

EVERY_S: Final = 0.1
SM_ACTIVE: Final = "multiprocessors active (NVML GPM)"
KERNEL_RUNNING: Final = "a kernel ran (nvidia-smi)"
_QUERY: Final = ("--query-gpu=utilization.gpu", "--format=csv,noheader,nounits")
_METRIC_SM_UTIL: Final = 2  # NVML_GPM_METRIC_SM_UTIL
_MOST_METRICS: Final = 512  # more than any version of NVML's own array has


class _Metric(ctypes.Structure):
    """nvmlGpmMetric_t."""

    _fields_ = (
        ("metricId", ctypes.c_uint),
        ("nvmlReturn", ctypes.c_int),
        ("value", ctypes.c_double),
        ("shortName", ctypes.c_char_p),
        ("longName", ctypes.c_char_p),
        ("unit", ctypes.c_char_p),
    )


class _Metrics(ctypes.Structure):
    """nvmlGpmMetricsGet_t."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("numMetrics", ctypes.c_uint),
        ("sample1", ctypes.c_void_p),
        ("sample2", ctypes.c_void_p),
        ("metrics", _Metric * _MOST_METRICS),
    )


class MultiprocessorsActive:
    """The mean share since the last call. Raises OSError where it cannot be had."""

    def __init__(self, library: Any = None) -> None:
        self._nvml = library or ctypes.CDLL("libnvidia-ml.so.1")
        self._check("nvmlInit_v2")
        self._device = ctypes.c_void_p()
        self._check("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(0), ctypes.byref(self._device))
        self._samples = (ctypes.c_void_p(), ctypes.c_void_p())
        for sample in self._samples:
            self._check("nvmlGpmSampleAlloc", ctypes.byref(sample))
        self._check("nvmlGpmSampleGet", self._device, self._samples[0])

    def __call__(self) -> float:
        before, now = self._samples
        self._check("nvmlGpmSampleGet", self._device, now)
        metrics = _Metrics(version=1, numMetrics=1, sample1=before, sample2=now)
        metrics.metrics[0].metricId = _METRIC_SM_UTIL
        self._check("nvmlGpmMetricsGet", ctypes.byref(metrics))
        if metrics.metrics[0].nvmlReturn:
            raise OSError(f"NVML's metric: status {metrics.metrics[0].nvmlReturn}")
        self._samples = (now, before)
        return float(metrics.metrics[0].value) / 100

    def _check(self, name: str, *arguments: Any) -> None:
        try:
            status = getattr(self._nvml, name)(*arguments)
        except AttributeError as error:
            raise OSError(f"this driver has no {name}") from error
        if status:
            raise OSError(f"{name}: status {status}")


def _kernel_running() -> float:
    ran = subprocess.run(["nvidia-smi", *_QUERY], capture_output=True, text=True, check=True)
    return int(ran.stdout.split()[0]) / 100


class GpuBusy:
    """Samples of how busy the first GPU is; none where there is none."""

    def __init__(self) -> None:
        self.source = ""
        self._samples: list[tuple[float, float]] = []  # when, share
        self._stopped = threading.Event()
        try:
            self._measure: Any = MultiprocessorsActive()
            self._measure()
            self.source = SM_ACTIVE
        except OSError:
            if shutil.which("nvidia-smi") is None:
                return
            self._measure, self.source = _kernel_running, KERNEL_RUNNING
        threading.Thread(target=self._sample, daemon=True).start()

    def _sample(self) -> None:
        while not self._stopped.wait(EVERY_S):
            try:
                self._samples.append((time.perf_counter(), self._measure()))
            except (OSError, subprocess.SubprocessError, ValueError, IndexError):
                return  # the figures then say that there are none

    def share_since(self, started: float) -> float | None:
        """The mean from that `time.perf_counter()` to now."""
        samples = [share for when, share in self._samples if when >= started + EVERY_S]
        return statistics.mean(samples) if samples else None

    def stop(self) -> None:
        self._stopped.set()


@contextmanager
def watching_the_gpu() -> Iterator[GpuBusy]:
    busy = GpuBusy()
    try:
        yield busy
    finally:
        busy.stop()
