"""Ways to turn a file into 16 kHz mono: each returns its number of samples, or None if it cannot read it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import audioread  # type: ignore[import-untyped]
import av
import librosa
import numpy as np
import soundfile

from asr_server.audio.limits import AudioLimits
from asr_server.audio.recording import Recording
from asr_server.core import Chunk, Samples

Way = Callable[[Path], int | None]


def ours(path: Path) -> int:
    num_samples, finished = 0, False
    with Recording(path, AudioLimits()) as recording:
        while not finished:
            pieces, finished = recording.next_slice()
            num_samples += sum(len(p.samples) if isinstance(p, Chunk) else p.num_samples for p in pieces)
    return num_samples


def by_librosa(path: Path) -> int | None:
    """Where libsndfile cannot, it runs the ffmpeg program, if there is one."""
    with warnings.catch_warnings(action="ignore"):
        try:
            return len(librosa.load(path, sr=16_000, mono=True)[0])
        except (soundfile.LibsndfileError, audioread.NoBackendError):
            return None


def by_pyav_frames(path: Path) -> int:
    """Each frame decoded, resampled and turned into an array by itself."""
    with av.open(str(path)) as container:
        resampler = av.AudioResampler("flt", "mono", 16_000)
        frames = [f.to_ndarray() for frame in container.decode(audio=0) for f in resampler.resample(frame)]
        frames += [f.to_ndarray() for f in resampler.resample(None)]
    return sum(frame.shape[1] for frame in frames)


def by_whole_file(path: Path) -> int:
    """As vLLM does it: the whole file, the mean over channels, PyAV's resampler, split afterwards."""
    try:
        samples, sample_rate = soundfile.read(path, dtype="float32", always_2d=True)
    except soundfile.LibsndfileError:
        samples, sample_rate = decode_whole(path)
    mono = samples.mean(axis=1)
    frame = av.AudioFrame.from_ndarray(mono[None], "fltp", "mono")
    frame.sample_rate = sample_rate
    resampler = av.AudioResampler("fltp", "mono", 16_000)
    parts = [*resampler.resample(frame), *resampler.resample(None)]
    return sum(map(len, split_afterwards(np.concatenate([part.to_ndarray()[0] for part in parts]))))


def decode_whole(path: Path) -> tuple[np.ndarray, int]:
    with av.open(str(path)) as container:
        frames = [frame.to_ndarray() for frame in container.decode(audio=0)]
        return np.concatenate(frames, axis=1).T, container.streams.audio[0].rate


def split_afterwards(samples: Samples) -> Iterable[Samples]:
    """30 s clips, each cut at the quietest of ten 100 ms windows in its last second."""
    while len(samples) > 480_000:
        windows = samples[464_000:480_000].reshape(10, 1600)[:-1]
        cut = 464_000 + 1600 * int(np.argmin([np.sqrt(np.mean(window**2)) for window in windows]))
        yield samples[:cut]
        samples = samples[cut:]
    yield samples


WAYS: dict[str, Way] = {
    "ours": ours,
    "librosa.load": by_librosa,
    "PyAV per frame": by_pyav_frames,
    "whole file": by_whole_file,
}
