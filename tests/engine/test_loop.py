"""The decode loop over a language model of chance: whatever runs beside, each text is read as it is alone."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any, Final

import msgspec
import numpy as np
import pytest

from asr_server.core import ChunkId, ChunkResult, DecodingOptions
from asr_server.engine.active_chunk import ActiveChunk
from asr_server.engine.beam import NUM_NAMED, BeamSearch, num_candidates, num_named
from asr_server.engine.boost import KeywordBoost, Row, keyword_boost
from asr_server.engine.loop import DecodeLoop
from asr_server.engine.runner import StepPlan
from asr_server.engine.slots import SlotStart, SlotTable
from asr_server.engine.tokens import noise_seed_of
from tests.vocabulary import make_tokenizer, spell

TOKENIZER: Final = make_tokenizer()
END, FIRST_TIME = TOKENIZER.specials.end_of_text, TOKENIZER.specials.timestamp_begin
WRITTEN: Final = spell(" abcde")
KEYWORDS = ("abcd", "deb")
BEAM_SIZE, NUM_SLOTS = 3, 4
MOST_TOKENS = 14
PLAIN = DecodingOptions(language="en", compression_ratio_threshold=99.0)


def next_logprobs(prompt: Sequence[int], tokens: Sequence[int]) -> dict[int, float]:
    chance = random.Random(f"{list(prompt)} {list(tokens)}")
    time = FIRST_TIME + 1 + 10 * len(tokens)
    scores = {token: chance.gauss(0, 2) for token in (*WRITTEN, time, END)}
    if not tokens:  # no text is empty
        del scores[END]
    total = math.log(sum(map(math.exp, scores.values())))
    return {token: score - total for token, score in scores.items()}


def likeliest_first(logprobs: dict[int, float]) -> list[tuple[int, float]]:
    return sorted(logprobs.items(), key=lambda each: -each[1])


def chosen(
    start: SlotStart, tokens: Sequence[int], row: Row | None, is_drawn: bool, is_restricted: bool
) -> tuple[int, float]:
    """Return the next token of a text by its options, and its log-probability."""
    logprobs = next_logprobs(start.prompt, tokens)
    scores = dict(logprobs)
    if start.options.presence_penalty:
        scores = {token: score - 3.0 * (token in tokens) for token, score in scores.items()}
    if row is not None:
        for token, bonus in zip(row.tokens, row.bonuses, strict=True):
            if token in scores:
                scores[token] += bonus
    if is_drawn:
        noise = random.Random(f"{start.noise_seed} {list(tokens)}")
        kept = likeliest_first(scores)[: start.options.top_k if is_restricted else None]
        scores = {token: score / start.temperature + noise.gauss(0, 1) for token, score in kept}
    token = max(scores, key=lambda each: scores[each])
    return token, logprobs[token]


def named_beside(row: Row, logprobs: dict[int, float], count: int) -> list[tuple[int, float]]:
    """Return the likeliest tokens of a keyword that are not among the likeliest of all."""
    likeliest = {token for token, _ in likeliest_first(logprobs)[:count]}
    named = {
        token: logprobs[token] + bonus
        for token, bonus in zip(row.tokens, row.bonuses, strict=True)
        if token in logprobs and token not in likeliest
    }
    return [(token, logprobs[token]) for token, _ in likeliest_first(named)[:NUM_NAMED]]


class ReadNow:
    def __init__(self, values: Any) -> None:
        self._values = values

    def array(self) -> Any:
        return self._values


class ChanceRunner:
    """The device's side of a step, in Python: each slot's text goes on by the token chosen for it."""

    def __init__(self, text_positions: int, beam_size: int) -> None:
        self._num_lines = 3 + 2 * (num_candidates(beam_size) + num_named(beam_size))
        self.model = SimpleNamespace(sizes=SimpleNamespace(text_positions=text_positions))
        self.texts: dict[int, tuple[SlotStart, list[int]]] = {}
        self.plans: list[StepPlan] = []
        self.num_branches = 0

    def start(self, starts: Iterable[SlotStart]) -> None:
        for start in starts:
            self.texts[start.slot] = start, list(start.tokens)

    def branch(self, sources: Sequence[int], starts: Sequence[SlotStart]) -> None:
        """Keys and values are those of the source's text: it has to begin alike, but for the last token."""
        before = {source: self.texts[source] for source in sources}
        for source, start in zip(sources, starts, strict=True):
            known, text = before[source]
            assert known.prompt == start.prompt
            assert text[: len(start.tokens) - 1] == list(start.tokens[:-1])
        self.num_branches += len(starts)
        self.start(starts)

    def decode(self, plan: StepPlan) -> ReadNow:
        self.plans.append(plan)
        columns = [self._column(slot, plan) for slot in range(plan.num_rows)]
        return ReadNow(np.array(columns).T)

    def _column(self, slot: int, plan: StepPlan) -> list[float]:
        count = num_candidates(BEAM_SIZE)
        if slot not in self.texts:
            return [0.0] * self._num_lines
        start, text = self.texts[slot]
        logprobs = next_logprobs(start.prompt, text)
        penalised = slot in (*plan.penalised, *plan.sampled)
        row = dict(plan.boosted).get(slot)
        options = start.options if penalised else PLAIN
        restricted = plan.restricted and bool(start.options.top_k)
        asked = SlotStart(slot, start.prompt, options, start.temperature, start.noise_seed)
        asked = asked if slot not in plan.sampled else start
        token, logprob = chosen(asked, text, row, slot in plan.sampled, restricted)
        if len(start.prompt) + len(text) > plan.context:
            token, logprob = WRITTEN[0], -99.0  # a step that reads too little of the text
        likeliest = likeliest_first(logprobs)[:count]
        named = dict(plan.named).get(slot, Row((), ()))
        others = named_beside(named, logprobs, count)
        others += [(0, -math.inf)] * (NUM_NAMED - len(others))
        text.append(token)
        of_all = [*zip(*likeliest, strict=True), *zip(*others, strict=True)]
        lines = [token, logprob, no_speech_of(start.prompt), *(each for line in of_all for each in line)]
        return lines[: self._num_lines]


