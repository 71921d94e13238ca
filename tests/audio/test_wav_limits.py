"""WAV to the byte: which headers and chunks are taken, and what lies behind the samples."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest

from asr_server.audio.decoder import CannotOpen
from asr_server.audio.wav import WavDecoder, _is_sound, unsized_header
from asr_server.core import Samples
from tests.audio.audio_files import voice
from tests.audio.test_decoders import all_of

SOUND = (voice(16_000, 1, 2.0) * 32767).astype("<i2").tobytes()
LOUD = SOUND[2 * int(np.abs(voice(16_000, 1, 2.0)[:-6000]).argmax()) :]


def chunk(name: bytes, content: bytes, size: int | None = None) -> bytes:
    return struct.pack("<4sI", name, len(content) if size is None else size) + content


def form(
    bits: int = 16, *, tag: int = 1, channels: int = 1, align: int | None = None, rate: int = 16_000
) -> bytes:
    frame_bytes = channels * ((bits + 7) // 8) if align is None else align
    return struct.pack("<HHIIHH", tag, channels, rate, rate * frame_bytes, frame_bytes, bits)


def wav(*chunks: bytes, kind: bytes = b"RIFF") -> bytes:
    return kind + b"\xff\xff\xff\xffWAVE" + b"".join(chunks)


def opened(folder: Path, content: bytes) -> WavDecoder:
    (folder / "a.wav").write_bytes(content)
    return WavDecoder(os.open(folder / "a.wav", os.O_RDONLY))


def num_bytes(folder: Path, content: bytes, bits: int = 16) -> int:
    """How many bytes of sound are read."""
    decoder = opened(folder, content)
    num_frames = len(all_of(decoder))
    os.close(decoder.fd)
    return num_frames * bits // 8


PLAIN = chunk(b"fmt ", form())


def test_a_header_without_sizes_counts_bytes_and_bits() -> None:
    found = struct.unpack("<4sI4s4sIHHIIHH4sI", unsized_header(48_000, 2, 3))
    expected = (16, 1, 2, 48_000, 288_000, 6, 24, b"data", 0xFFFFFFFF)
    assert found == (b"RIFF", 0xFFFFFFFF, b"WAVE", b"fmt ", *expected)
    assert struct.unpack("<I", unsized_header(1 << 31, 2, 2)[28:32]) == (0,)


@pytest.mark.parametrize("size", [0x7FFFF000, 0xFFFFFFFF - 36])
def test_a_size_that_a_writer_leaves_means_to_the_end(tmp_path: Path, size: int) -> None:
    decoder = opened(tmp_path, wav(PLAIN, chunk(b"data", bytes(3200), size)))
    assert (len(all_of(decoder)), decoder.truncated) == (1600, False)


@pytest.mark.parametrize(("channels", "bits", "num_frames"), [(1, 16, 262_144), (3, 24, 58_254)])
def test_a_block_has_half_a_mebibyte(tmp_path: Path, channels: int, bits: int, num_frames: int) -> None:
    sound = bytes((num_frames + 1) * channels * bits // 8)
    decoder = opened(tmp_path, wav(chunk(b"fmt ", form(bits, channels=channels)), chunk(b"data", sound)))
    assert [len(decoder.read()) for _ in range(3)] == [num_frames, 1, 0]


@pytest.mark.parametrize(
    "fmt",
    [
        *(form(align=3), form(align=0), form(channels=0), form()[:14]),
        *(form(16, tag=6), form(16, tag=7), form(16, tag=3), form(40), form(0)),
        form(tag=0xFFFE),
        form(tag=0xFFFE) + bytes(8),
    ],
)
def test_a_format_that_contradicts_itself_is_left_to_others(tmp_path: Path, fmt: bytes) -> None:
    with pytest.raises(CannotOpen):
        opened(tmp_path, wav(chunk(b"fmt ", fmt), chunk(b"data", bytes(3200))))


@pytest.mark.parametrize(("bits", "sample_bytes"), [(9, 2), (12, 2), (16, 2), (17, 3), (20, 3), (25, 4)])
def test_bits_are_rounded_up_to_bytes(tmp_path: Path, bits: int, sample_bytes: int) -> None:
    content = wav(chunk(b"fmt ", form(bits)), chunk(b"data", bytes(12 * sample_bytes)))
    assert len(all_of(opened(tmp_path, content))) == 12


def test_the_shortest_extensible_format_names_its_layout(tmp_path: Path) -> None:
    fmt = form(channels=2, tag=0xFFFE) + struct.pack("<HHIH", 10, 16, 0b101, 1)
    decoder = opened(tmp_path, wav(chunk(b"fmt ", fmt), chunk(b"data", bytes(400))))
    assert (decoder.layout, len(all_of(decoder)), decoder.is_float) == (("FL", "FC"), 100, False)


def test_a_file_without_a_rate_has_a_length(tmp_path: Path) -> None:
    """Its limits refuse it, with the rate."""
    assert opened(tmp_path, wav(chunk(b"fmt ", form(rate=0)), chunk(b"data", bytes(200)))).duration_s == 100


def test_256_chunks_are_read_before_the_samples_and_behind_them(tmp_path: Path) -> None:
    junk = chunk(b"JUNK", b"")
    content = wav(PLAIN, junk * 254, chunk(b"data", bytes(200)), junk * 255, chunk(b"data", bytes(100)))
    assert num_bytes(tmp_path, content) == 300
    behind = wav(PLAIN, chunk(b"data", bytes(200)), junk * 256, chunk(b"data", bytes(100)))
    assert num_bytes(tmp_path, behind) == 200
    with pytest.raises(CannotOpen):
        opened(tmp_path, wav(PLAIN, junk * 255, chunk(b"data", bytes(200))))


@pytest.mark.parametrize(("long_size", "size"), [(3200, 3200), (0, 7200), (3204, 3204)])
def test_a_long_size_counts_where_the_short_one_is_unset(tmp_path: Path, long_size: int, size: int) -> None:
    ds64 = chunk(b"ds64", struct.pack("<QQQI", 0, long_size, 0, 0))
    content = wav(ds64, PLAIN, chunk(b"data", bytes(7200), 0xFFFFFFFF), kind=b"RF64")
    assert num_bytes(tmp_path, content) == size
    assert num_bytes(tmp_path, wav(ds64, PLAIN, chunk(b"data", bytes(300)), kind=b"BW64")) == 300


def test_a_long_size_that_is_cut_short_is_none(tmp_path: Path) -> None:
    content = wav(PLAIN, chunk(b"ds64", bytes(4)), chunk(b"data", bytes(200), 0xFFFFFFFF))
    assert num_bytes(tmp_path, content) == 200


# -- Behind the samples --------------------------------------------------------------------------------------

FIRST = wav(PLAIN, chunk(b"data", SOUND[:8000]))


@pytest.mark.parametrize(
    ("rest", "num_more"),
    [
        (chunk(b"abcd", LOUD[:5000]), 0),
        (chunk(b"a_-9", LOUD[:5000]), 0),
        (chunk(b"abcd", LOUD[:5000], 5001), 5008),
        (chunk(b"\xe9bcd", LOUD[:5000]), 5008),
        (chunk(b"RIFF", LOUD[:5000]), 5008),
        (chunk(b"LIST", LOUD[:5000], 9000), 0),
        (chunk(b"data", LOUD[:5000], 9000), 5000),
        (LOUD[:4096], 4096),
        (LOUD[:4095], 0),
        (bytes(70_000) + LOUD[:5000], 0),
    ],
)
def test_what_no_chunk_claims_is_sound_if_it_sounds_so(tmp_path: Path, rest: bytes, num_more: int) -> None:
    assert num_bytes(tmp_path, FIRST + rest) == 8000 + num_more


@pytest.mark.parametrize("size", [7999, 8001])
def test_sound_that_is_read_on_keeps_its_frames(tmp_path: Path, size: int) -> None:
    frames = all_of(opened(tmp_path, wav(PLAIN, chunk(b"data", SOUND, size))))
    assert np.array_equal(frames[:, 0], np.frombuffer(SOUND, "<i2") / np.float32(2**15))


@pytest.mark.parametrize(
    ("other", "is_read"),
    [
        (wav(PLAIN, chunk(b"data", bytes(400))), True),
        (wav(PLAIN), False),
        (wav(chunk(b"fmt ", form(rate=8000)), chunk(b"data", bytes(400))), False),
    ],
)
def test_a_joined_file_is_read_if_its_format_is_the_same(tmp_path: Path, other: bytes, is_read: bool) -> None:
    decoder = opened(tmp_path, FIRST + other + FIRST)
    assert len(all_of(decoder)) == (4000 + 200 + 4000 if is_read else 4000)
    assert decoder.truncated != is_read


def steps(level: float, num_flips: int) -> Samples:
    """A level whose sign changes so often in two hundred samples."""
    signs = np.cumprod(np.where(np.arange(20_000) % 200 < num_flips, -1, 1))
    return (level * signs).astype(np.float32)


@pytest.mark.parametrize(
    ("level", "num_flips", "is_sound"),
    [(0.38, 100, True), (0.4, 100, False), (0.4, 78, True), (0.4, 82, False)],
)
def test_sound_is_not_loud_or_goes_on_as_it_was(level: float, num_flips: int, is_sound: bool) -> None:
    samples = steps(level, num_flips)
    assert _is_sound(samples) == is_sound
    samples[7] = np.nan
    assert not _is_sound(samples)


def test_an_odd_size_is_padded_before_the_next_samples(tmp_path: Path) -> None:
    """Of 24 bits, sound behind too small a size goes on with whole frames."""
    eight = chunk(b"fmt ", form(8))
    content = wav(
        eight, chunk(b"data", bytes(4001)), b"\0", chunk(b"data", bytes(500)), chunk(b"LIST", bytes(4))
    )
    assert num_bytes(tmp_path, content, 8) == 4501
    wide = np.zeros((len(LOUD) // 2, 3), np.uint8)
    wide[:, 1:] = np.frombuffer(LOUD, np.uint8).reshape(-1, 2)
    decoder = opened(tmp_path, wav(chunk(b"fmt ", form(24)), chunk(b"data", wide.tobytes(), 3001)))
    assert np.array_equal(all_of(decoder)[:, 0], np.frombuffer(LOUD, "<i2") / np.float32(2**15))


def test_a_plain_file_has_an_exact_length_and_no_layout(tmp_path: Path) -> None:
    decoder = opened(tmp_path, FIRST)
    assert (decoder.has_exact_duration, decoder.duration_s, decoder.layout) == (True, 0.25, ())
    assert opened(tmp_path, wav(chunk(b"fmt ", form(8)), chunk(b"data", b""))).duration_s == 0


def test_another_kind_of_riff_and_another_wave_are_left_to_others(tmp_path: Path) -> None:
    for content in (FIRST.replace(b"WAVE", b"AVI "), FIRST.replace(b"RIFF", b"XXXX")):
        with pytest.raises(CannotOpen, match="not a RIFF/WAVE file"):
            opened(tmp_path, content)
