"""How busy the GPU is: the share of its multiprocessors that work, sampled by NVML.

The driver's own utilisation, which nvidia-smi shows, is the share of the time in which any kernel ran at all,
and stands in only where the GPU or the container does not give the other (NVML's GPM: Hopper and later).
"""

from __future__ import annotations

import ctypes
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

EVERY_S: Final = 0.1
SM_ACTIVE: Final = "multiprocessors active (NVML GPM)"
KERNEL_RUNNING: Final = "a kernel ran (NVML)"
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


class _Utilization(ctypes.Structure):
    """nvmlUtilization_t."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class Nvml:
    """NVIDIA's library, and the first GPU. Raises OSError where it cannot be had."""

    def __init__(self, library: Any = None) -> None:
        self._library = library or ctypes.CDLL("libnvidia-ml.so.1")
        self("nvmlInit_v2")
        self.device = ctypes.c_void_p()
        self("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(0), ctypes.byref(self.device))

    def __call__(self, name: str, *arguments: Any) -> None:
        """Raises OSError where that function is missing or fails."""
        try:
            status = getattr(self._library, name)(*arguments)
        except AttributeError as error:
            raise OSError(f"this driver has no {name}") from error
        if status:
            raise OSError(f"{name}: status {status}")


class MultiprocessorsActive:
    """The mean share since the last call. Raises OSError where it cannot be had."""

    source: Final = SM_ACTIVE

    def __init__(self, nvml: Nvml) -> None:
        self._nvml = nvml
        self._samples = (ctypes.c_void_p(), ctypes.c_void_p())
        for sample in self._samples:
            nvml("nvmlGpmSampleAlloc", ctypes.byref(sample))
        nvml("nvmlGpmSampleGet", nvml.device, self._samples[0])

    def __call__(self) -> float:
        before, now = self._samples
        self._nvml("nvmlGpmSampleGet", self._nvml.device, now)
        metrics = _Metrics(version=1, numMetrics=1, sample1=before, sample2=now)
        metrics.metrics[0].metricId = _METRIC_SM_UTIL
        self._nvml("nvmlGpmMetricsGet", ctypes.byref(metrics))
        if metrics.metrics[0].nvmlReturn:
            raise OSError(f"NVML's metric: status {metrics.metrics[0].nvmlReturn}")
        self._samples = (now, before)
        return float(metrics.metrics[0].value) / 100


class KernelRunning:
    """The driver's own utilisation, from the library: nvidia-smi takes too long to start."""

    source: Final = KERNEL_RUNNING

    def __init__(self, nvml: Nvml) -> None:
        self._nvml = nvml

    def __call__(self) -> float:
        rates = _Utilization()
        self._nvml("nvmlDeviceGetUtilizationRates", self._nvml.device, ctypes.byref(rates))
        return float(rates.gpu) / 100


def measure_of(nvml: Nvml) -> MultiprocessorsActive | KernelRunning:
    """The better one that this GPU gives. Raises OSError where there is none."""
    try:
        active = MultiprocessorsActive(nvml)
        active()
        return active
    except OSError:
        running = KernelRunning(nvml)
        running()
        return running


class GpuBusy:
    """Samples of how busy the first GPU is; none where there is none."""

    def __init__(self) -> None:
        self.source = ""
        self._samples: list[tuple[float, float]] = []  # when, share
        self._stopped = threading.Event()
        try:
            self._measure = measure_of(Nvml())
        except OSError:
            return
        self.source = self._measure.source
        threading.Thread(target=self._sample, daemon=True).start()

    def _sample(self) -> None:
        while not self._stopped.wait(EVERY_S):
            try:
                self._samples.append((time.perf_counter(), self._measure()))
            except OSError:
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
