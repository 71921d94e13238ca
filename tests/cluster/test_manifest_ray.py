"""The manifest job over Ray: an actor by itself, and a real cluster of two raylets that loses one."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.until import wait_until
from tests.system.cli.test_transcribe import COMMAND, heard, record

NUM_LINES = 120


def write_manifest(path: Path, *lines: dict[str, Any] | str) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts))
    return path


def results(out: Path) -> dict[str, str]:
    """The texts by the names of their files."""
    return {path.name: path.read_text() for path in out.rglob("*.txt")}


def errors(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "errors.jsonl").read_text().splitlines()]


@pytest.mark.trial
def test_a_job_that_loses_its_driver_and_then_a_node_has_every_line_once(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    out = tmp_path / "out"
    record(tmp_path / "a.wav")
    names = [f"line-{index}" for index in range(NUM_LINES)]
    manifest = write_manifest(
        tmp_path / "files.jsonl", *({"audio": "a.wav", "id": name} for name in names), "no json"
    )
    node: Any = {"num_cpus": 2, "object_store_memory": 100 << 20, "node_ip_address": "127.0.0.1"}
    cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
    try:
        other = cluster.add_node(**node)
        command = [*COMMAND, "--manifest", str(manifest), "-o", str(out), "--executor", "ray"]

        def start() -> subprocess.Popen[bytes]:
            environment = os.environ | {"RAY_ADDRESS": cluster.address}
            return subprocess.Popen(command, stderr=subprocess.PIPE, env=environment)

        driver = start()
        wait_until(lambda: len(results(out)) >= NUM_LINES // 8 or driver.poll() is not None)
        driver.kill()
        driver.communicate()
        num_kept = len(results(out))
        assert num_kept < NUM_LINES
        driver = start()
        wait_until(lambda: len(results(out)) >= num_kept + NUM_LINES // 8 or driver.poll() is not None)
        cluster.remove_node(other, allow_graceful=False)
        assert len(results(out)) < NUM_LINES
        _, told = driver.communicate(timeout=300)
    finally:
        cluster.shutdown()  # type: ignore[no-untyped-call]
    assert driver.returncode == 1, told.decode()
    assert sorted(results(out)) == sorted(f"{name}.txt" for name in names)
    assert all(heard(text) for text in results(out).values())
    assert len(errors(out)) == 1
    numbers = told.decode().splitlines()[-1]
    assert "1 failed" in numbers
    assert "not begun" not in numbers
