"""How busy the GPU is: the share of the time in which a kernel ran, by NVML as nvidia-smi shows it."""

import ctypes
import statistics
import threading
import time
from typing import Final

EVERY_S: Final = 0.1


class _Utilization(ctypes.Structure):
    """nvmlUtilization_t, in percent."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class GpuBusy:
    """Samples of how busy the first GPU is; none where there is none."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, float]] = []  # when, share
        try:
            self._library = ctypes.CDLL("libnvidia-ml.so.1")  # nvidia-smi takes too long to start
        except OSError:
            return
        self._device = ctypes.c_void_p()
        self._library.nvmlInit_v2()
        self._library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(0), ctypes.byref(self._device))
        threading.Thread(target=self._sample, daemon=True).start()

    def _sample(self) -> None:
        rates = _Utilization()
        while self._library.nvmlDeviceGetUtilizationRates(self._device, ctypes.byref(rates)) == 0:
            self._samples.append((time.perf_counter(), rates.gpu / 100))
            time.sleep(EVERY_S)

    def share_since(self, started: float) -> float | None:
        """Return the mean from that `time.perf_counter()` to now."""
        samples = [share for when, share in self._samples if when >= started + EVERY_S]
        return statistics.mean(samples) if samples else None
