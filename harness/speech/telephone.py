"""A telephone line: what 300 to 3,400 Hz at 8 kHz and eight bits by mu-law (ITU-T G.711) leave of speech."""

import numpy as np
import numpy.typing as npt
import soxr
from scipy.signal import butter, sosfilt

from asr_server.core import SAMPLE_RATE, Samples

_RATE = 8000
_BAND_HZ = 300, 3400


def by_telephone(samples: Samples) -> Samples:
    """As many samples, at SAMPLE_RATE, as they are heard at the other end."""
    band = butter(4, _BAND_HZ, "bandpass", fs=SAMPLE_RATE, output="sos")
    narrow = soxr.resample(sosfilt(band, samples), SAMPLE_RATE, _RATE)
    heard = soxr.resample(_mu_law(narrow), _RATE, SAMPLE_RATE).astype(np.float32)
    return np.pad(heard, (0, max(0, len(samples) - len(heard))))[: len(samples)]


def _mu_law(samples: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """What eight bits leave of samples."""
    loudness = np.round(128 * np.log1p(255 * np.abs(np.clip(samples, -1, 1))) / np.log(256)) / 128
    return np.asarray(np.sign(samples) * (256**loudness - 1) / 255)
