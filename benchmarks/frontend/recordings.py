"""The files that are read: digits in synthesised voices, a voice for each channel, and a room's noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import av
import numpy as np
import soundfile
import soxr

from benchmarks.speech.digits import DATA

# File name -> rate, channels, and FFmpeg's names of codec and container.
FORMATS: dict[str, tuple[int, int, str, str]] = {
    "wav 48k stereo": (48_000, 2, "pcm_s16le", "wav"),
    "wav 44.1k stereo": (44_100, 2, "pcm_s16le", "wav"),
    "wav 16k mono": (16_000, 1, "pcm_s16le", "wav"),
    "flac 16k mono": (16_000, 1, "flac", "flac"),
    "flac 44.1k stereo": (44_100, 2, "flac", "flac"),
    "mp3 44.1k stereo": (44_100, 2, "libmp3lame", "mp3"),
    "ogg vorbis 44.1k stereo": (44_100, 2, "libvorbis", "ogg"),
    "m4a 44.1k stereo": (44_100, 2, "aac", "ipod"),
    "webm opus 48k stereo": (48_000, 2, "libopus", "webm"),
}


def recording(sample_rate: int, num_channels: int, duration_s: float) -> np.ndarray:
    """[frames, channels] float32."""
    rng = np.random.default_rng(0)
    channels = []
    for path in sorted(DATA.glob("digits-*.flac"))[:num_channels]:
        speech, rate = soundfile.read(path, dtype="float32")
        speech = np.resize(speech, round(duration_s * rate))
        channels.append(soxr.resample(speech, rate, sample_rate)[: round(duration_s * sample_rate)])
    frames = np.stack(channels, axis=1)
    return frames + rng.normal(0, 1e-3, frames.shape).astype(np.float32)


def write(path: Path, name: str, duration_s: float) -> None:
    sample_rate, num_channels, codec, container = FORMATS[name]
    frames = recording(sample_rate, num_channels, duration_s)
    if codec in ("pcm_s16le", "flac", "libvorbis"):
        subtype = "VORBIS" if codec == "libvorbis" else "PCM_16"
        with soundfile.SoundFile(
            path, "w", sample_rate, num_channels, format=container.upper(), subtype=subtype
        ) as file:
            for at in range(0, len(frames), sample_rate):
                file.write(frames[at : at + sample_rate])
        return
    layout = "stereo" if num_channels == 2 else "mono"
    with av.open(str(path), "w", format=container) as output:
        stream: Any = output.add_stream(codec, rate=sample_rate, layout=layout)
        stream.bit_rate = 64_000 if codec == "libopus" else 128_000
        resampler = av.AudioResampler(stream.format, layout, sample_rate, stream.frame_size or 1024)
        for at in range(0, len(frames), sample_rate):
            part = np.ascontiguousarray(frames[at : at + sample_rate].T)
            frame = av.AudioFrame.from_ndarray(part, "fltp", layout)
            frame.sample_rate, frame.pts = sample_rate, at
            for packed in resampler.resample(frame):
                output.mux(stream.encode(packed))
        output.mux(stream.encode(None))
