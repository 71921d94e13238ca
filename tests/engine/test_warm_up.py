"""One second of silence goes through all that a request needs, before the engine is ready."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asr_server.core import DecodingOptions
from asr_server.engine import Engine, EngineConfig, engine
from asr_server.engine.runner import Runner
from asr_server.engine.warm_up import warm_up
from benchmarks.engine_helpers import Checkpoint, transcribe
from tests.checkpoints import pocket_directory
from tests.engine.fake_cuda import KERNELS, fake_cuda, fake_engine
from tests.engine.small import SPECIALS, TOKENIZER
from tests.engine.test_engine import CLIPS

PARTS = ("encode", "language_probabilities", "prefill", "start", "decode", "align")


def count_calls(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    called: set[str] = set()
    for name in PARTS:
        original = getattr(Runner, name)

        def call(*arguments: Any, name: str = name, original: Any = original) -> Any:
            called.add(name)
            return original(*arguments)

        monkeypatch.setattr(Runner, name, call)
    return called


@pytest.mark.slow
def test_an_engine_on_a_gpu_has_computed_every_part_of_a_request_when_it_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory = pocket_directory()
    with fake_cuda(monkeypatch):
        made = fake_engine(monkeypatch, directory, torch.bfloat16, KERNELS, beam_size=5)
        parts = made.model, made.tokenizer, made._runner, made.config
        called = count_calls(monkeypatch)
        monkeypatch.setattr(engine, "load", lambda *_: (made.model, made.tokenizer, None, made.config))
        monkeypatch.setattr(engine, "_runner", lambda *_: made._runner)
        loaded = Engine.load(EngineConfig())
    assert (loaded.model, loaded.tokenizer, loaded._runner, loaded.config) == parts
    assert called == set(PARTS)
    assert loaded.slots_in_use == 0


@pytest.mark.slow
@pytest.mark.parametrize("beam_size", [1, 5])
def test_texts_are_the_same_after_it(pocket: Checkpoint, beam_size: int) -> None:
    options = DecodingOptions(language="de", max_new_tokens=16, word_timestamps=True)
    cold, warm = (pocket.engine(beam_size=beam_size) for _ in range(2))
    warm_up(warm._runner, warm.tokenizer)
    found, expected = (transcribe(each, CLIPS, options) for each in (warm, cold))
    assert found == expected


def test_every_part_of_a_request_is_computed(pocket: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    made = pocket.engine()
    called = count_calls(monkeypatch)
    warm_up(made._runner, made.tokenizer)
    assert called == set(PARTS)


def test_a_model_that_produces_nan_ends_the_start(
    pocket: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = pocket.engine()
    logits = made.model.decoder.logits
    monkeypatch.setattr(made.model.decoder, "logits", lambda *hidden: logits(*hidden) * math.nan)
    with pytest.raises(ValueError, match="NaN on one second of silence; check the weights"):
        warm_up(made._runner, made.tokenizer)


class Recorder:
    """Takes the place of a runner: notes what is asked of it, and which results are waited for."""

    def __init__(self, logprobs: tuple[float, float]) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.model = SimpleNamespace(sizes=SimpleNamespace(text_positions=448))
        self.logprobs = iter(logprobs)

    def launching(self) -> Any:
        return nullcontext()

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.calls.append((name, *arguments))
            result: Any = SimpleNamespace()
            for wait in ("join", "read", "aligned_result"):
                setattr(result, wait, lambda wait=wait: self._waited(f"{name} {wait}"))
            return [result] if name == "align" else result

        return call

    def _waited(self, name: str) -> Any:
        self.calls.append((name,))
        return (None, [next(self.logprobs), math.nan]) if name == "decode read" else None


@pytest.mark.parametrize("languages", [{}, SPECIALS.languages])
def test_a_second_of_silence_passes_through_the_first_slot(languages: dict[str, int]) -> None:
    """As a request does: its prompt is filled in up to where the model may say that nobody speaks."""
    tokenizer: Any = SimpleNamespace(specials=replace(SPECIALS, languages=languages))
    runner: Any = Recorder((-1.0, -2.0))
    warm_up(runner, tokenizer)
    calls = {name: arguments for name, *arguments in runner.calls}
    names = [name for name, *_ in runner.calls]
    detection = ["language_probabilities", "language_probabilities read"] if languages else []
    decoding = ["decode", "decode read"] * 2
    assert names == [
        *("encode", "encode join", *detection, "prefill", "start", *decoding, "align", "align aligned_result")
    ]
    slots, audio_slots, (samples,) = calls["encode"]
    assert (slots, audio_slots, len(samples), samples.any()) == ([0], [0], 16_000, False)
    assert calls.get("language_probabilities", [[0]]) == [[0]]
    ((start,),) = calls["start"]
    assert (start.slot, start.temperature) == (0, 0.0)
    (prefilled_slots, (prompt,), place) = calls["prefill"]
    assert prefilled_slots == [0]
    assert prompt == start.prompt[: place + 1]
    assert prompt[-1] == SPECIALS.start_of_transcript
    steps = [arguments[0] for name, *arguments in runner.calls if name == "decode"]
    assert [(step.num_rows, step.context) for step in steps] == [
        (1, len(start.prompt)),
        (1, len(start.prompt) + 1),
    ]
    (((chunk, result),),) = calls["align"]
    assert (chunk.slot, chunk.audio_slot, chunk.options.word_timestamps) == (0, 0, True)
    assert result.tokens == (0, 1)


def test_nan_in_a_later_step_is_seen() -> None:
    runner: Any = Recorder((-1.0, math.nan))
    with pytest.raises(ValueError, match="NaN"):
        warm_up(runner, TOKENIZER)
