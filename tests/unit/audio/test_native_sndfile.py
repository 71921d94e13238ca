"""FLAC and MP3 whose headers count too little, and files joined together."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from asr_server.audio.decoder import AudioLimits
from asr_server.audio.native import SndfileDecoder
from asr_server.audio.recording import Recording
from asr_server.errors import AudioTooLong
from tests.unit.audio.audio_files import (
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
from tests.unit.audio.test_decoders import all_of, rms

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


@pytest.mark.parametrize("share", [0.02, 1 / 3, 0.5])
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
    plain, alone = path.read_bytes(), audio_of(pieces_of(path)[0])
    rng = np.random.default_rng(8)
    picture = rng.integers(0, 255, 40_000, np.uint8).tobytes()
    ape = b"APETAGEX" + struct.pack("<IIII8x", 2000, len(picture), 1, 0) + picture
    for tags in (b"", b"TAG".ljust(128), ape, ape + b"TAG".ljust(128), bytes(3000)):
        path.write_bytes(plain + tags)
        pieces, recording = pieces_of(path)
        assert len(audio_of(pieces)) == len(alone)
        assert not recording.truncated


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


def test_a_joined_flac_of_another_rate_and_layout_is_read(tmp_path: Path) -> None:
    one, other = (
        make(tmp_path, "a.flac", voice(rate, num_channels, 2.0), rate).read_bytes()
        for rate, num_channels in ((16_000, 1), (44_100, 2))
    )
    (tmp_path / "a.flac").write_bytes(one + other + one)
    pieces, recording = pieces_of(tmp_path / "a.flac")
    assert recording.duration_s == pytest.approx(6.0, abs=0.01)
    assert not recording.truncated
    assert rms(audio_of(pieces)[-30_000:] - voice(16_000, 1, 2.0)[-30_000:, 0]) < 0.01


def test_an_mp3_of_constant_rate_without_a_count_is_whole_behind_a_tag(tmp_path: Path) -> None:
    """Its length is guessed by the file's size, and the tag counts."""
    for name, num_before, num_behind in (("a.mpga", 0, 0), ("untagged.mp3", 10_000, 128)):
        path = make(tmp_path, name, OTHER, 16_000)
        tag = b"ID3\x04\0\0" + bytes([0, 0, num_before >> 7, num_before & 127]) + bytes(num_before)
        path.write_bytes(tag + path.read_bytes() + b"TAG".ljust(num_behind, b"x"))
        recording = pieces_of(path)[1]
        assert recording.duration_s == pytest.approx(5.0, abs=0.2)
        assert not recording.truncated


def test_a_flac_has_the_layout_that_ffmpeg_gives_it(tmp_path: Path) -> None:
    is_alike = str.maketrans("S", "B")  # the format says "back or surround" of five and six
    for num_channels in range(3, 9):
        path = write_sndfile(tmp_path / "a.flac", voice(8000, num_channels, 0.1), 8000, subtype="PCM_16")
        with av.open(str(path)) as container:
            stream: Any = container.streams.audio[0]
            names = [channel.name.translate(is_alike) for channel in stream.layout.channels]
        assert [name.translate(is_alike) for name in SndfileDecoder(opened(path)).layout] == names


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
