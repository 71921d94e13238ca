"""One chunk, read part after part."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from asr_server.core import SAMPLE_RATE, ChunkResult, DecodingOptions, Samples
from asr_server.metrics import REGISTRY
from asr_server.transcription.reading import MAX_READINGS, MOST_PARTS
from asr_server.transcription.transcriber import Transcriber
from asr_server.transport.messages import Submit
from tests.support.fake_replica import noise, say, wav
from tests.support.speech import WORDS, silence
from tests.support.speech import say as speak
from tests.support.tokens import TOKENIZER, t, words
from tests.unit.transcription.parts import timed
from tests.unit.transcription.running_app import (
    ENGLISH,
    THREE_CHUNKS,
    RunningApp,
    number_of_the_chunk,
    two_channels,
)


def one_or_two(submit: Submit) -> ChunkResult:
    """A model that hears what comes first, and no more."""
    said = "2" if submit.id.part else "1"
    return say(t(0.3), *words(said), t(0.7))


async def test_an_unread_tail_is_sent_again_as_the_next_part(app: RunningApp) -> None:
    def answer(submit: Submit) -> ChunkResult:
        if submit.id.part == 0:
            return say(t(0), *words("1"), t(4), t(4.5), *words("9"))
        return say(t(0.5), *words("2"), t(3))

    app.answer = answer
    _, transcript = await app.transcribe(wav(noise(12)), ENGLISH)
    assert transcript.text == "one two"
    assert [(s.start_s, s.end_s) for s in transcript.segments] == [(0.0, 4.0), (4.5, 7.0)]
    assert [len(submit.samples) for submit in app.replica.submits] == [12 * 16_000, 8 * 16_000]
    assert transcript.segments[1].seek == 400


@pytest.mark.parametrize(
    ("given", "found", "detected", "asked"),
    [
        ("en", None, None, ["en", "en"]),
        ("en", "de", None, ["en", "en"]),
        (None, "de", "en", [None, "de"]),
        (None, None, "de", [None, "de"]),
        (None, None, None, [None, None]),
    ],
)
async def test_the_rest_of_a_chunk_is_asked_for_in_the_language_of_its_beginning(
    app: RunningApp, given: str | None, found: str | None, detected: str | None, asked: list[str | None]
) -> None:
    def answer(submit: Submit) -> ChunkResult:
        beginning = say(t(0), *words("1"), t(4), t(4.5), *words("9"))
        result = say(t(0.5), *words("2"), t(3)) if submit.id.part else beginning
        return msgspec.structs.replace(result, language=submit.options.language or found)

    app.answer = answer
    app.replica.probabilities = {detected: 1.0} if detected else None
    await app.transcribe(wav(noise(12)), DecodingOptions(language=given))
    assert [submit.options.language for submit in app.replica.submits] == asked


async def test_the_parts_of_a_chunk_are_bounded_and_the_last_one_has_no_tail(app: RunningApp) -> None:
    app.answer = lambda submit: say(t(0), *words("1"), t(0.5), t(0.5), *words("2"))
    _, transcript = await app.transcribe(wav(noise(20)), msgspec.structs.replace(ENGLISH, early_results=True))
    assert transcript.text == " ".join(["one"] * MAX_READINGS) + " two"
    asked = [submit.options for submit in app.replica.submits]
    assert [each.is_last_part for each in asked] == [False] * (MAX_READINGS - 1) + [True]
    assert [each.early_results for each in asked] == [True] * (MAX_READINGS - 1) + [False]


async def test_a_limit_set_by_the_client_is_an_end(app: RunningApp) -> None:
    app.answer = lambda submit: say(*words("1"), finish_reason="length")
    _, transcript = await app.transcribe(wav(noise(20)), DecodingOptions(language="en", max_new_tokens=1))
    assert (transcript.text, len(app.replica.submits)) == ("one", 1)


async def test_a_chunk_that_was_outvoted_is_read_again_in_the_files_language(app: RunningApp) -> None:
    told = [{"de": 0.5, "en": 0.4, "zh": 0.1}, {"de": 0.02, "en": 0.97, "zh": 0.01}]
    app.replica.probabilities_of = lambda submit: told[min(submit.id.chunk, 1)]
    deltas, transcript = await app.transcribe(THREE_CHUNKS, DecodingOptions())
    assert app.replica.languages_set == ["de", "en"]
    asked = [(submit.id.chunk, submit.options.language) for submit in app.replica.submits]
    assert sorted(asked, key=str) == sorted([(0, None), (1, None), (0, "en"), (2, "en")], key=str)
    assert {delta.language for delta in deltas} == {"en"}
    assert (transcript.text, transcript.languages) == ("zero one two", ("en",))


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (say(*words("5"), avg_logprob=-2.0, no_speech_prob=0.3), ""),
        (say(*words("5"), no_speech_prob=0.9), ""),
        (say(*words("5")), "five"),
    ],
)
async def test_doubtful_voiceless_text_is_dropped(app: RunningApp, result: ChunkResult, text: str) -> None:
    app.answer = lambda submit: result
    deltas, transcript = await app.transcribe(wav(noise(4)))
    assert transcript.text == "".join(delta.text for delta in deltas) == text
    assert len(transcript.segments) == len(transcript.logprobs) == len(text.split())


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (say(*words("5"), avg_logprob=-0.9), "five"),
        (say(*words("5"), avg_logprob=-2.0, no_speech_prob=0.9), ""),
    ],
)
async def test_without_the_detector_only_the_model_says_where_nobody_speaks(
    app: RunningApp, result: ChunkResult, text: str
) -> None:
    app.transcriber = Transcriber(app.dispatcher, app.pool, TOKENIZER, check_voice=False)
    app.answer = lambda submit: result
    _, transcript = await app.transcribe(wav(noise(4)))
    assert transcript.text == text


async def test_a_doubtful_text_is_kept_where_somebody_speaks(app: RunningApp) -> None:
    app.answer = lambda submit: say(*words("5"), avg_logprob=-0.9)
    _, transcript = await app.transcribe(wav(speak("5", gap_s=1.0).samples))
    assert transcript.text == "five"


async def test_only_the_segment_in_which_nobody_speaks_is_dropped(app: RunningApp) -> None:
    """Both are in doubt; one is of noise, the other of somebody's words."""
    spoken = speak("12", gap_s=0.2).samples
    sound = np.concatenate([spoken, np.zeros(4 * 16_000 - len(spoken), np.float32), noise(2.0)])
    app.answer = lambda submit: say(
        t(0), *words("12"), t(2), t(4), *words("9"), t(6), avg_logprob=-0.9, no_speech_prob=0.5
    )
    for options in (ENGLISH, msgspec.structs.replace(ENGLISH, early_results=True, streams=True)):
        deltas, transcript = await app.transcribe(wav(sound), options)
        assert transcript.text == "".join(delta.text for delta in deltas) == "one two"
        assert [segment.start_s for segment in transcript.segments] == [0.0]
        assert len(transcript.logprobs) == 2


