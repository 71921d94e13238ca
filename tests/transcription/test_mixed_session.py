"""Channels that are read by themselves because their mix gave no text."""

from __future__ import annotations

import numpy as np
import pytest

from asr_server.audio.recording import Recording
from asr_server.core import DecodingOptions
from tests.fake_replica import say, wav
from tests.memory_file import MemoryFile
from tests.speech import say as speak
from tests.transcription.running_app import RunningApp
from tests.vocabulary import words


@pytest.mark.parametrize(
    ("texts", "text", "num_read"),
    [
        (["1"], "one", 1),
        (["", "", "2"], "two", 3),
        (["", "1", "23"], "two three", 3),
        (["", "12", "3"], "one two", 3),
        (["", "1", "2"], "one", 3),
        (["", "", ""], "", 3),
    ],
)
async def test_channels_are_read_alone_only_where_their_mix_gives_no_text(
    app: RunningApp, texts: list[str], text: str, num_read: int
) -> None:
    def requests() -> list[str]:
        return list(dict.fromkeys(submit.id.request_id for submit in app.replica.submits))

    app.answer = lambda submit: say(*words(texts[requests().index(submit.id.request_id)]))
    speech = speak("1234").samples
    deltas, transcript = await app.transcribe(wav(np.stack([speech, speech / 2], axis=1)))
    assert "".join(delta.text for delta in deltas) == transcript.text == text
    assert len(requests()) == num_read


@pytest.mark.parametrize(("num_channels", "num_read"), [(1, 1), (2, 3), (8, 9), (9, 9)])
async def test_no_more_than_eight_channels_are_read_alone_and_a_single_one_is_read_once(
    app: RunningApp, num_channels: int, num_read: int
) -> None:
    app.answer = lambda submit: say()
    await app.transcribe(wav(np.repeat(speak("1234").samples[:, None], num_channels, axis=1)))
    assert len({submit.id.request_id for submit in app.replica.submits}) == num_read


async def test_the_channel_that_is_read_alone_is_logged(
    app: RunningApp, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "asr_server.transcription.mixed_session")
    app.answer = lambda submit: say(*words("5")) if len(app.replica.submits) == 3 else say()
    speech = speak("1234").samples
    await app.transcribe(wav(np.stack([speech, speech / 2], axis=1)))
    assert caplog.messages == ["the mix of all channels gave no text: read channel 2 alone"]


async def test_what_a_channel_says_has_its_language_probability(app: RunningApp) -> None:
    """The transcript is that of the channel, in all it tells."""
    app.replica.probabilities_of = lambda submit: {"de": 0.25 * len(app.replica.submits), "en": 0.1}
    app.answer = lambda submit: say(*words("5")) if len(app.replica.submits) == 3 else say()
    speech = speak("1234").samples
    recording = Recording(MemoryFile(wav(np.stack([speech, speech / 2], axis=1))))
    async with app.transcriber.run(recording, DecodingOptions()) as session:
        assert [delta.text async for delta in session if delta.text] == ["five"]
        assert session.language_probability == (await session.transcript()).language_probability
        assert session.language_probability == pytest.approx(0.75 / 0.85)
