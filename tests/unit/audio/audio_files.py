"""Recordings of every kind, made at test time with the encoders in libsndfile and FFmpeg's libraries."""

import hashlib
import io
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import av
import numpy as np
import numpy.typing as npt
import soundfile

from asr_server.audio.decoder import AudioLimits
from asr_server.audio.recording import Recording
from asr_server.audio.split import Splitter
from asr_server.core import Chunk, Samples
from tests.support.memory_file import MemoryFile
from tests.support.speech import RECORDINGS as REAL
from tests.support.speech import say

Frames = npt.NDArray[np.float32]  # [frames, channels]


@cache
def voice(sample_rate: int = 48_000, num_channels: int = 2, duration_s: float = 4.0) -> Frames:
    """Sums of tones below 3 kHz, swelling and fading a few times a second; a channel its own. Read-only."""
    times = np.arange(round(duration_s * sample_rate)) / sample_rate
    rng = np.random.default_rng(7)
    channels = []
    for channel in range(num_channels):
        tones, phases = rng.uniform(100, 3000, 8), rng.uniform(0, 6, 8)
        sound = sum(
            np.sin(2 * np.pi * tone * times + phase) for tone, phase in zip(tones, phases, strict=True)
        )
        channels.append(sound / 16 * (0.6 + 0.4 * np.sin(2 * np.pi * (3 + channel) * times)))
    frames = np.stack(channels, axis=1).astype(np.float32)
    frames.flags.writeable = False
    return frames


@cache
def spoken() -> Frames:
    """[frames, 1] at 16 kHz: digits, with pauses between them."""
    return say("3141592653", gap_s=0.3).samples[:, None]


def write_sndfile(path: Path, frames: Frames, sample_rate: int, **kind: str) -> Path:
    soundfile.write(path, frames, sample_rate, **kind)
    return path


def write_ffmpeg(
    target: Any,
    frames: Frames,
    sample_rate: int,
    codec: str,
    container: str,
    options: dict[str, str] | None = None,
    bit_rate: int = 128_000,
) -> None:
    """Encodes into a path or a file object; one without `seek` is written as a stream."""
    layout = {1: "mono", 2: "stereo", 6: "5.1", 8: "7.1"}[frames.shape[1]]
    with av.open(target, "w", format=container, options=options or {}) as output:
        stream: Any = output.add_stream(codec, rate=sample_rate, layout=layout)
        if not codec.startswith(("pcm", "alac", "flac")):
            stream.bit_rate = bit_rate
        resampler = av.AudioResampler(stream.format, layout, sample_rate, stream.frame_size or 1024)
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(frames.T), "fltp", layout)
        frame.sample_rate, frame.time_base, frame.pts = sample_rate, Fraction(1, sample_rate), 0
        for part in (*resampler.resample(frame), *resampler.resample(None)):
            output.mux(stream.encode(part))
        output.mux(stream.encode(None))


@dataclass
class Sound:
    """One audio track of a film: [frames, channels] at 48 kHz, or nothing at all."""

    frames: Frames | None
    start_s: float = 0.0
    gap: tuple[float, float] = (0.0, 0.0)  # seconds of sound before it, its seconds
    steps: Sequence[tuple[float, float]] = ()  # more of them
    language: str = ""
    disposition: int = 0  # av.stream.Disposition


def write_film(
    path: Path,
    container: str,
    sounds: list[Sound],
    picture_s: float = 0.0,
    codec: str = "aac",
    picture_codec: str = "mpeg4",
) -> Path:
    """Audio tracks with time stamps of their own, beside a picture of so many seconds."""
    with av.open(str(path), "w", format=container) as output:
        packets: list[tuple[float, Any]] = []
        if picture_s:
            video: Any = output.add_stream(picture_codec, rate=10 if picture_codec == "mpeg4" else 25)
            video.width = video.height = 32
            video.time_base = Fraction(1, 10)
        streams = [_sound_stream(output, codec, sound) for sound in sounds]
        if picture_s:
            packets += _picture_packets(video, round(picture_s * 10))
        for stream, sound in zip(streams, sounds, strict=True):
            if sound.frames is not None:
                packets += _sound_packets(stream, sound)
        for _, packet in sorted(packets, key=lambda pair: pair[0]):
            output.mux(packet)
    return path