def no_speech_of(prompt: Sequence[int]) -> float:
    return prompt[0] % 7 / 10


def make(number: int, options: DecodingOptions, beam_size: int) -> ActiveChunk:
    samples = np.zeros(16_000, np.float32)
    chunk = ActiveChunk(ChunkId("a", number), samples, options, "en", beam_size=beam_size)
    chunk.prompt, chunk.max_tokens = [number, *range(number % 3)], options.max_new_tokens or MOST_TOKENS
    return chunk


Read = tuple[ChunkResult, list[ChunkResult]]  # with what was reported early


def alone(number: int, options: DecodingOptions, beam_size: int) -> Read:
    """Read one chunk without slots, batch or steps ahead."""
    chunk, early = make(number, options, beam_size), list[ChunkResult]()
    chunk.begin(END, keyword_boost(TOKENIZER, options.keywords) if options.keywords else None)
    while True:
        result = chunk.keep_early_result(searched(chunk, early) if chunk.beam else written(chunk, early))
        if not chunk.next_try(result):
            return chunk.with_fallbacks(chunk.best_result(result)), early


def report(chunk: ActiveChunk, early: list[ChunkResult]) -> None:
    if found := chunk.next_early_result(TOKENIZER):
        early.append(found)


def written(chunk: ActiveChunk, early: list[ChunkResult]) -> ChunkResult:
    options, temperature = chunk.options, chunk.temperature
    seed = noise_seed_of(options.seed, chunk.id, temperature) if temperature else 0
    start = SlotStart(0, chunk.prompt, options, temperature, seed)
    chunk.no_speech_prob = no_speech_of(chunk.prompt)
    while True:
        row = chunk.boost.row(chunk.boost_state) if chunk.boost and chunk.is_greedy else None
        token, logprob = chosen(start, chunk.tokens, row, temperature > 0, options.top_k > 0)
        if reason := chunk.append(token, logprob, END):
            return chunk.result(reason, TOKENIZER)
        report(chunk, early)


