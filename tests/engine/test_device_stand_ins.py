"""The engine as it runs on a GPU, imitated on CPU: the same tokens, nothing read back, encodes gathered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from asr_server.core import Cancel, DecodingOptions, Event, Failed, Result
from asr_server.engine import Engine
from benchmarks.clips import make_clip
from tests.engine.device_stand_ins import StandInGraphs, imitate_graphs, imitate_late_device
from tests.engine.engine_helpers import Checkpoint, answer_languages, results, run, submit, transcribe
from tests.engine.test_engine import CLIPS, MIXED, PLAIN


@pytest.fixture(scope="module")
def alone(pocket: Checkpoint) -> list[Any]:
    """Each clip with its options in an engine of its own, without any stand-in."""
    return [
        transcribe(pocket.engine(num_slots=1), [clip], options)[0]
        for clip, options in zip(CLIPS, MIXED, strict=True)
    ]


def run_mixed(engine: Engine) -> list[Event]:
    """Every kind of request, some arriving while others run."""
    events: list[Event] = []
    for i, (clip, options) in enumerate(zip(CLIPS, MIXED, strict=True)):
        submit(engine, str(i), clip, options)
        if i % 3 == 2:
            events += answer_languages(engine, engine.step())
    return events + run(engine)


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("num_slots", [3, 8])
def test_graphs_that_overwrite_their_memory_change_no_token(
    pocket: Checkpoint,
    alone: list[Any],
    num_slots: int,
    lookahead: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    imitate_graphs(monkeypatch)
    monkeypatch.setattr(StandInGraphs, "num_replays", 0)
    found = results(run_mixed(pocket.engine(num_slots=num_slots, encode_batch=3, lookahead=lookahead)))
    assert [found[str(i)].tokens for i in range(len(alone))] == [each.tokens for each in alone]
    assert [found[str(i)].temperature for i in range(len(alone))] == [each.temperature for each in alone]
    assert StandInGraphs.num_replays > 20


@pytest.mark.parametrize("seed", range(6))
def test_encodes_and_copies_that_finish_late_change_no_token(
    pocket: Checkpoint, alone: list[Any], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    imitate_late_device(monkeypatch, seed)
    engine = pocket.engine(num_slots=2 + seed, encode_batch=2, lookahead=True)
    found = results(run_mixed(engine))
    assert [found[str(i)].tokens for i in range(len(alone))] == [each.tokens for each in alone]
    assert engine.slots_in_use == 0


@pytest.mark.parametrize("seed", range(4))
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


def test_chunks_that_trickle_in_are_encoded_together(
    pocket: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One chunk arrives at each step, and an encode takes a few steps: those that wait go as one batch."""
    encoders = imitate_late_device(monkeypatch)
    engine = pocket.engine(num_slots=16, encode_batch=8, lookahead=True)
    events: list[Event] = []
    for i in range(48):
        submit(engine, str(i), CLIPS[i % len(CLIPS)], PLAIN)
        events += engine.step()
    assert len(results(events + run(engine))) == 48
    (encoder,) = encoders
    assert sum(encoder.batches) == 48
    assert 48 / len(encoder.batches) >= 1.5, encoder.batches


class ForbidReadingBack(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fails on operations for which the host would have to wait for a GPU."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal.", "item")

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function)
        assert not any(f"aten.{word}" in name for word in self.FORBIDDEN), f"{name} waits for the device"
        if "aten.fill_" in name or "aten.copy_" in name:
            source = args[1] if len(args) > 1 else None
            is_number = not isinstance(source, torch.Tensor) or source.dim() == 0
            assert not (is_number and args[0].numel() == 1), f"{name} copies one number from the host"
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [*MIXED[:5], MIXED[7]])
def test_no_step_reads_from_the_device_or_stores_single_numbers(
    pocket: Checkpoint, options: DecodingOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Admission, encoding, prefill, start and steady steps; what `HostCopy` reads is the one exception."""
    imitate_late_device(monkeypatch)
    engine = pocket.engine(num_slots=4, lookahead=True)
    for i in range(3):
        submit(engine, str(i), CLIPS[i], options)
    with ForbidReadingBack():  # type: ignore[no-untyped-call]
        events = run(engine)
    assert len(results(events)) == 3


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


def test_running_out_of_memory_fails_the_chunks_of_the_batch_alone(
    pocket: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = pocket.engine()
    encode = engine._runner.encode

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(engine._runner, "encode", fail)
    submit(engine, "bad", make_clip(0, 1), PLAIN)
    events = engine.step()
    monkeypatch.setattr(engine._runner, "encode", encode)
    submit(engine, "good", make_clip(0, 1), PLAIN)
    events += run(engine)
    assert [event.id.request_id for event in events if isinstance(event, Failed)] == ["bad"]
    assert [event.id.request_id for event in events if isinstance(event, Result)] == ["good"]