def _sound_stream(output: Any, codec: str, sound: Sound) -> Any:
    layout = "mono" if sound.frames is None or sound.frames.shape[1] == 1 else "stereo"
    stream = output.add_stream(codec, rate=48_000, layout=layout)
    stream.time_base = Fraction(1, 48_000)
    stream.disposition = sound.disposition
    if sound.language:
        stream.metadata["language"] = sound.language
    return stream


def _picture_packets(stream: Any, num_frames: int) -> list[tuple[float, Any]]:
    packets = []
    for number in range(num_frames + 1):
        frame = av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), "rgb24")
        frame.pts, frame.time_base = number, Fraction(1, 10)
        packets += [(number / 10, packet) for packet in stream.encode(frame if number < num_frames else None)]
    return packets


def _sound_packets(stream: Any, sound: Sound) -> list[tuple[float, Any]]:
    assert sound.frames is not None
    packets = []
    size = stream.frame_size or 960
    for at in [*range(0, len(sound.frames), size), None]:
        frame = None
        if at is not None:
            part = np.ascontiguousarray(sound.frames[at : at + size].T)
            frame = av.AudioFrame.from_ndarray(part, "fltp", stream.layout.name)
            frame.sample_rate, frame.time_base, frame.pts = 48_000, Fraction(1, 48_000), at
        for packet in stream.encode(frame):
            gaps = [gap_s for at_s, gap_s in (sound.gap, *sound.steps) if packet.pts / 48_000 >= at_s]
            shift = round(48_000 * (sound.start_s + sum(gaps)))
            packet.pts, packet.dts = packet.pts + shift, packet.dts + shift
            packets.append((packet.pts / 48_000, packet))
    return packets


class Pipe(io.RawIOBase):
    """A target that cannot seek, as when a browser's recorder writes."""

    def __init__(self) -> None:
        self.data = bytearray()

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def write(self, data: Any) -> int:
        self.data += bytes(data)
        return len(data)


class _Unseekable:
    """PyAV asks for the attribute, not whether it works."""

    def __init__(self, pipe: Pipe) -> None:
        self.write = pipe.write


def streamed(frames: Frames, sample_rate: int, codec: str, container: str, **options: str) -> bytes:
    """What comes out when the writer cannot go back: no duration, no cues, no sizes."""
    pipe = Pipe()
    write_ffmpeg(_Unseekable(pipe), frames, sample_rate, codec, container, options=dict(options))
    return bytes(pipe.data)


Write = Callable[[Path, Frames, int], object]


def _ffmpeg(codec: str, container: str, **options: str) -> Write:
    return lambda path, frames, rate: write_ffmpeg(path, frames, rate, codec, container, options=options)


def _sndfile(**kind: str) -> Write:
    return lambda path, frames, rate: write_sndfile(path, frames, rate, **kind)


