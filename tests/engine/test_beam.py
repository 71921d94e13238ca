"""Beam search: openai-whisper's, token for token, whoever else is decoded; nothing is held when it ends."""

from __future__ import annotations

import math
import random
from typing import Any

import msgspec
import pytest
import torch

from asr_server.channel.messages import Cancel, Event
from asr_server.core import ChunkResult, DecodingOptions
from asr_server.engine import Engine, active_chunk
from asr_server.engine.beam import BeamSearch
from benchmarks.clips import make_clip
from benchmarks.engine_helpers import Checkpoint, answer_languages, results, run, submit, transcribe
from benchmarks.openai_whisper import load_openai_whisper
from benchmarks.speech.corpora import corpus, sample
from tests.engine.device_stand_ins import imitate_late_device
from tests.engine.test_engine import CLIPS, MIXED
from tests.real_weights import hugging_face_checkpoint
from tests.speech import say

THEIR_WARNING = pytest.mark.filterwarnings(
    "ignore:__array_wrap__:DeprecationWarning"
)  # numpy's, in openai-whisper

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
    beam = BeamSearch(width, max_tokens, END)
    while not beam.is_over:
        rows = [next_logprobs(each.tokens, seed).topk(beam.num_candidates) for each in beam.running]
        beam.advance([zip(row.indices.tolist(), row.values.tolist(), strict=True) for row in rows])
    best = beam.best()
    return best.tokens, best.sum_logprob


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


def test_numbers_that_are_none_end_the_search() -> None:
    beam = BeamSearch(2, 5, END)
    assert beam.advance([[(1, math.nan), (2, -math.inf)]]) == []
    assert beam.is_over
    assert beam.best().tokens == ()


# -- In the engine ----------------------------------------------------------------------------------------


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every greedy text is in doubt."""
    monkeypatch.setattr(active_chunk, "BEAM_BELOW", math.inf)


def likelier_of_theirs(theirs: Any, features: torch.Tensor, **asked: Any) -> list[tuple[Any, bool]]:
    """openai-whisper's greedy text or its beam's, whichever is likelier; whether it is the beam's."""
    import whisper

    def decoded(beam_size: int | None) -> list[Any]:
        options = whisper.DecodingOptions(temperature=0.0, beam_size=beam_size, fp16=False, **asked)
        with torch.inference_mode():
            return [whisper.decode(theirs, each, options) for each in features]

    pairs = zip(decoded(None), decoded(WIDTH), strict=True)
    return [
        (beam, True) if beam.avg_logprob > greedy.avg_logprob + 1e-4 else (greedy, False)
        for greedy, beam in pairs
    ]


@THEIR_WARNING
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("lookahead", [False, True])
def test_texts_are_those_of_openai_whispers_beam_search(pocket: Checkpoint, lookahead: bool) -> None:
    import whisper

    mels = [whisper.log_mel_spectrogram(clip, padding=whisper.audio.N_SAMPLES) for clip in HEARD]
    features = torch.stack([whisper.pad_or_trim(mel, whisper.audio.N_FRAMES) for mel in mels])
    expected = likelier_of_theirs(
        load_openai_whisper(pocket.directory), features, language="de", sample_len=ASKED.max_new_tokens
    )
    found = transcribe(pocket.engine(beam_size=WIDTH, lookahead=lookahead), HEARD, ASKED)
    assert sum(is_beams for _, is_beams in expected) > 1, "a beam finds something likelier"
    for ours, (theirs, _) in zip(found, expected, strict=True):
        assert list(ours.tokens) == theirs.tokens
        assert ours.beam_searched
        assert ours.temperature == 0
        if ours.finish_reason == "stop":
            assert ours.avg_logprob == pytest.approx(theirs.avg_logprob, abs=1e-3)


@THEIR_WARNING
@pytest.mark.usefixtures("always")
def test_real_speech_is_read_as_openai_whispers_beam_search_reads_it() -> None:
    import whisper

    clips = [
        *sample(corpus("fillets"), 2),
        *[clip for clip in corpus("audioeval") if clip.language == "es"][:1],
    ]
    if not clips:
        pytest.skip("no recordings are installed")
    checkpoint = Checkpoint.load(hugging_face_checkpoint("base"))
    engine, theirs = checkpoint.engine(beam_size=WIDTH), load_openai_whisper(checkpoint.directory)
    for clip in clips:
        mel = whisper.log_mel_spectrogram(whisper.pad_or_trim(clip.samples()))
        ((expected, _),) = likelier_of_theirs(theirs, mel[None], language=clip.language)
        options = DecodingOptions(language=clip.language)
        (found,) = transcribe(engine, [clip.samples()], options)
        assert list(found.tokens) == expected.tokens, clip.name
        assert found.avg_logprob == pytest.approx(expected.avg_logprob, abs=2e-3), clip.name


