"""The engine's steps on a small model: what is admitted, encoded, decoded, aligned and told, and when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from asr_server.channel.messages import (
    Cancel,
    Credit,
    EarlyResult,
    Event,
    Failed,
    LanguageDetected,
    Result,
    SetLanguage,
    Submit,
)
from asr_server.core import ChunkId, ChunkResult, DecodingOptions, Samples
from asr_server.engine import Engine, EngineConfig
from asr_server.engine import engine as module
from asr_server.engine.active_chunk import ActiveChunk
from asr_server.engine.ranks import Begin, LeadingRunner, Operation
from asr_server.engine.runner import Runner
from benchmarks.engine_helpers import results, run, submit, transcribe
from tests.engine.device_stand_ins import LateEncoder, imitate_late_device
from tests.engine.small import SIZES, TOKENIZER, clip, small

PLAIN = DecodingOptions(language="de", max_new_tokens=6, compression_ratio_threshold=99.0)
CLIPS = [clip(seed, 0.5 + seed / 3) for seed in range(6)]


def change(**options: Any) -> DecodingOptions:
    return msgspec.structs.replace(PLAIN, **options)


MIXED = [
    PLAIN,
    change(temperatures=(0.8,), seed=4),
    change(word_timestamps=True),
    change(presence_penalty=1.0, max_new_tokens=9),
    change(language=None),
    change(max_new_tokens=3, keywords=("one", "two")),
]


def engine(**config: Any) -> Engine:
    return small().engine(device="cpu", **config)


def alone(clip: Samples, options: DecodingOptions, **config: Any) -> ChunkResult:
    return transcribe(engine(num_slots=1, **config), [clip], options)[0]


def kinds(events: Sequence[Event]) -> list[str]:
    return [type(event).__name__ for event in events]


@pytest.mark.parametrize(
    "config",
    [
        {"num_slots": 2, "encode_batch": 2},
        {"num_slots": 3, "lookahead": True, "beam_size": 2},
        {"num_slots": 4, "short_audio": "tail", "compute_workers": 2, "lookahead": True},
    ],
)
def test_each_request_is_answered_as_if_it_were_alone(config: dict[str, Any]) -> None:
    beside = engine(**config)
    mode = {key: value for key, value in config.items() if key in ("beam_size", "short_audio")}
    for number, (samples, options) in enumerate(zip(CLIPS, MIXED, strict=True)):
        submit(beside, str(number), samples, options)
    events = run(beside)
    found = results(events)
    for number, (samples, options) in enumerate(zip(CLIPS, MIXED, strict=True)):
        expected = alone(samples, options, **mode)
        assert found[str(number)].tokens == expected.tokens, number
        assert found[str(number)].token_times_s == expected.token_times_s
        assert found[str(number)].logprobs == pytest.approx(expected.logprobs, abs=1e-3)
        assert found[str(number)].language == expected.language
    assert sum(event.count for event in events if isinstance(event, Credit)) == len(MIXED)
    assert beside.slots_in_use == 0
    assert not beside.has_work
    assert beside.step() == []
    beside.close()


def test_a_step_admits_as_many_as_there_are_slots_and_an_encode_takes() -> None:
    """Each gives its credit back when it leaves the queue."""
    some = engine(num_slots=3, encode_batch=2)
    for number in range(5):
        submit(some, str(number), CLIPS[number], PLAIN)
    assert some.has_work
    assert kinds(some.step()) == ["Credit"] * 2
    assert (some.slots_in_use, some.num_steps, some.num_decode_steps) == (2, 1, 1)
    assert kinds(some.step()) == ["Credit"]
    assert some.slots_in_use == 3
    assert some.step() == []
    results(run(some))
    assert some.num_decoded_tokens >= 5 * 2


def test_credit_is_granted_for_one_batch_and_says_what_runs() -> None:
    credit = engine(num_slots=5, encode_batch=3).initial_credit()
    assert (credit.count, credit.num_slots) == (3, 5)
    assert credit.engine is not None
    assert (credit.engine.device, credit.engine.num_slots, credit.engine.dtype) == ("cpu", 5, "float32")


@pytest.mark.parametrize(("seconds", "expected"), [(0.0, 4), (0.5, 3), (0.4, 3), (0.2, 4), (9.0, 1)])
def test_chunks_that_are_decoded_wait_at_most_so_long_for_an_encode(seconds: float, expected: int) -> None:
    some = engine(num_slots=8, encode_batch=4)
    submit(some, "first", CLIPS[0], change(max_new_tokens=40))
    some.step()
    some._seconds_per_encode = seconds
    for number in range(6):
        submit(some, str(number), CLIPS[1], PLAIN)
    some.step()
    assert some.slots_in_use == 1 + expected
    assert 0 < some._seconds_per_encode != seconds, "measured"


def test_without_anything_to_decode_a_whole_batch_is_encoded() -> None:
    some = engine(num_slots=8, encode_batch=4)
    some._seconds_per_encode = 9.0
    for number in range(6):
        submit(some, str(number), CLIPS[1], PLAIN)
    some.step()
    assert some.slots_in_use == 4


@pytest.mark.parametrize(("workers", "lengths_s", "admitted"), [
    (1, (0.3, 0.3, 0.3), 1), (1, (2.9, 0.3), 1), (2, (0.3, 0.3, 0.3), 2), (2, (2.9, 0.3, 0.3), 2),
])  # fmt: skip
def test_each_worker_of_a_cpu_fills_one_window_with_short_chunks(
    workers: int, lengths_s: tuple[float, ...], admitted: int
) -> None:
    """The shortest is encoded as 2 s, of a window of 3 s."""
    some = engine(num_slots=8, encode_batch=8, short_audio="tail", compute_workers=workers)
    for number, length_s in enumerate(lengths_s):
        submit(some, str(number), clip(number, length_s), PLAIN)
    some.step()
    assert some.slots_in_use == admitted
    assert len(results(run(some))) == len(lengths_s)


def test_a_window_holds_two_short_chunks_where_it_is_twice_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(engine()._window), "positions_for", lambda window, _: window.num_positions // 2)
    some = engine(num_slots=8, encode_batch=8, short_audio="tail", compute_workers=1)
    for number in range(3):
        some._waiting.append(ActiveChunk.from_submit(Submit(ChunkId(str(number), 0), CLIPS[0], PLAIN)))
    assert len(some._admit()) == 2


def late(monkeypatch: pytest.MonkeyPatch, **config: Any) -> tuple[Engine, list[LateEncoder]]:
    encoders = imitate_late_device(monkeypatch, 1)
    return engine(**config), encoders


def test_so_many_batches_are_under_way_and_the_others_are_encoded_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    some, (encoder,) = late(monkeypatch, num_slots=16, encode_batch=3, compute_workers=1)
    submit(some, "first", CLIPS[0], change(max_new_tokens=50))
    some.step()
    with monkeypatch.context() as patched:
        patched.setattr("tests.engine.device_stand_ins.LateEncode.is_done", lambda _: False)
        for _ in range(5):
            for number in range(2):
                submit(some, f"{encoder.batches} {some.num_steps} {number}", CLIPS[1], PLAIN)
            some.step()
    assert encoder.batches[:3] == [1, 2, 2]
    assert len(encoder.batches) == 1 + 2, "two of a worker"
    assert len(results(run(some))) == 11


def test_an_encode_that_is_not_done_is_joined_where_nothing_is_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    some, _ = late(monkeypatch, num_slots=4)
    monkeypatch.setattr("tests.engine.device_stand_ins.LateEncode.is_done", lambda _: False)
    submit(some, "a", CLIPS[0], PLAIN)
    some.step()
    assert some.num_decode_steps == 1


def test_a_chunk_that_is_cancelled_while_it_is_encoded_keeps_its_slot_until_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    some, _ = late(monkeypatch, num_slots=4)
    submit(some, "stays", CLIPS[0], PLAIN)
    some.step()
    submit(some, "leaves", CLIPS[1], PLAIN)
    submit(some, "stays too", CLIPS[1], PLAIN)
    with monkeypatch.context() as patched:
        patched.setattr("tests.engine.device_stand_ins.LateEncode.is_done", lambda _: False)
        some.step()
    some.handle(Cancel("leaves"))
    assert some.slots_in_use == 3
    assert set(results(run(some))) == {"stays", "stays too"}
    assert some.slots_in_use == 0


@pytest.mark.parametrize("stage", ["waiting", "held", "decoded"])
def test_a_cancelled_request_leaves_at_once(stage: str) -> None:
    some = engine(num_slots=2)
    options = change(language=None) if stage == "held" else change(max_new_tokens=30)
    submit(some, "leaves", CLIPS[0], options)
    submit(some, "stays", CLIPS[1], options)
    if stage != "waiting":
        some.step()
    before = some.slots_in_use
    some.handle(Cancel("leaves"))
    assert some.slots_in_use == max(0, before - 1)
    some.handle(SetLanguage(ChunkId("stays", 0), "de"))
    assert set(results(run(some))) == {"stays"}


def test_a_text_that_waits_for_its_alignment_can_be_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_ALIGNING", 0)
    some = engine(num_slots=3)
    for name in ("leaves", "stays"):
        submit(some, name, CLIPS[2], change(word_timestamps=True, max_new_tokens=4))
    for _ in range(8):
        some.step()
    assert (some.slots_in_use, some.has_work, some._loop.has_work) == (2, True, False)
    some.handle(Cancel("leaves"))
    assert some.slots_in_use == 1
    monkeypatch.setattr(module, "_MOST_ALIGNING", 32)
    assert set(results(run(some))) == {"stays"}


def test_texts_are_aligned_a_batch_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ALIGN_BATCH", 2)
    batches: list[int] = []
    align = Runner.align

    def noted(runner: Runner, finished: Any) -> Any:
        batches.append(len(finished))
        return align(runner, finished)

    monkeypatch.setattr(Runner, "align", noted)
    options = change(word_timestamps=True, max_new_tokens=3)
    assert len(transcribe(engine(num_slots=5), CLIPS[:5], options)) == 5
    assert batches == [2, 2, 1]


def test_a_text_of_times_alone_is_not_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runner, "align", None)
    options = change(word_timestamps=True, max_new_tokens=1)
    (found,) = transcribe(engine(), CLIPS[:1], options)
    assert not any(map(TOKENIZER.is_text, found.tokens))
    assert found.token_times_s == ()


def test_the_language_is_asked_for_among_those_that_are_possible() -> None:
    some = engine()
    id = submit(some, "a", CLIPS[0], change(language=None, candidate_languages=("zh", "de", "xx")))
    events = some.step()
    assert kinds(events) == ["Credit", "LanguageDetected"]
    detected = events[1]
    assert isinstance(detected, LanguageDetected)
    assert (detected.id, set(detected.probabilities)) == (id, {"zh", "de"})
    assert sum(detected.probabilities.values()) == pytest.approx(1)
    assert (some.slots_in_use, some.has_work) == (1, False)
    some.handle(SetLanguage(ChunkId("a", 1), "de"))  # another chunk's
    assert not some.has_work
    some.handle(SetLanguage(id, "zh"))
    assert some.has_work
    assert results(run(some))["a"] == alone(CLIPS[0], change(language="zh"))


def test_a_language_that_the_model_does_not_know_fails_its_chunk() -> None:
    some = engine()
    id = submit(some, "a", CLIPS[0], change(language=None))
    some.step()
    some.handle(SetLanguage(id, "xx"))
    assert some.slots_in_use == 0
    (failed,) = run(some)
    assert failed == Failed(id, "this checkpoint does not know the language 'xx'")


def test_a_chunk_that_cannot_be_decoded_gives_its_credit_back_and_takes_no_slot() -> None:
    some = engine()
    id = submit(some, "a", np.zeros(0, np.float32), PLAIN)
    assert some.has_work, "the answer"
    assert some.step() == [Credit(1), Failed(id, "no samples, or samples that are not finite")]
    assert some.num_decode_steps == 0


@pytest.mark.parametrize(
    ("method", "doing"),
    [("encode", "encoding"), ("prefill", "prefill"), ("align", "alignment"),
     ("language_probabilities", "language detection")],
)  # fmt: skip
def test_chunks_for_which_there_is_no_memory_fail_alone(
    method: str, doing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = engine()
    submit(some, "a", CLIPS[2], change(word_timestamps=True, language=None if "lang" in method else "de"))
    with monkeypatch.context() as patched:

        def fail(*_: Any) -> None:
            raise MemoryError("full")

        patched.setattr(Runner, method, fail)
        (failed,) = [event for event in run(some) if isinstance(event, Failed)]
    assert failed.message == f"{doing} failed: full"
    assert some.slots_in_use == 0
    submit(some, "b", CLIPS[2], PLAIN)
    assert results(run(some))["b"] == alone(CLIPS[2], PLAIN)


def test_a_fault_of_ours_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Runner, "encode", fail)
    some = engine()
    submit(some, "a", CLIPS[0], PLAIN)
    with pytest.raises(ZeroDivisionError):
        some.step()


def test_a_text_of_nan_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    some = engine()
    logits = some.model.decoder.logits
    monkeypatch.setattr(some.model.decoder, "logits", lambda *hidden: logits(*hidden) * float("nan"))
    id = submit(some, "a", CLIPS[0], PLAIN)
    assert [event for event in run(some) if isinstance(event, Failed)] == [
        Failed(id, "the model produced NaN on this audio; check the weights or try another --dtype")
    ]


def test_segments_are_told_as_they_are_closed() -> None:
    options = change(early_results=True, max_new_tokens=40, logprob_threshold=-99.0)
    some = engine()
    submit(some, "a", CLIPS[1], options)
    events = run(some)
    early = [event.result for event in events if isinstance(event, EarlyResult)]
    whole = results(events)["a"]
    assert early
    assert all(whole.tokens[: len(each.tokens)] == each.tokens for each in early)
    assert early[-1].tokens[-1] >= TOKENIZER.specials.timestamp_begin


def test_times_of_a_chunk_are_counted_from_its_slot() -> None:
    some = engine()
    submit(some, "a", CLIPS[0], PLAIN)
    (result,) = [event for event in run(some) if isinstance(event, Result)]
    assert result.times is not None
    assert result.times.encode_s > 0
    assert result.times.decode_s > 0


def test_steps_with_work_are_timed_and_others_are_not() -> None:
    some = engine()
    some.step()
    assert sum(some.step_timer.times.counts) == 0
    submit(some, "a", CLIPS[0], change(max_new_tokens=2))
    some.step()
    assert sum(some.step_timer.times.counts) == 1
    assert some.num_steps == 2
    assert some.num_layers == 2 * SIZES.decoder_layers + SIZES.encoder_layers


def test_where_short_audio_is_padded_no_segment_begins_behind_it() -> None:
    """Whole windows keep openai-whisper's texts, which have such segments."""
    chunks = {}
    for mode in ("exact", "tail"):
        some = engine(short_audio=mode)
        submit(some, "a", CLIPS[0], PLAIN)
        (chunks[mode],) = some._waiting
    first = TOKENIZER.specials.timestamp_begin
    assert chunks["exact"].audio_end == float("inf")
    assert chunks["tail"].audio_end == first + 25


