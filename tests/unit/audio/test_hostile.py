"""Damage and malice: a refusal or a transcript, never a hang, a crash or growth."""

import contextlib
import struct
import time
from functools import cache
from pathlib import Path

import numpy as np
import psutil
import pytest

from asr_server.errors import AudioTooLong, InvalidAudio, RequestError
from tests.unit.audio.audio_files import FORMATS, chunks_of, make, streamed, voice
from tests.unit.audio.hostile import mutated
from tests.unit.audio.test_wav import raw_wav

MIB = 1 << 20
DECODE_PROCESS = "asr_server.audio.ffmpeg_process"  # in its command line


def originals(folder: Path) -> dict[str, bytes]:
    return {name: make(folder, name, voice(48_000, 2, 1.5), 48_000).read_bytes() for name in FORMATS}


def resident_mb() -> tuple[float, float]:
    """Of this process, and of the largest of those that decode for it. Other tests leave children, too."""
    me = psutil.Process()
    decoding = [child for child in me.children(recursive=True) if DECODE_PROCESS in child.cmdline()]
    sizes = [process.memory_info().rss / MIB for process in (me, *decoding)]
    return sizes[0], max(sizes[1:], default=0.0)


@pytest.mark.slow
def test_200_mutated_files_are_read_or_refused(tmp_path: Path) -> None:
    files, count, num_read = originals(tmp_path), 200, 0
    for name, content in mutated(files, count, seed=1):
        start = time.perf_counter()
        with contextlib.suppress(RequestError):
            chunks_of(content)
            num_read += 1
        assert time.perf_counter() - start < 30, name
    assert 0.2 * count < num_read < 0.9 * count  # the mutations are neither harmless nor all fatal


@cache
def silent_opus(duration_s: float) -> bytes:
    """What a bomb is made of: an hour of it is a few kilobytes."""
    return streamed(np.zeros((round(duration_s * 8000), 1), np.float32), 8000, "libopus", "ogg")


def test_decoded_bytes_are_counted_at_the_file_s_own_rate_and_layout() -> None:
    with pytest.raises(AudioTooLong, match="decoded size"):
        chunks_of(silent_opus(120), max_decoded_bytes=100 * 48_000 * 4)


def flac_header(sample_rate: int, num_channels: int, bits: int = 16, num_frames: int = 1 << 35) -> bytes:
    """A STREAMINFO block that promises the world, and noise after it."""
    packed = sample_rate << 44 | (num_channels - 1) << 41 | (bits - 1) << 36 | num_frames
    info = struct.pack(">HH", 4096, 4096) + bytes(6) + packed.to_bytes(8, "big") + bytes(16)
    return b"fLaC\x80" + len(info).to_bytes(3, "big") + info + np.random.default_rng(1).bytes(200_000)


def test_a_flac_of_a_forged_header_and_noise_is_refused() -> None:
    with pytest.raises(InvalidAudio, match="No audio could be decoded"):
        chunks_of(flac_header(655_350, 8))


@pytest.mark.parametrize("size", [0xFFFFFFF0, 0xFFFFFFFF, 0xF0000000])
def test_a_wav_that_claims_4_gb_is_what_it_is(size: int) -> None:
    before_mb, _ = resident_mb()
    _, recording = chunks_of(raw_wav(np.random.default_rng(1).bytes(320_000), data_size=size))
    assert recording.duration_s == 10.0
    assert resident_mb()[0] - before_mb < 64


@pytest.mark.parametrize("num_channels", [33, 1000, 65_535])
def test_a_wav_of_too_many_channels_is_refused(num_channels: int) -> None:
    header = bytearray(raw_wav(bytes(1_000_000)))
    header[22:24] = num_channels.to_bytes(2, "little")
    header[32:34] = min(2 * num_channels, 65_535).to_bytes(2, "little")
    with pytest.raises(RequestError) as caught:
        chunks_of(bytes(header))
    assert caught.value.param == "file"


@pytest.mark.trial
@pytest.mark.timeout(900)
def test_25_mib_of_silent_opus_stops_at_12_hours_within_bounds(tmp_path: Path) -> None:
    hour = silent_opus(3600)
    bomb = tmp_path / "bomb.opus"
    with bomb.open("wb") as file:
        while file.tell() < 25 * MIB:
            file.write(hour)
    before_mb, _ = resident_mb()
    start = time.perf_counter()
    with pytest.raises(AudioTooLong, match=r"--max-(audio-s|decoded-bytes|preprocess-s)"):
        chunks_of(bomb)
    after_mb, decoding_mb = resident_mb()
    print(f"refused after {time.perf_counter() - start:.1f} s, {after_mb - before_mb:.0f} MB more")
    assert after_mb - before_mb < 32
    assert decoding_mb < 128