def searched(chunk: ActiveChunk, early: list[ChunkResult]) -> ChunkResult:
    beam, count = chunk.beam, num_candidates(BEAM_SIZE)
    assert beam is not None
    chunk.no_speech_prob = no_speech_of(chunk.prompt)
    while True:
        rows = [next_logprobs(chunk.prompt, each.tokens) for each in beam.running]
        named = [
            named_beside(chunk.boost.row(each.match.state), row, count) if chunk.boost else []
            for each, row in zip(beam.running, rows, strict=True)
        ]
        beam.advance([likeliest_first(row)[:count] for row in rows], named)
        if beam.is_over or chunk.is_loop(beam.running[0].tokens, END):
            return chunk.result_of_beam(beam, TOKENIZER)
        report(chunk, early)


class Together:
    """A loop with its slots and runner, and the chunks that are in it."""

    def __init__(
        self, overlapped: bool, num_searches: int = 1, text_positions: int = 64, beam_size: int = BEAM_SIZE
    ) -> None:
        self.runner = ChanceRunner(text_positions, beam_size)
        self.early: dict[int, list[ChunkResult]] = {}
        self.slots = SlotTable(NUM_SLOTS, num_searches, beam_size)
        runner: Any = self.runner
        self.loop = DecodeLoop(runner, TOKENIZER, self.slots, overlapped, self._report)
        self.results: dict[int, ChunkResult] = {}

    def _report(self, chunk: ActiveChunk, result: ChunkResult) -> None:
        self.early.setdefault(chunk.id.chunk, []).append(result)

    def start(self, *chunks: ActiveChunk) -> None:
        for chunk in chunks:
            self.slots.place(chunk)
        self.loop.start(list(chunks))

    def step(self) -> None:
        for chunk, result in self.loop.step():
            assert chunk.finished
            self.slots.free(chunk)
            assert chunk.id.chunk not in self.results, "a chunk ends once"
            self.results[chunk.id.chunk] = result

    def read_all(self, waiting: Sequence[ActiveChunk] = ()) -> None:
        waiting = list(waiting)
        while waiting or self.loop.has_work:
            room = NUM_SLOTS - len(self.slots)
            self.start(*waiting[:room])
            del waiting[:room]
            self.step()


def change(**options: Any) -> DecodingOptions:
    return msgspec.structs.replace(PLAIN, **options)


ASKED: Final = [
    (PLAIN, 1),
    (PLAIN, BEAM_SIZE),
    (change(temperatures=(0.7,), seed=3), 1),
    (change(temperatures=(0.5,), top_k=2), 1),
    (change(presence_penalty=1.0), BEAM_SIZE),
    (change(temperatures=(0.9,), presence_penalty=1.0), 1),
    (change(keywords=KEYWORDS), 1),
    (change(keywords=KEYWORDS), BEAM_SIZE),
    (change(early_results=True, logprob_threshold=-9.0), 1),
    (change(early_results=True, logprob_threshold=-9.0), BEAM_SIZE),
    (change(temperatures=(0.0, 0.2, 0.4), logprob_threshold=0.0), BEAM_SIZE),
    (change(temperatures=(0.0, 0.2, 0.4), logprob_threshold=0.0, keywords=KEYWORDS), 1),
    (change(max_new_tokens=1), BEAM_SIZE),
]


