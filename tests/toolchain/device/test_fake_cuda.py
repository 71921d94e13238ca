"""All that an engine computes on a GPU, on tensors without numbers: it fits together, on one device."""

from typing import Any

import msgspec
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from asr_server.core import DecodingOptions
from asr_server.model.kernels import TORCH, Kernels
from asr_server.transport.messages import Event
from harness.clips import make_clip
from harness.engine_helpers import answer_languages, results, run, submit
from tests.support.checkpoints import pocket_directory
from tests.toolchain.device.test_device_stand_ins import WORDS
from tests.unit.engine.fake_cuda import KERNELS, FakeGraph, Launched, MadeUp, fake_cuda, fake_engine
from tests.unit.engine.test_engine import CLIPS, MIXED

pytestmark = pytest.mark.slow

KEYWORDS = DecodingOptions(language="de", keywords=("Kubernetes", "one two"))
BRIEF = [msgspec.structs.replace(options, max_new_tokens=3) for options in [*MIXED, WORDS, KEYWORDS]]


@pytest.mark.parametrize(
    ("dtype", "kernels", "config"),
    [
        (
            torch.bfloat16,
            KERNELS,
            {"short_audio": "tail", "beam_size": 5},
        ),  # a server's, unless told otherwise
        pytest.param(torch.bfloat16, TORCH, {"copy_overlap": True}, marks=pytest.mark.trial),
        pytest.param(
            torch.float16, KERNELS, {"cuda_graphs": False, "short_audio": "tail"}, marks=pytest.mark.trial
        ),
        pytest.param(torch.bfloat16, KERNELS, {}, marks=pytest.mark.trial),
        pytest.param(torch.float32, TORCH, {}, marks=pytest.mark.trial),
        pytest.param(torch.float32, KERNELS, {"lookahead": False}, marks=pytest.mark.trial),
    ],
)
def test_whole_requests_compute_on_the_gpu_alone(
    dtype: torch.dtype, kernels: Kernels, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading, graphs, encodes, languages, prompts, drawn and penalised rows, retries, word times."""
    directory = pocket_directory()
    with fake_cuda(monkeypatch):
        engine = fake_engine(monkeypatch, directory, dtype, kernels, **config)
        assert engine._runner.cache.cross_keys.stride(-2) % 16 == 0, "so that products read 16 bytes at once"
        events: list[Event] = []
        for i, options in enumerate(BRIEF):
            submit(engine, str(i), CLIPS[i % len(CLIPS)], options)
            events += answer_languages(engine, engine.step())
        found = results(events + run(engine))
    assert len(found) == len(BRIEF)
    assert max(result.temperature for result in found.values()) == 1.0, "retried"
    assert bool(Launched.count) == (kernels == KERNELS)
    assert bool(FakeGraph.num_replays) == config.get("cuda_graphs", True)


class CountLaunches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes torch's operations on the device, and copies from it; `Launched` counts the kernels of Triton."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves((args, kwargs, output)) if isinstance(each, torch.Tensor)]
        copies = str(function).startswith("aten.to.") and output is not args[0]
        is_launch = copies or not (function.is_view or str(function).startswith(("prim.", "aten.empty")))
        if is_launch and any(each.is_cuda for each in tensors):
            self.names.append(str(function))
        return output


def launches_of_a_step(
    monkeypatch: pytest.MonkeyPatch, beam_size: int, num_with_keywords: int = 0
) -> list[str]:
    """All that one step of 128 rows launches on a GPU, recorded in a graph or not."""
    directory = pocket_directory()
    with fake_cuda(monkeypatch):
        size = {"num_slots": 128, "encode_batch": 32, "beam_size": beam_size}
        engine = fake_engine(monkeypatch, directory, torch.bfloat16, KERNELS, cuda_graphs=False, **size)
        for i in range(128):
            options = KEYWORDS if i < num_with_keywords else DecodingOptions(language="de")
            submit(engine, str(i), CLIPS[0], options)
        while len(engine._loop.chunks) < 128 or engine._encoding:
            engine.step()
        num_before = Launched.count
        with CountLaunches() as counted:
            engine.step()
        assert len(engine._loop.chunks) == 128
        names: list[str] = [*counted.names, *["triton"] * (Launched.count - num_before)]
        return names


def test_a_step_of_sure_searches_launches_what_a_greedy_step_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MadeUp, "lead", 99.0)
    searches, greedy = (launches_of_a_step(monkeypatch, beam_size) for beam_size in (5, 1))
    assert searches == greedy
    assert greedy.count("triton") > 5


def test_a_step_launches_as_much_for_one_row_of_keywords_as_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MadeUp, "lead", 99.0)
    one, every = (launches_of_a_step(monkeypatch, 5, num_with_keywords) for num_with_keywords in (1, 128))
    assert one == every


def launches_outside_graphs(monkeypatch: pytest.MonkeyPatch, in_doubt: int) -> list[str]:
    """What a step of 32 searches launches beside its graphs: `in_doubt` go on in several hypotheses, and one
    chunk ends.
    """
    directory = pocket_directory()
    with fake_cuda(monkeypatch):
        size = {"num_slots": 64, "encode_batch": 16, "beam_size": 5}
        engine = fake_engine(monkeypatch, directory, torch.bfloat16, KERNELS, **size)
        for i in range(32):
            options = DecodingOptions(language="de", max_new_tokens=5 if i == 3 else 50)
            submit(engine, str(i), CLIPS[0], options)
        while len(engine._loop.chunks) < 32 or engine._encoding:
            engine.step()
        monkeypatch.setattr(MadeUp, "num_in_doubt", in_doubt)
        while True:
            num_before, num_chunks = Launched.count, len(engine._loop.chunks)
            with CountLaunches() as counted:
                engine.step()
            if len(engine._loop.chunks) < num_chunks:
                return [*counted.names, *["triton"] * (Launched.count - num_before)]


def test_a_step_with_several_hypotheses_and_a_chunk_that_ends_launches_little_beside_its_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(MadeUp, "lead", 99.0)
    names = launches_outside_graphs(monkeypatch, in_doubt=8)
    assert 4 < len(names) <= 15, names


def test_an_encode_is_three_copies_and_one_graph_for_each_length(monkeypatch: pytest.MonkeyPatch) -> None:
    directory = pocket_directory()
    with fake_cuda(monkeypatch):
        size = {"num_slots": 33, "encode_batch": 11, "short_audio": "tail"}
        engine = fake_engine(monkeypatch, directory, torch.bfloat16, KERNELS, **size)
        for i in range(33):
            submit(engine, str(i), make_clip(i, 3), DecodingOptions(language="de"))
        num_before, num_replays = Launched.count, FakeGraph.num_replays
        with CountLaunches() as counted:
            engine._encode(engine._admit())
        assert len(counted.names) + Launched.count - num_before <= 10, counted.names
        assert FakeGraph.num_replays == num_replays + 1
        assert engine.slots_in_use == 33