# Name of the file -> how to write it. Opus knows only 48 kHz and its divisors.
LOSSLESS: dict[str, Write] = {
    "a.wav": _sndfile(subtype="PCM_16"),
    "a.flac": _sndfile(subtype="PCM_16"),
    "a.aiff": _sndfile(subtype="PCM_16"),
    "big-endian.aif": _sndfile(subtype="PCM_24", format="AIFF"),
    "alac.m4a": _ffmpeg("alac", "ipod"),
    "flac.mka": _ffmpeg("flac", "matroska"),
    "flac.oga": _ffmpeg("flac", "ogg"),
    "pcm.mov": _ffmpeg("pcm_s16le", "mov"),
}
LOSSY: dict[str, Write] = {
    "a.mp3": _ffmpeg("libmp3lame", "mp3", id3v2_version="0"),
    "untagged.mp3": _ffmpeg("libmp3lame", "mp3", id3v2_version="0", write_xing="0"),
    "a.mpga": _ffmpeg("libmp3lame", "mp3"),
    "a.mpeg": _ffmpeg("libmp3lame", "mpeg"),
    "a.m4a": _ffmpeg("aac", "ipod"),
    "index-first.mp4": _ffmpeg("aac", "mp4", movflags="+faststart"),
    "index-last.mp4": _ffmpeg("aac", "mp4"),
    "fragmented.mp4": _ffmpeg("aac", "mp4", movflags="+frag_keyframe+empty_moov+default_base_moof"),
    "a.aac": _ffmpeg("aac", "adts"),
    "a.ogg": _sndfile(format="OGG", subtype="VORBIS"),
    "a.oga": _sndfile(format="OGG", subtype="VORBIS"),
    "a.opus": _ffmpeg("libopus", "ogg"),
    "a.webm": _ffmpeg("libopus", "webm"),
    "browser.webm": lambda path, frames, rate: path.write_bytes(streamed(frames, rate, "libopus", "webm")),
}
FORMATS = LOSSLESS | LOSSY


_made: dict[tuple[str, int, bytes], bytes] = {}


def make(folder: Path, name: str, frames: Frames, sample_rate: int) -> Path:
    """The recording under that name; what has been encoded once is not encoded again."""
    path = folder / name
    key = (name, sample_rate, hashlib.sha256(frames.tobytes()).digest() + bytes(frames.shape[1:]))
    if key in _made:
        path.write_bytes(_made[key])
    else:
        FORMATS[name](path, frames, sample_rate)
        _made[key] = path.read_bytes()
    return path


def opened(path: Path) -> int:
    """Return a descriptor, open for as long as the tests run."""
    return os.open(path, os.O_RDONLY)


def slices(recording: Recording) -> Iterator[Chunk]:
    finished = False
    while not finished:
        chunks, finished = recording.next_slice()
        yield from chunks


def chunks_of(source: bytes | Path | BinaryIO, **limits: Any) -> tuple[list[Chunk], Recording]:
    """All chunks of a file, having checked their order and bounds."""
    recording = Recording(MemoryFile(source) if isinstance(source, bytes) else source, AudioLimits(**limits))
    chunks = list(slices(recording))
    assert end_of(chunks) <= round(recording.duration_s * 16_000)
    return chunks, recording


def chunks_by(splitter: Splitter, samples: Samples, block: int) -> list[Chunk]:
    """What the splitter makes of the samples, in blocks of that length; asserts their order and bounds."""
    chunks: list[Chunk] = []
    for at in range(0, len(samples), block):
        chunks += splitter.push(samples[at : at + block])
    chunks += splitter.finish()
    assert end_of(chunks) <= splitter.num_samples == len(samples)
    return chunks


def end_of(chunks: list[Chunk]) -> int:
    """Where the last chunk ends; asserts that none begins before the one before it ends."""
    end = 0
    for number, chunk in enumerate(chunks):
        assert chunk.index == number
        assert chunk.start_sample >= end
        assert 0 < len(chunk.samples) <= 480_000
        assert chunk.samples.dtype == np.float32
        assert chunk.samples.flags.c_contiguous
        end = chunk.start_sample + len(chunk.samples)
    return end


def audio_of(chunks: list[Chunk]) -> Frames:
    """The chunks' samples, with zeros for the silences between them."""
    audio = np.zeros(end_of(chunks), np.float32)
    for chunk in chunks:
        audio[chunk.start_sample :][: len(chunk.samples)] = chunk.samples
    return audio


def real_recordings() -> list[Path]:
    return sorted(path for path in REAL.glob("*") if path.is_file()) if REAL.is_dir() else []
