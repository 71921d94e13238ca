"""Files that clients send, good and bad, made here."""

import io
from typing import Literal

import av
import numpy as np
import soundfile
import soxr

from asr_server.core import SAMPLE_RATE, Samples


def sound_file(samples: Samples, format: str = "WAV", subtype: str = "PCM_16") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, SAMPLE_RATE, format=format, subtype=subtype)
    return file.getvalue()


def mp3(samples: Samples) -> bytes:
    return sound_file(samples, "MP3", "MPEG_LAYER_III")


def opus(samples: Samples) -> bytes:
    return sound_file(samples, "OGG", "OPUS")


def m4a(samples: Samples) -> bytes:
    """AAC in mp4, the index at the end, as recorders write it."""
    return _encoded(samples, SAMPLE_RATE, "aac", "mp4")


def webm(samples: Samples) -> bytes:
    """Opus in WebM, as browsers record it."""
    resampled = np.asarray(soxr.resample(samples, SAMPLE_RATE, 48_000), np.float32)
    return _encoded(resampled, 48_000, "libopus", "webm")


def _encoded(samples: Samples, rate: int, codec: Literal["aac", "libopus"], container_format: str) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format=container_format) as container:
        stream = container.add_stream(codec, rate=rate, layout="mono")
        frame = av.AudioFrame.from_ndarray(samples[None], format="fltp", layout="mono")
        frame.sample_rate = rate
        frame.pts = 0
        for packet in [*stream.encode(frame), *stream.encode(None)]:
            container.mux(packet)
    return file.getvalue()
