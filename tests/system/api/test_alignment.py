"""Times of a given text, by HTTP: the embedded model hears the digits, the text says what they are."""

from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import httpx
import pytest

from asr_server.api.upload import MAX_LONG_BYTES
from tests.conftest import Server
from tests.support.speech import WORDS, say
from tests.unit.api.sample_files import sound_file

SPOKEN = say("381720465", gap_s=0.4)
OURS, THEIRS = "/v1/audio/alignments", "/v1/forced-alignment"
NEAR_S = 0.15


@pytest.fixture
async def http(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url, timeout=250) as client:
        yield client


async def post(http: httpx.AsyncClient, text: str, path: str = OURS, **fields: str) -> httpx.Response:
    files = {"file": ("digits.flac", sound_file(SPOKEN.samples, "FLAC"))}
    return await http.post(path, files=files, data={"text": text} | fields)


async def aligned(http: httpx.AsyncClient, text: str, **fields: str) -> dict[str, Any]:
    reply = await post(http, text, **fields)
    assert reply.status_code == 200, reply.text
    body: dict[str, Any] = reply.json()
    return body


def is_near(word: dict[str, Any], time_s: tuple[float, float]) -> bool:
    off_s = max(abs(word["start"] - time_s[0]), abs(word["end"] - time_s[1]))
    return bool(off_s <= NEAR_S)


@pytest.mark.parametrize("write", [str, str.upper, lambda text: text.title().replace(" ", ", ") + "!"])
async def test_each_word_has_its_time_as_it_is_written(http: httpx.AsyncClient, write: Any) -> None:
    text = write(SPOKEN.text)
    body = await aligned(http, text)
    assert [word["word"] for word in body["words"]] == text.split()
    assert all(map(is_near, body["words"], SPOKEN.times))
    assert all(0 < word["confidence"] <= 1 and word["loss"] >= 0 for word in body["words"])
    assert (body["not_spoken"], body["not_in_text"], body["language"]) == ([], [], "english")
    assert body["loss"] < 1


async def test_words_that_nobody_says_are_listed_apart(http: httpx.AsyncClient) -> None:
    digits = SPOKEN.text.split()
    preface = "this was read aloud by somebody who likes to count"
    body = await aligned(http, " ".join([preface, *digits[:4], "and now the rest of them", *digits[4:]]))
    assert [word["word"] for word in body["words"]] == digits
    assert all(map(is_near, body["words"], SPOKEN.times))
    assert [each["text"] for each in body["not_spoken"]] == [preface, "and now the rest of them"]
    assert body["not_spoken"][1]["at"] == body["words"][3]["end"]


async def test_speech_that_the_text_lacks_is_listed(http: httpx.AsyncClient) -> None:
    digits = SPOKEN.text.split()
    body = await aligned(http, " ".join([*digits[:3], *digits[5:]]))
    (besides,) = body["not_in_text"]
    assert besides["text"] == " ".join(digits[3:5])
    assert is_near(besides, (SPOKEN.times[3][0], SPOKEN.times[4][1]))


async def test_another_text_is_marked_and_forced_nowhere(http: httpx.AsyncClient) -> None:
    body = await aligned(http, "Some years ago I thought I would sail about a little and see the watery part")
    assert (body["words"], body.get("loss")) == ([], None)
    assert len(body["not_spoken"]) == len(body["not_in_text"]) == 1
    assert body["not_in_text"][0]["text"].split() == SPOKEN.text.split()


async def test_characters_share_the_times_of_their_words(http: httpx.AsyncClient) -> None:
    by_word = await aligned(http, SPOKEN.text)
    body = await aligned(http, SPOKEN.text, granularity="character")
    assert "words" not in body
    characters = body["characters"]
    assert "".join(each["character"] for each in characters) == SPOKEN.text.replace(" ", "")
    assert all(before["end"] <= behind["start"] + 1e-6 for before, behind in pairwise(characters))
    assert characters[0]["start"] == by_word["words"][0]["start"]
    assert characters[-1]["end"] == by_word["words"][-1]["end"]


async def test_elevenlabs_shape_has_all_of_the_text(http: httpx.AsyncClient) -> None:
    text = f"{SPOKEN.text} thank you for listening to all of that"
    reply = await post(http, text, THEIRS, enabled_spooled_file="true")
    assert reply.headers["x-ignored-fields"] == "enabled_spooled_file"
    body = reply.json()
    assert {*body} == {"words", "characters", "loss"}
    assert [word["text"] for word in body["words"]] == text.split()
    assert all(map(is_near, body["words"], SPOKEN.times))
    assert "".join(each["text"] for each in body["characters"]) == text.replace(" ", "")
    said, besides = body["words"][: len(WORDS) - 1], body["words"][len(WORDS) - 1 :]
    assert max(word["loss"] for word in said) < min(word["loss"] for word in besides)
    assert all(word["start"] == word["end"] for word in besides)


@pytest.mark.parametrize(
    ("path", "fields", "param", "says"),
    [
        (OURS, {}, "text", "no word"),
        (OURS, {"text": " ... "}, "text", "no word"),
        (OURS, {"text": "a " * (MAX_LONG_BYTES // 2 + 1)}, "text", str(MAX_LONG_BYTES)),
        (OURS, {"text": "one", "granularity": "phoneme"}, "granularity", "'word' or 'character'"),
        (OURS, {"text": "one", "language": "klingon"}, "language", "klingon"),
        (OURS, {"text": "one", "response_format": "srt"}, "response_format", "response_format"),
        (THEIRS, {"text": "one", "model": "whisper-1"}, "model", "model"),
    ],
)
async def test_wrong_fields_are_refused_by_name(
    http: httpx.AsyncClient, path: str, fields: dict[str, str], param: str, says: str
) -> None:
    reply = await http.post(path, files={"file": sound_file(SPOKEN.samples, "FLAC")}, data=fields)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param)
    assert says in error["message"]


async def test_a_recording_is_required(http: httpx.AsyncClient) -> None:
    reply = await http.post(OURS, files={"text": (None, "one two")})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "file")
