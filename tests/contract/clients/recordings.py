"""A recording as programs that read WAV themselves want it: 16 bits, one channel."""

from pathlib import Path

import soundfile
import soxr

from asr_server.core import SAMPLE_RATE
from tests.support.speech import Spoken


def write_wav(path: Path, spoken: Spoken, rate: int = SAMPLE_RATE) -> Path:
    soundfile.write(path, soxr.resample(spoken.samples, SAMPLE_RATE, rate), rate, subtype="PCM_16")
    return path
