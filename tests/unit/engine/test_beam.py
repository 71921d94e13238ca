"""Beam search: openai-whisper's, pruned; the same whoever else is decoded; nothing is held when it ends."""

import math
import random
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from asr_server.core import ChunkResult, DecodingOptions
from asr_server.engine import Engine, active_chunk
from asr_server.engine.beam import BeamSearch, leads, num_candidates
from asr_server.transport.messages import Cancel
from harness.clips import make_clip
from harness.engine_helpers import Checkpoint, results, run, submit, transcribe
from harness.openai_whisper import load_openai_whisper
from tests.support.speech import say
from tests.unit.engine.test_engine import CLIPS, MIXED, run_mixed

END = 9
VOCABULARY = 10
WIDTH = 5
ASKED = DecodingOptions(language="de", max_new_tokens=16, compression_ratio_threshold=99.0)
HEARD = [make_clip(40 + i, duration_s) for i, duration_s in enumerate((30, 3, 12, 7))]


def next_logprobs(tokens: tuple[int, ...], seed: int) -> torch.Tensor:
    """Of a language model that is made of chance: [VOCABULARY]. Some tokens are forbidden."""
    chance = random.Random(f"{seed} {tokens}")
    scores = torch.tensor([chance.gauss(0, 2) for _ in range(VOCABULARY)])
    scores[END if not tokens else chance.randrange(END)] = -math.inf  # the text is never empty
    return scores.log_softmax(-1)


def search(width: int, seed: int, max_tokens: int) -> tuple[tuple[int, ...], float]:
    beam = BeamSearch(width, max_tokens, END, margin=math.inf)
    while not beam.is_over:
        rows = [next_logprobs(each.tokens, seed).topk(num_candidates(width)) for each in beam.running]
        beam.advance([zip(row.indices.tolist(), row.values.tolist(), strict=True) for row in rows])
    best = beam.best()
    return best.tokens, best.sum_logprob


def test_numbers_that_are_none_end_the_search() -> None:
    beam = BeamSearch(2, 5, END)
    assert beam.advance([[(1, math.nan), (2, -math.inf)]]) == []
    assert beam.is_over
    assert beam.best().tokens == ()


def read_on(beam: BeamSearch, *candidates: dict[int, float]) -> list[tuple[int, ...]]:
    """One step: for each hypothesis its next tokens with their probabilities. The hypotheses then."""
    beam.advance([[(token, math.log(each[token])) for token in each] for each in candidates])
    return [each.tokens for each in beam.running]


def test_unlikely_hypotheses_are_dropped_but_for_the_greedy_one() -> None:
    beam = BeamSearch(WIDTH, 30, END)
    assert read_on(beam, {1: 0.9, 2: 0.09}) == [(1,)], "a tenth as likely"
    assert read_on(beam, {3: 0.5, 4: 0.4}) == [(1, 3), (1, 4)]
    followed = {5: 0.02, 6: 0.01}
    assert read_on(beam, followed, {7: 0.9}) == [(1, 3, 5), (1, 4, 7)], "greedy decoding went there"


@pytest.mark.slow
@pytest.mark.parametrize("audio_end", [math.inf, END + 3])
def test_a_sure_search_appends_what_comparing_all_candidates_would_keep(audio_end: float) -> None:
    """On random searches, sure and in doubt by turns, with timestamps (after `END`) and impossible tokens."""
    num_sure = 0
    for seed in range(100):
        chance = random.Random(seed)
        fast, plain = (BeamSearch(WIDTH, 12, END, audio_end=audio_end) for _ in range(2))
        while not plain.is_over:
            rows = np.array([next_candidates(chance) for _ in plain.running])
            lists = [list(zip(map(int, row[0]), row[1].tolist(), strict=True)) for row in rows]
            (logprob, *_), (lead, *_) = leads(rows[:, 0], rows[:, 1], END)
            is_sure = fast.append_if_sure(lists[0][0][0], logprob, lead)
            parents = [0] if is_sure else fast.advance(lists)
            assert parents == plain.advance(lists)
            assert found(fast) == found(plain)
            num_sure += is_sure
    assert num_sure > 150


