"""WAV as it is written in the wild; FLAC and MP3 whose headers count too little; files joined together."""

import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile

from asr_server.audio.decoder import CannotOpen
from asr_server.audio.wav import WavDecoder, unsized_header
from tests.unit.audio.audio_files import (
    Frames,
    audio_of,
    chunks_of,
    make,
    opened,
    voice,
    write_ffmpeg,
    write_sndfile,
)
from tests.unit.audio.test_decoders import all_of, rms

SPEECH = voice(16_000, 1, 2.0)


def pcm(frames: Frames) -> bytes:
    return (frames * 32767).astype("<i2").tobytes()


def written(folder: Path, data: bytes) -> Path:
    (folder / "a.wav").write_bytes(data)
    return folder / "a.wav"


def decoded(path: Path) -> tuple[Frames, WavDecoder]:
    decoder = WavDecoder(opened(path))
    return all_of(decoder), decoder


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
def test_every_depth_is_read_as_libsndfile_reads_it(tmp_path: Path, container: str, subtype: str) -> None:
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


UNKNOWN = {
    "empty": b"",
    "magic": b"RIFF",
    "no chunks": b"RIFF\0\0\0\0WAVE",
    "another form": b"RIFF\0\0\0\0AVI " + bytes(100),
    "half a header": raw_wav(b"")[:30],
    "a thousand chunks": raw_wav(bytes(100), extra=b"junk\0\0\0\0" * 1000),
    "adpcm": raw_wav(bytes(100), tag=2),
    "40 bits": raw_wav(bytes(100), bits=40),
    "16 bits in four bytes": raw_wav(bytes(100), 16)[:32] + b"\4\0" + raw_wav(bytes(100), 16)[34:],
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_what_it_does_not_know_is_left_to_others(tmp_path: Path, kind: str) -> None:
    (tmp_path / "a.wav").write_bytes(UNKNOWN[kind])
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
def test_the_long_size_counts_if_the_short_is_unset(tmp_path: Path, long_size: int, num_frames: int) -> None:
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


@pytest.mark.parametrize("share", [0.02, 1 / 3, 0.5])
def test_a_flac_whose_header_counts_too_few_samples_is_read_to_its_end(tmp_path: Path, share: float) -> None:
    path = flac_with_count(make(tmp_path, "a.flac", OTHER, 16_000), share)
    chunks, recording = chunks_of(path)
    assert rms(audio_of(chunks) - OTHER[:, 0]) < 1e-4
    assert recording.duration_s == pytest.approx(5.0)
    assert not recording.truncated


@pytest.mark.parametrize("name", ["a.flac", "a.mp3", "a.mpga", "untagged.mp3"])
def test_files_joined_together_are_read_to_the_last(tmp_path: Path, name: str) -> None:
    parts = OTHER, ONE[:9600], ONE  # the second one of 0.6 s
    alone = [audio_of(chunks_of(make(tmp_path, name, part, 16_000))[0]) for part in parts]
    chunks, recording = chunks_of(joined(tmp_path, name, *parts))
    samples = audio_of(chunks)
    assert recording.duration_s == pytest.approx(sum(map(len, alone)) / 16_000, abs=0.3)
    assert rms(samples[: len(alone[0]) - 4000] - alone[0][:-4000]) < 1e-3
    assert rms(samples[-16_000:]) == pytest.approx(rms(alone[2][-16_000:]), rel=0.2)
    assert not recording.truncated


@pytest.mark.parametrize("name", ["a.mp3", "a.flac"])
def test_tags_behind_the_sound_are_no_more_of_it(tmp_path: Path, name: str) -> None:
    path = make(tmp_path, name, ONE, 16_000)
    plain, alone = path.read_bytes(), audio_of(chunks_of(path)[0])
    rng = np.random.default_rng(8)
    picture = rng.integers(0, 255, 40_000, np.uint8).tobytes()
    ape = b"APETAGEX" + struct.pack("<IIII8x", 2000, len(picture), 1, 0) + picture
    for tags in (b"", b"TAG".ljust(128), ape, ape + b"TAG".ljust(128), bytes(3000)):
        path.write_bytes(plain + tags)
        chunks, recording = chunks_of(path)
        assert len(audio_of(chunks)) == pytest.approx(len(alone), abs=1200)  # an MP3's padding
        assert not recording.truncated


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
        chunks_of(write_sndfile(tmp_path / "mono" / "a.wav", frames @ weights, 48_000, subtype="FLOAT"))[0]
    )
    for name in ("a.flac", "a.m4a", "a.ac3", "a.wav"):
        samples = audio_of(chunks_of(tmp_path / name)[0])[: len(expected)]
        lag = int(np.argmax(np.correlate(samples[8000:24_000], expected[8000:20_000], "valid")))
        aligned = samples[8000 + lag : 20_000 + lag]
        assert np.corrcoef(aligned, expected[8000:20_000])[0, 1] > 0.95, name


def test_a_joined_flac_of_another_rate_and_layout_is_read(tmp_path: Path) -> None:
    one, other = (
        make(tmp_path, "a.flac", voice(rate, num_channels, 2.0), rate).read_bytes()
        for rate, num_channels in ((16_000, 1), (44_100, 2))
    )
    (tmp_path / "a.flac").write_bytes(one + other + one)
    chunks, recording = chunks_of(tmp_path / "a.flac")
    assert recording.duration_s == pytest.approx(6.0, abs=0.01)
    assert not recording.truncated
    assert rms(audio_of(chunks)[-30_000:] - voice(16_000, 1, 2.0)[-30_000:, 0]) < 0.01


def test_an_mp3_of_constant_rate_without_a_count_is_whole_behind_a_tag(tmp_path: Path) -> None:
    """Its length is guessed by the file's size, and the tag counts."""
    for name, num_before, num_behind in (("a.mpga", 0, 0), ("untagged.mp3", 10_000, 128)):
        path = make(tmp_path, name, OTHER, 16_000)
        tag = b"ID3\x04\0\0" + bytes([0, 0, num_before >> 7, num_before & 127]) + bytes(num_before)
        path.write_bytes(tag + path.read_bytes() + b"TAG".ljust(num_behind, b"x"))
        recording = chunks_of(path)[1]
        assert recording.duration_s == pytest.approx(5.0, abs=0.2)
        assert not recording.truncated


DECODE = """
import sys
from pathlib import Path
from asr_server.audio.recording import Recording

recording = Recording(Path(sys.argv[1]))
while not recording.next_slice(4).finished:
    pass
assert recording.truncated
print("Python's own", file=sys.stderr)
"""


def test_libraries_print_nothing_of_a_damaged_file(tmp_path: Path) -> None:
    path = make(tmp_path, "a.mp3", OTHER, 16_000)
    whole = path.read_bytes()
    path.write_bytes(whole[:5000] + bytes(3000) + whole[9000:])
    command = [sys.executable, "-c", DECODE, str(path)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    assert printed == "Python's own\n"
