"""Each line of the error table, seen by the official client; after each the server goes on."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from tests.api.official_client import SPOKEN, transcribe
from tests.api.sample_files import m4a, silent_film, sound_file
from tests.speech import silence


@pytest.mark.parametrize(
    ("file", "code"),
    [
        (b"this is a letter, not a recording. " * 100, "invalid_audio"),
        (b"", "invalid_audio"),
        (m4a(SPOKEN.samples)[:-2000], "invalid_audio"),  # its index was at the end
        (silent_film(), "invalid_audio"),
        (sound_file(silence(0.05)), "audio_too_short"),
    ],
    ids=["letter", "empty", "truncated-m4a", "silent-film", "too-short"],
)
async def test_a_bad_file_is_a_400_that_says_so_and_the_next_request_is_answered(
    client: AsyncOpenAI, file: bytes, code: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await transcribe(client, file)
    assert (caught.value.code, caught.value.param) == (code, "file")
    assert caught.value.type == "invalid_request_error"
    assert caught.value.request_id
    assert (await transcribe(client, sound_file(SPOKEN.samples))).text == SPOKEN.text


async def test_a_truncated_wav_gives_what_is_there(client: AsyncOpenAI) -> None:
    truncated = sound_file(SPOKEN.samples)[: 44 + int(2 * 16_000 * (SPOKEN.times[2][1] + 0.3))]
    assert (await transcribe(client, truncated)).text == "three one four"


async def test_an_unknown_model_is_not_found(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await client.audio.transcriptions.create(file=sound_file(SPOKEN.samples), model="nobody")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"language": "klingon"}, "language"),
        ({"temperature": 1.5}, "temperature"),
        ({"extra_body": {"colour": "red"}}, "colour"),
        (
            {"response_format": "json", "timestamp_granularities": ["word"]},
            "timestamp_granularities[]",
        ),
        ({"response_format": "text", "include": ["logprobs"]}, "include[]"),
        ({"response_format": "srt", "stream": True}, "stream"),
        ({"known_speaker_names": ["Ann"]}, "known_speaker_names[]"),
    ],
)
async def test_a_wrong_field_is_named(client: AsyncOpenAI, options: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await transcribe(client, sound_file(SPOKEN.samples), **options)
    assert (caught.value.code, caught.value.param) == ("invalid_value", param)


@pytest.mark.filterwarnings("ignore:deprecated")  # by the client; ours is to answer it
async def test_a_model_that_cannot_translate_says_so(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="cannot translate"):
        await client.audio.translations.create(file=sound_file(SPOKEN.samples), model="whisper-1")


async def test_an_upload_over_the_limit_is_too_large(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        await transcribe(client, bytes(26 * 1024 * 1024))
    assert (caught.value.status_code, caught.value.code) == (413, "request_too_large")


async def test_the_models_are_listed(client: AsyncOpenAI) -> None:
    names = [model.id async for model in client.models.list()]
    assert names[:2] == ["whisper-digits", "whisper-1"]
    assert {"gpt-4o-transcribe", "gpt-4o-mini-transcribe", "gpt-transcribe"} < set(names)
    assert {"gpt-live-transcribe", "gpt-realtime-whisper"} < set(names)  # LiveKit's and pipecat's
    model = await client.models.retrieve("gpt-transcribe")
    assert (model.id, model.shutdown_date) == ("gpt-transcribe", None)