def found(beam: BeamSearch) -> list[Any]:
    """Return all hypotheses; sums of several times may be rounded otherwise."""
    both = [*beam.running, *beam.ended]
    logprobs = [np.round([*each.logprobs, each.sum_logprob], 9).tolist() for each in both]
    return [logprobs, [each._replace(logprobs=(), sum_logprob=0.0) for each in both]]


def next_candidates(chance: random.Random) -> list[list[float]]:
    """Distinct tokens, the likeliest first, and their log-probabilities."""
    tokens = chance.sample(range(END + 6), WIDTH + 1)
    spread = chance.choice([1.0, 8.0, 40.0, 40.0])
    scores = torch.tensor([chance.gauss(0, spread) for _ in tokens]).sort(descending=True).values
    if chance.random() < 0.2:
        scores[chance.randrange(1, len(scores)) :] = -math.inf
    return [[float(token) for token in tokens], scores.double().log_softmax(-1).tolist()]


def test_doubt_and_numbers_that_are_none_are_never_sure() -> None:
    for logprobs in ([math.nan] * 3, [-0.3, -1.4, -9.0], [-math.inf] * 3):
        beam = BeamSearch(2, 9, END)
        (logprob,), (lead,) = leads(np.array([[1, 2, 3]]), np.array([logprobs]), END)
        assert not beam.append_if_sure(1, logprob, lead)
        assert beam.running[0].tokens == ()


def test_a_search_that_is_bound_begins_with_what_it_is_bound_to() -> None:
    beam = BeamSearch(2, 30, END)
    assert read_on(beam, {1: 0.9}) == [(1,)]
    assert read_on(beam, {2: 0.5, END: 0.5}) == [(1, 2)], "a text has ended before the report"
    beam.bind(2)
    assert read_on(beam, {3: 0.3, END: 0.6}) == [(1, 2, 3)]
    assert beam.best().tokens == (1, 2), "behind the report any text may win"
    read_on(beam, {4: 0.1, END: 0.1})
    assert beam.best().tokens[:2] == (1, 2)


def test_of_hypotheses_that_come_to_say_the_same_the_likelier_goes_on() -> None:
    beam = BeamSearch(WIDTH, 30, END)
    read_on(beam, {1: 0.5, 2: 0.4})
    assert len(read_on(beam, {3: 0.9}, {3: 0.9})) == 2
    assert read_on(beam, {4: 0.9}, {4: 0.9}) == [(1, 3, 4)]


def test_a_word_that_is_spelt_in_more_tokens_is_the_same_a_step_later() -> None:
    beam = BeamSearch(WIDTH, 30, END)
    read_on(beam, {1: 0.5, 2: 0.4})
    read_on(beam, {4: 0.9}, {3: 0.9})  # the second one is a token behind
    assert len(read_on(beam, {5: 0.9}, {4: 0.9})) == 2
    assert read_on(beam, {6: 0.9}, {5: 0.9}) == [(1, 4, 5, 6)]


def test_a_text_ends_where_a_segment_would_begin_behind_the_audio() -> None:
    beam = BeamSearch(WIDTH, 30, END, audio_end=END + 5)
    assert read_on(beam, {1: 0.9}) == [(1,)]
    assert read_on(beam, {END + 7: 0.9}) == [(1, END + 7)], "a segment may end there"
    assert read_on(beam, {END + 8: 0.5, END + 4: 0.15, END: 0.3}) == []
    assert beam.best().tokens == (1, END + 7)
    assert beam.best().sum_logprob == pytest.approx(math.log(0.9 * 0.9 * 0.95)), "that it ends, or goes on"


def test_a_long_text_is_not_given_up_for_a_short_one_that_is_less_likely_for_its_length() -> None:
    beam = BeamSearch(WIDTH, 30, END)
    read_on(beam, {1: 0.6, 2: 0.4})
    read_on(beam, {END: 0.1}, {3: 0.3})
    for token in (4, 5, 6, 7, 8):
        assert read_on(beam, {token: 0.5})
    read_on(beam, {END: 0.9})
    assert beam.is_over
    assert beam.best().tokens == (2, 3, 4, 5, 6, 7, 8)


