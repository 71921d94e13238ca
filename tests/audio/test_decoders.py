"""Each decoder, at the file's own rate and layout, against FFmpeg's libraries read a frame at a time."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import av
import numpy as np
import pytest

from asr_server.audio.decoder import CannotOpen, Decoder
from asr_server.audio.decoders import open_native, sniff
from asr_server.audio.ffmpeg_decoder import FfmpegDecoder
from asr_server.audio.sndfile import SndfileDecoder
from asr_server.audio.wav import WavDecoder
from asr_server.errors import InvalidAudio
from tests.audio.audio_files import (
    FORMATS,
    LOSSLESS,
    Frames,
    make,
    opened,
    real_recordings,
    voice,
    write_ffmpeg,
    write_sndfile,
)


def all_of(decoder: Decoder) -> Frames:
    blocks = []
    while len(block := decoder.read()):
        blocks.append(np.array(block))
    decoder.close()
    return np.concatenate(blocks)


def decoded(path: Path) -> tuple[Frames, Decoder]:
    fd = os.open(path, os.O_RDONLY)
    decoder = open_native(fd) or FfmpegDecoder(fd)
    frames = all_of(decoder)
    os.close(fd)
    return frames, decoder


def by_ffmpeg(path: Path) -> Frames:
    """[frames, channels] by the shortest loop there is."""
    with av.open(str(path)) as container:
        stream = container.streams.audio[0]
        stream.codec_context.thread_count = 1
        resampler = av.AudioResampler("fltp")
        frames = [part for frame in container.decode(stream) for part in resampler.resample(frame)]
    return np.concatenate([frame.to_ndarray().T for frame in frames])


def rms(frames: Frames) -> float:
    return float(np.sqrt(np.mean(np.square(frames, dtype=np.float64))))


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_samples_are_those_of_ffmpeg(tmp_path: Path, name: str) -> None:
    path = make(tmp_path, name, voice(), 48_000)
    frames, decoder = decoded(path)
    expected = by_ffmpeg(path)
    assert (decoder.sample_rate, decoder.num_channels) == (48_000, 2)
    assert frames.shape == expected.shape
    assert rms(expected) > 0.05
    assert rms(frames - expected) < 1e-6
    assert not decoder.truncated


@pytest.mark.parametrize("name", LOSSLESS)
def test_lossless_formats_give_back_what_was_written(tmp_path: Path, name: str) -> None:
    frames, _ = decoded(make(tmp_path, name, voice(), 48_000))
    assert frames.shape == voice().shape
    assert np.abs(frames - voice()).max() <= 2**-15


@pytest.mark.parametrize("path", real_recordings() or [None], ids=lambda path: getattr(path, "name", "none"))
def test_real_recordings_are_read_as_ffmpeg_reads_them(path: Path | None) -> None:
    if path is None:
        pytest.skip("no recordings in ../shared/data/audio")
    frames, expected = decoded(path)[0], by_ffmpeg(path)
    assert len(frames) == len(expected)
    assert rms(frames - expected) < 1e-3


@pytest.mark.parametrize(
    ("name", "num_channels"),
    [
        *itertools.product(("a.wav", "a.flac", "a.aiff", "a.ogg", "pcm.mov", "a.m4a", "a.opus"), (1, 2, 6)),
        *itertools.product(("a.wav", "a.flac", "a.aiff", "a.ogg"), (8,)),
    ],
)
def test_channels_are_kept_apart(tmp_path: Path, name: str, num_channels: int) -> None:
    frames, decoder = decoded(make(tmp_path, name, voice(48_000, num_channels, 1.0), 48_000))
    expected = voice(48_000, num_channels, 1.0)
    assert decoder.num_channels == num_channels
    length = min(len(frames), len(expected))
    order = np.abs(np.corrcoef(frames[:length].T, expected[:length].T))[:num_channels, num_channels:].argmax(
        axis=1
    )
    assert sorted(order.tolist()) == list(range(num_channels))  # surround formats may order them differently


@pytest.mark.parametrize(
    "sample_rate", [8_000, 11_025, 16_000, 22_050, 32_000, 44_100, 88_200, 96_000, 192_000]
)
@pytest.mark.parametrize("name", ["a.wav", "a.flac", "a.aiff"])
def test_rates_from_8_to_192_khz(tmp_path: Path, name: str, sample_rate: int) -> None:
    frames, decoder = decoded(make(tmp_path, name, voice(sample_rate, 1, 0.5), sample_rate))
    assert decoder.sample_rate == sample_rate
    assert rms(frames - voice(sample_rate, 1, 0.5)) < 1e-4


@pytest.mark.parametrize("sample_rate", [8_000, 11_025, 16_000, 22_050, 24_000, 32_000, 44_100])
def test_mp3_of_every_rate_is_aligned(tmp_path: Path, sample_rate: int) -> None:
    path = make(tmp_path, "a.mp3", voice(sample_rate, 1, 2.0), sample_rate)
    frames, expected = decoded(path)[0], by_ffmpeg(path)
    assert len(frames) == len(expected)
    assert rms(frames - expected) < 1e-5


@pytest.mark.parametrize(
    ("name", "subtype", "is_float"),
    [
        ("a.wav", "PCM_16", False),
        ("a.wav", "FLOAT", True),
        ("a.wav", "DOUBLE", True),
        ("a.aiff", "PCM_16", False),
        ("a.aiff", "FLOAT", True),
        ("a.aiff", "DOUBLE", True),
        ("a.flac", "PCM_24", False),
        ("a.au", "PCM_16", False),
        ("a.au", "FLOAT", True),
        ("a.au", "DOUBLE", True),
    ],
)
def test_floats_are_known_as_such_because_they_may_be_no_numbers(
    tmp_path: Path, name: str, subtype: str, is_float: bool
) -> None:
    path = write_sndfile(tmp_path / name, voice(16_000, 1, 0.5), 16_000, subtype=subtype)
    assert decoded(path)[1].is_float == is_float


@pytest.mark.parametrize("subtype", ["PCM_S8", "PCM_16", "PCM_24"])
def test_flac_depths(tmp_path: Path, subtype: str) -> None:
    path = write_sndfile(tmp_path / "a.flac", voice(16_000, 1, 1.0), 16_000, subtype=subtype)
    assert rms(decoded(path)[0] - voice(16_000, 1, 1.0)) < 2.0**-7


@pytest.mark.parametrize(
    "subtype", ["PCM_S8", "PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW"]
)
def test_aiff_depths(tmp_path: Path, subtype: str) -> None:
    path = write_sndfile(tmp_path / "a.aiff", voice(16_000, 1, 1.0), 16_000, subtype=subtype, format="AIFF")
    assert rms(decoded(path)[0] - voice(16_000, 1, 1.0)) < 2.0**-6


@pytest.mark.parametrize(
    ("codec", "sample_format"),
    [
        ("pcm_u8", "u8"),
        ("pcm_s16le", "s16"),
        ("pcm_s32le", "s32"),
        ("pcm_f32le", "flt"),
        ("pcm_f64le", "dbl"),
    ],
)
def test_ffmpeg_formats_of_every_kind_have_the_same_scale(
    tmp_path: Path, codec: str, sample_format: str
) -> None:
    write_ffmpeg(str(tmp_path / "a.mka"), voice(16_000, 2, 1.0), 16_000, codec, "matroska")
    with av.open(str(tmp_path / "a.mka")) as container:
        assert next(container.decode(audio=0)).format.name == sample_format
    frames = all_of(FfmpegDecoder(opened(tmp_path / "a.mka")))
    assert np.abs(frames - voice(16_000, 2, 1.0)).max() <= (2**-7 if codec == "pcm_u8" else 2**-15)


def test_no_frame_of_the_first_packet_is_lost(tmp_path: Path) -> None:
    write_ffmpeg(str(tmp_path / "a.wav"), voice(44_100, 2, 2.0), 44_100, "adpcm_ima_wav", "wav")
    frames, expected = decoded(tmp_path / "a.wav")[0], by_ffmpeg(tmp_path / "a.wav")
    assert np.array_equal(frames, expected)


def test_a_stream_that_changes_its_layout_goes_on_in_the_first_one(tmp_path: Path) -> None:
    for name, num_channels in (("1", 1), ("2", 2)):
        write_ffmpeg(str(tmp_path / name), voice(44_100, num_channels, 2.0), 44_100, "aac", "adts")
    joined = tmp_path / "a.aac"
    joined.write_bytes((tmp_path / "1").read_bytes() + (tmp_path / "2").read_bytes())
    frames, decoder = decoded(joined)
    assert decoder.num_channels == 1
    assert len(frames) == pytest.approx(4.0 * 44_100, rel=0.03)
    assert rms(frames[-44_100:]) > 0.05


def test_chained_ogg_is_read_to_its_end(tmp_path: Path) -> None:
    one = make(tmp_path, "a.ogg", voice(44_100, 1, 2.0), 44_100).read_bytes()
    (tmp_path / "chained.ogg").write_bytes(
        one + make(tmp_path, "a.ogg", voice(44_100, 1, 2.0), 44_100).read_bytes()
    )
    assert len(decoded(tmp_path / "chained.ogg")[0]) == pytest.approx(4.0 * 44_100, rel=0.01)


def test_content_decides_and_not_the_name(tmp_path: Path) -> None:
    for name, family in (("a.wav", "wav"), ("a.mp3", "sndfile"), ("a.flac", "sndfile"), ("a.m4a", "ffmpeg")):
        path = make(tmp_path, name, voice(48_000, 1, 1.0), 48_000)
        fd = os.open(path.rename(tmp_path / "upload"), os.O_RDONLY)
        assert sniff(fd) == family
        os.close(fd)


@pytest.mark.parametrize(
    ("head", "family"),
    [
        *((kind + bytes(4) + b"WAVE", "wav") for kind in (b"RIFF", b"RF64", b"BW64")),
        *((b"FORM" + bytes(4) + kind, "sndfile") for kind in (b"AIFF", b"AIFC")),
        *((b"fLaC", "sndfile"), (b"\xff\xfb", "sndfile"), (b"ID3\x04\0\0\0\0\0\1x\xff\xfb", "sndfile")),
        *((b"RIFF" + bytes(4) + b"AVI ", "ffmpeg"), (b"XXXX" + bytes(4) + b"WAVE", "ffmpeg")),
        *((b"FORM" + bytes(4) + b"8SVX", "ffmpeg"), (b"XXXX" + bytes(4) + b"AIFF", "ffmpeg")),
        *((b"\xff", "ffmpeg"), (b"\xff\xf1", "ffmpeg"), (b"\xfe\xfb", "ffmpeg")),
    ],
)
def test_a_family_is_known_by_the_first_bytes(tmp_path: Path, head: bytes, family: str) -> None:
    (tmp_path / "upload").write_bytes(head)
    assert sniff(opened(tmp_path / "upload")) == family


def test_each_family_has_its_decoder(tmp_path: Path) -> None:
    for name, kind in (("a.wav", WavDecoder), ("a.flac", SndfileDecoder), ("a.m4a", type(None))):
        decoder = open_native(opened(make(tmp_path, name, voice(48_000, 1, 1.0), 48_000)))
        assert type(decoder) is kind
        if decoder is not None:
            decoder.close()


def test_an_id3_tag_with_cover_art_hides_no_mp3(tmp_path: Path) -> None:
    path = make(tmp_path, "a.mp3", voice(44_100, 1, 1.0), 44_100)
    plain = decoded(path)[0]
    path.write_bytes(_id3(300_000) + path.read_bytes())
    fd = os.open(path, os.O_RDONLY)
    assert sniff(fd) == "sndfile"
    os.close(fd)
    assert np.array_equal(decoded(path)[0], plain)


def _id3(size: int) -> bytes:
    """A tag of `size` bytes with a picture in it that contains what looks like the start of a frame."""
    frame = (
        b"APIC" + size_bytes(size - 10) + b"\0\0" + b"\0image/png\0\3\0" + b"\xff\xfb\x90\x64" * (size // 4)
    )
    return b"ID3\x04\0\0" + size_bytes(size) + frame[:size]


def size_bytes(size: int) -> bytes:
    return bytes((size >> shift) & 0x7F for shift in (21, 14, 7, 0))


def test_a_video_without_sound_is_refused_by_name(tmp_path: Path) -> None:
    write_silent_video(tmp_path / "a.mp4")
    with pytest.raises(InvalidAudio, match="no audio stream"):
        FfmpegDecoder(opened(tmp_path / "a.mp4"))


def write_silent_video(path: Path) -> None:
    with av.open(str(path), "w") as output:
        stream = output.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 32
        for _ in range(10):
            frame = av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), "rgb24")
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))


def test_a_playlist_cannot_name_another_file(tmp_path: Path) -> None:
    secret = make(tmp_path, "a.mp3", voice(44_100, 1, 1.0), 44_100)
    for name, text in (
        ("a.m3u8", f"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{secret}\n#EXT-X-ENDLIST\n"),
        ("a.ffconcat", f"ffconcat version 1.0\nfile {secret}\n"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(CannotOpen):
            FfmpegDecoder(opened(tmp_path / name))


def test_libsndfile_says_that_it_cannot_open(tmp_path: Path) -> None:
    (tmp_path / "a.flac").write_bytes(b"fLaC" + bytes(100))
    fd = os.open(tmp_path / "a.flac", os.O_RDONLY)
    with pytest.raises(CannotOpen):
        SndfileDecoder(fd)
    os.close(fd)
