"""The server's side of the protocol, against a test that plays the decode process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest

from asr_server import errors, metrics
from asr_server.audio import ffmpeg_client
from asr_server.audio.ffmpeg_client import (
    END,
    HEADER,
    NEXT,
    OPENED,
    REFUSED,
    SAMPLES,
    STATUS,
    DecodeProcess,
    DecodeProcesses,
    Finished,
    Opened,
    Refused,
    RemoteStream,
    decode_processes,
)
from asr_server.audio.limits import AudioLimits
from asr_server.core import Samples, Track
from asr_server.errors import DecodingUnavailable, InvalidAudio
from tests.audio.audio_files import make, voice

SOUND = voice(16_000, 1, 0.5)[:, 0]


def process_with(*numbers: int) -> tuple[DecodeProcess, socket.socket]:
    """A process of which the forkserver has told so much and then ended; the other side of its connection."""
    ours, theirs = socket.socketpair()
    status_fd, told = os.pipe()
    os.write(told, b"".join(STATUS.pack(number) for number in numbers))
    os.close(told)
    return DecodeProcess(ours, status_fd), theirs


def answer(kind: int, content: bytes) -> bytes:
    return HEADER.pack(kind, len(content)) + content


def described(num_channels: int = 1) -> bytes:
    return answer(OPENED, msgspec.msgpack.encode(Opened(0.5, num_channels, (Track(2, "de"),))))


def block(samples: Samples) -> bytes:
    return answer(SAMPLES, samples.tobytes())


def ended(truncated: bool = False) -> bytes:
    return answer(END, msgspec.msgpack.encode(Finished(truncated)))


class Played:
    """Decode processes whose answers lie ready, one after another."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._processes: list[DecodeProcess] = []
        self._all: list[DecodeProcess] = []
        self.others: list[socket.socket] = []
        patch.setattr(decode_processes, "take", lambda *_: self._processes.pop(0))

    def add(self, *answers: bytes, numbers: tuple[int, ...] = (), is_open: bool = False) -> None:
        process, other = process_with(*numbers)
        other.sendall(b"".join(answers))
        if not is_open:
            other.shutdown(socket.SHUT_WR)
        self._processes.append(process)
        self._all.append(process)
        self.others.append(other)

    def close(self) -> None:
        for other in self.others:
            other.close()
        for process in self._all:
            if process.connection.fileno() >= 0:
                process.close()


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[Played]:
    played = Played(monkeypatch)
    yield played
    played.close()


def stream(split_channels: bool = False, closed: threading.Event | None = None) -> RemoteStream:
    return RemoteStream(0, AudioLimits(), closed or threading.Event(), split_channels)


def all_of(remote: RemoteStream) -> Samples:
    blocks = []
    while (samples := remote.read()) is not None:
        blocks.append(samples.copy())  # its memory is used again
    remote.close()
    return np.concatenate(blocks)


def num_deaths() -> float:
    return metrics.REGISTRY.get_sample_value("asr_decode_process_deaths_total") or 0.0


@pytest.mark.parametrize(
    ("numbers", "is_file"),
    [
        ((7, 0), True),
        ((7, 256), True),
        *(((7, int(number)), True) for number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGPROF)),
        *(
            ((7, int(number)), False)
            for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGALRM, signal.SIGHUP)
        ),
        ((7,), False),
        ((), False),
    ],
)
def test_how_a_process_ended_tells_whether_its_file_is_at_fault(
    numbers: tuple[int, ...], is_file: bool
) -> None:
    process, other = process_with(*numbers)
    with other:
        assert process.ended_by_the_file() == is_file
        process.close()


def test_a_process_is_killed_by_the_number_that_the_forkserver_told() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        for numbers, is_killed in (((), False), ((child.pid,), False), ((child.pid, 9), True)):
            process, other = process_with(*numbers)
            with other:
                assert process.kill() == is_killed
                process.close()
        assert child.wait(60) == -signal.SIGKILL
    gone, other = process_with(child.pid, 9)
    with other:
        assert gone.kill(), "it has ended meanwhile"
        gone.close()