async def test_without_it_each_chunk_has_the_requests_prompt(app: RunningApp) -> None:
    await app.transcribe(THREE_CHUNKS, DecodingOptions(language="en", prompt_tokens=words("99")))
    assert {submit.options.prompt_tokens for submit in app.replica.submits} == {words("99")}


async def test_a_text_found_at_a_high_temperature_is_no_prompt(app: RunningApp) -> None:
    def unsure_of_the_second(submit: Submit) -> ChunkResult:
        temperature = 0.6 if submit.id.chunk == 1 else 0.4
        return msgspec.structs.replace(number_of_the_chunk(submit), temperature=temperature)

    app.answer = unsure_of_the_second
    await app.transcribe(THREE_CHUNKS, DecodingOptions(language="en", condition_on_previous_text=True))
    assert [submit.options.prompt_tokens for submit in app.replica.submits] == [(), words("0"), ()]


async def test_each_channel_knows_what_was_said_before_in_it(app: RunningApp) -> None:
    options = DecodingOptions(language="en", prompt_tokens=words("99"), condition_on_previous_text=True)
    await app.transcribe(two_channels((0, 0, 75), (1, 0, 75)), options, ("ann", "bob"))
    prompts = [submit.options.prompt_tokens for submit in app.replica.submits]
    assert prompts == [words("99"), words("99"), words("990"), words("991"), words("9902"), words("9913")]


