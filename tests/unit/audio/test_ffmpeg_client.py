"""What a codec does to its process stays there, and no process outlives the server."""

import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np
import psutil
import pytest

from asr_server import metrics
from asr_server.audio import ffmpeg_client
from asr_server.audio.decoder import AudioLimits
from asr_server.audio.ffmpeg_client import (
    HEADER,
    MAX_IDLE,
    MAX_SILENCE_MS,
    decode_processes,
)
from asr_server.audio.recording import Recording
from asr_server.core import Chunk
from asr_server.errors import DecodingUnavailable, InvalidAudio
from tests.support.until import is_alive
from tests.support.until import wait_until as until
from tests.unit.audio.audio_files import audio_of, chunks_of, make, slices, voice

pytestmark = pytest.mark.slow

ENOUGH_S = 60.0


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("files"), "a.m4a", voice(24_000, 1, 65.0), 24_000)


OTHERS: set[psutil.Process] = set()  # children of this process before the test: a server for all tests, say


@pytest.fixture(autouse=True)
def forkserver() -> Iterator[None]:
    decode_processes.shutdown()
    OTHERS.update(psutil.Process().children(recursive=True))
    yield
    decode_processes.shutdown()
    OTHERS.clear()


def family() -> list[psutil.Process]:
    """The forkserver and the decode processes."""
    return [child for child in psutil.Process().children(recursive=True) if child not in OTHERS]


def decoding() -> list[psutil.Process]:
    own_children = psutil.Process().children()  # the forkserver; asking a process that has just ended raises
    return [process for process in family() if process not in own_children]


def test_one_process_for_each_open_file_and_idle_ones_are_used_again(path: Path) -> None:
    recordings = [Recording(path, AudioLimits()) for _ in range(MAX_IDLE + 2)]
    for recording in recordings:
        recording.next_slice()
    busy = {process.pid for process in decoding()}
    assert len(busy) == MAX_IDLE + 2
    for recording in recordings:
        assert list(slices(recording))
    chunks_of(path)
    until(lambda: len(decoding()) == MAX_IDLE)
    assert {process.pid for process in decoding()} < busy


def test_a_process_that_crashes_costs_its_own_file_only(path: Path) -> None:
    one, other = Recording(path, AudioLimits()), Recording(path, AudioLimits())
    one.next_slice()
    before = {process.pid for process in decoding()}
    other.next_slice()
    (crashed,) = {process.pid for process in decoding()} - before
    os.kill(crashed, signal.SIGSEGV)
    until(lambda: not psutil.pid_exists(crashed))
    deaths = "asr_decode_process_deaths_total"
    deaths_before = metrics.REGISTRY.get_sample_value(deaths) or 0
    with pytest.raises(InvalidAudio, match="could not be decoded"):
        list(slices(other))
    assert metrics.REGISTRY.get_sample_value(deaths) == deaths_before + 1
    assert list(slices(one))
    assert chunks_of(path)[1].duration_s == pytest.approx(65, abs=0.05)


def begun(path: Path) -> tuple[Recording, list[Chunk], psutil.Process]:
    """A recording whose first chunk is there, and the process that decodes it."""
    recording = Recording(path, AudioLimits())
    return recording, recording.next_slice().chunks, decoding()[-1]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGALRM])
