"""Beam search as openai-whisper does it, on a language model of chance and on random weights."""

import math
from functools import partial
from typing import Any

import pytest
import torch

from asr_server.engine import active_chunk
from asr_server.engine.beam import BeamSearch
from harness.engine_helpers import Checkpoint, transcribe
from harness.openai_whisper import load_openai_whisper
from tests.unit.engine.test_beam import ASKED, END, HEARD, WIDTH, next_logprobs, search

THEIR_WARNING = pytest.mark.filterwarnings(
    "ignore:__array_wrap__:DeprecationWarning"
)  # numpy's, in openai-whisper


class NoCache:
    def rearrange_kv_cache(self, _: object) -> None: ...


def their_search(width: int, seed: int, max_tokens: int) -> tuple[tuple[int, ...], float]:
    from whisper.decoding import BeamSearchDecoder, MaximumLikelihoodRanker

    decoder: Any = BeamSearchDecoder(width, END, NoCache())
    tokens, sums = torch.zeros(width, 1, dtype=torch.long), torch.zeros(width)
    for _ in range(max_tokens):
        scores = torch.stack([next_logprobs(tuple(row[1:]), seed) for row in tokens.tolist()])
        tokens, completed = decoder.update(tokens, scores, sums)
        if completed:
            break
    ended, totals = decoder.finalize(tokens[None], sums[None])
    texts = [[row[1 : row.tolist().index(END)] for row in rows] for rows in ended]
    (best,) = MaximumLikelihoodRanker(None).rank(texts, totals)
    return tuple(texts[0][best].tolist()), totals[0][best]


@THEIR_WARNING
@pytest.mark.parametrize("width", [2, 3, 5])
@pytest.mark.parametrize("max_tokens", [3, 30])
def test_the_search_is_openai_whispers(width: int, max_tokens: int) -> None:
    for seed in range(30):
        tokens, total = search(width, seed, max_tokens)
        their_tokens, their_total = their_search(width, seed, max_tokens)
        assert tokens == their_tokens
        assert total == pytest.approx(their_total, abs=1e-4)


@pytest.fixture
def unpruned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search of the engine is openai-whisper's."""
    monkeypatch.setattr(active_chunk, "BeamSearch", partial(BeamSearch, margin=math.inf))


def with_beam(theirs: Any, features: torch.Tensor, **asked: Any) -> list[Any]:
    import whisper

    options = whisper.DecodingOptions(temperature=0.0, beam_size=WIDTH, fp16=False, **asked)
    with torch.inference_mode():
        return [whisper.decode(theirs, each, options) for each in features]


@THEIR_WARNING
@pytest.mark.usefixtures("unpruned")
def test_texts_are_those_of_openai_whispers_beam_search(pocket: Checkpoint) -> None:
    import whisper

    clips = HEARD[:2]
    mels = [whisper.log_mel_spectrogram(clip, padding=whisper.audio.N_SAMPLES) for clip in clips]
    features = torch.stack([whisper.pad_or_trim(mel, whisper.audio.N_FRAMES) for mel in mels])
    theirs = load_openai_whisper(pocket.directory)
    expected = with_beam(theirs, features, language="de", sample_len=ASKED.max_new_tokens)
    greedy = transcribe(pocket.engine(), clips, ASKED)
    for lookahead in (False, True):
        found = transcribe(pocket.engine(beam_size=WIDTH, lookahead=lookahead), clips, ASKED)
        assert [each.tokens for each in found] != [each.tokens for each in greedy]
        for ours, their in zip(found, expected, strict=True):
            assert list(ours.tokens) == their.tokens
            assert ours.temperature == 0
            if ours.finish_reason == "stop":
                assert ours.avg_logprob == pytest.approx(their.avg_logprob, abs=1e-3)