def test_blocks_come_one_for_each_request_until_the_end(played: Played) -> None:
    played.add(described(), block(SOUND[:5000]), block(SOUND[5000:]), ended(truncated=True))
    remote = stream()
    assert (remote.duration_s, remote.num_channels, remote.tracks_read) == (None, 1, ())
    assert np.array_equal(all_of(remote), SOUND)
    assert (remote.duration_s, remote.num_channels) == (0.5, 1)
    assert remote.tracks_read == (Track(2, "de"),)
    assert remote.truncated
    assert remote.read() is None
    assert played.others[0].recv(16) == NEXT * 3
    assert played.others[0].recv(16) == b"", "the connection is closed"


def test_two_channels_are_given_side_by_side(played: Played) -> None:
    both = np.stack([SOUND, -SOUND], axis=1)
    played.add(described(2), block(both), ended())
    remote = stream(split_channels=True)
    assert np.array_equal(all_of(remote), both)
    assert (remote.num_channels, remote.truncated) == (2, False)


def test_a_refusal_is_raised_as_its_error(played: Played) -> None:
    for name in ("AudioTooLong", "NoSuchTrack"):
        played.add(answer(REFUSED, msgspec.msgpack.encode(Refused(name, "so"))))
        remote = stream()
        with pytest.raises(getattr(errors, name), match=r"^so$"):
            remote.read()
        assert remote.read() is None, "it has ended"
        remote.close()


def test_who_was_killed_is_replaced_once_and_no_sample_comes_twice(
    played: Played, caplog: pytest.LogCaptureFixture
) -> None:
    before = num_deaths()
    played.add(described(), block(SOUND[:1000]), block(SOUND[1000:3000]), numbers=(7, signal.SIGKILL))
    played.add(described(), block(SOUND[:2500]), block(SOUND[2500:6000]), block(SOUND[6000:]), ended())
    assert np.array_equal(all_of(stream()), SOUND)
    assert num_deaths() == before + 1
    assert "decoded once more" in caplog.text
    assert played.others[0].recv(16) == NEXT * 3
    assert played.others[0].recv(16) == b""


def test_two_channels_of_who_was_killed_go_on_where_they_were(played: Played) -> None:
    both = np.stack([SOUND, -SOUND], axis=1)
    played.add(described(2), block(both[:1000]), numbers=(7, signal.SIGKILL))
    played.add(described(2), block(both[:700]), block(both[700:]), ended())
    assert np.array_equal(all_of(stream(split_channels=True)), both)


