"""FLAC and MP3 whose headers count too little, and files joined together."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from asr_server.audio.limits import AudioLimits
from asr_server.audio.recording import Recording
from asr_server.audio.sndfile import (
    BLOCK_FRAMES,
    MAX_TAGS,
    SndfileDecoder,
    flac_follows,
    flac_of_another_format_follows,
    id3_size,
    mp3_follows,
)
from asr_server.errors import AudioTooLong
from tests.audio.audio_files import (
    Frames,
    audio_of,
    make,
    opened,
    pieces_of,
    slices,
    voice,
    write_ffmpeg,
    write_sndfile,
)
from tests.audio.test_decoders import all_of, rms
from tests.memory_file import MemoryFile

ONE, OTHER = voice(16_000, 1, 3.0), np.array(voice(16_000, 1, 5.0)[::-1])


def flac_with_count(path: Path, share: float) -> Path:
    """The header's count of samples multiplied by `share`; 36 bits that begin in the middle of byte 21."""
    data = bytearray(path.read_bytes())
    (packed,) = struct.unpack(">Q", data[18:26])
    count = round((packed & (1 << 36) - 1) * share)
    data[18:26] = struct.pack(">Q", packed >> 36 << 36 | count)
    path.write_bytes(data)
    return path


def joined(folder: Path, name: str, *parts: Frames, between: bytes = b"") -> Path:
    files = [make(folder, name, part, 16_000).read_bytes() for part in parts]
    (folder / name).write_bytes(between.join(files))
    return folder / name


def more_follows(path: Path) -> bool:
    fd = os.open(path, os.O_RDONLY)
    try:
        decoder = SndfileDecoder(fd)
        all_of(decoder)
        return decoder.has_more
    finally:
        os.close(fd)


@pytest.mark.parametrize("share", [0.02, 1 / 3, 0.5, 0.9, 0.99])
def test_a_flac_whose_header_counts_too_few_samples_is_read_to_its_end(tmp_path: Path, share: float) -> None:
    path = flac_with_count(make(tmp_path, "a.flac", OTHER, 16_000), share)
    pieces, recording = pieces_of(path)
    assert rms(audio_of(pieces) - OTHER[:, 0]) < 1e-4
    assert recording.duration_s == pytest.approx(5.0)
    assert not recording.truncated


@pytest.mark.parametrize("name", ["a.flac", "a.mp3", "a.mpga", "untagged.mp3"])
def test_files_joined_together_are_read_to_the_last(tmp_path: Path, name: str) -> None:
    alone = [audio_of(pieces_of(make(tmp_path, name, part, 16_000))[0]) for part in (ONE, OTHER, ONE)]
    pieces, recording = pieces_of(joined(tmp_path, name, ONE, OTHER, ONE))
    samples = audio_of(pieces)
    assert recording.duration_s == pytest.approx(sum(map(len, alone)) / 16_000, abs=0.3)
    assert rms(samples[: len(alone[0]) - 4000] - alone[0][:-4000]) < 1e-3
    assert rms(samples[-16_000:]) == pytest.approx(rms(alone[2][-16_000:]), rel=0.2)
    assert not recording.truncated


@pytest.mark.parametrize("name", ["a.mp3", "a.flac"])
def test_tags_behind_the_sound_are_no_more_of_it(tmp_path: Path, name: str) -> None:
    path = make(tmp_path, name, ONE, 16_000)
    plain = path.read_bytes()
    rng = np.random.default_rng(8)
    picture = rng.integers(0, 255, 40_000, np.uint8).tobytes()
    ape = b"APETAGEX" + struct.pack("<IIII8x", 2000, len(picture), 1, 0) + picture
    for tags in (b"", b"TAG".ljust(128), ape, ape + b"TAG".ljust(128), bytes(3000)):
        path.write_bytes(plain + tags)
        assert not more_follows(path)


def test_an_mp3_behind_a_short_one_is_found_behind_its_tags(tmp_path: Path) -> None:
    path = joined(tmp_path, "a.mp3", ONE, voice(16_000, 1, 0.4), between=b"TAG".ljust(128))
    assert more_follows(path)


def test_a_flac_that_is_too_long_is_refused_by_its_header(tmp_path: Path) -> None:
    path = flac_with_count(make(tmp_path, "a.flac", ONE, 16_000), 20_000)
    recording = Recording(path, AudioLimits(max_audio_s=43_200))
    with pytest.raises(AudioTooLong, match="max-audio-s"):
        list(slices(recording))
    assert recording.duration_s == 0  # nothing was decoded


