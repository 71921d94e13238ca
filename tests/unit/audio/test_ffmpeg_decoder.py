"""The time line of a container, and which of its tracks is read."""

import time
from pathlib import Path

import numpy as np
import pytest
from av.stream import Disposition

from asr_server.audio.decoder import (
    DEFAULT_TRACK,
    AudioLimits,
    TrackChoice,
    parse_choice,
    ranked,
)
from asr_server.audio.ffmpeg_decoder import FfmpegDecoder
from asr_server.core import Track
from asr_server.errors import AudioTooLong, InvalidValue, NoSuchTrack
from tests.unit.audio.audio_files import Frames, Sound, opened, voice, write_ffmpeg, write_film
from tests.unit.audio.test_decoders import all_of


def tone(frequency: int, duration_s: float = 2.0, num_channels: int = 1) -> Frames:
    times = np.arange(round(48_000 * duration_s)) / 48_000
    one = 0.3 * np.sin(2 * np.pi * frequency * times)
    return np.repeat(one[:, None], num_channels, axis=1).astype(np.float32)


def pitch(frames: Frames) -> float:
    """The strongest frequency in Hz."""
    spectrum = np.abs(np.fft.rfft(frames.mean(axis=1)))
    return float(np.argmax(spectrum)) * 48_000 / len(frames)


def first_sound_s(frames: Frames, start_s: float = 0.0) -> float:
    loud = np.abs(frames[round(start_s * 48_000) :]).max(axis=1) > 0.05
    return start_s + float(np.argmax(loud)) / 48_000


@pytest.mark.parametrize(
    ("container", "codec"),
    [("matroska", "aac"), ("mp4", "aac"), ("mov", "aac"), ("mpegts", "aac"), ("matroska", "libopus")],
)
def test_sound_that_begins_after_a_picture_stays_late(tmp_path: Path, container: str, codec: str) -> None:
    path = write_film(tmp_path / "a", container, [Sound(tone(440), start_s=4.02)], 6.0, codec)
    decoder = FfmpegDecoder(opened(path))
    frames = all_of(decoder)
    assert first_sound_s(frames) == pytest.approx(4.02, abs=0.03)
    assert len(frames) / 48_000 == pytest.approx(6.02, abs=0.06)
    assert not decoder.truncated


@pytest.mark.parametrize(
    ("container", "codec"),
    [("matroska", "aac"), ("webm", "libopus"), ("ogg", "libopus"), ("mp4", "aac"), ("mpegts", "aac")],
)
@pytest.mark.parametrize("gap_s", [0.4, 5.0])
def test_a_gap_of_time_stamps_is_silence(tmp_path: Path, container: str, codec: str, gap_s: float) -> None:
    path = write_film(tmp_path / "a", container, [Sound(tone(440), gap=(1.0, gap_s))], codec=codec)
    decoder = FfmpegDecoder(opened(path))
    frames = all_of(decoder)
    assert len(frames) / 48_000 == pytest.approx(2.0 + gap_s, abs=0.06)
    assert first_sound_s(frames, 1.1) == pytest.approx(1.0 + gap_s, abs=0.04)
    assert not decoder.truncated


def test_a_clock_that_jumps_in_a_transport_stream_is_no_silence(tmp_path: Path) -> None:
    path = write_film(tmp_path / "a.ts", "mpegts", [Sound(tone(440), gap=(1.0, 3600.0))])
    assert len(all_of(FfmpegDecoder(opened(path)))) / 48_000 == pytest.approx(2.0, abs=0.1)


