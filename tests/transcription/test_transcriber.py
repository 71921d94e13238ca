"""A request from its recording to its transcript."""

from __future__ import annotations

import asyncio

import pytest

from asr_server.core import DecodingOptions
from asr_server.errors import InvalidAudio
from tests.transcription.running_app import (
    THREE_CHUNKS,
    RunningApp,
    until,
)


async def test_what_is_no_audio_raises_what_it_is(app: RunningApp) -> None:
    with pytest.raises(InvalidAudio):
        await app.transcribe(b"this is no audio at all" * 100)


async def test_detection_stays_among_the_candidates(app: RunningApp) -> None:
    app.replica.probabilities = {"de": 0.9, "en": 0.06, "zh": 0.04}
    _, transcript = await app.transcribe(THREE_CHUNKS, DecodingOptions(candidate_languages=("en", "zh")))
    assert transcript.language == "english"


async def test_cancelling_a_request_cancels_its_chunks_and_closes_its_recording(app: RunningApp) -> None:
    app.replica.holding = True
    running = asyncio.create_task(app.transcribe(THREE_CHUNKS))
    await until(lambda: len(app.replica.held) >= 2)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(app.replica.cancelled) == 1
    assert app.dispatcher.num_chunks == 0
