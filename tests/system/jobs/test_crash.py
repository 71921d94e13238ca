"""Jobs survive the end of the server at any moment, and cost nothing where there are none."""

import os
import random
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from asr_server.core import Samples
from harness.speech.digits import say
from harness.speech.long_readings import recording
from tests.conftest import Server, run_server
from tests.support.fake_replica import wav
from tests.support.real_weights import real_checkpoint
from tests.support.until import wait_until

URL = "/v1/audio/transcriptions"
# In float32 the text of a chunk does not depend on what is decoded beside it.
OPTIONS = ("--dtype", "float32", "--max-slots", "4", "--log-level", "debug")
LIMIT_S = 2 * 3600.0  # of each wait of a trial
MOST_IN_FLIGHT = 12  # chunks with a replica: its slots and one batch of the encoder, or reported and not kept
FIELDS = {"response_format": "verbose_json"}
WORDS = FIELDS | {"timestamp_granularities[]": ["segment", "word"]}


def test_without_a_folder_for_jobs_nothing_of_them_is_imported() -> None:
    code = "import sys, asr_server.server.run, asr_server.cli.serve\nsys.exit('sqlalchemy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def digits(seed: int, num_digits: int) -> Samples:
    text = "".join(random.Random(seed).choices("0123456789", k=num_digits))
    return say(text, gap_s=0.4).samples


def send(server: Server, recording: bytes, **fields: Any) -> httpx.Response:
    return httpx.post(server.url + URL, files={"file": recording}, data=fields, timeout=LIMIT_S)


def job(server: Server, id: str) -> dict[str, Any]:
    found: dict[str, Any] = server.get(f"{URL}/{id}").json()
    return found


def survive(tmp_path: Path, recordings: list[bytes], num_kills: int, *options: str) -> None:
    """Kill a server at random moments of its jobs; compare with what it answers undisturbed."""
    folder = ("--jobs-dir", str(tmp_path / "jobs"))
    chance = random.Random(0)
    logs = []
    with run_server(*options, *folder) as server:
        expected = [send(server, recording, **WORDS).json() for recording in recordings]
        ids = [send(server, recording, background="true", **WORDS).json()["id"] for recording in recordings]
        kill_when_further(server, chance.uniform(0, 1 / num_kills))
        logs.append(server.written())
    for _ in range(num_kills - 1):
        with run_server(*options, *folder) as server:
            kill_when_further(server, chance.uniform(0, 1 / num_kills))
            logs.append(server.written())
    with run_server(*options, *folder) as server:
        wait_until(lambda: all(each["completed_at"] for each in jobs_of(server)), LIMIT_S, 0.2)
        assert [(each["id"], each["status"]) for each in jobs_of(server)] == [(id, "completed") for id in ids]
        contents = [server.get(f"{URL}/{id}/content").json() for id in ids]
        assert [text_and_times(each) for each in contents] == [text_and_times(each) for each in expected]
        logs.append(server.written())
    check_what_was_done(logs, ids, num_kills)


def text_and_times(body: dict[str, Any]) -> dict[str, Any]:
    """Leave out probabilities: their last digits depend on the batch, in float32 too."""
    segments = [(each["start"], each["end"], each["text"], each["tokens"]) for each in body["segments"]]
    words = [(each["start"], each["end"], each["word"]) for each in body["words"]]
    return body | {"segments": segments, "words": words}


def jobs_of(server: Server) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    page: dict[str, Any] = {"has_more": True, "last_id": ""}
    while page["has_more"]:
        page = server.get(f"{URL}?limit=100&order=asc&after={page['last_id']}").json()
        found += page["data"]
    return found


def kill_when_further(server: Server, share: float) -> None:
    """Kill the server when so much more of all audio is done."""

    def seconds(which: str) -> float:
        return sum(float(each[which] or 0) for each in jobs_of(server))

    until_s = min(seconds("seconds_total") - 1e-3, seconds("seconds_done") + share * seconds("seconds_total"))
    wait_until(lambda: seconds("seconds_done") >= until_s, LIMIT_S)
    os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait()


def check_what_was_done(logs: list[str], ids: list[str], num_kills: int) -> None:
    log = "".join(logs)
    num_sent, num_sent_undisturbed = (
        len(re.findall(rf"\[api {kind}_\w+\].* chunk \d+ goes to", log)) for kind in ("job", "req")
    )
    assert num_sent_undisturbed >= len(ids)
    assert num_sent <= num_sent_undisturbed + num_kills * MOST_IN_FLIGHT
    assert max(Counter(re.findall(r"job (job_\w+): completed", log)).values()) == 1


@pytest.mark.slow
def test_recordings_of_a_killed_server_end_once_with_the_text_they_would_have_had(tmp_path: Path) -> None:
    recordings = [wav(digits(seed, 40)) for seed in range(4)]
    survive(tmp_path, recordings, 2, *OPTIONS)


@pytest.mark.slow
def test_jobs_that_a_stop_finds_under_way_go_on_at_the_next_start(tmp_path: Path) -> None:
    folder = ("--jobs-dir", str(tmp_path / "jobs"))
    recordings = [wav(digits(seed, 100)) for seed in range(2)]
    with run_server(*OPTIONS, *folder) as server:
        ids = [send(server, recording, background="true").json()["id"] for recording in recordings]
        wait_until(lambda: job(server, ids[0])["seconds_done"] > 0)
    assert server.process.returncode == 0
    with run_server(*OPTIONS, *folder) as server:
        wait_until(lambda: all(job(server, id)["completed_at"] for id in ids), pause_s=0.2)
        for id, recording in zip(ids, recordings, strict=True):
            assert server.get(f"{URL}/{id}/content").content == send(server, recording).content


@pytest.mark.slow
def test_the_command_leaves_its_recording_to_the_server_and_comes_back_for_it(tmp_path: Path) -> None:
    recording, results = tmp_path / "talk.wav", tmp_path / "results"
    recording.write_bytes(wav(digits(0, 80)))
    folder = ("--jobs-dir", str(tmp_path / "jobs"))
    with run_server(*OPTIONS, *folder) as server:
        flags = ["--url", server.url, "--background", "--format", "srt", "--output", str(results)]
        command = [sys.executable, "-m", "asr_server", "transcribe", str(recording), *flags]
        first = subprocess.Popen(command, stderr=subprocess.PIPE)
        wait_until(lambda: server.get(URL).json()["data"], pause_s=0.05)
        first.send_signal(signal.SIGINT)
        first.communicate()
        again = subprocess.run(command, capture_output=True, text=True, check=False)
        assert again.returncode == 0, again.stderr
        (kept,) = server.get(URL).json()["data"]
        assert kept["status"] == "completed"
        direct = send(server, recording.read_bytes(), response_format="srt").text
        assert (results / "talk.srt").read_text().rstrip() == direct.rstrip()


@pytest.mark.trial
@pytest.mark.timeout(2 * LIMIT_S)
def test_two_hundred_recordings_survive_twenty_kills(tmp_path: Path) -> None:
    survive(tmp_path, [wav(digits(seed, 20)) for seed in range(200)], 20, *OPTIONS)


@pytest.mark.trial
@pytest.mark.timeout(2 * LIMIT_S)
def test_two_hours_with_published_weights_survive_five_kills(tmp_path: Path) -> None:
    checkpoint = str(real_checkpoint("base"))
    two_hours = np.concatenate([recording("plain", 600, seed).samples for seed in range(12)])
    survive(tmp_path, [wav(two_hours)], 5, checkpoint, *OPTIONS)