def test_surround_is_mixed_by_its_layout_in_every_format(tmp_path: Path) -> None:
    """Speech in the centre, loud effects around it and a rumble."""
    speech, effects = voice(48_000, 1, 2.0)[:, 0], np.array(voice(48_000, 6, 2.0)[::-1])
    frames = effects * np.float32(0.5)
    frames[:, 2], frames[:, 3] = speech, 0.9 * np.sin(np.arange(96_000) * 2 * np.pi * 40 / 48_000)
    write_sndfile(tmp_path / "a.flac", frames, 48_000, subtype="PCM_24")
    for name, codec, container in (
        ("a.m4a", "aac", "ipod"),
        ("a.ac3", "ac3", "ac3"),
        ("a.wav", "pcm_s16le", "wav"),
    ):
        write_ffmpeg(str(tmp_path / name), frames, 48_000, codec, container, bit_rate=448_000)
    weights = np.array([0.7, 0.7, 1, 0, 0.5, 0.5], np.float32) / np.float32(3.4)
    (tmp_path / "mono").mkdir()
    expected = audio_of(
        pieces_of(write_sndfile(tmp_path / "mono" / "a.wav", frames @ weights, 48_000, subtype="FLOAT"))[0]
    )
    for name in ("a.flac", "a.m4a", "a.ac3", "a.wav"):
        samples = audio_of(pieces_of(tmp_path / name)[0])[: len(expected)]
        lag = int(np.argmax(np.correlate(samples[8000:24_000], expected[8000:20_000], "valid")))
        aligned = samples[8000 + lag : 20_000 + lag]
        assert np.corrcoef(aligned, expected[8000:20_000])[0, 1] > 0.95, name


def test_a_joined_flac_of_another_rate_is_said_to_be_missing(tmp_path: Path) -> None:
    one, other = (
        make(tmp_path, "a.flac", voice(rate, 1, 2.0), rate).read_bytes() for rate in (16_000, 44_100)
    )
    (tmp_path / "a.flac").write_bytes(one + other)
    _, recording = pieces_of(tmp_path / "a.flac")
    assert (recording.duration_s, recording.truncated) == (2.0, True)


@pytest.mark.parametrize("name", ["a.m4a", "index-first.mp4", "a.aiff"])
def test_of_files_that_nobody_can_join_the_first_is_read_and_the_rest_said_to_be_missing(
    tmp_path: Path, name: str
) -> None:
    whole = make(tmp_path, name, ONE, 16_000)
    assert not pieces_of(whole)[1].truncated
    recording = pieces_of(joined(tmp_path, name, ONE, OTHER))[1]
    assert recording.duration_s == pytest.approx(3.0, abs=0.1)
    assert recording.truncated


def test_blocks_are_full_and_a_flac_has_the_layout_that_ffmpeg_gives_it(tmp_path: Path) -> None:
    for num_channels in range(1, 9):
        frames = voice(8000, num_channels, 9.0 if num_channels == 1 else 0.1)
        path = write_sndfile(tmp_path / "a.flac", frames, 8000, subtype="PCM_16")
        decoder = SndfileDecoder(opened(path))
        assert len(decoder.read()) == min(len(frames), BLOCK_FRAMES) <= 1 << 16
        with av.open(str(path)) as container:
            stream: Any = container.streams.audio[0]
            names = [channel.name for channel in stream.layout.channels] if num_channels > 2 else []
        is_alike = str.maketrans("S", "B")  # the format says "back or surround" of five and six
        assert [name.translate(is_alike) for name in decoder.layout] == [n.translate(is_alike) for n in names]
        assert decoder.has_exact_duration
        assert not decoder.is_float
    floats = write_sndfile(tmp_path / "a.aiff", frames, 8000, subtype="FLOAT")
    assert SndfileDecoder(opened(floats)).is_float
    assert not SndfileDecoder(opened(make(tmp_path, "a.mp3", ONE, 16_000))).has_exact_duration


# -- Frames of MP3, by their marks ---------------------------------------------------------------------------


def follows(judge: Callable[..., bool], data: bytes, *numbers: int) -> bool:
    with MemoryFile(data) as file:
        return judge(file.fileno(), *numbers)