@pytest.mark.parametrize(("step_s", "at_s"), [(0.6, [10.0, 20.0, 30.0]), (0.02, list(range(1, 40)))])
def test_time_stamps_that_run_behind_the_samples_are_followed_without_losing_sound(
    tmp_path: Path, step_s: float, at_s: list[float]
) -> None:
    """A recorder that was paused and resumed, and a clock that is slow by 2 %."""
    sound = np.tile(np.concatenate([tone(440, 0.8), tone(440, 0.2) * 0]), (50, 1))
    sounds = [Sound(sound, steps=[(at, -step_s) for at in at_s])]
    frames = all_of(FfmpegDecoder(opened(write_film(tmp_path / "a", "matroska", sounds, codec="flac"))))
    behind_s = step_s * len(at_s)
    assert len(frames) / 48_000 == pytest.approx(50.0 - behind_s, abs=0.15)
    loud = np.abs(frames[:, 0]).reshape(-1, 480)[: len(frames) // 480].max(axis=1) > 0.05
    assert loud.sum() / 100 == pytest.approx(40.0, abs=1.0)


def test_a_raw_stream_has_no_clock(tmp_path: Path) -> None:
    """Its demuxer counts time at the rate of the first frame."""
    for name, rate, num_channels in (("1", 16_000, 1), ("2", 44_100, 2)):
        write_ffmpeg(str(tmp_path / name), voice(rate, num_channels, 3.0), rate, "aac", "adts")
    path = tmp_path / "joined.aac"
    path.write_bytes((tmp_path / "1").read_bytes() + (tmp_path / "2").read_bytes())
    frames = all_of(FfmpegDecoder(opened(path)))
    assert len(frames) / 16_000 == pytest.approx(6.0, abs=0.2)
    assert first_sound_s(frames[round(0.1 * 16_000) :]) < 0.1
    assert np.abs(frames).reshape(-1)[: 5 * 16_000].reshape(-1, 1600).max(axis=1).min() > 0.02


@pytest.mark.parametrize(
    ("name", "container", "codec"),
    [("a.ogg", "ogg", "libopus"), ("a.mp4", "mp4", "aac"), ("b", "ogg", "flac")],
)
def test_files_joined_together_are_read_to_the_last_whatever_their_layouts(
    tmp_path: Path, name: str, container: str, codec: str
) -> None:
    parts = [tone(440), tone(660, num_channels=2), tone(880, 3.0)]
    paths = [tmp_path / f"{number}-{name}" for number in range(3)]
    for path, part in zip(paths, parts, strict=True):
        write_film(path, container, [Sound(part)], codec=codec)
    (tmp_path / name).write_bytes(b"".join(path.read_bytes() for path in paths))
    decoder = FfmpegDecoder(opened(tmp_path / name))
    frames = all_of(decoder)
    assert len(frames) / 48_000 == pytest.approx(7.0, abs=0.1)
    pitches = [pitch(frames[round(start_s * 48_000) :][:48_000]) for start_s in (0.5, 2.5, 5.0)]
    assert pitches == pytest.approx([440, 660, 880], abs=3)
    assert not decoder.truncated


def test_a_joined_file_that_cannot_be_read_is_reported(tmp_path: Path) -> None:
    path = write_film(tmp_path / "a.mp4", "mp4", [Sound(tone(440))])
    path.write_bytes(path.read_bytes() + b"\0\0\0\x18ftypM4A " + bytes(5000))
    decoder = FfmpegDecoder(opened(path))
    assert len(all_of(decoder)) / 48_000 == pytest.approx(2.0, abs=0.1)
    assert decoder.truncated


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
@pytest.mark.parametrize(
    ("container", "codec"), [("webm", "libopus"), ("ogg", "libopus"), ("ogg", "flac"), ("mp4", "aac")]
)
def test_zeros_in_a_file_are_reported_and_the_rest_keeps_its_time(
    tmp_path: Path, container: str, codec: str, share: float
) -> None:
    options = {"movflags": "+faststart"} if container == "mp4" else {}
    write_ffmpeg(str(tmp_path / "a"), voice(48_000, 1, 12.0), 48_000, codec, container, options=options)
    data = bytearray((tmp_path / "a").read_bytes())
    start, size = round(share * len(data)), len(data) // 10
    data[start : start + size] = bytes(size)
    (tmp_path / "a").write_bytes(data)
    decoder = FfmpegDecoder(opened(tmp_path / "a"))
    num_frames = len(all_of(decoder))
    assert decoder.truncated
    assert num_frames / 48_000 == pytest.approx(12.0, abs=0.1 if share < 0.9 else 2.5)


def test_pauses_of_a_telephone_are_silence_and_no_damage(tmp_path: Path) -> None:
    """AMR without speech: a frame that describes noise, then empty ones (3GPP TS 26.101)."""
    speech = bytes([0x3C]) + bytes(31)
    pause = bytes([0x44]) + bytes(5) + bytes([0x7C] * 7)
    (tmp_path / "a.amr").write_bytes(b"#!AMR\n" + speech * 100 + pause * 10 + speech * 50)
    decoder = FfmpegDecoder(opened(tmp_path / "a.amr"))
    assert len(all_of(decoder)) / 8000 == pytest.approx((100 + 80 + 50) * 0.02, abs=0.03)
    assert not decoder.truncated


def test_time_stamps_that_begin_again_do_not_hide_a_later_gap(tmp_path: Path) -> None:
    parts = [Sound(tone(440), gap=(1.0, gap_s)) for gap_s in (0.0, 0.5)]
    names = [write_film(tmp_path / str(n), "ogg", [part], codec="libopus") for n, part in enumerate(parts)]
    joined = tmp_path / "joined.ogg"
    joined.write_bytes(b"".join(name.read_bytes() for name in names))
    assert len(all_of(FfmpegDecoder(opened(joined)))) / 48_000 == pytest.approx(4.5, abs=0.1)


def test_silence_beyond_the_limit_is_refused_before_it_is_made(tmp_path: Path) -> None:
    path = write_film(tmp_path / "a.mkv", "matroska", [Sound(tone(440), gap=(1.0, 50_000.0))])
    started_s = time.process_time()
    with pytest.raises(AudioTooLong, match="max-audio-s"):
        all_of(FfmpegDecoder(opened(path), limits=AudioLimits(max_audio_s=43_200)))
    assert time.process_time() - started_s < 43_200 / 1000  # by far less than its samples would take


@pytest.mark.parametrize(("start_s", "picture_s"), [(20.0, 26.0), (5.0, 0.0)])
def test_sound_that_begins_late_is_not_cut_short(tmp_path: Path, start_s: float, picture_s: float) -> None:
    """Longer than FFmpeg looks ahead; and alone, where it is the start."""
    path = write_film(tmp_path / "a.mkv", "matroska", [Sound(tone(440), start_s=start_s)], picture_s)
    decoder = FfmpegDecoder(opened(path))
    lead_s = start_s if picture_s else 0.0
    assert len(all_of(decoder)) / 48_000 == pytest.approx(lead_s + 2.0, abs=0.05)
    assert not decoder.truncated


@pytest.mark.parametrize("container", ["matroska", "mp4", "mpegts"])
def test_a_picture_that_outlasts_the_sound_is_no_damage(tmp_path: Path, container: str) -> None:
    path = write_film(tmp_path / "a", container, [Sound(tone(440))], picture_s=4.0)
    decoder = FfmpegDecoder(opened(path))
    assert len(all_of(decoder)) / 48_000 == pytest.approx(2.0, abs=0.05)
    assert not decoder.truncated


def test_a_film_that_is_cut_short_is_said_to_be(tmp_path: Path) -> None:
    path = write_film(tmp_path / "a.mkv", "matroska", [Sound(voice(48_000, 1, 8.0))], picture_s=8.0)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    decoder = FfmpegDecoder(opened(path))
    assert 1 < len(all_of(decoder)) / 48_000 < 7
    assert decoder.truncated


@pytest.mark.parametrize("container", ["matroska", "mp4"])
def test_a_broken_packet_counts_as_cut_short_and_the_rest_is_read(tmp_path: Path, container: str) -> None:
    path = write_film(tmp_path / "a", container, [Sound(voice(48_000, 1, 4.0))])
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 40] = b"\xff" * 40
    path.write_bytes(data)
    decoder = FfmpegDecoder(opened(path))
    assert len(all_of(decoder)) / 48_000 == pytest.approx(4.0, abs=0.1)
    assert decoder.truncated


