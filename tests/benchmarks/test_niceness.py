from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks import niceness
from benchmarks.niceness import REPLICA_TITLE, processor_s

BUSY = f"""
import setproctitle, time
setproctitle.setproctitle("{REPLICA_TITLE}")
while time.process_time() < 0.2:
    pass
print(flush=True)
time.sleep(60)
"""


def test_the_processor_time_of_a_replica_is_found_by_its_title() -> None:
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE) as process:
        assert process.stdout
        try:
            process.stdout.readline()
            assert 0.15 < processor_s() < 5
        finally:
            process.kill()


def test_without_a_replica_the_title_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(niceness, "REPLICA_TITLE", "nobody's title")  # a server of other tests may run
    with pytest.raises(RuntimeError, match="nobody's title"):
        processor_s()
