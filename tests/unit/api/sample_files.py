"""Files that clients send, good and bad, made here."""

import io

import av
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