@pytest.mark.parametrize(
    ("between", "is_damage"),
    [
        (b"", False),
        (b"TAG" + bytes(125), False),
        (b"APETAGEX" + bytes(24), False),
        (b"XYZ" + bytes(125), True),
        (b"XYZ" + bytes(125) + b"TAG" + bytes(125), True),
    ],
)
def test_tags_between_joined_mp3s_are_no_damage(tmp_path: Path, between: bytes, is_damage: bool) -> None:
    path = tmp_path / "a.mp3"
    write_ffmpeg(str(path), voice(48_000, 1, 1.0), 48_000, "libmp3lame", "mp3")
    one = path.read_bytes()
    path.write_bytes(one + between + one)
    decoder = FfmpegDecoder(opened(path))
    assert len(all_of(decoder)) / 48_000 == pytest.approx(2.0, abs=0.1)
    assert decoder.truncated == is_damage


# -- Tracks ------------------------------------------------------------------------------------------------

FILM = [
    Sound(tone(400), language="eng", disposition=Disposition.comment),
    Sound(tone(500), language="ger", disposition=Disposition.default),
    Sound(tone(600), language="spa"),
]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (TrackChoice(), 500),
        (TrackChoice((1,)), 400),
        (TrackChoice((3,)), 600),
        (TrackChoice(language="spa"), 600),
        (TrackChoice(language="es"), 600),
        (TrackChoice(language="deu"), 500),
    ],
)
def test_the_default_track_is_read_or_the_named(tmp_path: Path, choice: TrackChoice, expected: int) -> None:
    decoder = FfmpegDecoder(opened(write_film(tmp_path / "a.mkv", "matroska", FILM)), choice)
    assert pitch(all_of(decoder)) == pytest.approx(expected, abs=2)
    (track,) = decoder.tracks_read
    assert track.number == expected // 100 - 3


