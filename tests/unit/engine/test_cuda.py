"""The fast path against the plain one, on a GPU where there is one."""

from typing import Any

import pytest
import torch

from asr_server.core import DecodingOptions
from asr_server.engine import encoding, runner
from asr_server.engine.cuda import record_graphs
from harness.checkpoints import fix_length
from harness.clips import make_clip
from harness.engine_helpers import Checkpoint, transcribe
from tests.support.checkpoints import pocket_directory
from tests.unit.engine.device_stand_ins import record

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CLIPS = [make_clip(i, 1 + 3.5 * i) for i in range(8)]
OPTIONS = [
    DecodingOptions(language="de", max_new_tokens=24),
    DecodingOptions(language="de", max_new_tokens=24),
    DecodingOptions(max_new_tokens=24),
    DecodingOptions(language="de", max_new_tokens=24, word_timestamps=True),
]
KEYWORDS = DecodingOptions(language="de", max_new_tokens=24, keywords=("Kubernetes", "one two"))


@pytest.fixture(scope="module")
def on_gpu() -> Checkpoint:
    return Checkpoint.load(pocket_directory(), device="cuda")


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("options", [*OPTIONS, KEYWORDS])
def test_as_a_server_decodes_the_gpu_gives_what_eager_computes(
    on_gpu: Checkpoint, options: DecodingOptions, kernels: str
) -> None:
    """Short chunks without their silence, several of one length at once, beam searches, and keywords."""
    own: dict[str, Any] = {"short_audio": "tail", "beam_size": 5, "kernels": kernels}
    found = transcribe(on_gpu.engine(lookahead=True, **own), CLIPS + CLIPS, options)
    plain = transcribe(on_gpu.engine(cuda_graphs=False, **own), CLIPS + CLIPS, options)
    assert [r.tokens for r in found] == [r.tokens for r in plain]


@pytest.mark.parametrize(
    ("options", "beam_size"),
    [
        *((options, 1) for options in [*OPTIONS, KEYWORDS]),
        (DecodingOptions(language="de", max_new_tokens=24, temperatures=(0.7,)), 1),
        (KEYWORDS, 5),
    ],
)
def test_the_host_never_waits_for_the_gpu_but_for_what_it_reads(
    on_gpu: Checkpoint, options: DecodingOptions, beam_size: int
) -> None:
    engine = on_gpu.engine(lookahead=True, beam_size=beam_size)
    transcribe(engine, CLIPS, options)  # allocates what later steps find allocated
    torch.cuda.set_sync_debug_mode("error")
    try:
        transcribe(engine, CLIPS, options)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_what_cannot_be_recorded_leaves_the_device_as_it_was() -> None:
    device, numbers, before = torch.device("cuda"), torch.ones(4, device="cuda"), torch.cuda.current_stream()
    reading_back = record_graphs(lambda count: numbers[:count] + numbers.sum().item(), [(4,)], device)
    assert reading_back is None
    assert torch.cuda.current_stream() == before
    torch.cuda.empty_cache()  # fails while torch believes that something is being recorded
    graphs = record_graphs(lambda count: numbers[:count] + 1, [(2,), (4,)], device)
    assert graphs is not None
    numbers.fill_(5)
    assert graphs.replay(2).tolist() == [6, 6]
    assert graphs.replay(3).tolist() == [6, 6, 6, 6]


@pytest.mark.parametrize("kernels", ["torch", "auto"])
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


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_in_bfloat16_graphs_streams_and_kernels_give_what_plain_decoding_gives(
    fixed_in_bfloat16: Checkpoint, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain: one operation after another, each step read before the next begins. In the same buckets of rows
    and text positions, for in bfloat16 another size may be rounded otherwise.
    """
    options = DecodingOptions(language="de", max_new_tokens=24)
    fast = {"lookahead": True, "copy_overlap": True, "compute_workers": 2}
    found = transcribe(fixed_in_bfloat16.engine(kernels=kernels, **fast), CLIPS, options)
    for module in (runner, encoding):
        monkeypatch.setattr(module, "record_graphs", record)  # computes when it is to replay
    plain = transcribe(fixed_in_bfloat16.engine(kernels=kernels), CLIPS, options)
    assert [r.tokens for r in found] == [r.tokens for r in plain]
    assert {len(r.tokens) for r in found} == {24}
    assert len({r.tokens for r in found}) > 1, "different audio, different text"
