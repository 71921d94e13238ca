"""One server with two models: each request gets the answer of the model that it names."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.api.figures import figures_of
from tests.conftest import Server, run_server
from tests.fake_replica import wav
from tests.real_weights import real_checkpoint
from tests.speech import say

DIGITS = wav(say("123").samples)


@pytest.fixture(scope="module")
def both() -> Iterator[Server]:
    """Serves the embedded model first, and whisper-base beside it."""
    with run_server("--models", f"digits=whisper-digits,base={real_checkpoint('base')}") as server:
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
