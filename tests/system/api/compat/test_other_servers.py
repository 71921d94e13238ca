"""The routes of whisper-asr-webservice, with the requests that Bazarr and Lingarr send."""

import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from msgspec.structs import replace
from openai import AsyncAzureOpenAI, AsyncOpenAI

from asr_server.annexes.compat import INFERENCE_WITHOUT_EFFECT
from asr_server.core import ChunkResult
from asr_server.transport.messages import Submit
from tests.conftest import Server
from tests.support.embedded import embedded
from tests.support.fake_replica import noise, wav
from tests.support.fake_replica import say as read
from tests.support.speech import say, silence
from tests.support.tokens import make_tokenizer, words
from tests.unit.api.running_app import SECOND, RunningApp, error_of, run_app
from tests.unit.api.sample_files import sound_file

LANGUAGES = ("en", "de")
FIRST_TIME = make_tokenizer(LANGUAGES).specials.timestamp_begin
SPOKEN = say("314")


def one_two(submit: Submit) -> ChunkResult:
    """Two segments: "one" in the first half second, and "two"."""
    times = [FIRST_TIME + step for step in (0, 25, 25, 50)]
    one, two = words("12")
    return read(times[0], one, times[1], times[2], two, times[3])


def one_two_timed(submit: Submit) -> ChunkResult:
    return replace(
        one_two(submit), token_times_s=(0.0, 0.4, 1.0), token_onsets_s=(0.2, 0.7), token_focus=(0.5, 0.5)
    )


@pytest.fixture
async def two() -> AsyncIterator[RunningApp]:
    async with run_app(answer=one_two, languages=LANGUAGES) as app:
        yield app


async def post(app: RunningApp, audio: bytes = SECOND, /, path: str = "/asr", **query: Any) -> httpx.Response:
    return await app.client.post(path, params=query, files={"audio_file": audio})


def test_bazarrs_request_gives_subtitles_of_samples_without_a_header(server: Server) -> None:
    samples = (np.clip(SPOKEN.samples, -1, 1) * 32767).astype("<i2").tobytes()
    query = "task=transcribe&language=eng&output=srt&encode=false&video_file=a.mkv"
    reply = httpx.post(f"{server.url}/asr?{query}", files={"audio_file": samples}, timeout=60)
    assert reply.status_code == 200
    assert re.fullmatch(rf"1\n00:00:00,\d+ --> 00:00:0\d,\d+\n{SPOKEN.text}\n\n", reply.text)
    assert reply.headers["x-ignored-fields"] == "video_file"


@pytest.mark.parametrize(
    ("output", "body"),
    [
        ("txt", "one two"),
        ("tsv", "start\tend\ttext\n0\t500\tone\n500\t1000\ttwo\n"),
        ("srt", "1\n00:00:00,000 --> 00:00:01,000\none two\n\n"),
        ("vtt", "WEBVTT\n\n00:00:00.000 --> 00:00:01.000\none two\n\n"),
    ],
)
async def test_an_output_is_a_file_of_its_kind(two: RunningApp, output: str, body: str) -> None:
    reply = await post(two, output=output)
    assert (reply.status_code, reply.text) == (200, body)
    assert reply.headers["content-disposition"] == f'attachment; filename="transcript.{output}"'
    assert reply.headers["asr-engine"] == "asr-server"


async def test_json_has_the_models_segments_and_words_where_asked_for(two: RunningApp) -> None:
    body = (await post(two, output="json", language="de")).json()
    assert (body["text"], body["language"]) == ("one two", "de")
    assert [(s["start"], s["end"], s["text"].strip()) for s in body["segments"]] == [
        (0.0, 0.5, "one"),
        (0.5, 1.0, "two"),
    ]
    assert not {"words", "speaker"} & set(body["segments"][0])
    async with run_app(answer=one_two_timed, languages=LANGUAGES) as app:
        timed = (await post(app, output="json", word_timestamps="true")).json()
    (one,), (two_,) = [segment["words"] for segment in timed["segments"]]
    assert (one["word"], two_["word"]) == (" one", " two")
    assert 0 < one["probability"] <= 1
    assert set(one) == {"word", "start", "end", "probability"}


async def test_fields_come_in_the_query_or_in_the_form(two: RunningApp) -> None:
    form = {"output": "tsv", "initial_prompt": "seven", "language": "deu"}
    reply = await two.client.post("/asr", data=form, files={"audio_file": SECOND})
    assert reply.text.startswith("start\tend\ttext\n")
    options = two.replica.submits[-1].options
    assert options.language == "de"
    assert options.prompt_tokens


@pytest.mark.parametrize("where", ["params", "data"])
@pytest.mark.parametrize("path", ["/asr", "/detect-language"])
async def test_a_field_that_is_not_known_is_refused_by_name(two: RunningApp, path: str, where: str) -> None:
    sent: dict[str, Any] = {where: {"foo": "1"}}
    reply = await two.client.post(path, files={"audio_file": SECOND}, **sent)
    assert (reply.status_code, error_of(reply)["param"]) == (400, "foo")


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"output": "docx"}, "output"),
        ({"diarize": "true"}, "diarize"),
        ({"diarize": "true", "output": "srt", "task": "translate"}, "diarize"),
        ({"min_speakers": "0"}, "min_speakers"),
    ],
)
async def test_what_it_cannot_is_refused_by_name(two: RunningApp, query: dict[str, str], param: str) -> None:
    reply = await post(two, **query)
    assert (reply.status_code, error_of(reply)["param"]) == (400, param)


