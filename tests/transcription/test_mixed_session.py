"""Channels that are read by themselves because their mix gave no text."""

from __future__ import annotations

import numpy as np
import pytest

from tests.fake_replica import say, wav
from tests.speech import say as speak
from tests.transcription.running_app import (
    RunningApp,
)
from tests.vocabulary import words


@pytest.mark.parametrize(("texts", "text", "num_read"), [("1", "one", 1), ("  2", "two", 3)])
async def test_channels_are_read_alone_only_where_their_mix_gives_no_text(
    app: RunningApp, texts: str, text: str, num_read: int
) -> None:
    def requests() -> list[str]:
        return list(dict.fromkeys(submit.id.request_id for submit in app.replica.submits))

    app.answer = lambda submit: say(*words(texts[requests().index(submit.id.request_id)].strip()))
    speech = speak("1234").samples
    deltas, transcript = await app.transcribe(wav(np.stack([speech, speech / 2], axis=1)))
    assert "".join(delta.text for delta in deltas) == transcript.text == text
    assert len(requests()) == num_read