def test_a_commentary_and_a_description_come_last_where_none_is_the_default(tmp_path: Path) -> None:
    sounds = [
        Sound(tone(400), disposition=Disposition.comment),
        Sound(tone(500), disposition=Disposition.visual_impaired),
        Sound(tone(600), disposition=Disposition.original),
    ]
    decoder = FfmpegDecoder(opened(write_film(tmp_path / "a.mkv", "matroska", sounds)))
    assert decoder.tracks_read[0].number == 3


@pytest.mark.parametrize("container", ["matroska", "mp4"])
@pytest.mark.parametrize("disposition", [0, Disposition.default])
def test_a_track_without_packets_is_passed_over(tmp_path: Path, container: str, disposition: int) -> None:
    sounds = [Sound(None, disposition=disposition), Sound(tone(500))]
    decoder = FfmpegDecoder(opened(write_film(tmp_path / "a", container, sounds)))
    assert pitch(all_of(decoder)) == pytest.approx(500, abs=2)
    assert not decoder.truncated


@pytest.mark.parametrize(
    ("text", "split_channels", "choice"),
    [
        ("", False, DEFAULT_TRACK),
        (" 2 ", False, TrackChoice((2,))),
        ("1, 2", True, TrackChoice((1, 2))),
        ("1", False, TrackChoice((1,))),
        ("999", True, TrackChoice((999,))),
        ("000000001", False, TrackChoice((1,))),
        ("ger", False, TrackChoice(language="ger")),
    ],
)
def test_tracks_are_numbers_or_a_language(text: str, split_channels: bool, choice: TrackChoice) -> None:
    assert parse_choice(text, split_channels) == choice


@pytest.mark.parametrize(
    "text", ["0", "1000", "-1", "1.5", "1,2", "eng,ger", "?", "9" * 60, "0000000001", "\u0662"]
)
def test_anything_else_is_refused_by_the_name_of_the_field(text: str) -> None:
    with pytest.raises(InvalidValue, match="'track'") as refused:
        parse_choice(text, split_channels=False)
    assert refused.value.param == "track"


@pytest.mark.parametrize("text", ["1,1", "1,2,3", "0,1", "eng,1"])
def test_split_channels_take_two_different_numbers(text: str) -> None:
    with pytest.raises(InvalidValue, match="'track'"):
        parse_choice(text, split_channels=True)


TRACKS = [
    Track(1, "deu", is_extra=True),
    Track(2, "eng", is_extra=True, is_default=True),
    Track(3, "ger"),
    Track(4),
    Track(5, "de"),
]


@pytest.mark.parametrize(
    ("choice", "numbers"),
    [
        (DEFAULT_TRACK, [2, 3, 4, 5, 1]),
        (TrackChoice((5, 1)), [5, 1]),
        (TrackChoice(language="de"), [3, 5, 1]),
    ],
)
def test_the_best_track_is_the_files_default_and_then_what_is_no_commentary(
    choice: TrackChoice, numbers: list[int]
) -> None:
    assert [track.number for track in ranked(TRACKS, choice)] == numbers


def test_a_choice_of_no_track_is_refused_with_those_that_are() -> None:
    many = [*TRACKS, *(Track(number, "en") for number in range(6, 25))]
    with pytest.raises(NoSuchTrack) as refused:
        ranked(many, TrackChoice(language="f" * 21))
    assert f"asks for the language '{'f' * 20}'; the file has 24 audio tracks (1: " in str(refused.value)
    assert str(refused.value).endswith(", 19: en, 20: en).")
    with pytest.raises(NoSuchTrack) as refused:
        ranked(TRACKS, TrackChoice((6,)))
    assert str(refused.value).endswith(
        "the file has 5 audio tracks (1: deu, 2: eng, 3: ger, 4: no language, 5: de)."
    )


def test_a_plain_recording_has_one_track() -> None:
    for choice in (DEFAULT_TRACK, TrackChoice((1,))):
        assert ranked([Track(1)], choice) == [Track(1)]
    for choice in (TrackChoice((2,)), TrackChoice((1, 2)), TrackChoice(language="eng")):
        with pytest.raises(NoSuchTrack, match="1 audio track "):
            ranked([Track(1)], choice)
