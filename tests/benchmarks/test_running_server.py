"""A server that does not start says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.running_server import running_server

# Listens nowhere: whoever asks it is refused, as by a server that has closed its port.
ENDING = """
import socket, sys, time
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
print(f"listening on http://127.0.0.1:{port}", flush=True)
time.sleep(0.3)
print("no engine: a tensor is not contiguous", flush=True)
sys.exit(1)
"""


def test_what_a_server_printed_before_it_ended_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ending_server.py").write_text(ENDING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with (
        pytest.raises(RuntimeError, match="not contiguous"),
        running_server(module="ending_server"),
    ):
        pass
