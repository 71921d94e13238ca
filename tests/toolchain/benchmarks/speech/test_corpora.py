from __future__ import annotations

import pytest

from harness.speech.corpora import SPEECH, corpora, corpus, sample


def installed(name: str) -> None:
    if not corpus(name):
        pytest.skip(
            f"the recordings of {name} are not here: harness/speech/install.sh fetches what can be had"
        )


@pytest.mark.parametrize("name", [*SPEECH, pytest.param("noises", marks=pytest.mark.trial)])
def test_every_clip_of_a_corpus_can_be_read_and_is_named_once(name: str) -> None:
    installed(name)
    clips = corpus(name)
    assert len({clip.name for clip in clips}) == len(clips)
    for clip in sample(clips, 20):
        assert clip.name.startswith(f"{name}/")
        samples = clip.samples()
        assert clip.duration_s == pytest.approx(len(samples) / 16_000, abs=0.1)
        assert 0.01 < abs(samples).max() <= 1.5 or clip.text == ""


def test_a_sample_is_the_same_every_time_and_keeps_the_order() -> None:
    clips = corpora()
    drawn = sample(clips, 5)
    assert drawn == sample(clips, 5)
    assert list(drawn) == sorted(drawn, key=clips.index)
    assert sample(clips, len(clips) + 1) == clips