def test_who_is_killed_twice_ends_the_file_without_blame(
    played: Played, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        played.add(described(), block(SOUND[:1000]), numbers=(7, signal.SIGKILL))
    with pytest.raises(DecodingUnavailable, match="ended by the system"):
        all_of(stream())
    assert caplog.messages == [
        "a decode process was ended by the system: the file is decoded once more",
        "a decode process was ended by the system for the second time with one file",
    ]


def test_where_no_process_can_be_started_nobody_is_blamed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise OSError("no handles")

    monkeypatch.setattr(decode_processes, "take", fails)
    with pytest.raises(DecodingUnavailable, match="can be started"):
        stream()
    assert caplog.messages == ["no decode process can be started: no handles"]


@pytest.mark.parametrize("is_killed", [True, False])
def test_who_is_frozen_is_replaced_with_all_that_wait_or_with_its_forkserver(
    played: Played, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_killed: bool
) -> None:
    done: list[str] = []
    monkeypatch.setattr(ffmpeg_client, "MAX_SILENCE_MS", 20)
    monkeypatch.setattr(DecodeProcess, "kill", lambda _: is_killed)
    for name in ("drop_idle", "restart"):
        monkeypatch.setattr(decode_processes, name, lambda name=name: done.append(name))
    played.add(described(), is_open=True)
    played.add(described(), block(SOUND), ended())
    assert np.array_equal(all_of(stream()), SOUND)
    assert done == ["drop_idle" if is_killed else "restart"]
    assert caplog.messages[0] == "a decode process is killed: no answer for 0.02 s"


def test_a_codec_that_crashes_ends_the_file_with_blame(played: Played) -> None:
    before = num_deaths()
    played.add(described(), block(SOUND[:1000]), numbers=(7, signal.SIGSEGV))
    with pytest.raises(InvalidAudio, match="could not be decoded"):
        all_of(stream())
    assert num_deaths() == before + 1


def test_a_recording_that_is_closed_waits_for_no_answer(played: Played) -> None:
    closed, before = threading.Event(), num_deaths()
    played.add(described(), is_open=True)
    remote = stream(closed=closed)
    closed.set()
    with pytest.raises(InvalidAudio, match="was closed"):
        remote.read()
    assert num_deaths() == before
    remote.close()
    remote.close()


def test_who_says_nothing_is_killed_and_replaced(
    played: Played, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ffmpeg_client, "MAX_SILENCE_MS", 60)
    with subprocess.Popen(["sleep", "60"]) as child:
        played.add(described(), block(SOUND[:1000]), numbers=(child.pid, signal.SIGKILL), is_open=True)
        played.add(described(), block(SOUND), ended())
        assert np.array_equal(all_of(stream()), SOUND)
        assert child.wait(60) == -signal.SIGKILL
    assert "no answer for 0.06 s" in caplog.text


def test_an_answer_longer_than_any_packet_decodes_to_is_not_read(played: Played) -> None:
    played.add(HEADER.pack(SAMPLES, (256 << 20) + 1), is_open=True)
    remote = stream()
    with pytest.raises(InvalidAudio):
        remote.read()
    remote.close()
    assert played.others[0].recv(16) == NEXT
    assert played.others[0].recv(16) == b""


def test_a_few_processes_wait_for_the_next_file_and_none_outlives_the_forkserver(tmp_path: Path) -> None:
    path, processes = make(tmp_path, "alac.m4a", SOUND[:, None], 16_000), DecodeProcesses()
    assert processes.forkserver_pid is None
    processes.start()
    first = processes.forkserver_pid
    assert first is not None
    processes.start()
    assert processes.forkserver_pid == first
    with path.open("rb") as file:
        taken = [processes.take(b"", file.fileno()) for _ in range(5)]
    for process in taken:
        processes.give_back(process)
    assert [process.connection.fileno() >= 0 for process in taken] == [True] * 4 + [False]
    with path.open("rb") as file:
        again = processes.take(b"", file.fileno())
    assert again in taken[:4], "one that waited"
    processes.drop_idle()
    assert sum(process.connection.fileno() >= 0 for process in taken) == 1
    processes.shutdown()
    assert processes.forkserver_pid is None
    processes.give_back(again)
    assert again.connection.fileno() < 0, "nobody would tell how it ends"
    assert not psutil.pid_exists(first)


class Forkserver:
    """Stands for a forkserver's process: it takes no connection, or all."""

    def __init__(self, pass_fds: list[int], is_dead: bool) -> None:
        self.pid, self.ended = 1000, list[str]()
        self.connection = None if is_dead else socket.socket(fileno=os.dup(pass_fds[0]))

    def kill(self) -> None:
        self.ended.append("killed")

    def wait(self) -> None:
        self.ended.append("waited for")


def test_a_forkserver_that_has_died_is_replaced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Forkserver] = []

    def start(*_: object, pass_fds: list[int], **__: object) -> Forkserver:
        started.append(Forkserver(pass_fds, is_dead=not started))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    processes = DecodeProcesses()
    with open(os.devnull, "rb") as file:
        process = processes.take(b"task", file.fileno())
    first, second = started
    assert (first.ended, second.ended) == (["killed", "waited for"], [])
    assert process.forkserver is second  # type: ignore[comparison-overlap]
    assert second.connection is not None
    message, fds, _, _ = socket.recv_fds(second.connection, 16, 2)
    assert message == b"f"
    with socket.socket(fileno=fds[0]) as theirs:
        task, files, _, _ = socket.recv_fds(theirs, 16, 2)
    assert (task, len(files)) == (b"task", 2)
    for fd in (fds[1], *files):
        os.close(fd)
    process.close()
    processes.shutdown()
    assert second.ended == ["killed", "waited for"]
    second.connection.close()