async def test_what_has_no_effect_is_named_in_a_header(two: RunningApp) -> None:
    translated = await post(two, task="translate", language="deu", word_timestamps="true", vad_filter="false")
    assert translated.headers["x-ignored-fields"] == "vad_filter, word_timestamps"
    options = two.replica.submits[0].options
    assert (options.task, options.language) == ("translate", "de")
    assert "x-ignored-fields" not in (await post(two, output="json", word_timestamps="true")).headers


async def test_the_language_is_detected_with_its_confidence(two: RunningApp) -> None:
    two.replica.probabilities = {"de": 0.75, "en": 0.25}
    reply = await post(two, path="/detect-language")
    confidence = pytest.approx(0.75)
    assert reply.json() == {"detected_language": "german", "language_code": "de", "confidence": confidence}
    raw = await post(two, wav(noise(2.0))[44:], path="/detect-language", encode="false")
    assert raw.json()["language_code"] == "de"
    assert len(two.replica.submits[-1].samples) == 32_000


async def test_the_language_is_detected_in_the_part_that_was_asked_for(two: RunningApp) -> None:
    part = {"detect_lang_offset": "1", "detect_lang_length": "2", "video_file": "true"}
    reply = await post(two, wav(noise(5.0)), path="/detect-language", **part)
    assert reply.headers["x-ignored-fields"] == "video_file"
    samples = two.replica.submits[-1].samples
    assert (len(samples), np.flatnonzero(samples)[0] >= 16_000) == (48_000, True)


async def test_where_nobody_speaks_there_is_no_language(two: RunningApp) -> None:
    reply = await post(two, wav(silence(1.0)), path="/detect-language")
    assert reply.json() == {"detected_language": "unknown", "language_code": "", "confidence": 0.0}
    silent = await post(two, wav(silence(1.0)), output="json")
    assert silent.json() == {"text": "", "segments": [], "language": ""}


def test_a_recording_under_another_name_is_missed_by_its_own(server: Server) -> None:
    reply = httpx.post(server.url + "/asr", files={"file": sound_file(SPOKEN.samples)}, timeout=60)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "audio_file")


def infer(server: Server, **fields: str) -> httpx.Response:
    files = {"file": ("a.wav", sound_file(SPOKEN.samples))}
    return httpx.post(f"{server.url}/inference", files=files, data=fields, timeout=60)


def test_the_call_of_its_readme_gives_the_text(server: Server) -> None:
    reply = infer(server, temperature="0.0", temperature_inc="0.2", response_format="json")
    assert (reply.status_code, reply.json()["text"]) == (200, SPOKEN.text)
    assert reply.headers["x-ignored-fields"] == "temperature_inc"


def test_verbose_json_has_the_words_within_segments(server: Server) -> None:
    body = infer(server, response_format="verbose_json", split_on_word="true").json()
    (segment,) = body["segments"]
    assert [word["word"].strip() for word in segment["words"]] == SPOKEN.text.split()
    assert all(0 < word["probability"] <= 1 for word in segment["words"])
    assert "words" not in body
    bare = infer(server, response_format="verbose_json", no_timestamps="true").json()["segments"][0]
    assert not {"start", "end"} & {*bare, *bare["words"][0]}


def test_the_length_of_a_line_is_that_of_subtitles(server: Server) -> None:
    srt = infer(server, response_format="srt", max_len="9").text
    lines = [line for line in srt.splitlines() if line and not line[0].isdigit()]
    assert (" ".join(lines), max(map(len, lines)) <= 9) == (SPOKEN.text, True)


def test_a_translation_is_refused_where_the_model_cannot(server: Server) -> None:
    assert "cannot translate" in infer(server, translate="true").json()["error"]["message"]


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


def azure_client(url: str, key: str = "none") -> AsyncAzureOpenAI:
    return AsyncAzureOpenAI(azure_endpoint=url, api_key=key, api_version="2026-06-01", max_retries=0)


async def text_by(client: AsyncOpenAI, model: str = "whisper-1") -> str:
    file = ("a.wav", sound_file(SPOKEN.samples))
    return (await client.audio.transcriptions.create(file=file, model=model)).text


async def test_a_deployment_is_a_name_of_the_model(server: Server) -> None:
    async with azure_client(server.url) as client:
        assert await text_by(client) == SPOKEN.text
        with pytest.raises(openai.NotFoundError, match="'whisper-of-ours' does not exist"):
            await text_by(client, "whisper-of-ours")


async def test_the_newer_routes_take_the_model_as_a_field(server: Server) -> None:
    async with AsyncOpenAI(base_url=f"{server.url}/openai/v1/", api_key="none") as client:
        assert await text_by(client) == SPOKEN.text


async def test_the_key_comes_in_a_header_of_its_own() -> None:
    async with run_app(embedded(api_key="the-right-key-of-azure")) as app:
        url = app.url
        file = ("a.wav", sound_file(noise(1.0)))
        async with azure_client(url, "the-right-key-of-azure") as client:
            assert await client.audio.transcriptions.create(file=file, model="whisper-1")
        async with azure_client(url, "another") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.audio.transcriptions.create(file=file, model="whisper-1")
