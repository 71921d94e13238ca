"""What a decode process makes of a film's tracks, and how it is confined."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from av.stream import Disposition

from asr_server.audio.decoder import AudioLimits, DecodeTask, FileInfo, TrackChoice
from asr_server.audio.ffmpeg_client import RemoteStream, decode_processes
from asr_server.core import SAMPLE_RATE
from asr_server.errors import NotStereo
from tests.unit.audio.audio_files import Frames, Sound, make, voice, write_film


def task(split_channels: bool = False, numbers: tuple[int, ...] = ()) -> DecodeTask:
    return DecodeTask(AudioLimits(), split_channels, TrackChoice(numbers))


def read(path: Path, given: DecodeTask) -> tuple[FileInfo, Frames]:
    """The file as a decode process answers it, [frames, channels]."""
    with path.open("rb") as file:
        stream, blocks = RemoteStream(file.fileno(), given, threading.Event()), list[Frames]()
        try:
            while (block := stream.read()) is not None:
                blocks.append(block.copy())
        finally:
            stream.close()
    samples = np.concatenate(blocks)
    return stream.info, samples.reshape(len(samples), -1)


def likeness(one: Frames, other: Frames) -> float:
    size = min(len(one), len(other))
    return float(np.corrcoef(one[:size], other[:size])[0, 1])


def film(folder: Path, *sounds: Frames) -> Path:
    default = [Disposition.default, *[0] * (len(sounds) - 1)]
    tracks = [Sound(sound, disposition=mark) for sound, mark in zip(sounds, default, strict=True)]
    return write_film(folder / "a.mkv", "matroska", tracks, codec="flac")


def test_two_tracks_of_one_voice_each_are_two_channels_where_they_are_asked_for(tmp_path: Path) -> None:
    one, other = np.split(voice(48_000, 2, 1.0), 2, axis=1)
    other = other[:24_000]  # behind it is silence
    path = film(tmp_path, one, other)
    for given, sides in ((task(True), (one, other)), (task(True, (2, 1)), (other, one))):
        opened, samples = read(path, given)
        assert opened.num_channels == 2
        assert [track.number for track in opened.tracks_read] == ([1, 2] if sides[0] is one else [2, 1])
        for channel, side in enumerate(sides):
            assert likeness(samples[:, channel], side[::3, 0]) > 0.99
        assert len(samples) == pytest.approx(len(one) / 3, abs=10)
        assert not samples[len(other) // 3 + 100 :, 0 if sides[0] is other else 1].any()
    for given, side in ((task(), one), (task(numbers=(2,)), other)):
        opened, samples = read(path, given)
        assert (opened.num_channels, len(opened.tracks_read)) == (1, 1)
        assert likeness(samples[:, 0], side[::3, 0]) > 0.99


def test_of_two_stereo_tracks_the_first_is_two_channels_and_one_voice_alone_is_none(tmp_path: Path) -> None:
    both = voice(48_000, 2, 1.0)
    opened, samples = read(film(tmp_path, both, both[:, ::-1]), task(split_channels=True))
    assert [track.number for track in opened.tracks_read] == [1]
    assert likeness(samples[:, 0], both[::3, 0]) > 0.99
    for sounds in (1, 3):
        with pytest.raises(NotStereo):
            read(film(tmp_path, *[both[:, :1]] * sounds), task(split_channels=True))


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[psutil.Process, psutil.Process]]:
    """The forkserver, and a decode process that waits to be asked for a block."""
    decode_processes.shutdown()
    path = make(tmp_path_factory.mktemp("sound"), "alac.m4a", voice(SAMPLE_RATE, 1, 20.0), SAMPLE_RATE)
    with path.open("rb") as file:
        stream = RemoteStream(file.fileno(), DecodeTask(), threading.Event())
        assert stream.read() is not None
    forkserver = psutil.Process(decode_processes.forkserver_pid)
    (child,) = forkserver.children()
    yield forkserver, child
    stream.close()
    decode_processes.shutdown()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_both_processes_are_confined(processes: tuple[psutil.Process, psutil.Process]) -> None:
    for process in processes:
        folder = Path(f"/proc/{process.pid}")
        limits = {
            line[:26].strip(): line[26:].split() for line in (folder / "limits").read_text().splitlines()
        }
        assert limits["Max data size"][:2] == [str(1 << 30)] * 2
        assert limits["Max core file size"][:2] == ["0", "0"]
        fields = [line.split(":", 1) for line in (folder / "status").read_text().splitlines()]
        status = {name: value.strip() for name, value in fields}
        assert status["NoNewPrivs"] == "1"
        ignored = int(status["SigIgn"], 16)
        assert all(ignored >> number - 1 & 1 for number in (signal.SIGINT, signal.SIGTERM))
        assert not ignored >> signal.SIGCHLD - 1 & 1
        if os.geteuid() == 0:  # who else may not look: it hides
            assert os.readlink(folder / "fd" / "0") == os.devnull
            assert process.environ()["OMP_NUM_THREADS"] == "1"
    forkserver, child = (Path(f"/proc/{process.pid}/status").read_text() for process in processes)
    assert "CapEff:\t0000000000000000" in child
    assert f"SigCgt:\t{1 << signal.SIGCHLD - 1:016x}" not in child, "it waits for no children"
    assert int(forkserver.split("SigCgt:")[1].split()[0], 16) >> signal.SIGCHLD - 1 & 1
