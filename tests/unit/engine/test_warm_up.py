"""One second of silence goes through all that a request needs, before the engine is ready."""

import math
from typing import Any

import pytest

from asr_server.core import DecodingOptions
from asr_server.engine.runner import Runner
from asr_server.engine.warm_up import warm_up
from harness.engine_helpers import Checkpoint, transcribe
from tests.unit.engine.test_engine import CLIPS

PARTS = ("encode", "language_probabilities", "prefill", "branch", "decode", "align")


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
@pytest.mark.parametrize("beam_size", [pytest.param(1, marks=pytest.mark.trial), 5])
def test_texts_are_the_same_after_it(pocket: Checkpoint, beam_size: int) -> None:
    options = DecodingOptions(language="de", max_new_tokens=16, word_timestamps=True)
    cold, warm = (pocket.engine(beam_size=beam_size) for _ in range(2))
    warm_up(warm._runner, warm.tokenizer, warm.num_slots)
    found, expected = (transcribe(each, CLIPS, options) for each in (warm, cold))
    assert found == expected


def test_every_part_of_a_request_is_computed(pocket: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    made = pocket.engine()
    called = count_calls(monkeypatch)
    warm_up(made._runner, made.tokenizer, made.num_slots)
    assert called == set(PARTS)


def test_a_model_that_gives_nan_ends_the_start(pocket: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    made = pocket.engine()
    logits = made.model.decoder.logits
    monkeypatch.setattr(made.model.decoder, "logits", lambda *hidden: logits(*hidden) * math.nan)
    with pytest.raises(ValueError, match="NaN on one second of silence; check the weights"):
        warm_up(made._runner, made.tokenizer, made.num_slots)


def test_prompts_of_few_or_many_rows_are_run(pocket: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than eight rows have a kernel of their own, which would be compiled while others are served."""
    made, num_tokens = pocket.engine(), list[int]()
    prefill = Runner.prefill

    def noted(own: Runner, slots: Any, prompts: Any, sot_index: int) -> None:
        num_tokens.append(sum(map(len, prompts)))
        prefill(own, slots, prompts, sot_index)

    monkeypatch.setattr(Runner, "prefill", noted)
    warm_up(made._runner, made.tokenizer, made.num_slots)
    assert min(num_tokens) <= 8 < max(num_tokens)
