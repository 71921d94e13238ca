"""Beam search with whisper-base, as openai-whisper does it."""

import numpy as np
import pytest

from asr_server.core import SAMPLE_RATE, DecodingOptions
from harness.engine_helpers import transcribe
from harness.speech.corpora import corpus, sample
from tests.support.real_weights import loaded_base, openai_whisper_base
from tests.unit.engine.test_beam import THEIR_WARNING, WIDTH, unpruned, with_beam  # noqa: F401


@THEIR_WARNING
@pytest.mark.usefixtures("unpruned")
@pytest.mark.parametrize("name", ["audioeval", pytest.param("fillets", marks=pytest.mark.trial)])
def test_real_speech_is_read_as_openai_whispers_beam_search_reads_it(name: str) -> None:
    import whisper

    greetings = [clip for clip in corpus("audioeval") if clip.name.endswith("es/hola_mundo")]
    clips = greetings if name == "audioeval" else sample(corpus(name), 1)
    if not clips:
        pytest.skip("no recordings are installed")
    engine, theirs = loaded_base().engine(beam_size=WIDTH), openai_whisper_base()
    for clip in clips:
        mel = whisper.log_mel_spectrogram(whisper.pad_or_trim(clip.samples()))
        (expected,) = with_beam(theirs, mel[None], language=clip.language)
        (found,) = transcribe(engine, [clip.samples()], DecodingOptions(language=clip.language))
        assert list(found.tokens) == expected.tokens, clip.name
        assert found.avg_logprob == pytest.approx(expected.avg_logprob, abs=2e-3), clip.name


def test_a_search_that_repeats_itself_is_ended_long_before_its_last_position() -> None:
    checkpoint = loaded_base()
    laughter = tuple(checkpoint.tokenizer.encode(" Ha" * 60))  # what the model goes on with
    noise = np.random.default_rng(0).normal(0, 0.05, 3 * SAMPLE_RATE).astype(np.float32)
    options = DecodingOptions(language="en", prompt_tokens=laughter)
    (heard,) = transcribe(checkpoint.engine(beam_size=WIDTH, short_audio="tail"), [noise], options)
    assert heard.finish_reason == "length"
    assert heard.compression_ratio > options.compression_ratio_threshold
    assert len(heard.tokens) < 100
