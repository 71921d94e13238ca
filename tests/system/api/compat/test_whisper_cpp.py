"""The route of whisper.cpp's server, with the fields of its own examples."""

import httpx
import numpy as np
import pytest

from asr_server.annexes.compat import INFERENCE_WITHOUT_EFFECT
from tests.conftest import Server
from tests.support.fake_replica import noise, wav
from tests.support.speech import say
from tests.unit.api.running_app import SECOND, error_of, run_app
from tests.unit.api.sample_files import sound_file

SPOKEN = say("314")


def post(server: Server, **fields: str) -> httpx.Response:
    files = {"file": ("a.wav", sound_file(SPOKEN.samples))}
    return httpx.post(f"{server.url}/inference", files=files, data=fields, timeout=60)


def test_the_call_of_its_readme_gives_the_text(server: Server) -> None:
    reply = post(server, temperature="0.0", temperature_inc="0.2", response_format="json")
    assert (reply.status_code, reply.json()["text"]) == (200, SPOKEN.text)
    assert reply.headers["x-ignored-fields"] == "temperature_inc"


def test_verbose_json_has_the_words_within_segments(server: Server) -> None:
    body = post(server, response_format="verbose_json", split_on_word="true").json()
    (segment,) = body["segments"]
    assert [word["word"].strip() for word in segment["words"]] == SPOKEN.text.split()
    assert all(0 < word["probability"] <= 1 for word in segment["words"])
    assert "words" not in body
    bare = post(server, response_format="verbose_json", no_timestamps="true").json()["segments"][0]
    assert not {"start", "end"} & {*bare, *bare["words"][0]}


def test_the_length_of_a_line_is_that_of_subtitles(server: Server) -> None:
    srt = post(server, response_format="srt", max_len="9").text
    lines = [line for line in srt.splitlines() if line and not line[0].isdigit()]
    assert (" ".join(lines), max(map(len, lines)) <= 9) == (SPOKEN.text, True)


def test_a_translation_is_refused_where_the_model_cannot(server: Server) -> None:
    assert "cannot translate" in post(server, translate="true").json()["error"]["message"]


async def test_an_offset_and_a_duration_are_those_of_the_part_that_is_read() -> None:
    async with run_app() as app:
        await app.post(wav(noise(5.0)), path="/inference", offset_t="1000", duration="2000")
        samples = app.replica.submits[0].samples
        assert (len(samples), np.flatnonzero(samples)[0] >= 16_000) == (48_000, True)
        body = (await app.post(path="/inference", offset_t="4000")).json()
        assert body["error"]["param"] == "file"


async def test_channels_are_speakers_where_the_format_shows_them() -> None:
    async with run_app() as app:
        mono = await app.post(path="/inference", diarize="true", response_format="srt")
        assert error_of(mono)["param"] == "channels"  # as there, it needs two
        refused = await app.post(path="/inference", diarize="true")
        assert (refused.status_code, error_of(refused)["param"]) == (400, "diarize")


async def test_fields_without_an_effect_are_taken_and_named() -> None:
    async with run_app() as app:
        reply = await app.post(
            path="/inference", max_len="5", **dict.fromkeys(sorted(INFERENCE_WITHOUT_EFFECT), "1")
        )
        assert reply.json()["text"] == "zero"
        assert set(reply.headers["x-ignored-fields"].split(", ")) == INFERENCE_WITHOUT_EFFECT | {"max_len"}
        refused = await app.post(path="/inference", colour="red")
        assert (refused.status_code, error_of(refused)["param"]) == (400, "colour")


@pytest.mark.parametrize(
    ("text", "task"),
    [*((text, "translate") for text in ("true", " TRUE ", "1", "yes", "on")), ("false", "transcribe")],
)
async def test_a_translation_keeps_the_language_of_its_speech(text: str, task: str) -> None:
    async with run_app(languages=("en", "de")) as app:
        fields = {"translate": text, "language": "de"}
        reply = await app.client.post("/inference", data=fields, files={"file": ("a.wav", SECOND)})
        assert reply.status_code == 200
        options = app.replica.submits[0].options
        assert (options.task, options.language) == (task, "de")
