"""The fields and bodies of whisper-asr-webservice, in front of a replica that says what the test wants."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from msgspec.structs import replace

from asr_server.api.compat.whisper_asr import router
from asr_server.api.request import parse_transcription_request
from asr_server.channel.messages import Submit
from asr_server.core import ChunkResult
from tests.api.running_app import SECOND, RunningApp, run_app
from tests.fake_replica import noise, say, wav
from tests.speech import silence
from tests.vocabulary import at, make_tokenizer, words

LANGUAGES = ("en", "de")
TOKENIZER = make_tokenizer(LANGUAGES)


def one_two(submit: Submit) -> ChunkResult:
    """Two segments: "one" in the first half second, and "two"."""
    times = [at(TOKENIZER, time_s) for time_s in (0.0, 0.5, 0.5, 1.0)]
    one, two = words("12")
    return say(times[0], one, times[1], times[2], two, times[3])


@pytest.fixture
async def two() -> AsyncIterator[RunningApp]:
    async with run_app(answer=one_two, languages=LANGUAGES) as app:
        yield app


async def post(app: RunningApp, audio: bytes = SECOND, /, path: str = "/asr", **query: Any) -> httpx.Response:
    return await app.client.post(path, params=query, files={"audio_file": audio})


@pytest.mark.parametrize(
    ("output", "body"),
    [
        ("txt", "one two"),
        ("tsv", "start\tend\ttext\n0\t500\tone\n500\t1000\ttwo\n"),
        ("srt", "1\n00:00:00,000 --> 00:00:01,000\none two\n\n"),
    ],
)
async def test_an_output_is_a_file_of_its_kind(two: RunningApp, output: str, body: str) -> None:
    reply = await post(two, output=output)
    assert reply.status_code == 200
    if output != "srt":
        assert reply.text == body
    assert "one" in reply.text
    assert reply.headers["content-disposition"] == f'attachment; filename="transcript.{output}"'
    assert reply.headers["asr-engine"] == "asr-server"
    assert reply.headers["content-type"].startswith("text/plain")


async def test_text_is_the_output_where_none_is_named_and_an_encoded_file_is_expected(
    two: RunningApp,
) -> None:
    assert (await post(two)).text == (await post(two, encode="true")).text == "one two"
    assert [len(submit.samples) for submit in two.replica.submits] == [16_000] * 2
    raw = await post(two, SECOND[44:], encode="false")
    assert raw.text == "one two"
    assert len(two.replica.submits[-1].samples) == 16_000
    options = two.replica.submits[0].options
    assert (options.task, options.language, options.word_timestamps) == ("transcribe", None, False)
    assert (options.prompt_tokens, options.segment_times) == ((), False)


async def test_json_has_the_models_segments_without_empty_fields(two: RunningApp) -> None:
    body = (await post(two, output="json", language="de")).json()
    assert (body["text"], body["language"]) == ("one two", "de")
    first, second = body["segments"]
    assert (first["start"], first["end"], first["text"].strip()) == (0.0, 0.5, "one")
    assert (second["start"], second["end"], second["id"]) == (0.5, 1.0, 1)
    assert not {"start_s", "end_s", "words", "speaker"} & set(first)
    assert None not in first.values()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[str, str]]]:
    """The fields of each request as OpenAI's own route is asked; those of speakers go no further."""
    found: list[list[tuple[str, str]]] = []

    def noted(fields: list[tuple[str, str]], models: Any) -> Any:
        found.append(fields)
        return parse_transcription_request(
            [pair for pair in fields if "speakers" not in pair[0] and pair[0] != "diarize"], models
        )

    monkeypatch.setattr("asr_server.api.compat.whisper_asr.parse_transcription_request", noted)
    return found


@pytest.mark.parametrize(
    ("query", "has_words"),
    [
        ({"output": "json", "word_timestamps": "true"}, True),
        ({"output": "json"}, False),
        ({"output": "txt", "word_timestamps": "true"}, False),
        ({"output": "tsv", "word_timestamps": "true"}, False),
    ],
)
async def test_word_times_are_asked_for_where_json_shows_them(
    two: RunningApp, asked: list[list[tuple[str, str]]], query: dict[str, str], has_words: bool
) -> None:
    assert (await post(two, **query)).status_code == 200
    granularities = [value for name, value in asked[0] if name == "timestamp_granularities"]
    assert granularities == ["segment", "word"] * has_words