def mp3_frames(sample_rate: int, bit_rate: int) -> list[bytes]:
    encoder: Any = av.CodecContext.create("libmp3lame", "w")
    encoder.sample_rate, encoder.layout, encoder.format = sample_rate, "mono", "s16p"
    encoder.bit_rate = bit_rate
    packets = []
    for _ in range(4):
        frame = av.AudioFrame(format="s16p", layout="mono", samples=encoder.frame_size or 1152)
        frame.planes[0].update(bytes(frame.planes[0].buffer_size))
        frame.sample_rate = sample_rate
        packets += encoder.encode(frame)
    return [bytes(packet) for packet in [*packets, *encoder.encode(None)]]


@pytest.mark.parametrize(
    ("sample_rates", "kbits"),
    [
        ((32_000, 44_100, 48_000), (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)),
        ((16_000, 22_050, 24_000), (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)),
        ((8000, 11_025, 12_000), (8, 16, 24, 32, 40, 48, 56, 64)),
    ],
)
def test_a_frame_of_an_mp3_is_as_long_as_its_header_says(
    sample_rates: tuple[int, ...], kbits: tuple[int, ...]
) -> None:
    for sample_rate in sample_rates:
        for kbit in kbits:
            frame = mp3_frames(sample_rate, 1000 * kbit)[0]
            assert follows(mp3_follows, frame, 0), "it ends with the file"
            assert follows(mp3_follows, b"junk" + frame + frame[:2] + b"junk", 4), "the next one follows"
            assert not follows(mp3_follows, frame + b"\0", 0)
            assert not follows(mp3_follows, frame[:-1], 0)


def test_a_header_of_an_mp3_with_a_reserved_rate_is_none() -> None:
    frame = mp3_frames(44_100, 64_000)[0]
    for bits in (0x00, 0xF0, 0x5C):  # no bit rate, a reserved one, a reserved sample rate
        assert not follows(mp3_follows, frame[:2] + bytes([bits]) + frame[3:], 0)
    assert not follows(mp3_follows, b"\xff\xfb", 0)


def test_tags_are_as_long_as_they_say() -> None:
    frame = mp3_frames(44_100, 64_000)[0]
    id3 = b"ID3\x04\0\0" + bytes([0, 0, 2, 5]) + bytes(2 * 128 + 5)
    footed = b"ID3\x04\0\x10" + bytes([0, 0, 0, 5]) + bytes(5 + 10)
    ape = b"APETAGEX" + struct.pack("<IIII8x", 2000, 300, 1, 0) + bytes(300)
    for tags in (id3, footed, ape, b"TAG".ljust(128, b"\0"), ape + id3):
        assert follows(mp3_follows, tags + frame, 0)
        assert follows(mp3_follows, b"junk" + tags + frame, 4)
        assert not follows(mp3_follows, tags[:-1] + frame + b"\0", 0), "the frame lies within the tag"
    assert id3_size(b"ID3\4\0\0" + bytes([1, 2, 3, 4])) == 10 + (1 << 21) + (2 << 14) + (3 << 7) + 4
    assert id3_size(b"ID3\4\0\x10" + bytes([0, 0, 0, 1])) == 21
    assert id3_size(b"ID3\4\0\0" + bytes([0, 0, 1])) == 0
    assert id3_size(b"TAG\4\0\0" + bytes([0, 0, 0, 1])) == 0


def test_more_than_tags_can_be_is_sound() -> None:
    assert not follows(mp3_follows, bytes(MAX_TAGS), 0)
    assert follows(mp3_follows, bytes(MAX_TAGS + 1), 0)
    assert MAX_TAGS == 65_536


# -- Frames of FLAC, by RFC 9639 -----------------------------------------------------------------------------


def stream_info(sample_rate: int = 16_000, num_channels: int = 1, bits: int = 16) -> bytes:
    packed = sample_rate << 44 | num_channels - 1 << 41 | bits - 1 << 36
    return b"fLaC\x80\0\0\x22" + struct.pack(">HH6xQ16x", 4096, 4608, packed)


def crc8(data: bytes) -> int:
    """The remainder of a long division."""
    rest = int.from_bytes(data, "big") << 8
    for shift in range(rest.bit_length() - 9, -1, -1):
        if rest >> shift + 8 & 1:
            rest ^= 0x107 << shift
    return rest