@pytest.mark.parametrize("num_searches", [1, 3])
@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_each_chunk_is_read_among_others_as_it_is_alone(
    seed: int, overlapped: bool, num_searches: int
) -> None:
    asked = random.Random(seed).sample(ASKED * 2, 2 * len(ASKED))
    numbered = list(enumerate(asked, 100 * seed))
    together = Together(overlapped, num_searches=num_searches)
    together.read_all([make(number, *each) for number, each in numbered])
    for number, each in numbered:
        expected, early = alone(number, *each)
        assert together.results[number] == expected, (number, each)
        assert together.early.get(number, []) == early, (number, each)
    assert any(together.early.values())
    assert len(together.slots) == 0


@pytest.mark.parametrize("overlapped", [False, True])
def test_without_searches_a_report_has_no_candidates(overlapped: bool) -> None:
    together = Together(overlapped, beam_size=1)
    together.read_all([make(number, options, 1) for number, (options, _) in enumerate(ASKED)])
    for number, (options, _) in enumerate(ASKED):
        assert together.results[number] == alone(number, options, 1)[0]


@pytest.mark.parametrize(("overlapped", "dropped"), [(False, 0), (True, 1)])
def test_a_step_reads_the_slots_and_positions_of_the_texts_and_no_more(
    overlapped: bool, dropped: int
) -> None:
    """Ahead of the host, a text that has ended is computed once more."""
    chunks = [make(number, PLAIN, 1) for number in (1, 2)]
    results = [alone(number, PLAIN, 1)[0] for number in (1, 2)]
    ends = [len(each.tokens) + (each.finish_reason == "stop") + dropped for each in results]  # steps of each
    together = Together(overlapped)
    together.read_all(chunks)
    assert together.loop.num_steps == len(together.runner.plans) == max(ends)
    assert together.loop.num_tokens == sum(ends)
    longest = [max(len(each.prompt) for each, end in zip(chunks, ends, strict=True) if step < end) + step
               for step in range(max(ends))]  # fmt: skip
    assert [plan.context for plan in together.runner.plans] == longest
    rows = [1 + max(slot for slot, end in enumerate(ends) if step < end) for step in range(max(ends))]
    assert [plan.num_rows for plan in together.runner.plans] == rows


@pytest.mark.parametrize("overlapped", [False, True])
def test_a_step_reads_no_more_positions_than_the_model_has(overlapped: bool) -> None:
    together = Together(overlapped, text_positions=5)
    chunk = make(2, change(max_new_tokens=3), 1)
    assert len(chunk.prompt) == 3
    together.read_all([chunk])
    assert [plan.context for plan in together.runner.plans] == [3, 4, 5, 5][: 3 + overlapped]


def first_plan(*asked: DecodingOptions) -> StepPlan:
    together = Together(overlapped=False)
    together.start(*(make(1 + 3 * place, options, 1) for place, options in enumerate(asked)))
    together.step()
    return together.runner.plans[0]


def test_a_plan_names_the_rows_that_draw_and_those_with_penalties() -> None:
    drawn, restricted = change(temperatures=(0.5,)), change(temperatures=(0.5,), min_p=0.1)
    penalised = change(frequency_penalty=0.5)
    drawn_too = change(temperatures=(0.5,), frequency_penalty=0.5)
    plan = first_plan(PLAIN, restricted, penalised, drawn_too)
    assert plan == StepPlan(4, 2, sampled=(1, 3), restricted=True, penalised=(2,))
    assert first_plan(drawn, PLAIN) == StepPlan(2, 2, sampled=(0,))
    assert first_plan(change(top_k=3), drawn) == StepPlan(2, 2, sampled=(1,))


