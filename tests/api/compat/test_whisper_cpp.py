"""The route of whisper.cpp's server, with the fields of its own examples."""

from __future__ import annotations

import httpx
import pytest

from tests.api.running_app import SECOND, run_app
from tests.api.sample_files import sound_file
from tests.conftest import Server
from tests.speech import say

SPOKEN = say("314")


def post(server: Server, **fields: str) -> httpx.Response:
    files = {"file": ("a.wav", sound_file(SPOKEN.samples))}
    return httpx.post(f"{server.url}/inference", files=files, data=fields, timeout=60)


def test_the_call_of_its_readme_gives_the_text(server: Server) -> None:
    reply = post(server, temperature="0.0", temperature_inc="0.2", response_format="json")
    assert reply.status_code == 200
    assert reply.json()["text"] == SPOKEN.text


@pytest.mark.parametrize("response_format", ["text", "srt", "vtt"])
def test_other_formats_are_plain(server: Server, response_format: str) -> None:
    assert SPOKEN.text in post(server, response_format=response_format).text


def test_verbose_json_has_segments_and_words(server: Server) -> None:
    body = post(server, response_format="verbose_json", split_on_word="true").json()
    assert [word["word"] for word in body["words"]] == SPOKEN.text.split()
    assert body["segments"][0]["text"].strip() == SPOKEN.text


def test_a_translation_is_refused_where_the_model_cannot(server: Server) -> None:
    assert "cannot translate" in post(server, translate="true").json()["error"]["message"]


def test_a_field_that_it_does_not_have_is_refused_by_name(server: Server) -> None:
    assert post(server, colour="red").json()["error"]["param"] == "colour"


async def test_a_translation_keeps_the_language_of_its_speech() -> None:
    async with run_app(languages=("en", "de")) as app:
        fields = {"translate": "true", "language": "de"}
        reply = await app.client.post("/inference", data=fields, files={"file": ("a.wav", SECOND)})
        assert reply.status_code == 200
        options = app.replica.submits[0].options
        assert (options.task, options.language) == ("translate", "de")