def coded(number: int) -> bytes:
    """As UTF-8 would, up to 36 bits."""
    if number < 0x80:
        return bytes([number])
    num_more = next(n for n in range(1, 7) if number < 1 << 5 * n + 6 or n == 6)
    first = 0xFF00 >> num_more + 1 & 0xFF | number >> 6 * num_more
    return bytes([first, *(0x80 | number >> 6 * n & 0x3F for n in reversed(range(num_more)))])


def frame_header(
    number: bytes, size: int, stated: bytes = b"", rate: int = 9, by_sample: bool = False, fourth: int = 0
) -> bytes:
    head = bytes([0xFF, 0xF9 if by_sample else 0xF8, size << 4 | rate, fourth]) + number + stated
    return head + bytes([crc8(head)])


def last_sample(header: bytes) -> int | None:
    """Return up to where the frame goes: the largest number of samples read with which it is one more."""
    data = stream_info() + bytes(50) + header + bytes(20)
    low, high = -1, 1 << 50
    if not follows(flac_follows, data, 42, low):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if follows(flac_follows, data, 42, middle) else (low, middle)
    return high


@pytest.mark.parametrize(
    ("size", "stated", "num_samples"),
    [
        *((code, b"", 576 * 2 ** (code - 2)) for code in range(2, 6)),
        *((code, b"", 256 * 2 ** (code - 8)) for code in range(8, 16)),
        (1, b"", 192),
        (6, b"\x0a", 11),
        (7, b"\x01\x0a", 267),
    ],
)
def test_a_frame_of_a_flac_has_as_many_samples_as_its_header_says(
    size: int, stated: bytes, num_samples: int
) -> None:
    assert last_sample(frame_header(coded(3), size, stated)) == 3 * 4608 + num_samples
    assert last_sample(frame_header(coded(500), size, stated, by_sample=True)) == 500 + num_samples
    assert last_sample(frame_header(coded(3), size, stated + b"\5", rate=12)) == 3 * 4608 + num_samples
    for rate in (13, 14):
        assert last_sample(frame_header(coded(3), size, stated + b"\5\6", rate)) == 3 * 4608 + num_samples


@pytest.mark.parametrize(
    "number", [0, 0x7F, 0x80, 0x7FF, 0x800, 0xFFFF, 1 << 20, 1 << 25, 1 << 30, (1 << 36) - 1]
)
def test_a_frames_number_has_one_to_seven_bytes(number: int) -> None:
    assert last_sample(frame_header(coded(number), 1, by_sample=True)) == number + 192


@pytest.mark.parametrize(
    "header",
    [
        frame_header(coded(3), 0),
        frame_header(coded(3), 1, rate=15),
        frame_header(coded(3), 1, fourth=1),
        frame_header(b"\xff" + bytes([0x80] * 7), 1),
        frame_header(b"\x83", 1),
        frame_header(b"\xc3\x43", 1),
        frame_header(coded(3), 1)[:-1] + b"\x99",
    ],
    ids=["size", "rate", "reserved bit", "eight bytes", "no first byte", "no second byte", "check sum"],
)
def test_what_only_looks_like_a_frame_of_a_flac_is_none(header: bytes) -> None:
    assert last_sample(header) is None


def test_frames_of_a_flac_are_looked_for_near_the_place_where_it_stopped() -> None:
    header = frame_header(coded(3), 1)

    def is_found(at: int, position: int, rest: int = 16) -> bool:
        return follows(flac_follows, stream_info().ljust(at, b"\0") + header.ljust(rest, b"\0"), position, 0)

    assert is_found(100_000, 100_000 + (1 << 15))
    assert not is_found(100_000, 100_001 + (1 << 15))
    last = 50_000 - (1 << 15) + (1 << 20) - 16
    assert is_found(last, 50_000, 100)
    assert not is_found(last + 1, 50_000, 100)
    assert not is_found(1000, 100, 15), "a header may have 16 bytes"


@pytest.mark.parametrize(
    ("other", "differs"),
    [
        ({}, False),
        ({"sample_rate": 16_001}, True),
        ({"num_channels": 2}, True),
        ({"bits": 24}, False),
    ],
)
def test_a_joined_flac_is_of_another_format_by_its_rate_and_channels(
    other: dict[str, int], differs: bool
) -> None:
    data = stream_info() + bytes(70) + stream_info(**other)
    assert follows(flac_of_another_format_follows, data, 42) == differs
    assert follows(flac_follows, data, 42, 10**9), "another file is more, whatever has been read"