def test_samples_are_dropped_once_they_are_encoded() -> None:
    some = engine()
    submit(some, "a", CLIPS[0], change(max_new_tokens=30))
    some.step()
    (chunk,) = some._loop.chunks
    assert len(chunk.samples) == len(CLIPS[0])
    assert chunk.samples.strides == (0,)


def test_other_ranks_are_sent_the_configuration_first() -> None:
    sent: list[Operation] = []
    made = small()
    config = EngineConfig(device="cpu", num_slots=2, encode_batch=1, compute_workers=1, lookahead=False)
    leading = Engine(made.model, made.tokenizer, made.rules, config, sent.append)
    assert isinstance(leading._runner, LeadingRunner)
    assert sent == [Begin(leading.config)]
    submit(leading, "a", CLIPS[0], PLAIN)
    assert results(run(leading))["a"] == alone(CLIPS[0], PLAIN)
    assert len(sent) > 3


def test_a_device_without_memory_for_the_engine_says_what_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("tried 3 GiB")

    monkeypatch.setattr(module, "load", fail)
    with pytest.raises(
        ValueError, match=r"lower --max-slots .* or --beam-size .*, or share the GPU less \(tried 3 GiB\)"
    ):
        Engine.load(EngineConfig())


@pytest.mark.parametrize(("device", "warmed"), [("cpu", 0), ("cuda", 1)])
def test_only_a_gpus_engine_is_warmed_up(device: str, warmed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    made = engine()
    monkeypatch.setattr(module, "load", lambda *_: (made.model, made.tokenizer, small().rules, made.config))
    monkeypatch.setattr(module, "warm_up", lambda *parts: calls.append(parts))
    monkeypatch.setattr(module.Engine, "__init__", lambda own, *_: own.__dict__.update(made.__dict__))
    monkeypatch.setitem(made.__dict__, "config", EngineConfig(device=device))
    Engine.load(EngineConfig())
    assert len(calls) == warmed
