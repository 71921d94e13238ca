"""A POST runs code in few files: those that a reader of the server follows."""

import json
import signal
from pathlib import Path

import httpx
import pytest

from tests.conftest import run_server
from tests.support.fake_replica import wav
from tests.support.speech import say
from tests.support.until import wait_until

MOST_FILES = 50
CLOCKS = {"annexes/monitoring/metrics.py", "transport/messages.py", "server/app.py"}  # tick beside any POST
SERVER_MODULE = "traced_server"
TRACED_SERVER = '''"""Serve; at each signal, write the files in which code ran since the last one."""
import json, os, runpy, signal, sys, threading
import asr_server

package, passed = os.path.dirname(asr_server.__file__), set()

def note(frame, event, argument):
    if event == "call" and frame.f_code.co_name != "<module>":
        passed.add(frame.f_code.co_filename)

def write(number, frame):
    paths = list(passed)  # in one step: threads of the engine add to it meanwhile
    mine = sorted(os.path.relpath(path, package) for path in paths if path.startswith(package))
    target = os.environ["PASSED_FILES"]
    with open(target + ".part", "w") as file:
        json.dump(mine, file)
    os.rename(target + ".part", target)
    passed.clear()

signal.signal(signal.SIGUSR1, write)
threading.setprofile(note)
sys.setprofile(note)
runpy.run_module("asr_server", run_name="__main__")
'''


@pytest.mark.slow
def test_a_post_runs_code_in_few_files(tmp_path: Path) -> None:
    """8 s of WAV, json, all defaults; the engine in the same process, so that its files count too."""
    (tmp_path / f"{SERVER_MODULE}.py").write_text(TRACED_SERVER)
    target = tmp_path / "passed.json"
    recording = wav(say("90817263", gap_s=0.5).samples[: 8 * 16_000])
    environment = {"PYTHONPATH": f"{tmp_path}", "PASSED_FILES": str(target)}
    with run_server("--executor", "inline", module=SERVER_MODULE, **environment) as server:
        passed = set[str]()
        for number in range(4):  # the first one also loads and compiles
            target.unlink(missing_ok=True)
            answer = httpx.post(
                f"{server.url}/v1/audio/transcriptions", files={"file": recording}, timeout=120
            )
            assert answer.status_code == 200, answer.text
            server.process.send_signal(signal.SIGUSR1)
            wait_until(target.exists)
            files = set(json.loads(target.read_text()))
            # A clock that ticks beside one of them is no part of it.
            passed = passed & files if number > 1 else files
    passed -= CLOCKS
    assert len(passed) <= MOST_FILES, "\n".join(sorted(passed))
