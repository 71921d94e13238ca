"""A file's session from bytes to chunks, in every format and every state of repair."""

import io
import struct
import tempfile
import threading
import time
from pathlib import Path
from typing import BinaryIO

import av
import numpy as np
import pytest
import soundfile

from asr_server.audio.decoder import RECORDING_FORMATS as SUPPORTED
from asr_server.audio.decoder import AudioLimits
from asr_server.audio.recording import Cancelled, Recording, memory_file
from asr_server.audio.split import Splitter
from asr_server.core import Chunk, Samples
from asr_server.errors import AudioTooLong, AudioTooShort, InvalidAudio, NotStereo
from tests.support.speech import RECORDINGS
from tests.unit.audio.audio_files import (
    FORMATS,
    audio_of,
    chunks_of,
    make,
    real_recordings,
    spoken,
    streamed,
    voice,
    write_sndfile,
)

UNTRIMMED = (
    "a.mpeg",
    "a.aac",
    "fragmented.mp4",
    "untagged.mp3",
)  # have no place to say what the encoder put before the sound
INDEX_LAST = ("a.m4a", "alac.m4a", "index-last.mp4", "pcm.mov")
FEW_PAGES = ("flac.oga", "a.ogg", "a.oga")  # what is left of them is half a page
TALK_S = len(spoken()) / 16_000


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_speech(tmp_path: Path, name: str) -> None:
    path = make(tmp_path, name, np.repeat(spoken(), 3, axis=0), 48_000)
    chunks, recording = chunks_of(path)
    assert recording.duration_s == pytest.approx(TALK_S, abs=0.1 if name in UNTRIMMED else 0.04)
    assert not recording.truncated
    samples, expected = audio_of(chunks), spoken()[:, 0]
    lag = (
        int(np.argmax(np.correlate(samples[:36_000], expected[:32_000], "valid"))) if name in UNTRIMMED else 0
    )
    length = min(len(samples) - lag, len(expected))
    assert np.corrcoef(samples[lag : lag + length], expected[:length])[0, 1] > 0.95


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.wav", "a.flac", "a.mp3", "a.m4a", "a.webm", "a.ogg", "browser.webm"])
def test_the_length_is_known_from_the_first_slice_if_the_header_has_it(tmp_path: Path, name: str) -> None:
    with Recording(make(tmp_path, name, np.repeat(spoken(), 9, axis=0), 48_000)) as recording:
        assert recording.expected_duration_s is None
        recording.next_slice()
        expected_s = recording.expected_duration_s
    known = pytest.approx(3 * TALK_S, abs=0.1)
    assert expected_s == (None if name == "browser.webm" else known)


def test_a_header_that_promises_more_than_the_file_holds_is_not_believed(tmp_path: Path) -> None:
    path = make(tmp_path, "a.wav", spoken(), 16_000)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    _, recording = chunks_of(path)
    assert recording.expected_duration_s == pytest.approx(TALK_S / 2, abs=0.1)


@pytest.mark.parametrize("kind", ["open file", "unlinked file", "in memory"])
@pytest.mark.parametrize("name", ["a.wav", "a.mp3", "a.m4a"])
def test_an_open_file_is_read_from_its_start_and_left_open(tmp_path: Path, name: str, kind: str) -> None:
    path = make(tmp_path, name, voice(48_000, 1, 1.0), 48_000)
    expected, data = audio_of(chunks_of(path)[0]), path.read_bytes()
    with path.open("rb") if kind == "open file" else filled(kind, data) as source:
        assert np.array_equal(audio_of(chunks_of(source)[0]), expected)
        source.seek(0)
        assert source.read() == data


def filled(kind: str, data: bytes) -> BinaryIO:
    """Written and not flushed: it stands at its end."""
    file = tempfile.TemporaryFile() if kind == "unlinked file" else memory_file()  # noqa: SIM115
    file.write(data)
    return file


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("share", [0.9, 0.5, 0.1])
def test_a_file_cut_short_is_read_or_said_why_not(tmp_path: Path, name: str, share: float) -> None:
    data = make(tmp_path, name, voice(48_000, 1, 10.0), 48_000).read_bytes()
    part = data[: int(len(data) * share)]
    if name in INDEX_LAST or (share == 0.1 and name in FEW_PAGES):
        with pytest.raises(InvalidAudio, match="Supported formats"):
            chunks_of(part)
    else:
        assert chunks_of(part)[1].duration_s == pytest.approx(10.0 * share, abs=1.5)