def test_a_plan_names_the_tokens_of_keywords_where_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a search without tokens, too: an empty row takes the place of the last step's."""
    boost = KeywordBoost((), [spell("ab")], lambda token: False)  # at the start of a text alone
    monkeypatch.setattr("asr_server.engine.loop.keyword_boost", lambda *_: boost)
    options, empty = change(keywords=KEYWORDS), Row((), ())
    together = Together(overlapped=False, num_searches=2)
    chunks = [make(number, options, size) for number, size in ((0, 1), (3, BEAM_SIZE), (6, 1))]
    together.start(*chunks)
    together.step()
    rows = [(chunk.slot, boost.row(chunk.boost_state)) for chunk in (chunks[0], chunks[2])]
    assert any(not each.tokens for _, each in rows)
    together.step()
    row = boost.row(boost.start)
    assert row.tokens == spell("a")
    first, second = together.runner.plans
    assert first == StepPlan(3, 1, boosted=((0, row), (2, row)), named=((1, row),))
    assert second.boosted == tuple(each for each in rows if each[1].tokens)
    searched = chunks[1]
    assert searched.beam is not None
    assert [slot for slot, _ in second.named] == [1, *range(3, second.num_rows)]
    assert all(found in (empty, boost.row(boost.step(boost.start, ord("a")))) for _, found in second.named)


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("size", [1, BEAM_SIZE])
def test_of_a_cancelled_chunk_nothing_comes_and_the_others_go_on(size: int, overlapped: bool) -> None:
    """A search that waits for slots, too: two of three wait here."""
    together = Together(overlapped)
    chunks = [make(number, PLAIN, size) for number in range(3)]
    together.start(*chunks)
    for _ in range(3):
        together.step()
    for chunk in chunks[:2]:
        if not chunk.finished:
            together.loop.chunks.remove(chunk)
            together.slots.free(chunk)
            chunk.finished = True
    ended = set(together.results)
    together.read_all()
    assert set(together.results) <= ended | {2}
    assert together.results[2] == alone(2, PLAIN, size)[0]


def test_there_is_work_until_the_step_ahead_is_read() -> None:
    together = Together(overlapped=True)
    assert not together.loop.has_work
    assert together.loop.step() == []
    assert together.runner.plans == []
    together.start(make(0, change(max_new_tokens=1), 1))
    assert together.loop.has_work
    together.step()
    assert together.results == {}
    together.step()
    assert list(together.results) == [0]
    assert together.loop.chunks == []
    assert together.loop.has_work, "the step ahead is under way"
    together.step()
    assert not together.loop.has_work
    assert len(together.runner.plans) == 2


@pytest.mark.parametrize("overlapped", [False, True])
def test_a_search_of_one_hypothesis_goes_on_in_its_slot_untouched(
    overlapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    certain = dict.fromkeys(WRITTEN, -20.0) | {WRITTEN[1]: -1e-6}
    monkeypatch.setattr("tests.engine.test_loop.next_logprobs", lambda *_: certain)
    monkeypatch.setattr(BeamSearch, "advance", None)  # nor are candidates compared, which takes longer
    together = Together(overlapped)
    together.read_all([make(0, PLAIN, BEAM_SIZE)])
    assert together.results[0].tokens == (WRITTEN[1],) * MOST_TOKENS
    assert together.runner.num_branches == 0
    assert together.loop.num_steps == MOST_TOKENS + overlapped


def test_a_wide_search_sets_only_slots_whose_text_changes() -> None:
    together = Together(overlapped=False)
    chunk = make(4, PLAIN, BEAM_SIZE)
    together.start(chunk)
    needed = 0
    while together.loop.has_work:
        before = together.runner.num_branches
        texts = {slot: list(text) for slot, (_, text) in together.runner.texts.items()}
        slots = list(chunk.slots)
        together.step()
        if chunk.beam is None or chunk.finished:
            continue
        parents = {tuple(texts[slot]) for slot in slots}
        running = [each.tokens for each in chunk.beam.running]
        assert {each[:-1] for each in running} <= parents
        needed += together.runner.num_branches - before
        assert together.runner.num_branches - before < max(2, len(running) + 1)
        assert [self_text(together, slot) for slot in chunk.slots] == running
    assert 0 < needed < sum(plan.num_rows for plan in together.runner.plans), "most go on in place"


def self_text(together: Together, slot: int) -> tuple[int, ...]:
    return tuple(together.runner.texts[slot][1])
