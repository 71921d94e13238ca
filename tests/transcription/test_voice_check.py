"""What the embedded model passes over."""

from __future__ import annotations

import numpy as np
import pytest

from asr_server.config import EMBEDDED_MODEL
from asr_server.core import DecodingOptions
from tests.speech import VOICES, digits_of, say, silence
from tests.transcription.pipeline import transcribe


@pytest.mark.parametrize("voice", VOICES)
async def test_a_digit_behind_a_long_pause_is_heard(voice: str) -> None:
    """Read in one piece, the window ends for the model with what comes before the pause."""
    sound = np.concatenate([say("31", voice).samples, silence(3.0), say("8", voice).samples])
    options = DecodingOptions(language="en", timestamps=True, word_timestamps=True)
    transcript = await transcribe(EMBEDDED_MODEL, sound, options, check_voice=True)
    assert digits_of(transcript.text) == "318"
    times_s = [time for s in transcript.segments for word in s.words for time in (word.start_s, word.end_s)]
    assert times_s == sorted(times_s)
