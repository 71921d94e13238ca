"""The engine as it runs on a GPU, imitated on CPU: the same tokens, nothing read back, encodes gathered."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from asr_server.core import DecodingOptions
from asr_server.engine import cuda as engine_cuda
from asr_server.engine import encoding, tokens
from asr_server.transport.messages import Cancel, Event, Failed, Result
from harness.clips import make_clip
from harness.engine_helpers import Checkpoint, answer_languages, results, run, submit
from tests.unit.engine.device_stand_ins import (
    StandInGraphs,
    imitate_graphs,
    imitate_late_device,
    living_tensors,
)
from tests.unit.engine.stream_stand_ins import address, imitate_streams, tensors_of
from tests.unit.engine.test_beam import WIDTH, results_of_mixed
from tests.unit.engine.test_beam_boosted import BOOSTED, strong, tokens_of  # noqa: F401
from tests.unit.engine.test_engine import CLIPS, MIXED, PLAIN, run_mixed

pytestmark = pytest.mark.slow
WORDS = DecodingOptions(language="de", max_new_tokens=9, word_timestamps=True)
KEYWORDS = DecodingOptions(language="de", max_new_tokens=9, keywords=("Kubernetes", "one two"))


def seeds(count: int, trial: int) -> list[Any]:
    """So many, and in the trials those up to `trial`."""
    return [*range(count), *(pytest.param(seed, marks=pytest.mark.trial) for seed in range(count, trial))]


@pytest.mark.parametrize(
    ("num_slots", "lookahead"),
    [
        (3, True),
        (8, False),
        *(pytest.param(*each, marks=pytest.mark.trial) for each in ((3, False), (8, True))),
    ],
)
def test_graphs_that_overwrite_their_memory_change_no_token(
    pocket: Checkpoint, alone: list[Any], num_slots: int, lookahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    imitate_graphs(monkeypatch)
    monkeypatch.setattr(StandInGraphs, "num_replays", 0)
    engine = pocket.engine(num_slots=num_slots, encode_batch=3, lookahead=lookahead)
    found = results(run_mixed(engine))
    assert [found[str(i)].tokens for i in range(len(alone))] == [each.tokens for each in alone]
    assert [found[str(i)].temperature for i in range(len(alone))] == [each.temperature for each in alone]
    num_steps = engine.heartbeat().num_decode_steps
    assert StandInGraphs.num_replays == 2 * num_steps, "also where rows draw or have penalties"


@pytest.mark.parametrize("seed", seeds(2, trial=6))
def test_encodes_and_copies_that_finish_late_change_no_token(
    pocket: Checkpoint, alone: list[Any], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    imitate_late_device(monkeypatch, seed)
    engine = pocket.engine(num_slots=2 + seed, encode_batch=2, lookahead=True)
    found = results(run_mixed(engine))
    assert [found[str(i)].tokens for i in range(len(alone))] == [each.tokens for each in alone]
    assert engine.slots_in_use == 0


@pytest.mark.parametrize("seed", seeds(1, trial=4))
def test_cancelling_while_work_is_late_disturbs_no_other_request(
    pocket: Checkpoint, alone: list[Any], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    imitate_late_device(monkeypatch, seed)
    engine = pocket.engine(num_slots=4, encode_batch=2, lookahead=True)
    events: list[Event] = []
    for i, (clip, options) in enumerate(zip(CLIPS, MIXED, strict=True)):
        submit(engine, str(i), clip, options)
        submit(engine, f"leaver {i}", clip, options)
        for _ in range(1 + (seed + i) % 3):
            events += answer_languages(engine, engine.step())
        engine.handle(Cancel(f"leaver {i}"))
    found = results(events + run(engine))
    assert [found[str(i)].tokens for i in range(len(alone))] == [each.tokens for each in alone]
    assert engine.slots_in_use == 0


def test_trickling_chunks_are_encoded_together(pocket: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """One chunk arrives at each step, and an encode takes a few steps: those that wait go as one batch."""
    encoders = imitate_late_device(monkeypatch)
    engine = pocket.engine(num_slots=16, encode_batch=8, lookahead=True)
    events: list[Event] = []
    for i in range(24):
        submit(engine, str(i), CLIPS[i % len(CLIPS)], PLAIN)
        events += engine.step()
    assert len(results(events + run(engine))) == 24
    (encoder,) = encoders
    assert sum(encoder.batches) == 24
    assert 24 / len(encoder.batches) >= 1.5, encoder.batches


class ForbidReadingBack(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fails on operations for which the host would have to wait for a GPU.

    These are reading from it, and handing it memory of the host otherwise than through `Transfers`: a tensor
    made of Python's numbers, such as a list as an index becomes.
    """

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal.", "item")

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        tokens._tensors.cache_clear()  # the host's, of earlier tests
        self._on_device = set(map(address, living_tensors()))
        monkeypatch.setattr(engine_cuda.Transfers, "_copied", lambda _, tensor: self._to_device(tensor))

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        copied = tensor.clone()
        self._on_device.add(address(copied))
        return copied

    def _follow(self, name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """What is computed from the host's memory alone is the host's too."""
        on_host = [each for each in inputs if address(each) not in self._on_device]
        mixed = len(on_host) < len(inputs) and any(each.dim() for each in on_host)
        assert not mixed, f"{name} is handed memory of the host"
        mine = {address(each) for each in outputs}
        is_new = (
            "aten.lift_fresh" in name
        )  # made of Python's numbers, where a tensor of the device may have been
        if is_new or (inputs and len(on_host) == len(inputs)):
            self._on_device -= mine
        else:
            self._on_device |= mine

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function)
        assert not any(f"aten.{word}" in name for word in self.FORBIDDEN), f"{name} waits for the device"
        if "aten.fill_" in name or "aten.copy_" in name:
            source = args[1] if len(args) > 1 else None
            is_number = not isinstance(source, torch.Tensor) or (
                source.dim() == 0 and address(source) not in self._on_device
            )
            assert not (is_number and args[0].numel() == 1), f"{name} copies one number from the host"
        output = function(*args, **(kwargs or {}))
        self._follow(name, tensors_of((args, kwargs)), tensors_of(output))
        return output


