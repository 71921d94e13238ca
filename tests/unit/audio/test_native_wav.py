"""WAV as it is written in the wild."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest
import soundfile

from asr_server.audio.decoder import CannotOpen
from asr_server.audio.native import WavDecoder, unsized_header
from tests.unit.audio.audio_files import Frames, streamed, voice, write_ffmpeg, write_sndfile
from tests.unit.audio.test_decoders import all_of

SPEECH = voice(16_000, 1, 2.0)


def pcm(frames: Frames) -> bytes:
    return (frames * 32767).astype("<i2").tobytes()


def written(folder: Path, data: bytes) -> Path:
    (folder / "a.wav").write_bytes(data)
    return folder / "a.wav"


def decoded(path: Path) -> tuple[Frames, WavDecoder]:
    fd = os.open(path, os.O_RDONLY)
    try:
        decoder = WavDecoder(fd)
        return all_of(decoder), decoder
    finally:
        os.close(fd)


def raw_wav(
    data: bytes, bits: int = 16, data_size: int | None = None, extra: bytes = b"", tag: int = 1
) -> bytes:
    """Mono at 16 kHz by hand, with any size in the header and any chunks before the samples."""
    sample_bytes = bits // 8
    fmt = struct.pack("<4sIHHIIHH", b"fmt ", 16, tag, 1, 16_000, 16_000 * sample_bytes, sample_bytes, bits)
    size = len(data) if data_size is None else data_size
    return b"RIFF\xff\xff\xff\xffWAVE" + fmt + extra + struct.pack("<4sI", b"data", size) + data


def test_samples_behind_a_header_without_sizes_are_read_to_the_end(tmp_path: Path) -> None:
    path = tmp_path / "unsized.wav"
    samples = np.array([[1000, -1000], [2000, -2000], [16384, 0]], dtype="<i2")
    path.write_bytes(unsized_header(44_100, num_channels=2, sample_bytes=2) + samples.tobytes())
    frames, decoder = decoded(path)
    assert decoder.sample_rate == 44_100
    np.testing.assert_array_equal(frames, samples / np.float32(32768))


@pytest.mark.parametrize("container", ["WAV", "WAVEX", "RF64"])
@pytest.mark.parametrize(
    "subtype", ["PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW"]
)
def test_every_depth_is_read_bit_for_bit_as_libsndfile_reads_it(
    tmp_path: Path, container: str, subtype: str
) -> None:
    path = write_sndfile(tmp_path / "a", voice(16_000, 2, 1.0), 16_000, format=container, subtype=subtype)
    expected, _ = soundfile.read(path, dtype="float32", always_2d=True)
    frames, decoder = decoded(path)
    assert np.array_equal(frames, expected)
    assert not decoder.truncated


@pytest.mark.parametrize("size", [0, 0xFFFFFFFF, 0x7FFFFFFF, 0x80000000, 0x7FFFF000, 0xFFFFFFFF - 36])
def test_a_size_never_filled_in_means_to_the_end(tmp_path: Path, size: int) -> None:
    (tmp_path / "a.wav").write_bytes(raw_wav(bytes(3200), data_size=size))
    frames, decoder = decoded(tmp_path / "a.wav")
    assert frames.shape == (1600, 1)
    assert not decoder.truncated


def test_ffmpeg_writing_to_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(streamed(voice(16_000, 1, 1.0), 16_000, "pcm_s16le", "wav"))
    frames, decoder = decoded(tmp_path / "a.wav")
    assert len(frames) == 16_000
    assert not decoder.truncated


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"RIFF",
        b"RIFF\0\0\0\0WAVE",
        b"RIFF\0\0\0\0AVI " + bytes(100),
        raw_wav(b"")[:30],
        raw_wav(bytes(100), extra=b"junk\0\0\0\0" * 1000),
        raw_wav(bytes(100), tag=2),
        raw_wav(bytes(100), bits=40),
        raw_wav(bytes(100), 16)[:32] + b"\4\0" + raw_wav(bytes(100), 16)[34:],
    ],
    ids=[
        "empty",
        "magic",
        "no chunks",
        "another form",
        "half a header",
        "a thousand chunks",
        "adpcm",
        "40 bits",
        "16 bits in four bytes",
    ],
)
def test_what_it_does_not_know_is_left_to_others(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.wav").write_bytes(content)
    with pytest.raises(CannotOpen):
        decoded(tmp_path / "a.wav")


@pytest.mark.parametrize("bits", [20, 24])
def test_bits_in_the_low_end_of_four_bytes_are_as_loud_as_elsewhere(tmp_path: Path, bits: int) -> None:
    """As `arecord -f S24_LE` writes them."""
    values = (SPEECH[:, 0] * 2 ** (bits - 1)).astype("<i4")
    content = bytearray(raw_wav(values.tobytes(), 32))
    content[34:36] = struct.pack("<H", bits)
    frames, decoder = decoded(written(tmp_path, bytes(content)))
    assert np.abs(frames - SPEECH).max() < 1e-5
    assert (decoder.duration_s, decoder.truncated) == (2.0, False)


@pytest.mark.parametrize(("long_size", "num_frames"), [(3200, 1600), (0, 3600)])
def test_a_long_size_counts_where_the_short_one_is_unset(
    tmp_path: Path, long_size: int, num_frames: int
) -> None:
    ds64 = struct.pack("<4sIQQQI", b"ds64", 28, 0, long_size, 0, 0)
    content = raw_wav(bytes(7200), data_size=0xFFFFFFFF, extra=ds64).replace(b"RIFF", b"RF64")
    assert len(decoded(written(tmp_path, content))[0]) == num_frames


# -- Sizes that are wrong -----------------------------------------------------------------------------------


LIST = struct.pack("<4sI", b"LIST", 26) + b"INFOISFT" + bytes(18)


@pytest.mark.parametrize("size", [36, 8000, 31_999, 32_000])
def test_what_follows_a_size_that_was_never_updated_is_read(tmp_path: Path, size: int) -> None:
    frames, decoder = decoded(written(tmp_path, raw_wav(pcm(SPEECH), data_size=size)))
    assert np.abs(frames - SPEECH).max() < 1e-4
    assert len(frames) == len(SPEECH)
    assert (decoder.duration_s, decoder.truncated) == (2.0, False)


MORE_DATA = struct.pack("<4sI", b"data", 20_000) + bytes(20_000)


@pytest.mark.parametrize("second", [raw_wav(pcm(SPEECH)), MORE_DATA])
def test_of_joined_files_and_chunks_the_first_is_read_and_the_rest_said_to_be_missing(
    tmp_path: Path, second: bytes
) -> None:
    frames, decoder = decoded(written(tmp_path, raw_wav(pcm(SPEECH)) + second))
    assert len(frames) == len(SPEECH)
    assert decoder.truncated


def test_tags_and_zeros_behind_the_samples_are_no_sound(tmp_path: Path) -> None:
    for rest in (LIST, b"TAG" + b"a title".ljust(125), bytes(50_000), b"id3 \xff\xff\xff\x0fID3"):
        frames, decoder = decoded(written(tmp_path, raw_wav(pcm(SPEECH)) + rest))
        assert len(frames) == len(SPEECH)
        assert not decoder.truncated


@pytest.mark.parametrize("bits", [8, 24])
def test_an_odd_size_needs_no_byte_behind_it(tmp_path: Path, bits: int) -> None:
    data = bytes([128] * 4001) if bits == 8 else bytes(3 * 1333)
    for pad in (b"", b"\0"):
        frames, _ = decoded(written(tmp_path, raw_wav(data, bits) + pad + LIST))
        assert len(frames) == len(data) // (bits // 8)


def test_the_layout_is_that_of_the_channel_mask(tmp_path: Path) -> None:
    write_ffmpeg(str(tmp_path / "a.wav"), voice(16_000, 6, 0.5), 16_000, "pcm_s16le", "wav")
    assert decoded(tmp_path / "a.wav")[1].layout == ("FL", "FR", "FC", "LFE", "BL", "BR")
