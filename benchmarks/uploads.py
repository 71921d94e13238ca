"""Files to post: recordings of people as they are, or made of spoken digits in any length and format.

python -m benchmarks.uploads FOLDER --length long --formats wav,flac --count 128     made once, for many runs
"""

import argparse
import hashlib
import io
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

import numpy as np
import soundfile

from asr_server.core import SAMPLE_RATE, Samples
from harness.speech.corpora import Clip, chosen_clips
from harness.speech.digits import VOICES, say

CODECS = {"m4a": ("mp4", "aac"), "webm": ("webm", "libopus")}  # container, codec
FORMATS = ("wav", "flac", "mp3", "ogg", "m4a", "webm")
LONG_MINUTES = (14, 22, 18, 20, 19, 22)  # 115 in all, as in the set that vLLM published with
_DIGITS_PER_S = 1.5  # fewer than anyone says here


@dataclass(frozen=True)
class Upload:
    name: str
    data: bytes
    duration_s: float
    clip: Clip | None = None  # the recording of people that it is


def recordings_of_people(count: int) -> list[Upload]:
    """So many recordings whose words are known, of several corpora, half of them Dutch; in their own formats.

    Raises ValueError where none are installed.
    """
    clips = chosen_clips(count)
    if not clips:
        raise ValueError("no recordings are installed: harness/speech/install.sh fetches what can be had")
    return [Upload(clip.path.name, clip.path.read_bytes(), clip.duration_s, clip) for clip in clips]


def long_uploads(
    formats: Sequence[str] = FORMATS, count: int = 6, minutes: Sequence[float] = LONG_MINUTES
) -> list[Upload]:
    """The durations in turn: a minute of digits over and over, each time in other noise."""

    def recording(index: int) -> Samples:
        rng = np.random.default_rng([7, index])
        num_samples = round(60 * minutes[index % len(minutes)] * SAMPLE_RATE)
        noise = 2e-3 * rng.standard_normal(num_samples, np.float32)
        return np.resize(_spoken(index, 60, rng), num_samples) + noise

    return _encoded("long", recording, count, formats)


INDEX: Final = "index.json"


def made_once(folder: Path | None, length: str, formats: str, count: int) -> list[Upload]:
    """Return the first `count` files that lie in the folder; make and keep them where there are fewer."""
    if folder is None:
        return of_length(length, formats, count)
    kept = folder / f"{length}-{formats.replace(',', '-')}"
    if (kept / INDEX).exists():
        durations_s: dict[str, float] = json.loads((kept / INDEX).read_text())
        if len(durations_s) >= count:
            names = list(durations_s)[:count]
            return [Upload(name, (kept / name).read_bytes(), durations_s[name]) for name in names]
    uploads = of_length(length, formats, count)
    kept.mkdir(parents=True, exist_ok=True)
    for upload in uploads:
        (kept / upload.name).write_bytes(upload.data)
    index = kept / f"{INDEX}.{os.getpid()}"
    index.write_text(json.dumps({upload.name: upload.duration_s for upload in uploads}))
    index.replace(kept / INDEX)  # last: whoever finds it finds all files
    return uploads


def check_distinct(uploads: Sequence[Upload]) -> None:
    hashes = {hashlib.sha256(upload.data).digest() for upload in uploads}
    assert len(hashes) == len(uploads), "files must differ: no cache may answer"


def encode(samples: Samples, suffix: str) -> bytes:
    """The samples in a container that `suffix` names."""
    file = io.BytesIO()
    if suffix not in CODECS:
        soundfile.write(file, samples, SAMPLE_RATE, format=suffix.upper())
        return file.getvalue()
    import av  # large, and a machine to which everything must travel does without these formats

    container, codec = CODECS[suffix]
    pcm = (np.clip(samples, -1, 1) * 32767).astype(np.int16)
    frame = av.AudioFrame.from_ndarray(pcm[None, :], format="s16", layout="mono")
    frame.sample_rate, frame.pts = SAMPLE_RATE, 0
    with av.open(file, "w", format=container) as output:
        stream = cast(av.AudioStream, output.add_stream(codec, rate=48_000))
        context = stream.codec_context
        resampler = av.AudioResampler(context.format, "mono", 48_000, context.frame_size)
        for part in (*resampler.resample(frame), *resampler.resample(None)):
            output.mux(stream.encode(part))
        output.mux(stream.encode(None))
    return file.getvalue()


def _encoded(
    name: str, recording: Callable[[int], Samples], count: int, formats: Sequence[str]
) -> list[Upload]:
    """The formats in turn; on all cores, and no more recordings at once than these."""

    def upload(index: int) -> Upload:
        samples, suffix = recording(index), formats[index % len(formats)]
        return Upload(f"{name}-{index}.{suffix}", encode(samples, suffix), len(samples) / SAMPLE_RATE)

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return list(threads.map(upload, range(count)))


def _spoken(index: int, duration_s: float, rng: np.random.Generator) -> Samples:
    voice, num_samples = VOICES[index % len(VOICES)], round(duration_s * SAMPLE_RATE)
    digits = "".join(rng.choice(list("0123456789"), 1 + int(duration_s * _DIGITS_PER_S)))
    return np.resize(say(digits, voice).samples, num_samples)


def of_length(length: str, formats: str, count: int) -> list[Upload]:
    """Make sequences of digits, the formats in turn. `length`: seconds, mixed (2 to 30 s) or long."""
    if length == "long":
        return long_uploads(formats.split(","), count)
    rng = np.random.default_rng(5)
    durations_s = [rng.uniform(2, 30) if length == "mixed" else float(length) for _ in range(count)]
    recordings = [_spoken(index, duration_s, rng) for index, duration_s in enumerate(durations_s)]
    return _encoded(length, recordings.__getitem__, count, formats.split(","))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--length", nargs="+", required=True, help="seconds, mixed or long")
    parser.add_argument("--formats", required=True)
    parser.add_argument("--count", type=int, required=True)
    options = parser.parse_args()
    for length in options.length:
        uploads = made_once(options.folder, length, options.formats, options.count)
        print(f"{len(uploads)} files, {length} {options.formats}", flush=True)


if __name__ == "__main__":
    main()
