"""Token times: for whom they are computed, that nobody waits for them, and those of the references."""

import json
import math
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from asr_server.checkpoint.tokenizer import Tokenizer
from asr_server.core import ChunkResult, DecodingOptions, Samples
from asr_server.engine import Engine, alignment
from asr_server.engine.alignment import Aligner, first_frames
from asr_server.transport.messages import Cancel, Credit, Event, Failed, Result
from harness.clips import make_clip
from harness.engine_helpers import Checkpoint, Reference, results, run, submit, transcribe
from harness.openai_whisper import load_openai_whisper, token_times_s
from tests.support.checkpoints import (
    english_only_directory,
    large_directory,
    pocket_directory,
    tiny_directory,
)
from tests.support.speech import say

NEAR_S = 0.0201  # one position, and rounding
DURATIONS_S = (30, 7, 0.3, 12)
WORDS = DecodingOptions(language="de", word_timestamps=True, max_new_tokens=30)
PLAIN = DecodingOptions(language="de", max_new_tokens=30)


def clips(count: int = len(DURATIONS_S)) -> list[Samples]:
    return [make_clip(i, duration_s) for i, duration_s in enumerate(DURATIONS_S[:count])]


@pytest.mark.slow
def test_asking_for_words_changes_no_token_and_no_other_request(pocket: Checkpoint) -> None:
    some = [make_clip(i, 1 + 2 * i) for i in range(5)]
    plain = transcribe(pocket.engine(num_slots=3), some, PLAIN)
    alone = {i: transcribe(pocket.engine(num_slots=1), [some[i]], WORDS)[0] for i in (1, 3)}
    for lookahead in (False, True):
        engine = pocket.engine(num_slots=3, lookahead=lookahead)
        for i, clip in enumerate(some):
            submit(engine, str(i), clip, WORDS if i in alone else PLAIN)
        mixed = results(run(engine))
        for i, expected in enumerate(plain):
            assert mixed[str(i)].tokens == expected.tokens
            assert mixed[str(i)].token_times_s == (alone[i].token_times_s if i in alone else ())
            assert mixed[str(i)].token_onsets_s == (alone[i].token_onsets_s if i in alone else ())
        assert engine.slots_in_use == 0


@pytest.mark.slow
def test_there_is_a_time_for_each_text_token_and_one_for_the_end(pocket: Checkpoint) -> None:
    for clip, result in zip(clips(), transcribe(pocket.engine(), clips(), WORDS), strict=True):
        num_text = sum(map(pocket.tokenizer.is_text, result.tokens))
        assert (len(result.token_times_s), len(result.token_onsets_s)) == (num_text + 1, num_text)
        times_s = [0.0, *result.token_times_s, len(clip) / 16_000]
        assert times_s == sorted(times_s)


def test_the_pauses_of_the_audio_come_with_the_times(embedded: Checkpoint) -> None:
    spoken = say("3817", gap_s=0.4)
    options = DecodingOptions(language="en", word_timestamps=True)
    (result,) = transcribe(embedded.engine(), [spoken.samples], options)
    between = [(a[1], b[0]) for a, b in pairwise(spoken.times)]
    assert np.array(result.pauses_s[1:-1]) == pytest.approx(np.array(between), abs=0.02)
    starts_s, ends_s = zip(*spoken.times, strict=True)
    for time_s, earliest_s, latest_s in zip(
        result.token_times_s, (0.0, *ends_s), (*starts_s, len(spoken.samples) / 16_000), strict=True
    ):
        assert earliest_s - 0.1 <= time_s <= latest_s + 0.1


@pytest.mark.parametrize("text_only", [False, True])
def test_a_full_text_is_aligned_only_where_its_times_are_shown(embedded: Checkpoint, text_only: bool) -> None:
    options = DecodingOptions(language="en", word_timestamps=True, text_only=text_only)
    letters, engine, spoken = len("threeeightoneseven"), embedded.engine(), [say("3817").samples]
    unknown, full, short = (
        transcribe(engine, spoken, msgspec.structs.replace(options, full_letters=count))[0]
        for count in (0, letters, letters + 1)
    )
    assert [each.is_full for each in (unknown, full, short)] == [False, True, False]
    assert unknown.token_times_s == short.token_times_s
    assert full.token_times_s == (() if text_only else short.token_times_s)


