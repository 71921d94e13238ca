"""The fast path against the plain one, on a GPU where there is one."""

from __future__ import annotations

import pytest
import torch

from asr_server.core import DecodingOptions
from benchmarks.clips import make_clip
from tests.checkpoints import pocket_directory
from tests.engine.driving import Checkpoint, transcribe

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CLIPS = [make_clip(i, 1 + 3.5 * i) for i in range(8)]
OPTIONS = [
    DecodingOptions(language="de", max_new_tokens=24),
    DecodingOptions(language="de", max_new_tokens=24, timestamps=True),
    DecodingOptions(max_new_tokens=24, timestamps=True),
]


@pytest.fixture(scope="module")
def on_gpu() -> Checkpoint:
    return Checkpoint.load(pocket_directory(), device="cuda")


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("overlapped", [False, True])
def test_graphs_replay_what_eager_computes(
    on_gpu: Checkpoint, options: DecodingOptions, overlapped: bool
) -> None:
    replayed = transcribe(on_gpu.engine(overlapped=overlapped), CLIPS, options)
    engine = on_gpu.engine()
    engine._runner._graphs = None
    assert [r.tokens for r in replayed] == [r.tokens for r in transcribe(engine, CLIPS, options)]


@pytest.mark.parametrize("options", OPTIONS)
def test_the_gpu_gives_the_cpus_tokens(
    on_gpu: Checkpoint, pocket: Checkpoint, options: DecodingOptions
) -> None:
    found = transcribe(on_gpu.engine(overlapped=True), CLIPS, options)
    assert [r.tokens for r in found] == [r.tokens for r in transcribe(pocket.engine(), CLIPS, options)]
