"""Long files: the first chunk at once, memory as for short ones."""

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.unit.audio.test_recording_pool import hours_of_mp3

pytestmark = pytest.mark.slow

READ = """
import pathlib, sys, time, psutil
from asr_server.audio.decoder import AudioLimits
from asr_server.audio.recording import Recording

def peak_mb():
    me = psutil.Process()
    texts = [pathlib.Path(f"/proc/{p.pid}/status").read_text() for p in (me, *me.children(recursive=True))]
    return sum(int(t.split("VmHWM:")[1].split()[0]) for t in texts) / 1024

with Recording(pathlib.Path(sys.argv[2]), AudioLimits()) as warm:  # code and libraries are not this file's
    while not warm.next_slice().finished: pass
start = time.perf_counter()
recording, first_s, num_chunks, finished = Recording(pathlib.Path(sys.argv[1]), AudioLimits()), None, 0, False
while not finished:
    chunks, finished = recording.next_slice()
    num_chunks += len(chunks)
    if chunks and first_s is None: first_s = time.perf_counter() - start
print(recording.duration_s, first_s, time.perf_counter() - start, num_chunks, peak_mb())
"""


class ReadCost(NamedTuple):
    duration_s: float
    first_chunk_s: float
    total_s: float
    num_chunks: float
    peak_mb: float


def read_apart(path: Path, warm_up: Path) -> ReadCost:
    """In a process of its own, whose peak memory is therefore this file's."""
    output = subprocess.check_output([sys.executable, "-c", READ, str(path), str(warm_up)], text=True)
    return ReadCost(*map(float, output.split()))


def compare(short: Path, long: Path, duration_s: float) -> None:
    small, large = read_apart(short, short), read_apart(long, short)
    print(f"{long.name}: {large}; short: {small}")
    assert large.duration_s == pytest.approx(duration_s, rel=0.06)
    assert large.num_chunks > duration_s / 31
    assert large.peak_mb - small.peak_mb < 64
    assert large.first_chunk_s < large.total_s / 10


TWO_HOURS = pytest.param(2.0, marks=[pytest.mark.trial, pytest.mark.timeout(600)])


@pytest.mark.parametrize("hours", [0.5, TWO_HOURS])
def test_hours_of_mp3_take_no_more_memory_than_two_minutes(tmp_path: Path, hours: float) -> None:
    short = hours_of_mp3(tmp_path, 1 / 30).rename(tmp_path / "short.mp3")
    compare(short, hours_of_mp3(tmp_path, hours), round(hours * 3600))