async def test_a_chunk_without_speech_is_not_read(app: RunningApp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    await app.transcribe(wav(np.concatenate([noise(40), speak("1").samples])))
    assert {submit.id.chunk for submit in app.replica.submits} == {1}
    app.replica.submits.clear()
    (delta,), transcript = await app.transcribe(wav(noise(4)), DecodingOptions())
    assert (transcript.text, app.replica.submits) == ("", [])
    assert (delta.end_s, delta.num_audio_tokens) == (4.0, 200)


async def test_with_many_languages_what_pauses_part_has_one_each(app: RunningApp) -> None:
    spoken = ("de", "zh")
    app.replica.probabilities_of = lambda submit: {
        code: 0.9 if code == spoken[number(submit) % 2] else 0.1 for code in spoken
    }

    def number(submit: Submit) -> int:
        return submit.id.part // MOST_PARTS

    def answer(submit: Submit) -> ChunkResult:
        result = say(t(0), *words(str(number(submit))), t(len(submit.samples) // 320 * 0.02))
        return msgspec.structs.replace(result, language=spoken[number(submit) % 2])

    app.answer = answer
    sound = np.concatenate([speak("31415").samples, silence(0.8), speak("92653").samples])
    options = DecodingOptions(multilingual=True, prompt_tokens=words("7"))
    _, transcript = await app.transcribe(wav(sound), options)
    assert len(app.replica.submits) >= len(spoken)
    asked = {(submit.options.language, submit.options.prompt_tokens) for submit in app.replica.submits}
    assert asked == {(None, words("7"))}
    assert transcript.languages == spoken


@pytest.mark.parametrize(
    ("english", "in_german", "text", "asked"),
    [
        (0.7, say(t(0), *words("2"), t(4)), "two", [None, "de"]),
        (0.7, say(t(0), *words("2"), t(4), avg_logprob=-0.4), "one", [None, "de"]),  # German is less likely
        (0.7, say(t(0), *words("22222"), t(4), avg_logprob=-0.3), "one", [None, "de"]),  # so is more of it
        (0.7, msgspec.structs.replace(say(t(0), *words("2")), compression_ratio=2.5), "one", [None, "de"]),
        (0.7, say(t(0)), "one", [None, "de"]),  # no text is likely in any language
        (0.8, say(t(0), *words("2"), t(4)), "one", [None]),
    ],
)
@pytest.mark.parametrize("streams", [False, True])
async def test_a_part_of_doubtful_language_is_read_in_two_and_the_likelier_text_stands(
    app: RunningApp,
    english: float,
    in_german: ChunkResult,
    text: str,
    asked: list[str | None],
    streams: bool,
) -> None:
    app.replica.probabilities = {"zh": 0.05, "de": 0.95 - english, "en": english}

    def answer(submit: Submit) -> ChunkResult:
        code = submit.options.language or "en"
        result = in_german if code == "de" else say(t(0), *words("1"), t(4), avg_logprob=-0.5)
        return msgspec.structs.replace(result, language=code)

    app.answer = answer
    options = DecodingOptions(multilingual=True, early_results=True, streams=streams, temperatures=(0.0, 0.2))
    deltas, transcript = await app.transcribe(wav(noise(4)), options)
    assert transcript.text == "".join(delta.text for delta in deltas) == text
    assert transcript.languages == ("de" if text == "two" else "en",)
    assert [submit.options.language for submit in app.replica.submits] == asked
    assert {submit.options.temperatures for submit in app.replica.submits[1:]} <= {(0.0,)}


async def test_likely_text_that_leaves_speech_without_words_does_not_win(app: RunningApp) -> None:
    app.replica.probabilities = {"zh": 0.05, "de": 0.25, "en": 0.7}

    def answer(submit: Submit) -> ChunkResult:
        code = submit.options.language or "en"
        result = say(t(0), *words("31415"), avg_logprob=-0.8) if code == "de" else say(t(0), *words("1"))
        return msgspec.structs.replace(result, language=code)

    app.answer = answer
    _, transcript = await app.transcribe(wav(speak("31415").samples), DecodingOptions(multilingual=True))
    assert transcript.text.startswith("three one four one five")


async def test_stretches_of_a_chunk_are_read_at_once_and_answered_in_order(app: RunningApp) -> None:
    spoken = [speak(digit).samples for digit in "12"]
    sound = wav(np.concatenate([spoken[0], np.zeros(5 * SAMPLE_RATE, np.float32), spoken[1]]))

    def answer(submit: Submit) -> ChunkResult:
        number, again = divmod(submit.id.part, MOST_PARTS)
        if number == 0 and not again:  # its tail is read behind the second one
            return say(t(0.1), *words("1"), t(0.3), t(0.3), *words("9"))
        return say(t(0.1), *words("31"[again - 1] if number == 0 else "2"), t(0.3))

    app.answer = answer
    _, transcript = await app.transcribe(sound)
    assert transcript.text == "one three two"
    stretch, tail = 0, 1
    assert [submit.id.part for submit in app.replica.submits] == [stretch, MOST_PARTS, tail]
    assert {submit.options.prompt_tokens for submit in app.replica.submits[:2]} == {()}


async def test_speech_that_is_passed_over_behind_a_pause_is_read_again(app: RunningApp) -> None:
    first, pause, second = speak("1").samples, np.zeros(2 * SAMPLE_RATE, np.float32), speak("2").samples
    app.answer = one_or_two
    for options in (ENGLISH, msgspec.structs.replace(ENGLISH, early_results=True, streams=True)):
        deltas, transcript = await app.transcribe(wav(np.concatenate([first, pause, second])), options)
        assert transcript.text == "".join(delta.text for delta in deltas) == "one two"
        assert [each.options.is_tentative for each in app.replica.submits[-2:]] == [False, True]
        begins_s = (len(first) + len(pause)) / SAMPLE_RATE  # with silence of 0.3 s
        assert begins_s - 0.3 < transcript.segments[1].seek / 100 < begins_s + 0.3
        assert transcript.segments[1].start_s == pytest.approx(transcript.segments[1].seek / 100 + 0.3)


@pytest.mark.parametrize(
    "rest", [noise(3.0), np.concatenate([np.zeros(SAMPLE_RATE // 4, np.float32), speak("2").samples])]
)
async def test_neither_noise_nor_what_comes_at_once_is_read_again(app: RunningApp, rest: Samples) -> None:
    app.answer = one_or_two
    _, transcript = await app.transcribe(wav(np.concatenate([speak("1").samples, rest])), ENGLISH)
    assert transcript.text == "one"


SPOKEN_S = len(speak("1").samples) / SAMPLE_RATE
UNCUT = t(0), *words("137373739"), t(4)
AS_ONE = say(*UNCUT)
DOUBTED = [" nine three seven"]
BESIDE_NOISE = wav(np.concatenate([speak("1").samples, noise(6.0), speak("2").samples]))


def in_pieces_or(uncut: ChunkResult, in_noise: str = "937") -> Callable[[Submit], ChunkResult]:
    """A model that doubts what it hears beside noise, and what it hears in the whole chunk."""

    def answer(submit: Submit) -> ChunkResult:
        if submit.id.part == 0:
            doubted = (t(SPOKEN_S + 0.3), *words(in_noise), t(SPOKEN_S + 0.9))
            return say(t(0.1), *words("1"), t(SPOKEN_S), *doubted, avg_logprob=-0.9, no_speech_prob=0.6)
        return uncut if submit.options.is_tentative else say(t(0.3), *words("2"), t(0.7))

    return answer


@pytest.mark.parametrize(
    ("in_noise", "uncut", "text", "dropped"),
    [
        ("937", AS_ONE, "one three seven three seven three seven three nine two", []),
        ("937", say(*UNCUT, avg_logprob=-0.7, no_speech_prob=0.99), "one two", DOUBTED),
        ("937", say(t(0), *words("137"), t(7)), "one two", DOUBTED),
        ("937", msgspec.structs.replace(AS_ONE, compression_ratio=2.5), "one two", DOUBTED),
        ("9", AS_ONE, "one two", [" nine"]),  # a word or two may be invented: it is not read again
    ],
)
async def test_a_chunk_that_loses_text_beside_noise_is_read_in_one_piece_too(
    app: RunningApp, in_noise: str, uncut: ChunkResult, text: str, dropped: list[str]
) -> None:
    app.answer = in_pieces_or(uncut, in_noise)
    deltas, transcript = await app.transcribe(BESIDE_NOISE, ENGLISH)
    assert transcript.text == "".join(delta.text for delta in deltas) == text
    assert [each.text for each in transcript.dropped] == dropped


async def test_text_of_a_higher_temperature_has_its_chunk_read_no_more(app: RunningApp) -> None:
    pieces = in_pieces_or(AS_ONE)
    app.answer = lambda submit: msgspec.structs.replace(pieces(submit), num_fallbacks=1)
    _, transcript = await app.transcribe(BESIDE_NOISE, ENGLISH)
    assert transcript.text == "one two"


async def test_a_chunk_is_read_in_one_piece_once(app: RunningApp) -> None:
    app.answer = in_pieces_or(AS_ONE)
    await app.transcribe(BESIDE_NOISE, msgspec.structs.replace(ENGLISH, temperatures=(0.0, 0.2)))
    asked = [submit.options for submit in app.replica.submits]
    stretch, uncut = ((0.0, 0.2), False), ((0.0,), True)
    assert [(each.temperatures, each.is_tentative) for each in asked] == [stretch, stretch, uncut]


async def test_a_chunk_read_in_one_piece_after_a_replica_was_lost_has_words(app: RunningApp) -> None:
    """Its early report has no alignment: words get times by their letters, as in any other part."""
    app.answer = in_pieces_or(AS_ONE)
    options = msgspec.structs.replace(ENGLISH, word_timestamps=True)
    _, transcript = await app.transcribe(BESIDE_NOISE, options)
    uncut, second = transcript.segments
    for segment in (uncut, second):
        assert "".join(word.text for word in segment.words).strip() == segment.text.strip()


@pytest.mark.parametrize("asked", [{}, {"word_timestamps": True}])
async def test_every_answer_is_read_with_the_times_of_words_where_voices_are_checked(
    app: RunningApp, asked: dict[str, bool]
) -> None:
    """So that text is the same in every format; words are shown where they were asked for."""
    unchecked = Transcriber(app.dispatcher, app.pool, TOKENIZER, check_voice=False)
    for transcriber, is_timed in ((app.transcriber, True), (unchecked, bool(asked))):
        app.transcriber = transcriber
        _, transcript = await app.transcribe(wav(noise(2.0)), msgspec.structs.replace(ENGLISH, **asked))
        assert app.replica.submits[-1].options.word_timestamps == is_timed
        assert any(segment.words for segment in transcript.segments) == bool(asked)


# -- Speech inside a segment, with a model that reads the second sentence only -------------------------------

FIRST, SECOND = "314159265358", "2718"
STREAMED = msgspec.structs.replace(ENGLISH, early_results=True, streams=True)
WITH_WORDS = msgspec.structs.replace(ENGLISH, word_timestamps=True)
TEXT_ONLY = msgspec.structs.replace(ENGLISH, text_only=True)
UNTIMED: dict[str, Any] = {"token_times_s": (), "token_onsets_s": (), "token_focus": ()}


def two_sentences(pause_s: float) -> tuple[Samples, float]:
    """Both, and where the second one begins."""
    first, second = (speak(digits, "rms", gap_s=0.05, lead_s=0.0).samples for digits in (FIRST, SECOND))
    before = np.concatenate([silence(0.3), first, silence(pause_s)])
    return np.concatenate([before, second, silence(0.5)]), len(before) / SAMPLE_RATE


def second_alone(second_s: float) -> Callable[[Submit], ChunkResult]:
    """Read the second sentence, unless the first one stands alone."""

    def answer(submit: Submit) -> ChunkResult:
        duration_s = len(submit.samples) / SAMPLE_RATE
        if submit.id.part == 1:
            return timed(words(FIRST), 0.3, second_s - 1.0, duration_s)
        start_s = second_s if submit.id.part == 0 else 0.3
        return timed(words(SECOND), start_s, duration_s - 0.5, duration_s)

    return answer


def spelt(digits: str) -> str:
    return " ".join(WORDS[int(digit)] for digit in digits)


@pytest.mark.parametrize("options", [ENGLISH, WITH_WORDS, TEXT_ONLY])
async def test_a_text_that_fills_its_speech_is_read_once_whatever_the_times_of_its_words(
    app: RunningApp, options: DecodingOptions
) -> None:
    """So that a text of which no times are shown need not be aligned."""
    sound, second_s = two_sentences(1.6)

    def answer(submit: Submit) -> ChunkResult:
        result = second_alone(second_s)(submit)
        return msgspec.structs.replace(result, is_full=True, **(UNTIMED if options.text_only else {}))

    app.answer = answer
    _, transcript = await app.transcribe(wav(sound), options)
    assert transcript.text == spelt(SECOND)
    (submit,) = app.replica.submits
    assert submit.options.text_only == options.text_only
    assert submit.options.full_letters >= 40, "as many as the speech of both sentences has"


@pytest.mark.parametrize("pause_s", [0.6, 1.6])
@pytest.mark.parametrize("options", [ENGLISH, STREAMED, WITH_WORDS, TEXT_ONLY])
async def test_a_sentence_lost_before_a_pause_inside_a_segment_is_read_by_itself(
    app: RunningApp, options: DecodingOptions, pause_s: float
) -> None:
    sound, second_s = two_sentences(pause_s)
    app.answer = second_alone(second_s)
    deltas, transcript = await app.transcribe(wav(sound), options)
    assert transcript.text == "".join(delta.text for delta in deltas) == f"{spelt(FIRST)} {spelt(SECOND)}"
    whole, first, second = (len(submit.samples) for submit in app.replica.submits)
    assert whole - 3200 < first + second <= whole
    assert first / SAMPLE_RATE == pytest.approx(second_s - pause_s / 2, abs=0.4), "parted within the pause"


async def test_a_sentence_said_four_times_is_written_four_times(app: RunningApp) -> None:
    """By a model that reads one of them a time, the first or the last."""
    once = np.concatenate([speak(FIRST[:4], "rms", gap_s=0.05, lead_s=0.0).samples, silence(0.5)])
    once_s = len(once) / SAMPLE_RATE
    for is_last in (False, True):

        def answer(submit: Submit, is_last: bool = is_last) -> ChunkResult:
            duration_s = len(submit.samples) / SAMPLE_RATE
            start_s = max(0.0, duration_s - once_s) if is_last else 0.2
            return timed(words(FIRST[:4]), start_s, min(start_s + once_s - 0.5, duration_s), duration_s)

        app.answer = answer
        for options in (ENGLISH, STREAMED, WITH_WORDS):
            _, transcript = await app.transcribe(wav(np.concatenate([once] * 4)), options)
            assert transcript.text == " ".join([spelt(FIRST[:4])] * 4)


async def test_what_a_model_leaves_out_again_and_again_is_given_up(app: RunningApp) -> None:
    sound, _ = two_sentences(1.6)

    def answer(submit: Submit) -> ChunkResult:
        duration_s = len(submit.samples) / SAMPLE_RATE
        return timed(words("2"), max(0.0, duration_s - 0.4), duration_s - 0.2, duration_s)

    app.answer = answer
    await app.transcribe(wav(np.concatenate([sound, silence(1.2), sound])), ENGLISH)
    assert len(app.replica.submits) <= MAX_READINGS


# -- Sentences that a model says again -----------------------------------------------------------------------

REPEATED = say(t(0), *words("3141"), t(1.5), t(1.5))  # and leaves the rest unread
AGAIN, OTHER = say(t(0), *words("3141"), t(1)), say(t(0), *words("2718"), t(1))
PROMPTED = DecodingOptions(language="en", prompt_tokens=words("9"), early_results=True)


def in_turn(app: RunningApp, *answers: ChunkResult) -> None:
    """Answer the parts of one chunk so, without listening for voices."""
    following = iter(answers)
    app.answer = lambda submit: next(following)
    app.transcriber = Transcriber(app.dispatcher, app.pool, TOKENIZER, check_voice=False)


async def test_a_tail_that_repeats_its_prompt_is_read_without_it(app: RunningApp) -> None:
    in_turn(app, REPEATED, AGAIN, OTHER)
    _, transcript = await app.transcribe(wav(noise(4.0)), PROMPTED)
    assert transcript.text == "three one four one two seven one eight"
    prompts = [len(submit.options.prompt_tokens) for submit in app.replica.submits]
    assert prompts == [1, 1 + len(REPEATED.tokens) - 1, 1]
    assert [len(submit.samples) for submit in app.replica.submits] == [64_000, 40_000, 40_000]


async def test_a_sentence_that_is_really_said_twice_is_written_twice(app: RunningApp) -> None:
    in_turn(app, REPEATED, AGAIN, AGAIN)
    _, transcript = await app.transcribe(wav(noise(4.0)), PROMPTED)
    assert transcript.text == "three one four one three one four one"
    in_turn(app, say(t(0), *words("1"), t(1.5), t(1.5)), say(t(0), *words("1"), t(1)))
    _, transcript = await app.transcribe(wav(noise(4.0)), PROMPTED)
    assert transcript.text == "one one", "short answers without another reading"


async def test_a_repeated_prompt_is_read_again_in_a_language_of_its_own(app: RunningApp) -> None:
    """The language of the file, which other parts have, does not change."""
    in_turn(app, REPEATED, AGAIN, OTHER)
    app.replica.probabilities_of = lambda submit: (
        {"en": 0.9, "de": 0.1} if submit.id.part == 0 else {"de": 1.0}
    )
    _, transcript = await app.transcribe(wav(noise(4.0)), DecodingOptions(early_results=True))
    assert [submit.options.language for submit in app.replica.submits] == [None, "en", None]
    assert transcript.language == "english"


# -- What is counted -----------------------------------------------------------------------------------------


def counts() -> dict[str, float]:
    names = "asr_chunks_read_again_total", "asr_segments_dropped_total"
    return {
        sample.labels["reason"]: sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name in names
    }


PAUSED = np.concatenate([speak("1").samples, silence(2.0), speak("2").samples])
TWO = (t(0), *words("1"), t(1), t(1), *words("2"), t(2))


@pytest.mark.parametrize(
    ("answers", "sound", "reasons"),
    [
        ([say(t(0), *words("1"), t(4), t(4.5), *words("9")), AGAIN], noise(12), {"unread_tail": 1}),
        ([REPEATED, AGAIN, AGAIN], noise(4), {"unread_tail": 1, "prompt_repeated": 1}),
        (
            [say(t(0.3), *words("1"), t(0.7)), say(t(0.3), *words("2"), t(0.7))],
            PAUSED,
            {"speech_passed_over": 1},
        ),
        ([say(t(0), *words("1"), t(2))], noise(4), {}),
        ([say(*TWO, avg_logprob=-0.9, no_speech_prob=0.6)], noise(4), {"no_voice": 2}),
        ([say(*TWO, avg_logprob=-2.0, no_speech_prob=0.9)], noise(4), {"judged_silence": 2}),
    ],
)
async def test_why_audio_is_read_again_and_text_dropped_is_counted(
    app: RunningApp, answers: list[ChunkResult], sound: Samples, reasons: dict[str, int]
) -> None:
    following, before = iter(answers), counts()
    app.answer = lambda submit: next(following)
    await app.transcribe(wav(sound))
    after = counts()
    assert {name: after[name] - before[name] for name in after if after[name] != before[name]} == reasons


async def test_a_second_reading_of_a_chunk_has_numbers_of_its_own(app: RunningApp) -> None:
    """A replica knows a part by its number: none has that of a part that it may still hold."""
    told = [{"de": 0.5, "en": 0.4, "zh": 0.1}, {"de": 0.02, "en": 0.97, "zh": 0.01}]
    app.replica.probabilities_of = lambda submit: told[min(submit.id.chunk, 1)]
    await app.transcribe(THREE_CHUNKS, DecodingOptions())
    assert [submit.id.part for submit in app.replica.submits if submit.id.chunk == 0] == [0, 50]
