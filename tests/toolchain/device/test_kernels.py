"""The engine with Triton's kernels, under its interpreter: the tokens and word times are those of torch."""

import pytest
import torch

from asr_server.core import ChunkResult, DecodingOptions
from asr_server.model import whisper
from asr_server.model.kernels import triton_kernels
from harness.clips import make_clip
from harness.engine_helpers import Checkpoint, results, run, submit
from tests.support.checkpoints import short_window_directory
from tests.unit.engine.device_stand_ins import imitate_graphs, take_few_programs

REQUESTS = [
    (make_clip(0, 7.5), DecodingOptions(language="de", max_new_tokens=4)),
    (make_clip(1, 3.0), DecodingOptions(language="en", max_new_tokens=7, word_timestamps=True)),
    (make_clip(2, 6.0), DecodingOptions(max_new_tokens=5, temperatures=(0.7,))),
    (make_clip(3, 2.0), DecodingOptions(language="fr", max_new_tokens=3, repetition_penalty=1.5)),
]


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return Checkpoint.load(short_window_directory())


def tokens_of(checkpoint: Checkpoint, kernels: str) -> list[tuple[int, ...]]:
    return [result.tokens for result in heard(checkpoint, kernels)]


def heard(checkpoint: Checkpoint, kernels: str) -> list[ChunkResult]:
    """Three slots for four requests: one of them takes a slot that was used, and rows are held and free. What
    is greedy is a beam search of several hypotheses, as random weights are always in doubt.
    """
    engine = checkpoint.engine(num_slots=3, beam_size=2, kernels=kernels, short_audio="tail", lookahead=True)
    for i, (clip, options) in enumerate(REQUESTS):
        submit(engine, str(i), clip, options)
    found = results(run(engine))
    return [found[str(i)] for i in range(len(REQUESTS))]


def test_triton_gives_the_tokens_of_torch(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    take_few_programs(monkeypatch)
    expected = heard(checkpoint, "torch")
    imitate_graphs(monkeypatch)
    monkeypatch.setattr("asr_server.engine.engine.choose", lambda *_: (triton_kernels(), ""))
    found = heard(checkpoint, "auto")
    assert [result.tokens for result in found] == [result.tokens for result in expected]
    assert len({len(result.tokens) for result in expected}) > 1
    assert len(expected[1].token_times_s) > 1
    assert found[1].token_times_s == pytest.approx(expected[1].token_times_s, abs=0.0201)


def test_padding_rows_change_no_token(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, whose output projection has a multiple of 128 rows."""
    expected = tokens_of(checkpoint, "torch")
    on_gpu = torch.device("cuda")
    pad = whisper.padded_vocabulary
    monkeypatch.setattr(whisper, "padded_vocabulary", lambda vocabulary, _: pad(vocabulary, on_gpu))
    padded = Checkpoint.load(short_window_directory())
    sizes = padded.model.sizes
    assert len(padded.model.decoder.embedding) > sizes.vocabulary
    assert padded.model.decoder.logits(torch.zeros(1, sizes.width)).shape == (1, sizes.vocabulary)
    assert tokens_of(padded, "torch") == expected