@pytest.mark.parametrize("name", ["a.wav", "a.flac", "a.aiff", "a.mp3", "index-first.mp4", "fragmented.mp4"])
def test_a_file_cut_short_says_so(tmp_path: Path, name: str) -> None:
    data = make(tmp_path, name, voice(48_000, 1, 10.0), 48_000).read_bytes()
    _, recording = chunks_of(data[: len(data) // 2])
    assert recording.truncated


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0",
        b"hello, this is not audio at all",
        b"\0" * 10_000,
        b"%PDF-1.7\n" + b"x" * 5000,
        b"\x89PNG\r\n\x1a\n" + b"\0" * 500,
        b"RIFF\0\0\0\0WAVEfmt ",
        b"fLaC" + b"\0" * 500,
        b"OggS" + b"\0" * 500,
        b"ID3\x04\0\0\0\0\0\x10" + b"\0" * 500,
        b"\xff\xfb" * 300,
        b"\x1aE\xdf\xa3" + b"\0" * 500,
        b"\0\0\0\x18ftypM4A " + b"\0" * 500,
        bytes(range(256)) * 40,
        b"RIFF\0\0\0\0WAVE"
        + struct.pack("<4sI2H2I2H", b"fmt ", 16, 1, 1, 999, 1998, 2, 16)
        + b"data"
        + bytes(9000),
    ],
    ids=lambda content: repr(content[:8]),
)
def test_what_is_not_audio_is_refused_with_the_formats_that_are(content: bytes) -> None:
    with pytest.raises(InvalidAudio, match="Supported formats") as caught:
        chunks_of(content)
    assert caught.value.param == "file"
    assert SUPPORTED in caught.value.message


@pytest.mark.parametrize("name", ["a.wav", "a.flac", "a.m4a"])
def test_less_than_a_tenth_of_a_second_is_too_short(tmp_path: Path, name: str) -> None:
    path = make(tmp_path, name, voice(48_000, 1, 0.02), 48_000)
    with pytest.raises(AudioTooShort, match=r"at least 0\.1 s"):
        chunks_of(path)


@pytest.mark.parametrize(
    ("limit", "value", "words"),
    [
        ("max_audio_s", 3.0, ["duration", "3 s", "--max-audio-s (ASR_SERVER_MAX_AUDIO_S)"]),
        ("max_decoded_bytes", 100_000, ["decoded size", "100000 bytes"]),
        ("max_sample_rate", 44_100, ["sample rate", "44100 Hz", "48000 Hz"]),
        ("max_channels", 1, ["number of channels", "limit of 1"]),
        ("max_preprocess_s", 0.0, ["decoding time", "limit of 0 s"]),
    ],
)
@pytest.mark.parametrize("name", ["a.wav", "a.mp3", "a.webm"])
def test_each_limit_is_named(tmp_path: Path, name: str, limit: str, value: float, words: list[str]) -> None:
    path = make(tmp_path, name, voice(48_000, 2, 5.0), 48_000)
    with pytest.raises(AudioTooLong) as caught:
        chunks_of(path, **{limit: value})
    assert all(word in caught.value.message for word in words)
    assert len(chunks_of(path)[0]) == 1


@pytest.mark.slow
def test_a_busy_machine_makes_no_file_too_much_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    push = Splitter.push

    def push_late(self: Splitter, samples: Samples) -> list[Chunk]:
        time.sleep(0.2)
        return push(self, samples)

    monkeypatch.setattr(Splitter, "push", push_late)
    path = make(tmp_path, "a.wav", voice(24_000, 1, 65.0), 24_000)
    started_at = time.monotonic()
    assert chunks_of(path, max_preprocess_s=0.5)[1].duration_s == pytest.approx(65, abs=0.05)
    assert time.monotonic() - started_at > 0.5


