"""What runs on which stream of a GPU, and that everything waits for what it depends on: on stand-ins."""

from typing import Any

import pytest
import torch

from asr_server.engine import Engine
from asr_server.transport.messages import Event
from harness.engine_helpers import Checkpoint, results, run, submit, transcribe
from tests.toolchain.device.test_device_stand_ins import WORDS
from tests.unit.engine.stream_stand_ins import StandInStream, imitate_streams, watching
from tests.unit.engine.test_engine import CLIPS, MIXED

pytestmark = pytest.mark.slow

ASKED = [MIXED[1], MIXED[2], MIXED[4], WORDS]  # greedy, drawn, penalised, with word times
HEARD = [CLIPS[1], CLIPS[3], CLIPS[4], CLIPS[6]]


def shared_on_purpose(engine: Engine) -> list[torch.Tensor]:
    """A step reads slots side by side, also those being encoded into, whose rows it then drops."""
    cache = engine._runner.cache
    return [cache.cross_keys, cache.cross_values]


def run_watched(pocket: Checkpoint, monkeypatch: pytest.MonkeyPatch, copy_overlap: bool) -> int:
    """How often memory was used by another stream than the one it was allocated on."""
    imitate_streams(monkeypatch, copy_overlap)
    engine = pocket.engine(num_slots=3, encode_batch=2, lookahead=True, compute_workers=2, short_audio="tail")
    with watching(monkeypatch, shared_on_purpose(engine)) as watch:
        events: list[Event] = []
        for i, (clip, options) in enumerate(zip(HEARD, ASKED, strict=True)):
            submit(engine, str(i), clip, options)
            events += engine.step()
        assert len(results(events + run(engine))) == len(ASKED)
    return watch.num_shared


@pytest.mark.parametrize("copy_overlap", [False, True])
def test_every_stream_waits_for_what_it_uses_of_others(
    pocket: Checkpoint, copy_overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_shared = run_watched(pocket, monkeypatch, copy_overlap)
    assert bool(num_shared) == copy_overlap


def test_streams_and_copies_change_no_token(pocket: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [result.tokens for result in transcribe(pocket.engine(), HEARD, MIXED[1])]
    imitate_streams(monkeypatch, copy_overlap=True)
    engine = pocket.engine(num_slots=2, lookahead=True, compute_workers=2)
    assert [result.tokens for result in transcribe(engine, HEARD, MIXED[1])] == expected


def test_decoding_precedes_encoding_and_copies(pocket: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    imitate_streams(monkeypatch, copy_overlap=True)
    recorded: list[Any] = []
    monkeypatch.setattr(
        "asr_server.engine.runner.record_graphs",
        lambda compute, shapes, device, priority: recorded.append(priority),
    )
    engine = pocket.engine(compute_workers=2, lookahead=True)
    others = [stream.priority for stream in StandInStream.made if stream.priority >= 0]
    decoding = [stream for stream in StandInStream.made if stream.priority < 0]
    assert len(decoding) == 1
    assert len(others) == 1 + 2 + 2  # the default stream, two of copies, two of encodes
    assert set(recorded) == {decoding[0].priority}, "its graphs are recorded at its priority"
    used: list[StandInStream] = []
    decode = engine._runner.decode

    def watched(plan: Any) -> Any:
        used.append(StandInStream.current)
        return decode(plan)

    monkeypatch.setattr(engine._runner, "decode", watched)
    transcribe(engine, HEARD[:1], MIXED[0])
    assert used
    assert set(used) == set(decoding)


def test_an_encode_that_fails_half_way_is_waited_for_before_its_slots_are_written_again(
    pocket: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    imitate_streams(monkeypatch, copy_overlap=False)
    engine = pocket.engine(short_audio="tail")

    def fail(*_: object) -> None:
        StandInStream.current.launch()
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("asr_server.engine.encoding._CudaWorker.encode", fail)
    submit(engine, "0", HEARD[0], MIXED[0])
    engine.step()
    failed = next(stream for stream in StandInStream.made if stream.number and stream.clock[stream.number])
    (decoding,) = [stream for stream in StandInStream.made if stream.priority < 0]
    assert decoding.clock.get(failed.number) == failed.clock[failed.number]
