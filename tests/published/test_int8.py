"""8-bit products of whisper-base beside those in float32."""

import pytest

from asr_server.core import DecodingOptions
from harness.engine_helpers import Checkpoint, transcribe
from harness.speech import corpus
from harness.speech.error_rates import word_errors
from tests.support.real_weights import loaded_base, real_checkpoint
from tests.unit.engine.test_int8 import DTYPES, needs_int8


@needs_int8
def test_people_are_heard_as_well_in_int8() -> None:
    """A sentence, and one word of all more or less than in float32 at most."""
    directory, clips = real_checkpoint("base"), corpus("librivox")[1:2]
    if not clips:
        pytest.skip("the recordings of librivox are not here; harness/speech/install.sh fetches them")

    def num_errors(checkpoint: Checkpoint) -> int:
        engine, samples = checkpoint.engine(short_audio="tail"), [clip.samples() for clip in clips]
        found = transcribe(engine, samples, DecodingOptions(language="en"))
        texts = [checkpoint.tokenizer.decode(result.tokens) for result in found]
        return sum(word_errors(c.text or "", text).errors for c, text in zip(clips, texts, strict=True))

    exact = num_errors(loaded_base())
    for dtype in DTYPES:
        assert abs(num_errors(Checkpoint.load(directory, dtype, int8=True)) - exact) <= 1, dtype
