"""The manifest job over Ray: an actor by itself, and a real cluster of two raylets that loses one."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from asr_server.annexes.offline.local import TranscribeJob
from asr_server.annexes.offline.manifest import JobStopped, LineReport, Reports
from asr_server.annexes.offline.outputs import OutputError
from asr_server.config import EMBEDDED_MODEL, Settings
from asr_server.core import Transcript
from asr_server.errors import EngineUnavailable, InvalidAudio
from tests.cluster.ray_cluster import ray_cluster
from tests.support.embedded import embedded
from tests.support.until import wait_until
from tests.system.cli.test_transcribe import COMMAND, heard, record
from tests.unit.formats.samples import transcript

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
    out = tmp_path / "out"
    record(tmp_path / "a.wav")
    names = [f"line-{index}" for index in range(NUM_LINES)]
    manifest = write_manifest(
        tmp_path / "files.jsonl", *({"audio": "a.wav", "id": name} for name in names), "no json"
    )
    with ray_cluster(cpus_for_each=2) as cluster:
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
        cluster.kill_other_host()
        assert len(results(out)) < NUM_LINES
        _, told = driver.communicate(timeout=300)
    assert driver.returncode == 1, told.decode()
    assert sorted(results(out)) == sorted(f"{name}.txt" for name in names)
    assert all(heard(text) for text in results(out).values())
    assert len(errors(out)) == 1
    numbers = told.decode().splitlines()[-1]
    assert "1 failed" in numbers
    assert "not begun" not in numbers


ray = pytest.importorskip("ray")
manifest_ray = pytest.importorskip("asr_server.annexes.offline.manifest_ray")


# Ray's own, of options of its context that nobody sets.
of_ray = pytest.mark.filterwarnings("ignore::DeprecationWarning")


# -- The driver ----------------------------------------------------------------------------------------------


class Dataset:
    """What is asked of Ray Data: parts, and what reads them."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, num_gpus: float = 0, nodes: tuple[bool, ...] = (True,)
    ) -> None:
        self.num_parts, self.options = 0, dict[str, Any]()
        self.rows: list[LineReport | JobStopped | Exception] = []
        monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": num_gpus} if num_gpus else {})
        monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": alive} for alive in nodes])
        monkeypatch.setattr(ray.data, "range", self._range)

    def _range(self, num_parts: int, override_num_blocks: int) -> Dataset:
        assert num_parts == override_num_blocks
        self.num_parts = num_parts
        return self

    def map_batches(self, kind: object, **options: Any) -> Dataset:
        assert kind is manifest_ray.PartTranscriber
        self.options = options
        return self

    def iter_rows(self) -> Iterator[dict[str, bytes]]:
        for row in self.rows:
            if isinstance(row, Exception):
                raise row
            yield {"report": msgspec.json.encode(row)}


def job_of(folder: Path, num_bytes: int) -> TranscribeJob:
    manifest = folder / "files.jsonl"
    with manifest.open("wb") as file:
        file.truncate(num_bytes)
    return TranscribeJob((), output_dir=folder / "out", manifest=manifest)


