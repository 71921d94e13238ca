from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks import niceness
from benchmarks.niceness import processor_s

TITLE = "a title of its own"  # a server of other tests may run
BUSY = f"""
import setproctitle, time
setproctitle.setproctitle("{TITLE}")
while time.process_time() < 0.2:
    pass
print(flush=True)
time.sleep(60)
"""


def test_the_processor_time_of_a_replica_is_found_by_its_title(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(niceness, "REPLICA_TITLE", TITLE)
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE) as process:
        assert process.stdout
        try:
            process.stdout.readline()
            assert 0.15 < processor_s() < 5
        finally:
            process.kill()


def test_without_a_replica_the_title_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(niceness, "REPLICA_TITLE", "nobody's title")
    with pytest.raises(RuntimeError, match="nobody's title"):
        processor_s()
