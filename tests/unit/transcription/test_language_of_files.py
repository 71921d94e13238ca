"""The language of a file and of each chunk, as transformers has it on a random multilingual checkpoint."""

import asyncio
import math
from functools import cache

import numpy as np
import pytest
import torch

from asr_server.checkpoint.tokenizer import Tokenizer
from asr_server.core import DecodingOptions
from asr_server.transcription.language import CONFIDENT, MAX_VOTES
from harness.clips import make_clip
from harness.engine_helpers import Reference
from tests.support.checkpoints import short_window_directory
from tests.unit.transcription.pipeline import chunks_of, transcribe

WINDOW_S = 8
SOUND = make_clip(11, 5.5 * WINDOW_S)


@cache
def probabilities_by_transformers() -> list[dict[str, float]]:
    """Of each chunk's languages."""
    directory = short_window_directory()
    reference, specials = Reference(directory), Tokenizer.from_directory(directory).specials
    samples = [chunk.samples for chunk in chunks_of(directory, SOUND)]
    start = torch.full((len(samples), 1), specials.start_of_transcript)
    with torch.inference_mode():
        logits = reference.model(reference.features(samples), decoder_input_ids=start).logits[:, -1]
    codes = list(specials.languages)
    rows = logits[:, [specials.languages[code] for code in codes]].softmax(-1)
    return [dict(zip(codes, row, strict=True)) for row in rows.tolist()]


def voted(candidates: tuple[str, ...]) -> tuple[str, float]:
    """The language of the first chunks' summed log-probabilities among the candidates, and its share."""
    rows = probabilities_by_transformers()
    codes = [code for code in rows[0] if not candidates or code in candidates]
    sums = np.zeros(len(codes))
    for row in rows[:MAX_VOTES]:
        weights = np.array([row[code] for code in codes])
        sums += np.log(np.maximum(weights / weights.sum(), 1e-6))
        shares = np.exp(sums - sums.max())
        shares /= shares.sum()
        if shares.max() >= CONFIDENT:
            break
    return codes[int(shares.argmax())], float(shares.max())


@pytest.mark.parametrize("candidates", [pytest.param((), marks=pytest.mark.trial), ("de", "fr", "ja", "ru")])
def test_the_chunks_of_a_file_vote(candidates: tuple[str, ...]) -> None:
    options = DecodingOptions(candidate_languages=candidates, max_new_tokens=6)
    transcript = asyncio.run(transcribe(short_window_directory(), SOUND, options))
    code, share = voted(candidates)
    assert transcript.languages == (code,)
    assert transcript.language_probability is not None
    assert math.isclose(transcript.language_probability, share, abs_tol=1e-3)


def test_each_chunk_of_a_mixed_recording_has_its_own() -> None:
    options = DecodingOptions(multilingual=True, max_new_tokens=6)
    transcript = asyncio.run(transcribe(short_window_directory(), SOUND, options))
    own = [max(row, key=row.__getitem__) for row in probabilities_by_transformers()]
    assert len(set(own)) > 1, "the audio must matter"
    assert transcript.languages == tuple(dict.fromkeys(own))