@pytest.mark.parametrize("beam_size", [1, pytest.param(5, marks=pytest.mark.trial)])
@pytest.mark.parametrize(
    "asked",
    [
        [*MIXED, WORDS, KEYWORDS],
        [PLAIN] * 3,
        *(pytest.param([options] * 3, marks=pytest.mark.trial) for options in [*MIXED, WORDS, KEYWORDS]),
    ],
)
def test_no_step_reads_from_the_device_or_stores_single_numbers(
    pocket: Checkpoint, asked: list[DecodingOptions], beam_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Admission, encoding (of short audio), the language, prefill, start, steady steps of all kinds of rows,
    the ladder, moving slots, word times. What `HostCopy` reads is the one exception.
    """
    imitate_late_device(monkeypatch)
    engine = pocket.engine(num_slots=4, short_audio="tail", beam_size=beam_size)
    for i, options in enumerate(asked):
        submit(engine, str(i), CLIPS[i % 3], options)
    with ForbidReadingBack(monkeypatch):
        events = run(engine)
    assert len(results(events)) == len(asked)


def test_the_words_of_many_sequences_that_end_together_are_aligned_a_few_a_step(
    pocket: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = pocket.engine()
    align, batches = engine._runner.align, list[int]()

    def watched(finished: Any) -> Any:
        batches.append(len(finished))
        return align(finished)

    monkeypatch.setattr(engine._runner, "align", watched)
    for i in range(10):
        submit(engine, str(i), CLIPS[4], WORDS)
    submit(engine, "leaver", CLIPS[4], WORDS)
    events: list[Event] = []
    while not batches:
        events += engine.step()
    engine.handle(Cancel("leaver"))
    found = results(events + run(engine))
    assert batches == [4, 4, 2]
    assert set(found) == set(map(str, range(10)))
    assert len({result.token_times_s for result in found.values()}) == 1
    assert engine.slots_in_use == 0


def test_each_size_of_batch_and_length_of_audio_has_an_encoder_graph_and_no_more(
    pocket: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    imitate_streams(monkeypatch, copy_overlap=False)
    shapes: list[Any] = []
    monkeypatch.setattr(encoding, "record_graphs", lambda compute, own, device: shapes.append(own))
    pocket.engine(compute_workers=2, encode_batch=8, short_audio="tail")
    assert shapes == [[(rows, length) for length in (500, 1000, 1500) for rows in (1, 2, 4, 8)]] * 2


def test_an_error_of_the_device_ends_the_engine_and_is_not_taken_for_a_bad_chunk(
    pocket: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = pocket.engine()

    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(engine._runner, "encode", fail)
    submit(engine, "x", make_clip(0, 1), PLAIN)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        engine.step()


@pytest.mark.parametrize("where", ["encode", "prefill", "language_probabilities"])
def test_running_out_of_memory_fails_the_chunks_of_the_batch_alone(
    pocket: Checkpoint, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = pocket.engine()
    works = getattr(engine._runner, where)

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    options = msgspec.structs.replace(PLAIN, language=None if where == "language_probabilities" else "de")
    monkeypatch.setattr(engine._runner, where, fail)
    submit(engine, "bad", make_clip(0, 1), options)
    events = run(engine)
    monkeypatch.setattr(engine._runner, where, works)
    submit(engine, "good", make_clip(0, 1), options)
    events += run(engine)
    assert [event.id.handle_id for event in events if isinstance(event, Failed)] == ["bad"]
    assert [event.id.handle_id for event in events if isinstance(event, Result)] == ["good"]
    assert engine.slots_in_use == 0


@pytest.mark.slow
@pytest.mark.usefixtures("strong")
@pytest.mark.parametrize(
    ("asked", "seed"),
    [(MIXED, 0), (BOOSTED, 0), pytest.param(MIXED, 1, marks=pytest.mark.trial)],
    ids=["plain", "keywords", "plain 1"],
)
def test_a_search_is_the_same_on_a_device_that_is_late(
    pocket: Checkpoint, asked: Sequence[DecodingOptions], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = results_of_mixed(pocket.engine(beam_size=WIDTH), asked)
    imitate_late_device(monkeypatch, seed)
    found = results_of_mixed(pocket.engine(num_slots=4, beam_size=WIDTH), asked)
    assert tokens_of(found) == tokens_of(expected)
