"""The fast path against the plain one, on a GPU where there is one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from asr_server.core import DecodingOptions
from asr_server.engine import encoding, runner
from benchmarks.checkpoints import fix_length
from benchmarks.clips import make_clip
from tests.checkpoints import pocket_directory
from tests.engine.device_stand_ins import record
from tests.engine.engine_helpers import Checkpoint, transcribe

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CLIPS = [make_clip(i, 1 + 3.5 * i) for i in range(8)]
OPTIONS = [
    DecodingOptions(language="de", max_new_tokens=24),
    DecodingOptions(language="de", max_new_tokens=24, timestamps=True),
    DecodingOptions(max_new_tokens=24, timestamps=True),
    DecodingOptions(language="de", max_new_tokens=24, word_timestamps=True),
]


@pytest.fixture(scope="module")
def on_gpu() -> Checkpoint:
    return Checkpoint.load(pocket_directory(), device="cuda")


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"lookahead": True},
        {"lookahead": True, "copy_overlap": True},
        {"lookahead": True, "copy_overlap": True, "compute_workers": 3, "encode_batch": 2},
    ],
)
def test_graphs_streams_and_lookahead_give_what_eager_computes(
    on_gpu: Checkpoint, options: DecodingOptions, config: dict[str, Any]
) -> None:
    found = transcribe(on_gpu.engine(**config), CLIPS, options)
    plain = transcribe(on_gpu.engine(cuda_graphs=False), CLIPS, options)
    assert [r.tokens for r in found] == [r.tokens for r in plain]


@pytest.mark.parametrize(
    "options", [*OPTIONS, DecodingOptions(language="de", max_new_tokens=24, temperatures=(0.7,))]
)
def test_the_host_never_waits_for_the_gpu_but_for_what_it_reads(
    on_gpu: Checkpoint, options: DecodingOptions
) -> None:
    engine = on_gpu.engine(lookahead=True)
    transcribe(engine, CLIPS, options)  # allocates what later steps find allocated
    torch.cuda.set_sync_debug_mode("error")
    try:
        transcribe(engine, CLIPS, options)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("options", OPTIONS)
def test_the_gpu_gives_the_cpus_tokens(
    on_gpu: Checkpoint, pocket: Checkpoint, options: DecodingOptions, kernels: str
) -> None:
    found = transcribe(on_gpu.engine(lookahead=True, kernels=kernels), CLIPS, options)
    assert [r.tokens for r in found] == [r.tokens for r in transcribe(pocket.engine(), CLIPS, options)]


@pytest.fixture(scope="module")
def fixed_in_bfloat16(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """No text ends before its last token, so that all steps have all rows."""
    directory = fix_length(pocket_directory(), tmp_path_factory.mktemp("checkpoints") / "fixed")
    return Checkpoint.load(directory, torch.bfloat16, device="cuda")


@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("timestamps", [False, True])
def test_in_bfloat16_graphs_streams_and_kernels_give_what_plain_decoding_gives(
    fixed_in_bfloat16: Checkpoint, kernels: str, timestamps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain: one operation after another, each step read before the next begins. In the same buckets of rows
    and text positions, for in bfloat16 another size may be rounded otherwise.
    """
    options = DecodingOptions(language="de", max_new_tokens=24, timestamps=timestamps)
    fast = {"lookahead": True, "copy_overlap": True, "compute_workers": 2}
    found = transcribe(fixed_in_bfloat16.engine(kernels=kernels, **fast), CLIPS, options)
    for module in (runner, encoding):
        monkeypatch.setattr(module, "record_graphs", record)  # computes when it is to replay
    plain = transcribe(fixed_in_bfloat16.engine(kernels=kernels), CLIPS, options)
    assert [r.tokens for r in found] == [r.tokens for r in plain]
    assert {len(r.tokens) for r in found} == {24}
    assert len({r.tokens for r in found}) > 1, "different audio, different text"
