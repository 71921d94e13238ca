"""One server with two models: each request gets the answer of the model that it names."""

import os
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import httpx
import psutil
import pytest

from tests.conftest import Server, run_server
from tests.support.checkpoints import brief_directory
from tests.support.fake_replica import wav
from tests.support.real_weights import real_checkpoint
from tests.support.speech import say
from tests.support.until import wait_until
from tests.unit.api.figures import figures_of
from tests.unit.api.named_keys import SHOP, WEB, bearer, entry, write

DIGITS = wav(say("123").samples)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> str:
    entries = (entry("web", WEB), entry("operators", SHOP, admin=True))
    return str(write(tmp_path_factory.mktemp("keys") / "keys.yaml", *entries))


@pytest.fixture(scope="module")
def both(keys: str) -> Iterator[Server]:
    """Serves the embedded model first, and one of random weights, which says anything, beside it."""
    models = f"digits=whisper-digits,random={brief_directory()}"
    with run_server("--models", models, "--keys-file", keys) as server:
        yield server
    assert server.process.returncode == 0


def transcribe(server: Server, model: str) -> str:
    reply = httpx.post(
        f"{server.url}/v1/audio/transcriptions",
        files={"file": DIGITS},
        data={"model": model, "language": "en"},
        headers=bearer(WEB),
        timeout=300,
    )
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["text"]
    return text


def test_each_request_beside_others_gets_the_answer_of_its_model(both: Server) -> None:
    names = ["", "whisper-1", "digits", "random"] * 2
    with ThreadPoolExecutor(8) as threads:
        texts = list(threads.map(lambda name: transcribe(both, name), names))
    by_name = {
        name: {text for each, text in zip(names, texts, strict=True) if each == name} for name in names
    }
    assert by_name[""] == by_name["whisper-1"] == by_name["digits"] == {"one two three"}
    assert "one two three" not in by_name["random"]


def test_every_model_is_listed_and_has_figures_of_its_own(both: Server) -> None:
    models = ask(both, "")["data"]
    roots = {model["id"]: model["root"] for model in models}
    assert (roots["digits"], roots["whisper-1"], roots["random"]) == ("digits", "digits", "random")
    assert ask(both, "/random")["tasks"] == ["transcribe", "translate"]
    figures = figures_of(both.get("/metrics"))
    for name in ("digits", "random"):
        assert figures[f'asr_replica_ready{{model="{name}",replica="replica 0"}}'] == 1
        assert figures[f'asr_chunks{{model="{name}"}}'] == 0
    assert "asr_chunks" not in figures  # a sum over all would count the first model twice
    assert {replica["model"] for replica in both.get("/load").json()["replicas"]} == {"digits", "random"}


def change(server: Server, path: str, key: str = SHOP) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/models/{path}", headers=bearer(key), timeout=300)


def ask(server: Server, path: str) -> Any:
    return httpx.get(f"{server.url}/v1/models{path}", headers=bearer(WEB), timeout=30).json()


def replicas_of(server: Server, model: str) -> int:
    return sum(replica["model"] == model for replica in server.get("/load").json()["replicas"])


def test_an_unloaded_model_has_no_replica_and_the_next_request_brings_it_back(both: Server) -> None:
    assert change(both, "digits/unload").json()["state"] == "unloaded"
    assert (replicas_of(both, "digits"), replicas_of(both, "random")) == (0, 1)
    assert both.get("/ready").status_code == 200
    assert transcribe(both, "digits") == "one two three"
    assert ask(both, "/digits")["state"] == "ready"
    change(both, "digits/unload")
    assert change(both, "digits/load").json()["state"] == "ready"
    assert replicas_of(both, "digits") == 1
    assert change(both, "none/load").status_code == 404


# -- Given back each time ------------------------------------------------------------------------------------

ROUNDS = int(os.environ.get("ASR_TEST_UNLOADS", "100"))
MOST_GROWTH_BYTES = 50 << 20


class Footprint(NamedTuple):
    memory_bytes: int
    descriptors: int
    processes: int


def footprint(process: psutil.Process) -> Footprint:
    """The least of some looks: requests hold memory and files for moments."""
    looks = []
    for _ in range(20):
        family = [process, *process.children(recursive=True)]
        looks.append((sum(each.memory_info().rss for each in family), process.num_fds(), len(family)))
        time.sleep(0.02)
    return Footprint(*map(min, zip(*looks, strict=True)))


def ask_until(ended: threading.Event, server: Server, model: str) -> Counter[str]:
    texts = Counter[str]()
    while not ended.is_set():
        texts[transcribe(server, model)] += 1
    return texts


@pytest.mark.trial
def test_a_model_unloaded_and_loaded_beside_requests_gives_all_back_and_loses_none(keys: str) -> None:
    """Live requests go to the one model throughout; the other is asked each time that it was unloaded."""
    models = f"digits=whisper-digits,base={real_checkpoint('base')}"
    options = ("--keys-file", keys, "--drain-s", "300")
    with run_server("--models", models, *options) as server, ThreadPoolExecutor(2) as threads:
        ended = threading.Event()
        beside = threads.submit(ask_until, ended, server, "digits")
        try:
            process, footprints = psutil.Process(server.process.pid), []
            for _ in range(ROUNDS + 1):
                last = threads.submit(transcribe, server, "base")
                wait_until(lambda: state_of(server, "base") == "ready", 300)
                assert change(server, "base/unload").status_code == 200
                assert last.result()
                assert change(server, "base/unload").json()["state"] == "unloaded"
                footprints.append(footprint(process))
                if len(footprints) % 10 == 1:
                    print(f"\nafter {len(footprints) - 1} unloads: {footprints[-1]}", flush=True)
        finally:
            ended.set()
        assert set(beside.result()) == {"one two three"}
        loads_s = sorted(map(float, re.findall(r"model base loaded in (.+) s", server.written())))
    _, first, *others = footprints
    num_beside = beside.result().total()
    print(f"\n{len(others)} unloads: {first} at first, {others[-1]} at last; {num_beside} requests beside")
    print(f"seconds to load: {loads_s[0]} to {loads_s[-1]}, median {loads_s[len(loads_s) // 2]}")
    for number, each in enumerate(others):
        assert each.memory_bytes - first.memory_bytes < MOST_GROWTH_BYTES, number
        assert each.descriptors <= first.descriptors, number


def state_of(server: Server, model: str) -> str:
    state: str = ask(server, f"/{model}")["state"]
    return state