def run_mixed(engine: Engine) -> list[ChunkResult]:
    """Requests of every kind, some arriving while others run."""
    events: list[Event] = []
    for number, (clip, options) in enumerate(zip(CLIPS, MIXED, strict=True)):
        submit(engine, str(number), clip, options)
        if number % 3 == 2:
            events += answer_languages(engine, engine.step())
    found = results(events + run(engine))
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


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("num_slots", [1, 3, 8])
def test_beams_of_several_chunks_at_once_give_what_each_gives_alone(
    pocket: Checkpoint, alone: list[ChunkResult], num_slots: int, lookahead: bool
) -> None:
    """With few slots, too: then a beam waits until there are enough for it."""
    asked = [not (options.temperatures[0] or options.repetition_penalty > 1) for options in MIXED]
    assert [result.beam_searched for result in alone] == asked
    found = run_mixed(pocket.engine(num_slots=num_slots, beam_size=WIDTH, lookahead=lookahead))
    assert [result.tokens for result in found] == [result.tokens for result in alone]
    assert [result.num_fallbacks for result in found] == [result.num_fallbacks for result in alone]


@pytest.mark.parametrize("seed", range(2))
def test_a_beam_is_the_same_on_a_device_that_is_late(
    pocket: Checkpoint, alone: list[ChunkResult], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    imitate_late_device(monkeypatch, seed)
    found = run_mixed(pocket.engine(num_slots=4, beam_size=WIDTH))
    assert [result.tokens for result in found] == [result.tokens for result in alone]


@pytest.mark.parametrize("lookahead", [False, True])
def test_a_cancelled_beam_frees_all_its_slots_and_those_that_wait_go_on(
    pocket: Checkpoint, lookahead: bool
) -> None:
    engine = pocket.engine(num_slots=2, beam_size=WIDTH, lookahead=lookahead)
    for name, clip in zip(("leaver", "stayer"), HEARD, strict=False):
        submit(engine, name, clip, ASKED)
    while engine.slots_in_use <= 2:
        engine.step()
    assert engine.slots_in_use == 2 + WIDTH - 1, "one has a beam, the other waits for slots"
    assert engine.has_work
    engine.handle(Cancel("leaver"))
    assert engine.slots_in_use == 1
    found = results(run(engine))
    assert list(found) == ["stayer"]
    assert found["stayer"].beam_searched
    assert engine.slots_in_use == 0


def test_chunks_are_not_admitted_into_slots_that_a_beam_waits_for(pocket: Checkpoint) -> None:
    engine = pocket.engine(num_slots=2, beam_size=WIDTH)
    for number in range(6):
        submit(engine, str(number), HEARD[number % len(HEARD)], ASKED)
    most = 0
    events: list[Event] = []
    while engine.has_work:
        events += engine.step()
        most = max(most, engine.slots_in_use)
    assert len(results(events)) == 6
    assert most == 2 + WIDTH - 1


def test_a_stream_says_what_all_others_say(embedded: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """What of a chunk could be sent is not read again, whether somebody waits for it or not."""
    spoken = [say(digits).samples for digits in ("407", "98653", "12", "1234567")]
    options = DecodingOptions(language="en")
    streamed = msgspec.structs.replace(options, early_results=True)
    searched: list[bool] = []
    for below in (0.0, -0.3, -0.4, -0.5):
        monkeypatch.setattr(active_chunk, "BEAM_BELOW", below)
        found, of_stream = (
            transcribe(embedded.engine(beam_size=WIDTH), spoken, each) for each in (options, streamed)
        )
        assert [each.tokens for each in of_stream] == [each.tokens for each in found]
        assert [each.beam_searched for each in of_stream] == [each.beam_searched for each in found]
        searched += [each.beam_searched for each in found]
    assert set(searched) == {True, False}


@pytest.mark.parametrize(
    "own",
    [
        {"temperatures": (0.3,)},
        {"presence_penalty": 0.5},
        {"logprob_threshold": 0.0, "no_speech_threshold": -1.0},
        {"task": "translate"},
    ],
)
def test_a_clients_own_temperature_or_penalty_silence_and_translations_know_no_beam(
    pocket: Checkpoint, own: dict[str, Any]
) -> None:
    options = msgspec.structs.replace(ASKED, **own)
    found, plain = (transcribe(pocket.engine(beam_size=width), HEARD[:2], options) for width in (WIDTH, 1))
    assert [each.tokens for each in found] == [each.tokens for each in plain]
    assert not any(each.beam_searched for each in found)


def test_a_text_that_is_likely_is_left_as_it_is(pocket: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(active_chunk, "BEAM_BELOW", -math.inf)
    found = transcribe(pocket.engine(beam_size=WIDTH), HEARD[:2], ASKED)
    assert not any(each.beam_searched for each in found)