@pytest.mark.parametrize(
    ("values", "num_gpus", "nodes", "num_actors", "gpus_each"),
    [
        ({}, 0, (True, False, True), 2, 0),
        ({}, 1, (True,), 1, 1),
        ({}, 5, (True,), 5, 1),
        ({"tensor_parallel_size": 2}, 5, (True,), 2, 2),
        ({"device": "cuda"}, 3, (True,), 3, 1),
        ({"device": "cpu"}, 3, (True, True), 2, 0),
        ({"replicas": 7}, 3, (True,), 7, 1),
        ({"device": "cpu", "replicas": 7, "tensor_parallel_size": 2}, 3, (True,), 7, 0),
    ],
)
def test_an_actor_is_a_gpu_or_a_node(
    tmp_path: Path,
    values: dict[str, Any],
    num_gpus: int,
    nodes: tuple[bool, ...],
    num_actors: int,
    gpus_each: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = Dataset(monkeypatch, num_gpus, nodes)
    manifest_ray._dataset(embedded(**values), job_of(tmp_path, 1), {})
    options = data.options
    assert (options["compute"].min_size, options["compute"].max_size) == (num_actors, num_actors)
    assert (options["num_cpus"], options["num_gpus"], options["batch_size"]) == (1, gpus_each, 1)
    # Two parts under way, and the next one at hand.
    assert (options["max_concurrency"], options["compute"].max_tasks_in_flight_per_actor) == (2, 3)
    assert options["scheduling_strategy"] == "SPREAD"


def test_an_actor_gets_paths_and_a_model_that_it_finds_and_runs_one_replica(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = Dataset(monkeypatch)
    job = job_of(tmp_path, 1)
    monkeypatch.chdir(tmp_path)
    relative = replace(job, manifest=Path("files.jsonl"), output_dir=Path("out"))
    manifest_ray._dataset(embedded(executor="ray", replicas=3), relative, {5: 1})
    given = data.options["fn_constructor_kwargs"]
    assert (given["job"], given["repeats"]) == (job, {5: 1})
    settings = given["settings"]
    assert (settings.executor, settings.replicas, settings.model) == ("multiprocess", 1, "whisper-digits")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """What is asked of Ray itself."""
    found: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(ray, "init", lambda **options: found.append(("init", options)))
    monkeypatch.setattr(ray, "shutdown", lambda: found.append(("shutdown", {})))
    monkeypatch.delenv("RAY_BACKEND_LOG_LEVEL", raising=False)
    return found


def run(tmp_path: Path, log_level: Any = "error") -> Reports:
    folder = tmp_path / "out"
    folder.mkdir()
    reports = Reports(folder, 3, quiet=True)
    settings = embedded(executor="ray", log_level=log_level)
    manifest_ray.run_on_ray(settings, job_of(tmp_path, 1), reports, {}, "head:6379")
    return reports


@of_ray
@pytest.mark.parametrize(
    ("row", "message"),
    [
        (JobStopped("no room"), "^no room$"),
        (ray.exceptions.RayError("first\nlast line\n"), "^Ray: last line$"),
    ],
)
def test_what_ends_the_job_elsewhere_ends_the_driver(
    tmp_path: Path,
    calls: list[tuple[str, dict[str, Any]]],
    row: Any,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Dataset(monkeypatch).rows = [row]
    with pytest.raises(OutputError, match=message):
        run(tmp_path)
    assert calls[-1] == ("shutdown", {})


def test_an_empty_manifest_needs_no_actor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Dataset(monkeypatch)
    monkeypatch.setattr(ray.data, "from_items", lambda items: items)
    assert manifest_ray._dataset(embedded(), job_of(tmp_path, 0), {}) == []


# -- An actor ------------------------------------------------------------------------------------------------


class Scripted:
    """Reads a recording's text from its file: "bad" cannot be read, "dead" ends the engine."""

    model = ""
    is_running = False

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self.is_running = True
        yield

    def __init__(self, settings: Settings, job: TranscribeJob) -> None:
        Scripted.model = settings.model

    def options_for(self, language: str | None, prompt: str | None) -> None: ...

    async def transcribe(self, source: Path, on_progress: object, options: None) -> Transcript:
        assert self.is_running
        match text := source.read_text():
            case "bad":
                raise InvalidAudio("no audio")
            case "dead":
                raise EngineUnavailable("the engine is gone")
        return transcript(text=text)


logging_as: list[tuple[object, ...]] = []


def actor(folder: Path, *names: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An actor for recordings that hold their own names, a line of 20 bytes and a part each."""
    for name in names:
        (folder / name).write_text(name.strip())
    lines = [json.dumps({"audio": f"{name:<7}"}) for name in names]
    assert {len(line) for line in lines} == {20}
    (folder / "files.jsonl").write_text("".join(line[:-1] + "}\n" for line in lines))
    for name in names:
        (folder / name).rename(folder / f"{name:<7}")
    monkeypatch.setattr(manifest_ray, "LocalTranscriber", Scripted)
    monkeypatch.setattr(manifest_ray, "configure_logging", lambda *how: logging_as.append(how))
    job = TranscribeJob((), output_dir=folder / "out", manifest=folder / "files.jsonl")
    return manifest_ray.PartTranscriber(embedded(model="whisper-digits"), job, 21, {})


def reports(actor: Any, *parts: int) -> list[Any]:
    rows = actor({"id": np.array(parts)})["report"]
    return [msgspec.json.decode(row, type=LineReport | JobStopped) for row in rows]


def test_an_actor_works_off_the_lines_of_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transcriber = actor(tmp_path, "one", "bad", "two", monkeypatch=monkeypatch)
    assert Scripted.model == str(EMBEDDED_MODEL)
    assert logging_as[-1] == (embedded().log_level, "text", "actor")
    assert [(each.offset, each.outcome) for each in reports(transcriber, 0, 1)] == [
        (0, "transcribed"),
        (21, "failed"),
    ]
    assert [each.offset for each in reports(transcriber, 2)] == [42]
    assert [each.outcome for each in reports(transcriber, 0)] == ["skipped"], "its result is there"
    pipelines = [thread for thread in threading.enumerate() if thread.name == "pipeline"]
    assert pipelines
    assert all(thread.daemon for thread in pipelines), "Ray can end the actor"


def test_what_ends_an_actors_engine_is_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transcriber = actor(tmp_path, "dead", monkeypatch=monkeypatch)
    assert reports(transcriber, 0) == [JobStopped("the engine is gone")]
    (tmp_path / "files.jsonl").unlink()
    assert isinstance(reports(transcriber, 0)[0], JobStopped)
