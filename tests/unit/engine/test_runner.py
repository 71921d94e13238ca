"""A step's tokens and figures, against one pass of the model over each whole text."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from asr_server.core import DecodingOptions
from asr_server.engine.beam import NUM_NAMED
from asr_server.engine.boost import Row
from asr_server.engine.config import EngineConfig
from asr_server.engine.runner import Runner, StepPlan
from asr_server.engine.slots import SlotStart
from asr_server.model.rows import rows_of
from tests.unit.engine.device_stand_ins import imitate_graphs
from tests.unit.engine.small import PROMPT, RULES, SPECIALS, clip, small

END, FIRST_TIME = SPECIALS.end_of_text, SPECIALS.timestamp_begin
PLAIN = DecodingOptions(language="de")
CLIPS = [clip(seed, 0.8 + seed / 2) for seed in range(4)]
CONFIG = EngineConfig(device="cpu", num_slots=4, beam_size=2, encode_batch=4, compute_workers=1)
NUM_CANDIDATES = 3


def make_runner(**config: Any) -> Runner:
    made = small()
    return Runner(made.model, made.rules, made.tokenizer, replace(CONFIG, **config))


@pytest.fixture
def runner() -> Iterator[Runner]:
    made = make_runner()
    yield made
    made.close()


def scores_after(number: int, prompt: Sequence[int], tokens: Sequence[int] = ()) -> Tensor:
    """Return the scores behind the text of a clip, fed at once: [vocabulary]."""
    model = small().model
    with torch.inference_mode():
        cache = model.new_cache(1)
        cache.write_audio(0, model.decoder.cross_keys_values(model.encoder(model.log_mel([CLIPS[number]]))))
        text = torch.tensor([[*prompt, *tokens]])
        positions = torch.arange(text.shape[1])[None]
        hidden = model.decoder(text, positions, rows_of(cache, slice(0, 1), positions, text.shape[1]))
        return model.decoder.logits(hidden)[0, -1]


def logprobs_after(number: int, prompt: Sequence[int], tokens: Sequence[int] = ()) -> Tensor:
    """Return log-probabilities by Whisper's rules, as openai-whisper writes them down."""
    scores = scores_after(number, prompt, tokens).clone()
    scores[[*RULES.suppress, SPECIALS.no_timestamps]] = -math.inf
    if not tokens:
        scores[list(RULES.suppress_at_begin)] = -math.inf
        scores[:FIRST_TIME] = -math.inf
    times = [token for token in tokens if token >= FIRST_TIME]
    if tokens and tokens[-1] >= FIRST_TIME:
        if len(tokens) < 2 or tokens[-2] >= FIRST_TIME:
            scores[FIRST_TIME:] = -math.inf
        else:
            scores[:END] = -math.inf
    if times:
        is_open = tokens[-1] >= FIRST_TIME and len(tokens) > 1 and tokens[-2] < FIRST_TIME
        scores[FIRST_TIME : times[-1] + (not is_open)] = -math.inf
    own = scores.log_softmax(-1)
    if own[FIRST_TIME:].logsumexp(0) > own[:FIRST_TIME].max():
        scores[:FIRST_TIME] = -math.inf
    return scores.log_softmax(-1)


def begin(runner: Runner, starts: Sequence[SlotStart], numbers: Sequence[int]) -> None:
    slots = [start.slot for start in starts]
    runner.encode(slots, slots, [CLIPS[number] for number in numbers]).join()
    for start in starts:
        runner.prefill([start.slot], [list(start.prompt)[:-1]], 0)
    runner.branch([each.slot for each in starts], starts)


def check_row(lines: Any, slot: int, expected: Tensor) -> int:
    """Compare a row with log-probabilities; return its token."""
    token = int(lines[0, slot])
    assert token == int(expected.argmax())
    assert lines[1, slot] == pytest.approx(float(expected.max()), abs=1e-4)
    likeliest = expected.topk(NUM_CANDIDATES)
    assert lines[3 : 3 + NUM_CANDIDATES, slot].tolist() == likeliest.indices.tolist()
    found = lines[3 + NUM_CANDIDATES : 3 + 2 * NUM_CANDIDATES, slot]
    assert found.tolist() == pytest.approx(likeliest.values.tolist(), abs=1e-4)
    return token


