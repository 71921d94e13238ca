"""The fields of whisper.cpp's server, in front of a replica."""

from __future__ import annotations

import pytest
from fastapi import FastAPI

from asr_server.api.compat.whisper_cpp import router
from tests.api.running_app import RunningApp, run_app


async def test_the_options_of_its_command_change_nothing(app: RunningApp) -> None:
    fields = {"beam_size": "5", "no_timestamps": "true", "diarize": "true", "vad": "true", "max_len": "3"}
    assert (await app.post(path="/inference", **fields)).json()["text"] == "zero"
    (submit,) = app.replica.submits
    assert not submit.options.word_timestamps


@pytest.mark.parametrize(
    ("said", "task"),
    [*((text, "translate") for text in ("true", " TRUE ", "1", "yes", "on")), ("false", "transcribe")],
)
async def test_a_translation_is_asked_for_by_a_word(said: str, task: str) -> None:
    async with run_app(languages=("en", "de")) as app:
        assert (await app.post(path="/inference", translate=said)).status_code == 200
        assert app.replica.submits[0].options.task == task


async def test_verbose_json_has_segments_and_the_times_of_words(app: RunningApp) -> None:
    body = (await app.post(path="/inference", response_format="verbose_json")).json()
    assert (len(body["segments"]), len(body["words"])) == (1, 1)
    assert app.replica.submits[0].options.word_timestamps


def test_the_route_is_in_no_document() -> None:
    document = FastAPI()
    document.include_router(router)
    assert "/inference" not in document.openapi()["paths"]
