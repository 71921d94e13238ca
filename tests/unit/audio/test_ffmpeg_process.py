"""What a decode process answers and how it is confined: its loop here, and a real one beside."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
from av.stream import Disposition

from asr_server import errors
from asr_server.audio.decoder import AudioLimits, DecodeTask, FileInfo, TrackChoice
from asr_server.audio.ffmpeg_client import HEADER, NEXT, Answer, RemoteStream, decode_processes
from asr_server.audio.ffmpeg_process import decode
from asr_server.core import SAMPLE_RATE
from tests.unit.audio.audio_files import Frames, Sound, make, voice, write_film

BOTH, LEFT = voice(SAMPLE_RATE, 2, 1.0), voice(SAMPLE_RATE, 1, 1.0)


def task(
    split_channels: bool = False, numbers: tuple[int, ...] = (), channel: int | None = None, **limits: Any
) -> DecodeTask:
    return DecodeTask(AudioLimits(**limits), split_channels, TrackChoice(numbers), channel)


def received(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        assert part
        data += part
    return data


def ask_for_all(connection: socket.socket) -> list[tuple[Answer, bytes]]:
    """Ask until the file has ended or is refused."""
    answers: list[tuple[Answer, bytes]] = []
    while not answers or answers[-1][0].num_bytes:
        connection.sendall(NEXT)
        (size,) = HEADER.unpack(received(connection, HEADER.size))
        answer = msgspec.msgpack.decode(received(connection, size), type=Answer)
        answers.append((answer, received(connection, answer.num_bytes)))
    return answers


def answers_to(path: Path, given: DecodeTask) -> list[tuple[Answer, bytes]]:
    ours, theirs = socket.socketpair()
    fds = [os.open(path, os.O_RDONLY) for _ in range(2)]
    with ours, theirs, ThreadPoolExecutor(1) as client:
        asking: Future[list[tuple[Answer, bytes]]] = client.submit(ask_for_all, ours)
        try:
            decode(theirs, fds, given)
        finally:
            theirs.close()
        for fd in fds:
            os.close(fd)
        return asking.result()


def read(path: Path, given: DecodeTask, num_channels: int = 1) -> tuple[FileInfo, Frames]:
    answers = answers_to(path, given)
    last = answers[-1][0]
    assert not last.error
    samples = np.frombuffer(b"".join(block for _, block in answers), np.float32).reshape(-1, num_channels)
    return last.info, samples


def refusal(path: Path, given: DecodeTask) -> Answer:
    answer = answers_to(path, given)[-1][0]
    assert answer.error
    return answer


def likeness(one: Frames, other: Frames) -> float:
    size = min(len(one), len(other))
    return float(np.corrcoef(one[:size], other[:size])[0, 1])


def test_a_file_is_described_then_given_in_answers_of_eight_seconds(tmp_path: Path) -> None:
    sound = voice(SAMPLE_RATE, 1, 20.0)
    answers = answers_to(make(tmp_path, "alac.m4a", sound, SAMPLE_RATE), task())
    sizes_s = [len(content) / 4 / SAMPLE_RATE for _, content in answers]
    assert len(sizes_s) == 4
    assert all(8 <= size_s < 8.6 for size_s in sizes_s[:2])
    assert [answer.info for answer, _ in answers] == [FileInfo(20.0)] * 4
    samples = np.frombuffer(b"".join(content for _, content in answers), np.float32)
    assert np.abs(samples - sound[:, 0]).max() < 1e-4


def test_one_channel_both_or_their_mix_are_given(tmp_path: Path) -> None:
    path = make(tmp_path, "alac.m4a", BOTH, SAMPLE_RATE)
    opened, mixed = read(path, task())
    assert opened.num_channels == 2
    assert np.abs(mixed[:, 0] - BOTH.mean(axis=1)).max() < 1e-4
    assert np.abs(read(path, task(channel=1))[1][:, 0] - BOTH[:, 1]).max() < 1e-4
    assert np.abs(read(path, task(split_channels=True), 2)[1] - BOTH).max() < 1e-4


def film(folder: Path, *sounds: Frames) -> Path:
    default = [Disposition.default, *[0] * (len(sounds) - 1)]
    tracks = [Sound(sound, disposition=mark) for sound, mark in zip(sounds, default, strict=True)]
    return write_film(folder / "a.mkv", "matroska", tracks, codec="flac")


def test_two_tracks_of_one_voice_each_are_two_channels_where_they_are_asked_for(tmp_path: Path) -> None:
    one, other = np.split(voice(48_000, 2, 1.0), 2, axis=1)
    path = film(tmp_path, one, other)
    for given, sides in ((task(True), (one, other)), (task(True, (2, 1)), (other, one))):
        opened, samples = read(path, given, 2)
        assert opened.num_channels == 2
        assert [track.number for track in opened.tracks_read] == ([1, 2] if sides[0] is one else [2, 1])
        for channel, side in enumerate(sides):
            assert likeness(samples[:, channel], side[::3, 0]) > 0.99
    for given, side in ((task(), one), (task(numbers=(2,)), other)):
        opened, samples = read(path, given)
        assert (opened.num_channels, len(opened.tracks_read)) == (1, 1)
        assert likeness(samples[:, 0], side[::3, 0]) > 0.99


def test_of_two_stereo_tracks_the_first_is_two_channels_and_one_voice_alone_is_none(tmp_path: Path) -> None:
    both = voice(48_000, 2, 1.0)
    opened, samples = read(film(tmp_path, both, both[:, ::-1]), task(split_channels=True), 2)
    assert [track.number for track in opened.tracks_read] == [1]
    assert likeness(samples[:, 0], both[::3, 0]) > 0.99
    alone = film(tmp_path, both[:, :1])
    assert refusal(alone, task(split_channels=True)).error == "NotStereo"
    assert refusal(film(tmp_path, *[both[:, :1]] * 3), task(split_channels=True)).error == "NotStereo"


def test_what_is_wrong_with_a_file_is_answered_by_the_name_of_its_error(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"no sound")
    path = make(tmp_path, "alac.m4a", LEFT, SAMPLE_RATE)
    found = [
        refusal(tmp_path / "text", task()),
        refusal(path, task(max_audio_s=0.5)),
        refusal(path, task(max_preprocess_s=-1.0)),
        refusal(path, task(numbers=(4,))),
    ]
    assert [each.error for each in found] == ["InvalidAudio", "AudioTooLong", "AudioTooLong", "NoSuchTrack"]
    assert [each.message.split(",")[0] for each in found[:3]] == [
        "The file is not audio",
        "The file's duration is over the limit of 0.5 s",
        "The file's decoding time is over the limit of -1 s.",
    ]
    assert all(issubclass(getattr(errors, each.error), errors.RequestError) for each in found)


def test_a_file_that_ends_early_is_said_to(tmp_path: Path) -> None:
    path = make(tmp_path, "alac.m4a", LEFT, SAMPLE_RATE)
    assert not read(path, task())[0].truncated
    whole = make(tmp_path, "index-first.mp4", voice(48_000, 1, 4.0), 48_000)
    whole.write_bytes(whole.read_bytes()[:-10_000])
    assert read(whole, task())[0].truncated


@pytest.mark.parametrize("request_", [b"", b"x"])
def test_a_server_that_turns_away_ends_the_work(tmp_path: Path, request_: bytes) -> None:
    ours, theirs = socket.socketpair()
    with theirs, make(tmp_path, "alac.m4a", LEFT, SAMPLE_RATE).open("rb") as file:
        ours.sendall(request_)
        ours.close()
        with pytest.raises(ConnectionAbortedError):
            decode(theirs, [file.fileno()], task())


# -- A process of its own ------------------------------------------------------------------------------------


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
