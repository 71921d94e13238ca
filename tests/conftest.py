"""Real servers: `asr-server serve`, the embedded model, a free port. One is shared by the whole session."""

import gc
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, NamedTuple

import httpx
import pytest

# Before torch loads OpenMP: pytest-xdist's workers, and the servers that they start, share the cores out.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    CORES_EACH = max(1, len(os.sched_getaffinity(0)) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))
    for name in ("OMP_NUM_THREADS", "ASR_SERVER_CPU_THREADS"):
        os.environ.setdefault(name, str(CORES_EACH))

# The process that hands tests to workers runs none: they need not wait until it has loaded torch.
if "PYTEST_XDIST_WORKER" in os.environ or not any("numprocesses" in argument for argument in sys.argv):
    gc.disable()  # until all tests are collected: what is imported stays
    import asr_server.audio.voice  # before any test imports onnxruntime: turns its reports to Microsoft off
    import asr_server.engine  # noqa: F401  before any test imports torch: settles how OpenMP's threads wait

from asr_server.machine import freeze_gc
from asr_server.metrics import _current_request_stats
from asr_server.telemetry import JsonFormatter, TextFormatter, current_request_id
from asr_server.transcription.heard import Heard

# Where there is no GPU, Triton's kernels are tested on CPU tensors by its interpreter.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Read when Ray is imported, by whichever test is first: else Ray looks for the machine's outward address.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"

# Commands and servers that are told of no model run the embedded one, which is small, and fetch nothing.
os.environ["ASR_SERVER_MODEL"] = "whisper-digits"

START_LIMIT_S = 250.0
STOP_LIMIT_S = 60.0
TRIAL_LIMIT_S = 3600.0  # where a trial names no other
WITHOUT_ENGINE = ("--load", "lazy")  # none is launched before a request: for what needs none
SIGN = "listening on "
REAL_HELPERS = ("real_server", "loaded_base", "real_checkpoint")
SLOW_HELPERS = {
    *("server", "real_server", "run_server"),  # processes of their own, as are these:
    *("COMMAND", "running", "FaultyExecutor"),
    *("sync_playwright", "Page", "ray_cluster", "take_few_programs"),  # a browser, Ray, Triton's interpreter
    # The same by another implementation, and real weights:
    *("Reference", "load_openai_whisper", "loaded_base", "real_checkpoint", "write_ctranslate2"),
}


def pytest_configure() -> None:
    """A shell without job control starts what runs in its background with SIGINT ignored, and children
    inherit that: a server under test would never feel Ctrl-C.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is slow by what it asks for, or its module imports; other modules have the mark.

    Tests of real weights come first, so that one worker alone reads them.
    """
    items.sort(key=lambda item: [name not in asked_for(item) for name in REAL_HELPERS])
    for item in items:
        if SLOW_HELPERS & asked_for(item):
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("trial") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(TRIAL_LIMIT_S))


def pytest_collection_finish() -> None:
    freeze_gc()  # later collections of what was imported took two fifths of the suite's time
    gc.enable()


def asked_for(item: pytest.Item) -> set[str]:
    """Return the names of its fixtures and of all that its module has."""
    return {*getattr(item, "fixturenames", ()), *vars(getattr(item, "module", None) or object)}


@pytest.fixture(autouse=True)
def a_request_that_a_test_begins_ends_with_it() -> Iterator[None]:
    """Keep its figures and id from the next test of the process."""
    figures = _current_request_stats.set(None)  # type: ignore[arg-type]  # as where none has begun
    request_id = current_request_id.set("")
    yield
    _current_request_stats.reset(figures)
    current_request_id.reset(request_id)


@pytest.fixture(autouse=True)
def noise_stands_for_any_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read it, although nobody can be speaking; `monkeypatch.undo()` leaves it out, as a server does."""
    monkeypatch.setattr(Heard, "may_be_spoken", True)


@pytest.fixture(autouse=True, scope="module")
def imports_of_tests_are_frozen() -> Iterator[None]:
    yield
    freeze_gc()


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """A command that a test runs in this process settles how the process logs: for that test alone."""
    level = logging.root.level
    yield
    logging.root.setLevel(level)
    for handler in logging.root.handlers[:]:
        if isinstance(handler.formatter, TextFormatter | JsonFormatter):
            logging.root.removeHandler(handler)


class Server(NamedTuple):
    url: str
    process: subprocess.Popen[str]
    log: IO[str]  # what it and its children have written to standard error

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30, verify=False)

    def written(self) -> str:
        """All that it has logged so far."""
        return _written(self.log)

    def lines(self) -> list[str]:
        return self.written().splitlines()


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    limit = ("--max-upload-bytes", str(25 << 20))
    with run_server("--log-level", "debug", "--wyoming-port", "0", *limit) as server:
        yield server
    assert server.process.returncode == 0, "the server did not stop in order"


@pytest.fixture(scope="session")
def real_server() -> Iterator[Server]:
    """Serves whisper-base; skips where the published weights cannot be had.

    In float32: with bfloat16 the rounding of a chunk depends on what is computed beside it, so that at a near
    tie the same recording may be read differently among others than alone. Short audio is encoded as by
    default: whole windows, which float32 would have, take several times as long.
    """
    from tests.support.real_weights import real_checkpoint  # imports torch

    options = ("--dtype", "float32", "--short-audio", "tail")
    with run_server(str(real_checkpoint("base")), *options) as server:
        yield server
    assert server.process.returncode == 0, "the server did not stop in order"


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of a certificate and its key, which nobody has signed."""
    path = tmp_path_factory.mktemp("tls") / "server.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes"]
    command += ["-subj", "/CN=127.0.0.1", "-keyout", "-"]
    path.write_bytes(subprocess.run(command, check=True, capture_output=True).stdout)
    return str(path)


@contextmanager
def run_server(
    *options: str, python: str = sys.executable, module: str = "asr_server", **environment: str
) -> Iterator[Server]:
    """A server that is ready, the leader of a process group of its own. Stopped at the end."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [python, "-m", module, "serve", "--port", "0", *options],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=os.environ | environment,
            start_new_session=True,
        )
        try:
            server = Server(_address(process, log), process, log)
            _wait_until_ready(server)
            yield server
        finally:
            process.terminate()
            try:
                process.communicate(timeout=STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                raise


def _address(process: subprocess.Popen[str], log: IO[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(SIGN):
            return line.removeprefix(SIGN).strip()
    raise AssertionError(f"the server did not start:\n{_written(log)}")


def _wait_until_ready(server: Server) -> None:
    """Loading takes as long as it takes; /ready says when it is over."""
    deadline = time.monotonic() + START_LIMIT_S
    while not _is_ready(server):
        assert server.process.poll() is None, server.written()
        assert time.monotonic() < deadline, server.written()
        time.sleep(0.05)


def _is_ready(server: Server) -> bool:
    try:
        return server.get("/ready").status_code == 200
    except httpx.TransportError:  # it is ending, and its log says why
        return False


def _written(log: IO[str]) -> str:
    """Read without moving the place where the server writes, which is the same open file's."""
    return os.pread(log.fileno(), os.fstat(log.fileno()).st_size, 0).decode()
