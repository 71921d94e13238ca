"""Each decoder, at the file's own rate and layout, against FFmpeg's libraries read a frame at a time."""

import itertools
import os
from pathlib import Path

import av
import numpy as np
import pytest

from asr_server.audio.decoder import CannotOpen, Decoder
from asr_server.audio.ffmpeg_decoder import FfmpegDecoder
from asr_server.audio.recording import open_wav
from asr_server.audio.wav import WavDecoder
from asr_server.errors import InvalidAudio
from tests.unit.audio.audio_files import (
    FORMATS,
    Frames,
    Sound,
    make,
    opened,
    voice,
    write_ffmpeg,
    write_film,
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
    decoder = open_wav(fd) or FfmpegDecoder(fd)
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


@pytest.mark.parametrize("subtype", ["PCM_16", "FLOAT", "DOUBLE"])
@pytest.mark.parametrize("name", ["a.wav", "a.aiff", "a.au"])
def test_floats_are_known_as_such_because_they_may_be_no_numbers(
    tmp_path: Path, name: str, subtype: str
) -> None:
    path = write_sndfile(tmp_path / name, voice(16_000, 1, 0.5), 16_000, subtype=subtype)
    assert decoded(path)[1].is_float == (subtype != "PCM_16")


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
def test_ffmpeg_formats_all_have_the_same_scale(tmp_path: Path, codec: str, sample_format: str) -> None:
    write_ffmpeg(str(tmp_path / "a.mka"), voice(16_000, 2, 1.0), 16_000, codec, "matroska")
    with av.open(str(tmp_path / "a.mka")) as container:
        assert next(container.decode(audio=0)).format.name == sample_format
    frames = all_of(FfmpegDecoder(opened(tmp_path / "a.mka")))
    assert np.abs(frames - voice(16_000, 2, 1.0)).max() <= (2**-7 if codec == "pcm_u8" else 2**-15)


def test_no_frame_of_the_first_packet_is_lost(tmp_path: Path) -> None:
    write_ffmpeg(str(tmp_path / "a.wav"), voice(44_100, 2, 2.0), 44_100, "adpcm_ima_wav", "wav")
    frames, expected = decoded(tmp_path / "a.wav")[0], by_ffmpeg(tmp_path / "a.wav")
    assert np.array_equal(frames, expected)


@pytest.mark.parametrize("tag", [b"", b"ID3\x04\0\0\0\0\0\x05title"], ids=["plain", "tagged"])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.wav", WavDecoder),
        *((name, FfmpegDecoder) for name in ("a.flac", "a.mp3", "a.aiff", "a.m4a", "a.aac", "pcm.mov")),
    ],
)
def test_content_decides_and_neither_the_name_nor_a_tag_before_it(
    tmp_path: Path, name: str, kind: type[Decoder], tag: bytes
) -> None:
    path = make(tmp_path, name, voice(48_000, 1, 1.0), 48_000)
    plain = decoded(path)[0]
    (tmp_path / "upload").write_bytes(tag + path.read_bytes())
    frames, decoder = decoded(tmp_path / "upload")
    assert type(decoder) is kind
    assert np.array_equal(frames, plain)


def test_a_wav_of_big_endian_is_read(tmp_path: Path) -> None:
    path = write_sndfile(
        tmp_path / "a.wav", voice(16_000, 1, 1.0), 16_000, format="WAV", subtype="PCM_24", endian="BIG"
    )
    assert path.read_bytes()[:4] == b"RIFX"
    assert rms(decoded(path)[0] - voice(16_000, 1, 1.0)) < 2.0**-20


@pytest.mark.parametrize("container", ["mxf", "sph"])
def test_recorders_and_corpora_are_read(tmp_path: Path, container: str) -> None:
    """MXF of cameras; SPHERE, whose header is text."""
    path, sound = tmp_path / "a", voice(48_000, 1, 2.0)
    if container == "mxf":
        write_film(path, "mxf", [Sound(sound)], picture_s=2.0, codec="pcm_s16le", picture_codec="mpeg2video")
    else:
        head = "NIST_1A\n   1024\nsample_count -i 96000\nsample_rate -i 48000\nchannel_count -i 1\n"
        head += "sample_n_bytes -i 2\nsample_byte_format -s2 01\nsample_coding -s3 pcm\nend_head\n"
        path.write_bytes(head.encode().ljust(1024) + (sound * 2**15).astype("<i2").tobytes())
    frames, _ = decoded(path)
    assert rms(frames[: len(sound)] - sound[: len(frames)]) < 1e-3


def test_an_id3_tag_with_cover_art_hides_no_mp3(tmp_path: Path) -> None:
    path = make(tmp_path, "a.mp3", voice(44_100, 1, 1.0), 44_100)
    plain = decoded(path)[0]
    path.write_bytes(_id3(300_000) + path.read_bytes())
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