def test_a_given_text_is_aligned_like_the_same_text_decoded(embedded: Checkpoint) -> None:
    options, spoken = DecodingOptions(language="en", word_timestamps=True), say("3817", gap_s=0.4).samples
    (decoded,) = transcribe(embedded.engine(), [spoken], options)
    text = tuple(filter(embedded.tokenizer.is_text, decoded.tokens))
    given = msgspec.structs.replace(options, given_tokens=text)
    others = msgspec.structs.replace(options, given_tokens=text[::-1])
    engine = embedded.engine(num_slots=2)
    for name, asked in {"given": given, "decoded": options, "others": others}.items():
        submit(engine, name, spoken, asked)
    found = results(run(engine))
    assert found["decoded"] == decoded
    same = found["given"]
    assert (same.tokens, same.token_times_s) == (text, decoded.token_times_s)
    assert same.token_focus == decoded.token_focus
    assert len(same.logprobs) == len(text)
    assert same.avg_logprob > -1 > found["others"].avg_logprob
    assert engine.slots_in_use == 0


@pytest.mark.parametrize(("tokens", "says"), [((-1,), "vocabulary"), ((1,) * 446, "tokens")])
def test_an_unfit_given_text_fails_alone(embedded: Checkpoint, tokens: tuple[int, ...], says: str) -> None:
    engine = embedded.engine()
    options = DecodingOptions(language="en", word_timestamps=True, given_tokens=tokens)
    submit(engine, "wrong", say("3").samples, options)
    (failed,) = (event for event in run(engine) if isinstance(event, Failed))
    assert says in failed.message


@pytest.mark.trial
def test_a_text_that_fills_every_position_has_times_for_all_of_it(pocket: Checkpoint) -> None:
    """The text is fed behind one token more than it was decoded behind."""
    times = range(pocket.tokenizer.specials.timestamp_begin + 1, pocket.model.sizes.vocabulary)
    rules = replace(pocket.rules, suppress=(*pocket.rules.suppress, *times))  # all behind 0 s
    options = DecodingOptions(language="de", word_timestamps=True)
    engine = replace(pocket, rules=rules).engine(num_slots=1)
    (result,) = transcribe(engine, [make_clip(0, 3)], options)
    assert result.finish_reason == "length", "or the test proves nothing"
    num_text = sum(map(pocket.tokenizer.is_text, result.tokens))
    assert len(result.token_times_s) == num_text + 1 > 440


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.trial)])
def test_half_precision_moves_few_token_times(embedded: Checkpoint, dtype: torch.dtype) -> None:
    half = Checkpoint.load(embedded.directory, dtype)
    some = [say(digits).samples for digits in ("1", "427", "90817263", "55", "3141592")]
    options = DecodingOptions(language="en", word_timestamps=True)
    exact, rounded = (transcribe(each.engine(), some, options) for each in (embedded, half))
    assert [result.tokens for result in exact] == [result.tokens for result in rounded]
    for a, b in zip(exact, rounded, strict=True):
        assert np.median(np.abs(np.array(a.token_times_s) - np.array(b.token_times_s))) <= NEAR_S