def test_a_process_that_the_system_ended_is_replaced_and_nothing_is_lost_or_doubled(
    path: Path, number: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    expected = audio_of(chunks_of(path)[0])
    decode_processes.shutdown()
    recording, chunks, process = begun(path)
    process.send_signal(number)
    assert np.array_equal(audio_of([*chunks, *slices(recording)]), expected)
    assert "decoded once more" in caplog.text


class LimitOfTheFrozen:
    """1.5 s for as long as a frozen process lives, then the real limit: one that starts may be slow."""

    def __init__(self, frozen: Sequence[psutil.Process]) -> None:
        self._frozen = frozen

    def __le__(self, silent_ms: int) -> bool:
        return silent_ms >= (1500 if any(map(is_alive, self._frozen)) else MAX_SILENCE_MS)


@pytest.mark.parametrize("is_forkserver_frozen_too", [False, True])
def test_processes_that_are_frozen_are_killed_and_the_file_decoded_once_more(
    path: Path,
    is_forkserver_frozen_too: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = audio_of(chunks_of(path)[0])
    idle = Recording(path, AudioLimits())
    idle.next_slice()
    recording, chunks, _ = begun(path)
    list(slices(idle))
    frozen = family() if is_forkserver_frozen_too else decoding()
    assert len(frozen) == 2 + is_forkserver_frozen_too
    monkeypatch.setattr(ffmpeg_client, "MAX_SILENCE_MS", LimitOfTheFrozen(frozen))
    for process in frozen:
        process.suspend()
    assert np.array_equal(audio_of([*chunks, *slices(recording)]), expected)
    assert "no answer for 1.5 s" in caplog.text
    assert "decoded once more" in caplog.text
    until(lambda: not any(is_alive(process) for process in frozen))


def test_a_file_whose_process_the_system_ends_twice_is_no_fault_of_its_sender(path: Path) -> None:
    recording, _, process = begun(path)
    process.kill()
    until(lambda: not is_alive(process))
    while not (replaced := [other for other in decoding() if other != process and is_alive(other)]):
        recording.next_slice()
    replaced[0].kill()
    with pytest.raises(DecodingUnavailable):
        list(slices(recording))
    assert chunks_of(path)[0]


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGPROF])
def test_a_codec_that_crashes_or_never_ends_is_the_file_s_fault(path: Path, number: signal.Signals) -> None:
    recording, _, process = begun(path)
    process.send_signal(number)
    until(lambda: not is_alive(process))
    with pytest.raises(InvalidAudio, match="could not be decoded"):
        list(slices(recording))


def test_a_process_that_cannot_be_started_is_no_fault_of_the_file(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_handles() -> NoReturn:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(socket, "socketpair", no_handles)
        with pytest.raises(DecodingUnavailable):
            chunks_of(path)
    assert "Too many open files" in caplog.text
    assert chunks_of(path)[0]


def test_a_forkserver_that_died_is_replaced(path: Path) -> None:
    chunks_of(path)
    processes = family()
    for process in processes:
        process.kill()
    until(lambda: not any(is_alive(process) for process in processes))
    assert chunks_of(path)[0]


def test_a_process_that_hangs_is_ended_by_the_system(path: Path) -> None:
    script = (
        "from asr_server.audio import ffmpeg_process; ffmpeg_process.set_alarms(0.2, 30)\nwhile True: pass"
    )
    ended = subprocess.run([sys.executable, "-c", script], timeout=ENOUGH_S, check=False)
    assert ended.returncode == -signal.SIGPROF


def test_closing_a_recording_ends_its_process(path: Path) -> None:
    recording = Recording(path, AudioLimits())
    recording.next_slice()
    (process,) = decoding()
    recording.close()
    until(lambda: not is_alive(process))


@pytest.mark.parametrize("frozen", ["none", "all"])
def test_nothing_outlives_a_server_that_is_killed(path: Path, frozen: str) -> None:
    script = (
        "import sys, pathlib\n"
        "from asr_server.audio.decoder import AudioLimits\n"
        "from asr_server.audio.recording import Recording\n"
        "recording = Recording(pathlib.Path(sys.argv[1]), AudioLimits())\n"
        "recording.next_slice(); print('ready', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as server:
        assert server.stdout
        assert server.stdout.readline() == b"ready\n"
        forkserver, process = psutil.Process(server.pid).children(recursive=True)
        for one in {"none": [], "all": [forkserver, process]}[frozen]:
            one.suspend()
        server.kill()
    until(lambda: not is_alive(forkserver) and not is_alive(process))


def test_an_answer_longer_than_any_packet_is_not_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(decode_processes, "take", lambda *_: ours)
    theirs.sendall(HEADER.pack((256 << 20) + 1))
    with pytest.raises(InvalidAudio):
        chunks_of(path)
    theirs.close()


def test_the_libraries_that_decode_are_not_in_the_server_s_own_process() -> None:
    script = "import sys, asr_server.audio.recording; print('av' in sys.modules, 'torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", script], text=True).split() == ["False", "False"]
