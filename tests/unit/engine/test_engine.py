"""The engine's promises: every chunk ends once, other requests change nothing, options are obeyed."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from asr_server.core import ChunkId, ChunkResult, DecodingOptions, Samples
from asr_server.engine import Engine
from asr_server.engine import engine as engine_module
from asr_server.transport.messages import (
    Cancel,
    Credit,
    Event,
    Failed,
    LanguageDetected,
    Result,
    SetLanguage,
    Submit,
)
from harness.clips import make_clip
from harness.engine_helpers import Checkpoint, Reference, answer_languages, results, run, submit, transcribe
from tests.support.checkpoints import pocket_directory

CLIPS = [make_clip(i, duration_s) for i, duration_s in enumerate((9, 1, 30, 4, 0.5, 14, 2, 22))]
PLAIN = DecodingOptions(language="de", max_new_tokens=12)

# What may be asked for, one after another; each runs beside all other kinds.
MIXED = [
    DecodingOptions(language="de", max_new_tokens=5),
    DecodingOptions(language="en", max_new_tokens=17),
    DecodingOptions(language="fr", max_new_tokens=9, temperatures=(0.7,), seed=3),
    DecodingOptions(language="de", max_new_tokens=12, prompt_tokens=tuple(range(300, 340))),
    DecodingOptions(language="de", max_new_tokens=14, repetition_penalty=1.5, presence_penalty=0.2),
    DecodingOptions(max_new_tokens=6),
    DecodingOptions(language="es", max_new_tokens=8, temperatures=(0.0, 0.4, 1.0), logprob_threshold=0.0),
    DecodingOptions(language="de", max_new_tokens=20, temperatures=(1.0,), top_p=0.9, top_k=40, min_p=1e-5),
]


def run_mixed(engine: Engine, asked: Sequence[DecodingOptions] = MIXED) -> list[Event]:
    """Requests of every kind, some arriving while others run."""
    events: list[Event] = []
    for number, (clip, options) in enumerate(zip(CLIPS, asked, strict=True)):
        submit(engine, str(number), clip, options)
        if number % 3 == 2:
            events += answer_languages(engine, engine.step())
    return events + run(engine)


def credits(events: list[Event]) -> int:
    return sum(event.count for event in events if isinstance(event, Credit))


@pytest.mark.parametrize(
    ("num_slots", "lookahead"),
    [
        (2, True),
        *(pytest.param(*each, marks=pytest.mark.trial) for each in ((2, False), (8, False), (8, True))),
    ],
)
def test_other_requests_change_no_tokens(
    pocket: Checkpoint, alone: list[Any], num_slots: int, lookahead: bool
) -> None:
    engine = pocket.engine(num_slots=num_slots, encode_batch=3, lookahead=lookahead)
    found = results(run_mixed(engine))
    for i, expected in enumerate(alone):
        assert found[str(i)].tokens == expected.tokens
        assert found[str(i)].temperature == expected.temperature
        assert found[str(i)].avg_logprob == pytest.approx(expected.avg_logprob, abs=1e-4)
    assert engine.heartbeat().num_decoded_tokens > engine.heartbeat().num_decode_steps


# Every option, with a value that changes what its own request is told.
EACH_OPTION: dict[str, Any] = {
    "task": "translate",
    "language": "fr",
    "candidate_languages": ("fr", "ja"),
    "multilingual": True,
    "prompt_tokens": tuple(range(500, 700)),
    "keywords": ("one", "two", "Kubernetes"),
    "condition_on_previous_text": True,
    "word_timestamps": True,
    "text_only": True,
    "urgency": -1,
    "full_letters": 10,
    "early_results": True,
    "streams": True,
    "temperatures": (0.0, 0.6, 1.0),
    "compression_ratio_threshold": 0.0,
    "logprob_threshold": 0.0,
    "no_speech_threshold": 0.0,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.3,
    "repetition_penalty": 2.0,
    "frequency_penalty": 1.0,
    "presence_penalty": 1.0,
    "seed": 9,
    "max_new_tokens": 3,
    "token_logprobs": True,
    "is_last_part": True,
    "is_tentative": True,
    "given_tokens": (7, 8, 9),
    "draft_tokens": (7, 8, 9),
}


def test_each_option_of_one_request_leaves_the_texts_of_all_others_unchanged(pocket: Checkpoint) -> None:
    assert set(EACH_OPTION) == set(DecodingOptions.__struct_fields__)
    clips = [make_clip(70 + i, 3 + i) for i in range(2)]
    expected = transcribe(pocket.engine(), clips, PLAIN)
    engine = pocket.engine()
    for i, clip in enumerate(clips):
        submit(engine, str(i), clip, PLAIN)
    for name, value in EACH_OPTION.items():
        others: dict[str, Any] = {"language": None} if name in ("candidate_languages", "multilingual") else {}
        others |= {"temperatures": (0.8,)} if name in ("top_p", "top_k", "min_p", "seed") else {}
        submit(engine, name, make_clip(90, 5.0), msgspec.structs.replace(PLAIN, **{name: value}, **others))
    found = results(run(engine))
    assert [found[str(i)].tokens for i in range(len(clips))] == [result.tokens for result in expected]
    assert len({found[name].tokens for name in EACH_OPTION}) > 8, "the options must have had an effect"


def test_every_chunk_ends_once_and_gives_its_credit_back(pocket: Checkpoint) -> None:
    engine = pocket.engine(num_slots=2, encode_batch=2)
    for i, clip in enumerate(CLIPS[:5]):
        submit(engine, str(i), clip, PLAIN)
    submit(engine, "bad", CLIPS[0], DecodingOptions(language="tlh"))
    submit(engine, "gone", CLIPS[0], PLAIN)
    engine.handle(Cancel("gone"))
    events = run(engine)
    ended = [event.id.handle_id for event in events if isinstance(event, Result | Failed)]
    assert sorted(ended) == ["0", "1", "2", "3", "4", "bad"]
    assert credits(events) == 7
    assert engine.slots_in_use == 0
    assert engine.step() == []


@pytest.mark.parametrize("num_slots", [1, 3])
def test_urgent_chunks_pass_the_rest_and_others_wait_until_they_have_ended(
    pocket: Checkpoint, num_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "_LONGEST_HELD_S", 600.0)  # however slow the machine is
    engine = pocket.engine(num_slots=num_slots, encode_batch=3)
    for name, urgency in (("interim", -1), ("file", 0), ("final", 1)):
        options = msgspec.structs.replace(PLAIN, urgency=urgency, language=None if urgency > 0 else "de")
        submit(engine, name, CLIPS[1], options)
    while not (asked := [event for event in engine.step() if isinstance(event, LanguageDetected)]):
        pass
    assert engine.slots_in_use <= 2, "the interim reading must not be encoded"
    before = results(run(engine))  # while the urgent one waits for its language
    engine.handle(SetLanguage(asked[0].id, "de"))
    order = [*before, *results(run(engine))]
    assert order == (["final", "file", "interim"] if num_slots == 1 else ["file", "final", "interim"])


@pytest.mark.parametrize("lookahead", [False, True])
def test_a_cancelled_request_frees_its_slots_at_once(pocket: Checkpoint, lookahead: bool) -> None:
    engine = pocket.engine(num_slots=2, lookahead=lookahead)
    for i in range(2):
        submit(engine, "leaver", CLIPS[i], PLAIN)
    submit(engine, "stayer", CLIPS[2], PLAIN)
    engine.step()
    assert engine.slots_in_use == 2
    engine.handle(Cancel("leaver"))
    assert engine.slots_in_use == 0
    assert list(results(run(engine))) == ["stayer"]


@pytest.mark.parametrize(
    ("samples", "options", "reason"),
    [
        (CLIPS[1], DecodingOptions(language="tlh"), "language 'tlh'"),
        (CLIPS[1], DecodingOptions(language="de", prompt_tokens=(10**6,)), "vocabulary"),
        (np.zeros(30 * 16_000 + 1, np.float32), PLAIN, "window of 30 s"),
    ],
)
def test_a_chunk_that_cannot_be_decoded_fails_and_the_engine_goes_on(
    pocket: Checkpoint, samples: Samples, options: DecodingOptions, reason: str
) -> None:
    engine = pocket.engine()
    submit(engine, "bad", samples, options)
    submit(engine, "good", CLIPS[1], PLAIN)
    events = run(engine)
    (failure,) = [event for event in events if isinstance(event, Failed)]
    assert failure.id.handle_id == "bad"
    assert reason in failure.message
    assert [event.id.handle_id for event in events if isinstance(event, Result)] == ["good"]


# -- Language -------------------------------------------------------------------------------------------


def test_a_slot_is_held_until_the_language_is_set(pocket: Checkpoint) -> None:
    engine = pocket.engine()
    id = submit(engine, "x", CLIPS[3], DecodingOptions(max_new_tokens=4))
    (detected,) = [event for event in engine.step() if isinstance(event, LanguageDetected)]
    assert detected.id == id
    assert sum(detected.probabilities.values()) == pytest.approx(1, abs=1e-5)
    assert set(detected.probabilities) == set(pocket.tokenizer.specials.languages)
    assert not engine.has_work
    assert engine.slots_in_use == 1
    engine.handle(SetLanguage(id, "sv"))
    held = results(run(engine))["x"]
    given = transcribe(pocket.engine(), [CLIPS[3]], DecodingOptions(language="sv", max_new_tokens=4))[0]
    assert held == given
    assert held.language == "sv"


def test_detection_keeps_to_the_candidates(pocket: Checkpoint) -> None:
    engine = pocket.engine()
    options = DecodingOptions(candidate_languages=("fi", "nl", "tlh"), max_new_tokens=2)
    submit(engine, "x", CLIPS[3], options)
    (detected,) = [event for event in engine.step() if isinstance(event, LanguageDetected)]
    assert set(detected.probabilities) == {"fi", "nl"}


def test_one_chunk_of_a_request_can_be_cancelled(pocket: Checkpoint) -> None:
    engine = pocket.engine(num_slots=2)
    ids = [ChunkId("long", number) for number in range(3)]
    for id in ids:
        engine.handle(Submit(id, CLIPS[1], PLAIN))
    engine.step()
    engine.handle(Cancel("long", ids[0]))
    assert engine.slots_in_use == 1
    ended = {event.id for event in run(engine) if isinstance(event, Result)}
    assert ended == {ids[1], ids[2]}


def test_a_checkpoint_of_one_language_is_not_asked(embedded: Checkpoint) -> None:
    engine = embedded.engine()
    submit(engine, "x", CLIPS[1], DecodingOptions(max_new_tokens=4))
    events = run(engine)
    assert not [event for event in events if isinstance(event, LanguageDetected)]
    assert results(events)["x"].language is None


def test_a_held_chunk_can_be_cancelled(pocket: Checkpoint) -> None:
    engine = pocket.engine()
    submit(engine, "leaver", CLIPS[1], DecodingOptions(max_new_tokens=2))
    engine.step()
    engine.handle(Cancel("leaver"))
    assert engine.slots_in_use == 0


# -- Options --------------------------------------------------------------------------------------------


def test_the_ladder_is_climbed_while_results_are_unlikely_and_the_best_kept(pocket: Checkpoint) -> None:
    def heard(*temperatures: float) -> list[ChunkResult]:
        options = DecodingOptions(
            language="de",
            max_new_tokens=6,
            temperatures=temperatures,
            logprob_threshold=0.0,
            no_speech_threshold=1.1,
        )
        return transcribe(pocket.engine(), CLIPS[:2], options)

    found = heard(0.0, 0.2, 0.4)
    assert [result.num_fallbacks for result in found] == [2, 2]
    tries = zip(heard(0.0), heard(0.2), heard(0.4), strict=True)
    likeliest = [max(each, key=lambda result: result.avg_logprob) for each in tries]
    assert [result.tokens for result in found] == [result.tokens for result in likeliest]


def test_seeds_repeat_and_differ(pocket: Checkpoint) -> None:
    def drawn(seed: int) -> Any:
        options = DecodingOptions(language="de", max_new_tokens=12, temperatures=(1.0,), seed=seed)
        return transcribe(pocket.engine(), CLIPS[:1], options)[0].tokens

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_the_number_of_tokens_is_bounded_by_the_options_and_the_model(pocket: Checkpoint) -> None:
    (short,) = transcribe(pocket.engine(), CLIPS[1:2], DecodingOptions(language="de", max_new_tokens=3))
    assert (len(short.tokens), short.finish_reason) == (3, "length")
    asked = DecodingOptions(language="de", prompt_tokens=tuple(range(1000, 1300)))
    (long,) = transcribe(pocket.engine(), CLIPS[1:2], asked)
    room = 448 - 224 - 3  # <|startofprev|> and 223 tokens; then the three that start the transcript
    assert len(long.tokens) == room if long.finish_reason == "length" else len(long.tokens) < room


# -- Figures --------------------------------------------------------------------------------------------


@torch.inference_mode()
def test_log_probabilities_and_no_speech_are_those_of_the_model(pocket: Checkpoint) -> None:
    from whisper.decoding import ApplyTimestampRules

    (found,) = transcribe(pocket.engine(), CLIPS[:1], PLAIN)
    specials, rules = pocket.tokenizer.specials, pocket.rules
    prompt = [specials.start_of_transcript, specials.languages["de"], specials.transcribe]
    reference = Reference(pocket_directory())
    logits = reference.model(
        input_features=reference.features(CLIPS[:1]),
        decoder_input_ids=torch.tensor([[*prompt, *found.tokens]]),
    ).logits[0]
    no_speech = logits[0].softmax(-1)[specials.no_speech].item()
    assert found.no_speech_prob == pytest.approx(no_speech, rel=1e-3)
    scores = logits[len(prompt) - 1 : -1]
    scores[:, list(rules.suppress)] = float("-inf")
    scores[0, list(rules.suppress_at_begin)] = float("-inf")
    tokenizer: Any = SimpleNamespace(
        eot=specials.end_of_text,
        no_timestamps=specials.no_timestamps,
        timestamp_begin=specials.timestamp_begin,
    )
    timestamp_rules = ApplyTimestampRules(tokenizer, 0, rules.max_initial_timestamp)
    for length, row in enumerate(scores):
        timestamp_rules.apply(row[None], torch.tensor([found.tokens[:length]], dtype=torch.long))
    expected = scores.log_softmax(-1).gather(1, torch.tensor(found.tokens)[:, None])[:, 0]
    assert found.logprobs == pytest.approx(expected.tolist(), abs=1e-3)
    assert found.avg_logprob == pytest.approx(expected.sum().item() / (len(found.tokens) + 1), abs=1e-3)


@pytest.mark.parametrize("short_audio", ["exact", "tail"])
def test_audio_of_which_the_model_makes_no_numbers_fails_and_harms_no_later_chunk_in_its_slot(
    pocket: Checkpoint, short_audio: str
) -> None:
    """What a slot holds beyond its audio and text is masked, but read: it must be numbers."""
    later = [PLAIN, msgspec.structs.replace(PLAIN, prompt_tokens=tuple(range(300, 312)))]

    def hear(engine: Engine) -> list[Any]:
        for i, options in enumerate(later):
            submit(engine, str(i), CLIPS[3 + 3 * i], options)
        found = results(run(engine))
        return [found[str(i)].tokens for i in range(len(later))]

    engine = pocket.engine(num_slots=2, short_audio=short_audio, lookahead=True)
    ladder = msgspec.structs.replace(PLAIN, max_new_tokens=30, temperatures=(0.0, 0.5, 1.0))
    for i in range(2):
        submit(engine, f"too loud {i}", CLIPS[2] * np.float32(1e25), ladder)
    failed = [event.id.handle_id for event in run(engine) if isinstance(event, Failed)]
    assert failed == ["too loud 0", "too loud 1"]
    assert engine.heartbeat().num_decode_steps < 2 * 30, "nothing is tried again at another temperature"
    assert hear(engine) == hear(pocket.engine(num_slots=2, short_audio=short_audio, lookahead=True))


@pytest.mark.parametrize("lookahead", [pytest.param(False, marks=pytest.mark.trial), True])
def test_a_chunk_of_nan_that_is_cancelled_before_its_language_is_chosen_harms_no_later_chunk(
    pocket: Checkpoint, lookahead: bool
) -> None:
    engine = pocket.engine(num_slots=3, lookahead=lookahead)
    for name in ("before 0", "before 1", "before 2"):
        submit(engine, name, CLIPS[1], PLAIN)
    run(engine)
    beside, loud = (DecodingOptions(language=code, max_new_tokens=60) for code in ("de", None))
    submit(engine, "first", CLIPS[3], beside)
    submit(engine, "too loud", CLIPS[2] * np.float32(1e25), loud)
    submit(engine, "last", CLIPS[6], beside)
    while engine.heartbeat().num_decode_steps < 40:
        engine.step()
    engine.handle(Cancel("too loud"))
    submit(engine, "innocent", CLIPS[1], PLAIN)
    (alone,) = transcribe(pocket.engine(), CLIPS[1:2], PLAIN)
    assert results(run(engine))["innocent"].tokens == alone.tokens