def test_a_browser_s_recording_has_no_duration_and_is_read_whole() -> None:
    data = streamed(voice(24_000, 1, 65.0), 24_000, "libopus", "webm")
    with av.open(io.BytesIO(data), "r") as container:
        assert container.duration is None
    chunks, recording = chunks_of(data)
    assert recording.duration_s == pytest.approx(65.0, abs=0.02)
    assert len(chunks) >= 3
    assert not recording.truncated


@pytest.mark.parametrize("name", ["a.mp3", "a.flac"])
def test_what_is_joined_or_damaged_is_read_to_its_end(tmp_path: Path, name: str) -> None:
    """MP3s joined together, of which a header counts the first; a FLAC with a hole in the middle."""
    path = make(tmp_path, name, voice(48_000, 1, 10.0), 48_000)
    expected, data = audio_of(chunks_of(path)[0]), bytearray(path.read_bytes())
    if name == "a.mp3":
        data = data + bytes(5000) + data
    else:
        data[len(data) // 2 : len(data) // 2 + 100] = bytes(100)
    chunks, recording = chunks_of(bytes(data))
    samples = audio_of(chunks)
    assert recording.duration_s == pytest.approx(20.0 if name == "a.mp3" else 10.0, abs=0.3)
    assert recording.truncated == (name == "a.flac")
    assert np.abs(samples[:70_000] - expected[:70_000]).max() < 1e-5
    assert np.std(samples[-70_000:]) == pytest.approx(np.std(expected[-70_000:]), rel=0.1)


def test_the_first_chunk_leaves_before_the_rest_is_read(tmp_path: Path) -> None:
    recording = Recording(make(tmp_path, "a.mp3", voice(16_000, 1, 65.0), 16_000), AudioLimits())
    while not (decoded := recording.next_slice()).chunks:  # a slice ends after a while, too
        pass
    assert len(decoded.chunks) == 1
    assert not decoded.finished
    assert recording.duration_s < 45
    assert recording.held_bytes < 4 * 480_000
    recording.close()
    assert recording.held_bytes == 0


def test_a_closed_recording_gives_no_more_slices(tmp_path: Path) -> None:
    recording = Recording(make(tmp_path, "a.wav", voice(16_000, 1, 1.0), 16_000), AudioLimits())
    recording.close()
    recording.close()
    with pytest.raises(Cancelled):
        recording.next_slice()


def test_closing_while_a_thread_is_inside_waits_for_nobody(tmp_path: Path) -> None:
    recording = Recording(make(tmp_path, "a.m4a", voice(16_000, 1, 65.0), 16_000), AudioLimits())
    ended = threading.Event()

    def work() -> None:
        try:
            while not recording.next_slice().finished:
                pass
        except (Cancelled, InvalidAudio):  # between slices, or within one
            ended.set()

    thread = threading.Thread(target=work)
    thread.start()
    while recording.duration_s < 1:
        assert thread.is_alive()
    recording.close()
    thread.join(60)
    assert ended.is_set() or not thread.is_alive()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.wav", "a.mp3", "a.webm"])
def test_channels_kept_apart_are_cut_from_one_pass(tmp_path: Path, name: str) -> None:
    """Each channel's chunks are those of a file that holds nothing else."""
    sound = voice(16_000, 1, 70.0)
    frames = np.hstack([sound, np.roll(sound, 20 * 16_000)])
    frames[25 * 16_000 : 55 * 16_000, 1] = 0  # then the channels are cut at different places
    recording = Recording(make(tmp_path, name, frames, 16_000), AudioLimits(), split_channels=True)
    chunks: list[Chunk] = []
    finished = False
    while not finished:
        more, finished = recording.next_slice()
        assert recording.held_bytes <= 2 * 4 * 41 * 16_000
        chunks += more
        settled = recording.settled_s * 16_000
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    assert settled == 16_000 * recording.duration_s == pytest.approx(len(frames), abs=800)
    for channel in (0, 1):
        alone = [chunk for chunk in chunks if chunk.channel == channel]
        together = np.zeros(len(frames) + 800, np.float32)
        for chunk in alone:
            together[chunk.start_sample :][: len(chunk.samples)] = chunk.samples
        assert np.corrcoef(together[: len(frames)], frames[:, channel])[0, 1] > 0.9
        if name == "a.wav":
            expected, _ = chunks_of(write_sndfile(tmp_path / "alone.wav", frames[:, channel], 16_000))
            assert [chunk.start_sample for chunk in alone] == [chunk.start_sample for chunk in expected]


@pytest.mark.slow
def test_no_chunk_comes_before_what_is_settled(tmp_path: Path) -> None:
    frames = np.hstack([voice(16_000, 1, 200.0), np.zeros((200 * 16_000, 1), np.float32)])
    recording = Recording(make(tmp_path, "a.wav", frames, 16_000), AudioLimits(), split_channels=True)
    finished = False
    while not finished:
        settled = recording.settled_s * 16_000
        more, finished = recording.next_slice()
        assert all(chunk.start_sample >= settled for chunk in more)
        if not finished:
            assert recording.duration_s - recording.settled_s <= 41, "the silent channel holds the other up"


@pytest.mark.parametrize("name", ["a.wav", "a.m4a"])
@pytest.mark.parametrize("num_channels", [1, 6])
def test_only_two_channels_are_kept_apart(tmp_path: Path, name: str, num_channels: int) -> None:
    recording = Recording(
        make(tmp_path, name, voice(48_000, num_channels, 1.0), 48_000), AudioLimits(), split_channels=True
    )
    with pytest.raises(NotStereo, match=f"this one has {num_channels} channel"):
        recording.next_slice()


FIELD = RECORDINGS.parent / "field"
TRUNCATED = ("c05_zeros.webm",)


def field(name: str) -> Path:
    if not (FIELD / name).exists():
        pytest.skip(f"{FIELD / name} is not here: recordings of people are not part of the repository")
    return FIELD / name


@pytest.mark.parametrize(
    ("name", "duration_s"),
    [
        *(("c01_mp3_joined_small.mp3", 7.6), ("c01_steps.mkv", 58.2), ("c02_flac_total_third.flac", 11.0)),
        *(("c03_dtx1.amr", 20.54), ("c03_gap.mkv", 16.07), ("c03_late.mkv", 15.1)),
        *(("c04_default_second.mkv", 11.07), ("c05_zeros.webm", 20.55), ("c06_B16m_A44s.aac", 14.7)),
        *(("c06_opus_B1_A2.ogg", 14.59), ("c09_small_size.wav", 11.0), ("c19_video_longer.mkv", 11.07)),
        *(("c20_tag_wav.wav", 3.59), ("c24_24in32.wav", 3.59), ("c42_over_B.wav", 3.59)),
    ],
)
def test_a_file_has_its_length_and_says_whether_it_is_whole(name: str, duration_s: float) -> None:
    chunks, recording = chunks_of(field(name))
    assert recording.duration_s == pytest.approx(duration_s, abs=0.1)
    assert recording.truncated == (name in TRUNCATED)
    assert loudness(audio_of(chunks)) > 0.04


def loudness(samples: Samples) -> float:
    return float(np.sqrt(np.mean(np.square(samples, dtype=np.float64))))


SPEECH = [path for path in real_recordings() if path.suffix == ".wav" and "silence" not in path.name]


@pytest.mark.parametrize("path", SPEECH or [None], ids=lambda path: getattr(path, "name", "none"))
def test_a_bump_of_the_microphone_changes_no_sample_of_speech(tmp_path: Path, path: Path | None) -> None:
    if path is None:
        pytest.skip("no recordings in ../shared/data/audio")
    sound, sample_rate = soundfile.read(path, dtype="float32", always_2d=True)
    bump = 12 * np.sin(np.arange(int(0.3 * sample_rate)) / 40).astype(np.float32)
    bumped = np.concatenate([sound, np.repeat(bump[:, None], sound.shape[1], axis=1), sound])
    soundfile.write(tmp_path / "a.wav", bumped, sample_rate, subtype="FLOAT")
    samples = audio_of(chunks_of(tmp_path / "a.wav")[0])
    alone = audio_of(chunks_of(path)[0])
    num_alone = len(alone) - 1600
    assert np.abs(samples[:num_alone] - alone[:num_alone]).max() < 1e-3
    behind = samples[-num_alone:] - alone[-num_alone:]
    assert loudness(behind[1600:]) < 0.1 * loudness(alone)