@pytest.mark.parametrize("has_graphs", [False, True])
@pytest.mark.parametrize("slots", [(0, 1, 2), (3, 0, 2)], ids=["side by side", "scattered"])
def test_each_step_goes_on_where_the_text_stands(
    slots: tuple[int, ...], has_graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_graphs:
        imitate_graphs(monkeypatch)
    runner = make_runner()
    numbers = dict(zip(slots, (0, 1, 3), strict=True))
    runner.encode(slots, slots, [CLIPS[number] for number in numbers.values()]).join()
    runner.prefill(slots, [PROMPT[:2]] * 3, 0)
    runner.branch(slots, [SlotStart(slot, PROMPT, PLAIN) for slot in slots])
    no_speech = {
        slot: float(scores_after(number, PROMPT[:1]).softmax(-1)[SPECIALS.no_speech or 0])
        for slot, number in numbers.items()
    }
    texts: dict[int, list[int]] = {slot: [] for slot in slots}
    for step in range(5):
        lines = runner.decode(StepPlan(1 + max(slots), len(PROMPT) + step)).array()
        assert len(lines) == 3 + 2 * (NUM_CANDIDATES + NUM_NAMED)
        assert lines.shape[1] == (4 if has_graphs else 1 + max(slots)), "a graph reads a bucket of rows"
        for slot, text in texts.items():
            text.append(check_row(lines, slot, logprobs_after(numbers[slot], PROMPT, text)))
            assert lines[2, slot] == pytest.approx(no_speech[slot], rel=1e-3)
    assert len({tuple(text) for text in texts.values()}) == 3, "the audio must matter"
    runner.close()


def test_rows_that_draw_or_have_penalties_choose_by_their_options_alone(runner: Runner) -> None:
    penalties = DecodingOptions(language="de", presence_penalty=-50.0)
    cold = DecodingOptions(language="de", temperatures=(1.0,), top_k=1)
    starts = [
        SlotStart(0, PROMPT, PLAIN),
        SlotStart(1, PROMPT, penalties),
        SlotStart(2, PROMPT, cold, 1.0, noise_seed=12345),
        SlotStart(3, PROMPT, PLAIN, 1.0, noise_seed=12345),
    ]
    begin(runner, starts, [0, 0, 0, 0])
    texts: list[list[int]] = [[] for _ in starts]
    for step in range(6):
        plan = StepPlan(4, len(PROMPT) + step, sampled=(2, 3), restricted=True, penalised=(1,))
        lines = runner.decode(plan).array()
        for slot, text in enumerate(texts):
            expected, token = logprobs_after(0, PROMPT, text), int(lines[0, slot])
            assert lines[1, slot] == pytest.approx(float(expected[token]), abs=1e-4), "before the options"
            if slot in (0, 2):  # the one drawn from is the likeliest
                assert token == int(expected.argmax())
            if slot == 1:
                changed = expected.clone()
                changed[[each for each in text if each < END]] += 50
                assert token == int(changed.argmax())
            text.append(token)
    assert texts[0] != texts[1]
    assert texts[0] != texts[3]


def test_keywords_raise_the_tokens_that_they_name(runner: Runner) -> None:
    begin(runner, [SlotStart(slot, PROMPT, PLAIN) for slot in range(3)], [0, 1, 2])
    expected = [logprobs_after(number, PROMPT) for number in range(3)]
    order = [each.argsort(descending=True).tolist() for each in expected]
    wins, loses = Row((order[0][7], order[0][9]), (90.0, 30.0)), Row((order[1][5],), (0.0,))
    searched = Row((order[2][0], order[2][6], order[2][4], SPECIALS.no_timestamps), (9.0, 1.0, 1.0, 99.0))
    plan = StepPlan(3, 3, boosted=((0, wins), (1, loses)), named=((2, searched),))
    lines = runner.decode(plan).array()
    assert lines[0].tolist() == [order[0][7], order[1][0], order[2][0]]
    chosen = [float(each[int(token)]) for each, token in zip(expected, lines[0], strict=True)]
    assert lines[1].tolist() == pytest.approx(chosen, abs=1e-4), "without the bonus"
    named = lines[3 + 2 * NUM_CANDIDATES :, 2]
    tokens, logprobs = named[:NUM_NAMED].tolist(), named[NUM_NAMED:].tolist()
    both = sorted(order[2].index(int(token)) for token in tokens[:2])
    assert both == [4, 6], "without the likeliest, which the search has, and what is forbidden"
    assert logprobs[:2] == pytest.approx([float(expected[2][int(token)]) for token in tokens[:2]], abs=1e-4)
    assert logprobs[2] == -math.inf


def test_a_branch_goes_on_with_the_text_and_audio_of_another_slot(runner: Runner) -> None:
    begin(runner, [SlotStart(0, PROMPT, PLAIN)], [2])
    text = [int(runner.decode(StepPlan(1, 3 + step)).array()[0, 0]) for step in range(3)]
    second = logprobs_after(2, PROMPT, text[:2]).argsort(descending=True)[1]
    others = [*text[:2], int(second)]
    runner.branch(
        [0, 0], [SlotStart(0, PROMPT, PLAIN, tokens=text), SlotStart(3, PROMPT, PLAIN, tokens=others)]
    )
    runner.branch([0], [SlotStart(2, PROMPT, PLAIN, tokens=text[:1])])
    assert runner.cache.keys[:, 2, :, :3].all()
    assert not runner.cache.keys[:, 2, :, 3:].any(), "nothing of what the other text has gone on with"
    lines = runner.decode(StepPlan(4, 6)).array()
    check_row(lines, 0, logprobs_after(2, PROMPT, text))
    check_row(lines, 3, logprobs_after(2, PROMPT, others))
    runner.branch([3], [SlotStart(3, PROMPT, PLAIN, tokens=text[:2])])  # in its place: nothing is copied
    check_row(runner.decode(StepPlan(4, 5)).array(), 3, logprobs_after(2, PROMPT, text[:2]))


@pytest.mark.parametrize("has_graphs", [False, True])
def test_nothing_of_a_longer_text_before_is_left_behind_a_new_one(
    has_graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be masked, but NaN times zero is NaN."""
    if has_graphs:
        imitate_graphs(monkeypatch)
    runner = make_runner()
    begin(runner, [SlotStart(0, PROMPT, PLAIN), SlotStart(1, PROMPT, PLAIN)], [0, 1])
    for step in range(7):
        runner.decode(StepPlan(2, 3 + step)).array()
    for tensor in (runner.cache.keys, runner.cache.values):
        tensor[:, :2, :, : len(PROMPT) + 6] = math.nan
    runner.encode([1], [1], [CLIPS[3]]).join()
    runner.prefill([1], [PROMPT[:2]], 0)
    runner.branch([1], [SlotStart(1, PROMPT, PLAIN)])
    for tensor in (runner.cache.keys, runner.cache.values):
        assert not tensor[:, 1, :, 2:].any(), "NaN is true"
        assert tensor[:, 1, :, :2].isfinite().all()
    check_row(runner.decode(StepPlan(2, 3)).array(), 1, logprobs_after(3, PROMPT))
    runner.close()
