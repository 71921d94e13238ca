"""Files that clients send, good and bad, made here."""

from __future__ import annotations

import io
from fractions import Fraction

import av
import numpy as np
import soundfile

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
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=SAMPLE_RATE, layout="mono")
        frame = av.AudioFrame.from_ndarray(samples[None], format="fltp", layout="mono")
        frame.sample_rate = SAMPLE_RATE
        frame.pts = 0
        for packet in [*stream.encode(frame), *stream.encode(None)]:
            container.mux(packet)
    return file.getvalue()


def silent_film() -> bytes:
    """A video without a sound track."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        stream.time_base = Fraction(1, 10)
        for number in range(10):
            frame = av.VideoFrame.from_ndarray(np.zeros((64, 64, 3), np.uint8), format="rgb24")
            frame.pts = number
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()
