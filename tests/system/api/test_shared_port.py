"""Two whole servers on one port: clients notice neither the start, nor the death, nor the stop of one."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from urllib.parse import urlsplit

import httpx

from tests.conftest import STOP_LIMIT_S, WITHOUT_ENGINE, Server, run_server
from tests.support.speech import VOICES, say
from tests.support.until import wait_until
from tests.unit.api.sample_files import sound_file

PATH = "/v1/audio/transcriptions"
NUMBER = sound_file(say("314", VOICES[0], 0.2).samples)
NUM_ASKED = 5
MAX_TRIES = 100  # the system deals connections out at random


@contextmanager
def running(name: str, port: int = 0, *options: str) -> Iterator[Server]:
    with run_server("--served-model-name", name, "--reuse-port", "--port", str(port), *options) as server:
        yield server


def name_of(client: httpx.Client) -> str:
    name: str = client.get("/v1/models").json()["data"][0]["id"]
    return name


def who_reads(url: str) -> str:
    """The name of the server that takes a new connection and reads a recording."""
    with httpx.Client(base_url=url, timeout=60) as client:
        reply = client.post(PATH, files={"file": NUMBER}, data={"model": "whisper-1"})
        assert reply.status_code == 200, reply.text
        assert reply.json()["text"]
        return name_of(client)


def who_answers(url: str) -> str:
    with httpx.Client(base_url=url, timeout=60) as client:
        return name_of(client)


def all_who_answer(url: str) -> set[str]:
    return {who_reads(url), *(who_answers(url) for _ in range(NUM_ASKED))}


def until_both_answer(url: str, names: set[str]) -> None:
    answered: set[str] = set()
    for _ in range(MAX_TRIES):
        if answered == names:
            return
        answered.add(who_answers(url))
    raise AssertionError(f"only {answered} answer")


@contextmanager
def started_while_asking(url: str, name: str, port: int) -> Iterator[Server]:
    """Requests of the time in which the server starts are all answered."""
    has_started = threading.Event()

    def ask() -> None:
        while not has_started.wait(0.1):  # so that most of the processor starts the server
            who_reads(url)

    with ThreadPoolExecutor(1) as thread:
        asking = thread.submit(ask)
        try:
            with running(name, port) as server:
                has_started.set()
                asking.result()
                yield server
        finally:
            has_started.set()


class HeldUpload:
    """A request to the server of that name, the last bytes of which are sent by `finish`."""

    def __init__(self, url: str, name: str) -> None:
        self._client = self._connected_to(url, name)
        self._half_is_sent, self._rest_may_go = threading.Event(), threading.Event()
        self._thread = ThreadPoolExecutor(1)
        self._reply: Future[httpx.Response] = self._thread.submit(self._ask)
        assert self._half_is_sent.wait(60)

    def _connected_to(self, url: str, name: str) -> httpx.Client:
        for _ in range(MAX_TRIES):
            client = httpx.Client(base_url=url, timeout=60)
            if name_of(client) == name:
                return client
            client.close()
        raise AssertionError(f"{name} takes no connection")

    def _ask(self) -> httpx.Response:
        whole = httpx.Request("POST", "http://x", files={"file": NUMBER}, data={"model": "whisper-1"})
        headers = {"content-type": whole.headers["content-type"]}
        return self._client.post(PATH, content=self._body(whole.read()), headers=headers)

    def _body(self, data: bytes) -> Iterator[bytes]:
        yield data[: len(data) // 2]
        self._half_is_sent.set()
        self._rest_may_go.wait(60)
        yield data[len(data) // 2 :]

    def finish(self) -> httpx.Response:
        self._rest_may_go.set()
        try:
            return self._reply.result()
        finally:
            self._thread.shutdown()
            self._client.close()


def test_clients_notice_neither_a_start_nor_a_death_nor_a_stop() -> None:
    with running("first") as first:
        url, port = first.url, urlsplit(first.url).port or 0
        with running("second", port, *WITHOUT_ENGINE) as second:
            until_both_answer(url, {"first", "second"})
            second.process.kill()
            second.process.wait(STOP_LIMIT_S)
            assert all_who_answer(url) == {"first"}
        with started_while_asking(url, "third", port):
            held = HeldUpload(url, "first")
            first.process.terminate()
            wait_until(lambda: "draining: 1 requests in flight" in first.written())
            assert all_who_answer(url) == {"third"}
            assert held.finish().json()["text"]
            assert first.process.wait(STOP_LIMIT_S) == 0
            assert all_who_answer(url) == {"third"}
