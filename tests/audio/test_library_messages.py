"""What libmpg123 says of a damaged file, in a process of its own, whose standard error is looked at."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import soundfile

from asr_server.core import SAMPLE_RATE

DECODE = """
import sys, time
from pathlib import Path
from asr_server.audio.recording import Recording
from asr_server.telemetry import configure_logging

configure_logging(sys.argv[2])
recording = Recording(Path(sys.argv[1]))
while not recording.next_slice(4).finished:
    pass
assert recording.truncated
time.sleep(0.3 if sys.argv[2] == "debug" else 0)  # for the thread that logs
print("Python's own", file=sys.stderr)
"""


def said_of(recording: Path, log_level: str) -> list[str]:
    command = [sys.executable, "-c", DECODE, str(recording), log_level]
    return subprocess.run(command, check=True, capture_output=True, text=True).stderr.splitlines()


def test_what_a_library_prints_has_a_name_in_the_log_and_is_for_debugging(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).standard_normal(5 * SAMPLE_RATE).astype(np.float32) * 0.1
    recording = tmp_path / "hole.mp3"
    soundfile.write(recording, noise, SAMPLE_RATE)
    whole = recording.read_bytes()
    recording.write_bytes(whole[:5000] + bytes(3000) + whole[9000:])
    assert said_of(recording, "info") == ["Python's own"]
    *lines, last = said_of(recording, "debug")
    named = [line for line in lines if "library_messages: a library that decodes says: Note: Illegal" in line]
    assert len(named) == 1
    assert all("[api]" in line for line in lines)
    assert last == "Python's own"