async def test_json_has_each_word_with_its_times() -> None:
    def with_times(submit: Submit) -> ChunkResult:
        return replace(one_two(submit), token_times_s=(0.0, 0.4, 1.0), token_peaks_s=(0.2, 0.7))

    async with run_app(answer=with_times, languages=LANGUAGES) as app:
        body = (await post(app, output="json", word_timestamps="true")).json()
    (one,), (two,) = [segment["words"] for segment in body["segments"]]
    assert (one["word"], one["start"], two["word"], two["end"]) == (" one", 0.0, " two", 1.0)
    assert 0.4 <= one["end"] <= two["start"] < 0.6
    assert set(one) == {"word", "start", "end"}


async def test_a_prompt_and_a_language_reach_the_decoder(two: RunningApp) -> None:
    await post(two, initial_prompt="seven", language="deu")
    options = two.replica.submits[-1].options
    assert options.language == "de"
    assert options.prompt_tokens


async def test_a_translation_is_one_in_every_output(two: RunningApp) -> None:
    for output in ("json", "txt"):
        reply = await post(two, task="translate", output=output, word_timestamps="true", diarize="true")
        assert reply.status_code == 200
        assert two.replica.submits[-1].options.task == "translate"


@pytest.mark.parametrize(
    ("query", "pairs"),
    [
        ({"diarize": "true", "output": "srt"}, [("diarize", "true")]),
        ({"diarize": "true", "output": "txt"}, []),
        ({"output": "json", "min_speakers": "2"}, []),
        (
            {"diarize": "true", "output": "json", "min_speakers": "2", "max_speakers": "3"},
            [("diarize", "true"), ("min_speakers", "2"), ("max_speakers", "3")],
        ),
        (
            {"diarize": "true", "output": "tsv", "max_speakers": "3"},
            [("diarize", "true"), ("max_speakers", "3")],
        ),
    ],
)
async def test_voices_are_told_apart_where_the_output_shows_them(
    two: RunningApp,
    asked: list[list[tuple[str, str]]],
    query: dict[str, str],
    pairs: list[tuple[str, str]],
) -> None:
    assert (await post(two, **query)).status_code == 200
    assert [pair for pair in asked[0] if "speakers" in pair[0] or pair[0] == "diarize"] == pairs


async def test_a_language_is_detected_with_its_confidence(two: RunningApp) -> None:
    two.replica.probabilities = {"de": 0.75, "en": 0.25}
    reply = await post(two, path="/detect-language")
    confidence = pytest.approx(0.75)
    assert reply.json() == {"detected_language": "german", "language_code": "de", "confidence": confidence}
    assert len(two.replica.submits[-1].samples) == 16_000  # a file's header is none of its samples
    raw = await post(two, wav(noise(2.0))[44:], path="/detect-language", encode="false")
    assert raw.json()["language_code"] == "de"
    assert len(two.replica.submits[-1].samples) == 32_000


async def test_sound_in_which_nobody_speaks_has_no_language() -> None:
    async with run_app(answer=lambda _: say(), languages=LANGUAGES) as app:
        app.replica.probabilities = {"de": 0.75, "en": 0.25}
        reply = await post(app, path="/detect-language")
        assert app.replica.languages_set == ["de"]
    assert reply.json()["language_code"] == ""


async def test_a_model_of_one_language_says_none_where_nobody_speaks() -> None:
    async with run_app(answer=lambda _: say()) as app:
        reply = await post(app, path="/detect-language")
    assert reply.json() == {"detected_language": "unknown", "language_code": "", "confidence": 0.0}


async def test_a_model_of_one_language_is_sure_of_it(app: RunningApp) -> None:
    reply = await post(app, path="/detect-language")
    assert reply.json() == {"detected_language": "english", "language_code": "en", "confidence": 1.0}


async def test_silence_has_no_language(two: RunningApp) -> None:
    reply = await post(two, wav(silence(1.0)), path="/detect-language")
    assert reply.json() == {"detected_language": "unknown", "language_code": "", "confidence": 0.0}
    assert (await post(two, wav(silence(1.0)), output="json")).json() == {
        "text": "",
        "segments": [],
        "language": "",
    }


@pytest.mark.parametrize("path", ["/asr", "/detect-language"])
async def test_the_routes_take_a_recording_by_its_own_name_and_are_in_no_document(
    app: RunningApp, path: str
) -> None:
    refused = await app.client.post(path, files={"file": SECOND})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "audio_file")
    document = FastAPI()
    document.include_router(router)
    assert path not in document.openapi()["paths"]