# -- In the engine ----------------------------------------------------------------------------------------


def results_of_mixed(engine: Engine, asked: Sequence[DecodingOptions] = MIXED) -> list[ChunkResult]:
    found = results(run_mixed(engine, asked))
    assert engine.slots_in_use == 0
    return [found[str(number)] for number in range(len(CLIPS))]


@pytest.fixture(scope="module")
def alone(pocket: Checkpoint) -> list[ChunkResult]:
    """Each clip with its options, and nobody else in the engine."""
    engines = [pocket.engine(num_slots=1, beam_size=WIDTH) for _ in CLIPS]
    return [
        transcribe(engine, [clip], options)[0]
        for engine, clip, options in zip(engines, CLIPS, MIXED, strict=True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_slots", "lookahead"),
    [
        (3, True),
        *(
            pytest.param(*each, marks=pytest.mark.trial)
            for each in ((1, False), (1, True), (3, False), (8, False), (8, True))
        ),
    ],
)
def test_beams_of_several_chunks_at_once_give_what_each_gives_alone(
    pocket: Checkpoint, alone: list[ChunkResult], num_slots: int, lookahead: bool
) -> None:
    found = results_of_mixed(pocket.engine(num_slots=num_slots, beam_size=WIDTH, lookahead=lookahead))
    assert [result.tokens for result in found] == [result.tokens for result in alone]
    assert [result.num_fallbacks for result in found] == [result.num_fallbacks for result in alone]


@pytest.mark.slow
@pytest.mark.parametrize("lookahead", [False, True])
def test_most_tokens_of_clear_speech_are_appended_as_sure_and_change_no_text(
    embedded: Checkpoint, lookahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoken = [say(digits).samples for digits in ("407", "98653", "12")]
    append, advance, num_doubtful = BeamSearch.append_if_sure, BeamSearch.advance, 0

    def count(beam: BeamSearch, *candidates: Any) -> list[int]:
        nonlocal num_doubtful
        num_doubtful += 1
        return advance(beam, *candidates)

    def run_all(append_if_sure: Any) -> tuple[list[tuple[Any, float]], int]:
        nonlocal num_doubtful
        num_doubtful = 0
        monkeypatch.setattr(BeamSearch, "append_if_sure", append_if_sure)
        found = transcribe(embedded.engine(beam_size=WIDTH, lookahead=lookahead), spoken, DecodingOptions())
        return [(each.tokens, each.avg_logprob) for each in found], num_doubtful

    monkeypatch.setattr(BeamSearch, "advance", count)
    plain, num_steps = run_all(lambda *_: False)
    found, num_compared = run_all(append)
    assert found == plain
    num_words = sum(map(embedded.tokenizer.is_text, chain.from_iterable(tokens for tokens, _ in found)))
    assert num_steps - num_compared > num_words / 2, "timestamps and ends are always compared"


@pytest.mark.slow
@pytest.mark.parametrize("lookahead", [pytest.param(False, marks=pytest.mark.trial), True])
def test_a_cancelled_search_frees_all_its_slots(pocket: Checkpoint, lookahead: bool) -> None:
    engine = pocket.engine(num_slots=2, beam_size=WIDTH, lookahead=lookahead)
    for name, clip in zip(("leaver", "stayer"), HEARD, strict=False):
        submit(engine, name, clip, ASKED)
    for _ in range(6):
        engine.step()
    engine.handle(Cancel("leaver"))
    assert engine.slots_in_use == 1
    found = results(run(engine))
    assert list(found) == ["stayer"]
    assert found["stayer"].tokens == transcribe(pocket.engine(beam_size=WIDTH), HEARD[:2], ASKED)[1].tokens
    assert engine.slots_in_use == 0


@pytest.mark.slow
def test_a_stream_says_what_all_others_say(embedded: Checkpoint) -> None:
    spoken = [say(digits).samples for digits in ("407", "98653", "12", "1234567")]
    options = DecodingOptions(language="en")
    streamed = msgspec.structs.replace(options, early_results=True)
    found, of_stream = (
        transcribe(embedded.engine(beam_size=WIDTH), spoken, each) for each in (options, streamed)
    )
    assert [each.tokens for each in of_stream] == [each.tokens for each in found]


@pytest.mark.slow
@pytest.mark.parametrize("own", [{"temperatures": (0.3,)}, {"presence_penalty": 0.5}, {"task": "translate"}])
def test_a_clients_own_temperature_or_penalty_and_translations_know_no_beam(
    pocket: Checkpoint, own: dict[str, Any]
) -> None:
    options = msgspec.structs.replace(ASKED, **own)
    found, plain = (transcribe(pocket.engine(beam_size=width), HEARD[1:2], options) for width in (WIDTH, 1))
    assert [each.tokens for each in found] == [each.tokens for each in plain]


THEIR_WARNING = pytest.mark.filterwarnings(
    "ignore:__array_wrap__:DeprecationWarning"
)  # numpy's, in openai-whisper


class NoCache:
    def rearrange_kv_cache(self, _: object) -> None: ...


def their_search(width: int, seed: int, max_tokens: int) -> tuple[tuple[int, ...], float]:
    from whisper.decoding import BeamSearchDecoder, MaximumLikelihoodRanker

    decoder: Any = BeamSearchDecoder(width, END, NoCache())
    tokens, sums = torch.zeros(width, 1, dtype=torch.long), torch.zeros(width)
    for _ in range(max_tokens):
        scores = torch.stack([next_logprobs(tuple(row[1:]), seed) for row in tokens.tolist()])
        tokens, completed = decoder.update(tokens, scores, sums)
        if completed:
            break
    ended, totals = decoder.finalize(tokens[None], sums[None])
    texts = [[row[1 : row.tolist().index(END)] for row in rows] for rows in ended]
    (best,) = MaximumLikelihoodRanker(None).rank(texts, totals)
    return tuple(texts[0][best].tolist()), totals[0][best]


@THEIR_WARNING
@pytest.mark.parametrize("width", [2, 3, 5])
@pytest.mark.parametrize("max_tokens", [3, 30])
def test_the_search_is_openai_whispers(width: int, max_tokens: int) -> None:
    for seed in range(30):
        tokens, total = search(width, seed, max_tokens)
        their_tokens, their_total = their_search(width, seed, max_tokens)
        assert tokens == their_tokens
        assert total == pytest.approx(their_total, abs=1e-4)


@pytest.fixture
def unpruned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search of the engine is openai-whisper's."""
    monkeypatch.setattr(active_chunk, "BeamSearch", partial(BeamSearch, margin=math.inf))


def with_beam(theirs: Any, features: torch.Tensor, **asked: Any) -> list[Any]:
    import whisper

    options = whisper.DecodingOptions(temperature=0.0, beam_size=WIDTH, fp16=False, **asked)
    with torch.inference_mode():
        return [whisper.decode(theirs, each, options) for each in features]


@THEIR_WARNING
@pytest.mark.usefixtures("unpruned")
def test_texts_are_those_of_openai_whispers_beam_search(pocket: Checkpoint) -> None:
    import whisper

    clips = HEARD[:2]
    mels = [whisper.log_mel_spectrogram(clip, padding=whisper.audio.N_SAMPLES) for clip in clips]
    features = torch.stack([whisper.pad_or_trim(mel, whisper.audio.N_FRAMES) for mel in mels])
    theirs = load_openai_whisper(pocket.directory)
    expected = with_beam(theirs, features, language="de", sample_len=ASKED.max_new_tokens)
    greedy = transcribe(pocket.engine(), clips, ASKED)
    for lookahead in (False, True):
        found = transcribe(pocket.engine(beam_size=WIDTH, lookahead=lookahead), clips, ASKED)
        assert [each.tokens for each in found] != [each.tokens for each in greedy]
        for ours, their in zip(found, expected, strict=True):
            assert list(ours.tokens) == their.tokens
            assert ours.temperature == 0
            if ours.finish_reason == "stop":
                assert ours.avg_logprob == pytest.approx(their.avg_logprob, abs=1e-3)
