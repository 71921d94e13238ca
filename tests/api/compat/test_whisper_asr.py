"""The routes of whisper-asr-webservice, with the requests that Bazarr and Lingarr send."""

from __future__ import annotations

import re
from typing import Any

import httpx
import numpy as np
import pytest

from tests.api.running_app import SECOND, run_app
from tests.api.sample_files import sound_file
from tests.conftest import Server
from tests.speech import say, silence

SPOKEN = say("314")


def pcm() -> bytes:
    """Samples without a header, as FFmpeg's `-f s16le -ac 1 -ar 16000` writes them."""
    return bytes((np.clip(SPOKEN.samples, -1, 1) * 32767).astype("<i2").tobytes())


def post(server: Server, path: str = "/asr", audio: bytes | None = None, **query: Any) -> httpx.Response:
    audio = sound_file(SPOKEN.samples) if audio is None else audio
    return httpx.post(server.url + path, params=query, files={"audio_file": audio}, timeout=60)


def test_bazarrs_request_gives_subtitles(server: Server) -> None:
    query = {
        "task": "transcribe",
        "language": "en",
        "output": "srt",
        "encode": "false",
        "video_file": "a.mkv",
    }
    reply = post(server, audio=pcm(), **query)
    assert reply.status_code == 200
    assert re.fullmatch(rf"1\n00:00:00,\d+ --> 00:00:0\d,\d+\n{SPOKEN.text}\n\n", reply.text)


@pytest.mark.parametrize("output", ["txt", "vtt", "srt", "tsv", "json"])
def test_each_output_has_the_text(server: Server, output: str) -> None:
    assert SPOKEN.text in post(server, output=output, encode="true").text


def test_tsv_counts_milliseconds(server: Server) -> None:
    head, line = post(server, output="tsv").text.splitlines()
    start, end, text = line.split("\t")
    assert (head, text) == ("start\tend\ttext", SPOKEN.text)
    assert 0 <= int(start) < int(end) <= 1000 * len(SPOKEN.samples) / 16_000


def test_json_has_words_where_they_are_asked_for(server: Server) -> None:
    body = post(server, output="json", word_timestamps="true", vad_filter="true").json()
    assert (body["text"], body["language"]) == (SPOKEN.text, "en")
    words = [word["word"].strip() for segment in body["segments"] for word in segment["words"]]
    assert words == SPOKEN.text.split()
    assert "words" not in post(server, output="json").json()["segments"][0]


def test_the_language_is_detected_from_samples_without_a_header(server: Server) -> None:
    reply = post(server, "/detect-language", pcm(), encode="false")
    assert reply.json() == {"detected_language": "english", "language_code": "en", "confidence": 1.0}


def test_nobody_speaks_no_language(server: Server) -> None:
    reply = post(server, "/detect-language", sound_file(silence(2.0)))
    assert reply.json() == {"detected_language": "unknown", "language_code": "", "confidence": 0.0}


def test_three_letters_name_a_language(server: Server) -> None:
    assert post(server, language="eng").text.strip() == SPOKEN.text


def test_a_recording_under_another_name_is_missed_by_its_own(server: Server) -> None:
    reply = httpx.post(server.url + "/asr", files={"file": sound_file(SPOKEN.samples)}, timeout=60)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "audio_file")


def test_an_unknown_output_is_refused_with_openais_error_body(server: Server) -> None:
    reply = post(server, output="docx")
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "output"


async def test_a_translation_keeps_the_language_of_its_speech() -> None:
    async with run_app(languages=("en", "de")) as app:
        query = {"task": "translate", "language": "deu"}
        reply = await app.client.post("/asr", params=query, files={"audio_file": SECOND})
        assert reply.status_code == 200
        options = app.replica.submits[0].options
        assert (options.task, options.language) == ("translate", "de")