@pytest.fixture
def held_up(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """No text is laid along its audio before this is set."""
    may_go_on = threading.Event()

    def wait_first(gain: alignment.Matrix) -> Any:
        assert may_go_on.wait(120), "the engine's thread waits here"
        return first_frames(gain)

    monkeypatch.setattr(alignment, "first_frames", wait_first)
    return may_go_on


def run_until(engine: Engine, name: str) -> list[Event]:
    events: list[Event] = []
    while name not in results(events):
        events += engine.step()
    return events


@pytest.mark.slow
def test_texts_laid_along_their_audio_hold_up_nobody(pocket: Checkpoint, held_up: threading.Event) -> None:
    expected = transcribe_words(pocket, held_up)
    engine = pocket.engine(lookahead=True)
    for i, clip in enumerate(clips(2)):
        submit(engine, str(i), clip, WORDS)
    submit(engine, "longer", clips(1)[0], msgspec.structs.replace(PLAIN, max_new_tokens=60))
    events = run_until(engine, "longer")
    assert set(results(events)) == {"longer"}
    held_up.set()
    found = results(run(engine))
    assert [found[str(i)].token_times_s for i in range(len(expected))] == expected


def transcribe_words(pocket: Checkpoint, held_up: threading.Event) -> list[tuple[float, ...]]:
    held_up.set()
    found = transcribe(pocket.engine(), clips(2), WORDS)
    held_up.clear()
    return [result.token_times_s for result in found]


@pytest.mark.slow
def test_an_engine_that_is_closed_leaves_no_thread(pocket: Checkpoint) -> None:
    before = set(threading.enumerate())
    engine = pocket.engine()
    transcribe(engine, clips(1), WORDS)
    assert set(threading.enumerate()) - before
    engine.close()
    assert not set(threading.enumerate()) - before


def test_a_cancelled_request_gets_no_times(pocket: Checkpoint) -> None:
    engine = pocket.engine()
    submit(engine, "leaver", clips()[0], WORDS)
    engine.step()
    engine.handle(Cancel("leaver"))
    assert not [event for event in run(engine) if isinstance(event, Result)]


def test_attention_of_nan_fails_its_chunk_alone(pocket: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = pocket.engine(num_slots=2)
    add_layer = Aligner._add_layer

    def spoil_one(own: Aligner, gain: Tensor, attention: Tensor, text: Any, *rest: Any) -> None:
        add_layer(own, gain, attention, text, *rest)
        if text.num_positions > 200:
            gain.fill_(math.nan)

    monkeypatch.setattr(Aligner, "_add_layer", spoil_one)
    for name, duration_s in (("short", 2), ("long", 6)):
        submit(engine, name, make_clip(1, duration_s), WORDS)
    events = run(engine)
    (failed,) = [event for event in events if isinstance(event, Failed)]
    assert failed.id.handle_id == "long"
    assert "NaN" in failed.message
    assert [event.id.handle_id for event in events if isinstance(event, Result)] == ["short"]
    assert sum(event.count for event in events if isinstance(event, Credit)) == 2
    assert engine.slots_in_use == 0


@pytest.fixture
def plain_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """openai/whisper's path, on which tokens may share a position."""
    monkeypatch.setattr(alignment, "first_frames", partial(first_frames, share_frames=True))


def offs_s(
    checkpoint: Checkpoint, some: Sequence[Samples], found: Sequence[ChunkResult], language: str | None
) -> list[float]:
    """How far each token's time lies from openai/whisper's."""
    reference = load_openai_whisper(checkpoint.directory)
    offs: list[float] = []
    for clip, result in zip(some, found, strict=True):
        expected = token_times_s(reference, checkpoint.tokenizer, clip, result.tokens, language)
        offs += np.abs(np.array(expected) - np.array(result.token_times_s)).tolist()
    return offs


@pytest.mark.usefixtures("plain_method")
@pytest.mark.parametrize(
    ("directory", "language"),
    [
        pytest.param(tiny_directory, "de", marks=pytest.mark.trial),
        pytest.param(large_directory, "de", marks=pytest.mark.trial),
        pytest.param(english_only_directory, None, marks=pytest.mark.trial),
    ],
)
def test_token_times_are_those_of_openai_whisper(directory: Callable[[], Path], language: str | None) -> None:
    # Not 30 s for large: the last log-mel frame is transformers' there, and random weights enlarge it.
    checkpoint, some = Checkpoint.load(directory()), clips()[directory is large_directory :]
    options = DecodingOptions(language="de", word_timestamps=True, max_new_tokens=44)  # text and nothing else
    found = transcribe(checkpoint.engine(), some, options)
    assert len({result.token_times_s for result in found}) == len(some), "the audio must matter"
    offs = offs_s(checkpoint, some, found, language)
    assert len(offs) > 100, "or one off is more than a hundredth"
    assert np.mean(np.array(offs) <= NEAR_S) >= 0.99


@pytest.mark.usefixtures("plain_method")
def test_the_embedded_models_token_times_are_those_of_openai_whisper(embedded: Checkpoint) -> None:
    some = [say(digits).samples for digits in ("1", "427", "90817263", "55", "3141592")]
    options = DecodingOptions(language="en", word_timestamps=True)
    offs = offs_s(embedded, some, transcribe(embedded.engine(), some, options), "en")
    assert len(offs) > 20
    assert np.mean(np.array(offs) <= NEAR_S) >= 0.99


@pytest.mark.usefixtures("plain_method")
def test_the_embedded_models_token_times_are_transformers_on_the_same_rows(embedded: Checkpoint) -> None:
    """Its features, network, median filter and dynamic time warping; benchmarks/results/word-times.md says
    what it does with attention in between.
    """
    some = [say(digits).samples for digits in ("1", "427", "90817", "55", "31415")]
    options = DecodingOptions(language="en", word_timestamps=True)
    found = transcribe(embedded.engine(), some, options)
    reference = Reference(embedded.directory)
    reference.model.set_attn_implementation("eager")
    offs: list[float] = []
    for clip, result in zip(some, found, strict=True):
        expected = _times_of_transformers(reference, embedded.tokenizer, clip, result.tokens)
        offs += np.abs(np.array(expected) - np.array(result.token_times_s)).tolist()
    assert len(offs) > 15
    assert np.mean(np.array(offs) <= NEAR_S) >= 0.99


def _times_of_transformers(
    reference: Reference, tokenizer: Tokenizer, samples: Samples, tokens: Sequence[int]
) -> list[float]:
    from transformers.models.whisper import generation_whisper

    specials = tokenizer.specials
    prompt = [specials.start_of_transcript, specials.languages["en"], specials.transcribe]
    text = [token for token in tokens if tokenizer.is_text(token)]
    fed = torch.tensor([[*prompt, specials.no_timestamps, *text, specials.end_of_text]])
    with torch.inference_mode():
        attention = reference.model(
            input_features=reference.features([samples]), decoder_input_ids=fed, output_attentions=True
        ).cross_attentions
    heads = reference.model.generation_config.alignment_heads
    weights = torch.stack([attention[layer][0, head] for layer, head in heads])[..., : len(samples) // 320]
    weights /= weights.sum(-1, keepdim=True)
    std, mean = torch.std_mean(weights, dim=-2, keepdim=True, correction=0)
    smoothed = generation_whisper._median_filter((weights - mean) / std, 7).mean(0)[len(prompt) : -1]
    rows, frames = generation_whisper._dynamic_time_warping(-smoothed.double().numpy())
    return [float(frames[np.argmax(rows == row)]) * 0.02 for row in range(len(text) + 1)]


def with_heads(target: Path, heads: list[list[int]]) -> Path:
    shutil.copytree(pocket_directory(), target)
    config = json.loads((target / "generation_config.json").read_text())
    (target / "generation_config.json").write_text(json.dumps(config | {"alignment_heads": heads}))
    return target


@pytest.mark.usefixtures("plain_method")
def test_alignment_heads_are_the_checkpoints_own(tmp_path: Path) -> None:
    checkpoint = Checkpoint.load(with_heads(tmp_path / "own", [[1, 1], [0, 1]]))
    assert checkpoint.model.alignment_heads == {0: [1], 1: [1]}
    some = clips()[1:3]
    offs = offs_s(checkpoint, some, transcribe(checkpoint.engine(), some, WORDS), "de")
    assert np.mean(np.array(offs) <= NEAR_S) >= 0.99
