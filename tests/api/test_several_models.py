"""One server with two models: each request gets the answer of the model that it names."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from asr_server.config import EMBEDDED_MODEL
from tests.api.figures import figures_of
from tests.conftest import Server, run_server
from tests.fake_replica import wav
from tests.real_weights import real_checkpoint
from tests.speech import say

ADMIN_KEY = "admin-key-of-24-letters."
DIGITS = wav(say("123").samples)


@pytest.fixture(scope="module")
def both() -> Iterator[Server]:
    """Serves the embedded model first, and whisper-base beside it."""
    models = f"digits=whisper-digits,base={real_checkpoint('base')}"
    with run_server("--models", models, "--admin-key", ADMIN_KEY) as server:
        yield server
    assert server.process.returncode == 0


def transcribe(server: Server, model: str) -> str:
    reply = httpx.post(
        f"{server.url}/v1/audio/transcriptions",
        files={"file": DIGITS},
        data={"model": model, "language": "en"},
        timeout=120,
    )
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["text"]
    return text


def test_each_request_beside_others_gets_the_answer_of_its_model(both: Server) -> None:
    names = ["", "whisper-1", "digits", "base"] * 4
    with ThreadPoolExecutor(8) as threads:
        texts = list(threads.map(lambda name: transcribe(both, name), names))
    by_name = {
        name: {text for each, text in zip(names, texts, strict=True) if each == name} for name in names
    }
    assert by_name[""] == by_name["whisper-1"] == by_name["digits"] == {"one two three"}
    (text,) = by_name["base"]
    assert text != "one two three"  # base writes capitals or figures


def test_every_model_is_listed_and_has_figures_of_its_own(both: Server) -> None:
    models = both.get("/v1/models").json()["data"]
    roots = {model["id"]: model["root"] for model in models}
    assert (roots["digits"], roots["whisper-1"], roots["base"]) == ("digits", "digits", "base")
    assert both.get("/v1/models/base").json()["tasks"] == ["transcribe", "translate"]
    figures = figures_of(both.get("/metrics"))
    for name in ("digits", "base"):
        assert figures[f'asr_replica_ready{{model="{name}",replica="replica 0"}}'] == 1
        assert figures[f'asr_chunks{{model="{name}"}}'] == 0
    assert {replica["model"] for replica in both.get("/load").json()["replicas"]} == {"digits", "base"}


def change(server: Server, path: str, key: str = ADMIN_KEY) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{server.url}/v1/models/{path}", headers=headers, timeout=60)


def replicas_of(server: Server, model: str) -> int:
    return sum(replica["model"] == model for replica in server.get("/load").json()["replicas"])


def test_an_unloaded_model_has_no_replica_and_the_next_request_brings_it_back(both: Server) -> None:
    assert change(both, "digits/unload").json()["state"] == "unloaded"
    assert (replicas_of(both, "digits"), replicas_of(both, "base")) == (0, 1)
    assert both.get("/ready").status_code == 200
    assert transcribe(both, "digits") == "one two three"
    assert both.get("/v1/models/digits").json()["state"] == "ready"
    change(both, "digits/unload")
    assert change(both, "digits/load").json()["state"] == "ready"
    assert replicas_of(both, "digits") == 1


def test_a_new_version_takes_a_models_place_under_load_and_no_request_is_lost(
    both: Server, tmp_path: Path
) -> None:
    versions = [shutil.copytree(EMBEDDED_MODEL, tmp_path / f"v{number}") for number in (1, 2)]
    with ThreadPoolExecutor(4) as threads:
        requests = [threads.submit(transcribe, both, "digits") for _ in range(40)]
        for directory in versions:
            swapped = change(both, f"digits/load?model={directory}")
            assert (swapped.status_code, swapped.json()["state"]) == (200, "ready")
            requests += [threads.submit(transcribe, both, "digits") for _ in range(20)]
        assert {request.result() for request in requests} == {"one two three"}
    wait_until(lambda: replicas_of(both, "digits") == 1)
    assert f"model digits is served from {versions[1]}" in both.written()


def test_a_version_that_cannot_be_served_changes_nothing(both: Server, tmp_path: Path) -> None:
    refused = change(both, f"digits/load?model={tmp_path}")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
    assert transcribe(both, "digits") == "one two three"


def test_only_the_admin_key_changes_models(both: Server, server: Server) -> None:
    for key in ("wrong", ADMIN_KEY[:-1]):
        assert change(both, "digits/unload", key).status_code == 401
    assert change(both, "nobody/unload").status_code == 404
    refused = change(server, "whisper-1/unload")
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "admin_off")
    assert "--admin-key" in refused.json()["error"]["message"]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
