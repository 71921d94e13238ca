"""The text of all chunks and channels, joined."""

from __future__ import annotations

import logging
import math
from typing import Any

import msgspec
import numpy as np
import pytest

from asr_server.audio.recording import ChunkSource
from asr_server.channel.messages import Submit
from asr_server.core import Chunk, ChunkResult, DecodingOptions, DroppedSegment
from asr_server.transcription.language_detector import LanguageDetector
from asr_server.transcription.segments import DecodedPart, Span
from asr_server.transcription.transcript import TranscriptBuilder
from tests.fake_replica import noise, say, wav
from tests.transcription.running_app import (
    ENGLISH,
    THREE_CHUNKS,
    TOKENIZER,
    RunningApp,
    number_of_the_chunk,
    t,
    two_channels,
)
from tests.vocabulary import spell, words


async def test_a_file_of_several_chunks_comes_back_as_one_text(app: RunningApp) -> None:
    deltas, transcript = await app.transcribe(THREE_CHUNKS)
    assert transcript.text == "zero one two"
    assert "".join(delta.text for delta in deltas) == transcript.text
    assert transcript.duration_s == pytest.approx(75.0)
    assert transcript.language == "english"
    assert [segment.id for segment in transcript.segments] == [0, 1, 2]
    assert transcript.num_audio_tokens == sum(delta.num_audio_tokens for delta in deltas)
    assert transcript.num_text_tokens == 3


async def test_how_likely_each_token_was_is_told_only_where_it_is_asked_for(app: RunningApp) -> None:
    for asked in (True, False):
        options = msgspec.structs.replace(ENGLISH, token_logprobs=asked)
        deltas, transcript = await app.transcribe(wav(noise(20)), options)
        assert transcript.text
        assert bool(transcript.logprobs) == any(delta.logprobs for delta in deltas) == asked


async def test_silence_is_an_empty_text(app: RunningApp) -> None:
    deltas, transcript = await app.transcribe(wav(np.zeros(32_000, np.float32)), DecodingOptions())
    assert (transcript.text, transcript.segments) == ("", ())
    assert all(delta.text == "" for delta in deltas)
    assert transcript.duration_s == 2.0


async def test_a_truncated_recording_is_named_in_the_log(
    app: RunningApp, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        _, transcript = await app.transcribe(wav(noise(4))[: 2 * 32_000])
    assert transcript.text == "zero"
    assert "ends early" in caplog.text


async def test_a_mixed_recording_is_read_chunk_by_chunk_in_the_language_of_each(app: RunningApp) -> None:
    spoken = ["de", "en", "en"]
    app.replica.probabilities_of = lambda submit: {
        code: 0.9 if code == spoken[submit.id.chunk] else 0.1 for code in ("de", "en")
    }
    app.answer = lambda submit: msgspec.structs.replace(
        number_of_the_chunk(submit), language=spoken[submit.id.chunk]
    )
    deltas, transcript = await app.transcribe(THREE_CHUNKS, DecodingOptions(multilingual=True))
    assert [submit.options.language for submit in app.replica.submits] == [None] * 3
    assert app.replica.languages_set == spoken
    assert [delta.language for delta in deltas] == spoken
    assert (transcript.language, transcript.languages) == ("english", ("de", "en"))


async def test_channels_are_transcribed_apart_and_interleaved(app: RunningApp) -> None:
    """The left one in three chunks, the right one in two that begin within the first and the third."""
    source = two_channels((0, 0, 75), (1, 5, 8), (1, 65, 70))

    def twice_where_there_is_time(submit: Submit) -> ChunkResult:
        number = words(str(submit.id.chunk))
        again = (t(20), *number, t(22)) if len(submit.samples) > 22 * 16_000 else ()
        return say(t(0), *number, t(2), *again)

    app.answer = twice_where_there_is_time
    deltas, transcript = await app.transcribe(source, ENGLISH, ("ann", "bob"))
    speakers = [segment.speaker for segment in transcript.segments]
    assert speakers == ["ann", "bob", "ann", "ann", "ann", "ann", "bob"]
    starts_s = [segment.start_s for segment in transcript.segments]
    assert starts_s == sorted(starts_s)
    assert [segment.id for segment in transcript.segments] == list(range(7))
    assert "".join(delta.text for delta in deltas) == transcript.text
    ends_s = [delta.end_s for delta in deltas]
    assert ends_s == sorted(ends_s)
    assert transcript.duration_s == pytest.approx(75.0)


async def test_channels_kept_apart_have_languages_of_their_own(app: RunningApp) -> None:
    """Text that is held back for the other channel keeps its language: Chinese is joined without a space."""
    samples = np.zeros((75 * 16_000, 2), np.float32)
    samples[: 20 * 16_000, 0] = noise(20)
    for start_s in (40, 65):
        samples[start_s * 16_000 : (start_s + 8) * 16_000, 1] = 0.2 * noise(8)

    def is_chinese(submit: Submit) -> bool:
        return float(np.abs(submit.samples).max()) < 0.2

    def answer(submit: Submit) -> ChunkResult:
        text, language = (spell("你好吗"), "zh") if is_chinese(submit) else (words("1"), "en")
        return msgspec.structs.replace(say(t(0), *text, t(1)), language=language)

    app.answer = answer
    app.replica.probabilities_of = lambda submit: {"zh": 0.9 if is_chinese(submit) else 0.1, "en": 0.5}
    options = DecodingOptions(multilingual=True)
    deltas, transcript = await app.transcribe(wav(samples), options, ("ann", "bob"))
    assert (transcript.text, transcript.languages) == ("one你好吗你好吗", ("en", "zh"))
    assert transcript.language == "chinese"
    assert [*dict.fromkeys(delta.language for delta in deltas if delta.text)] == ["en", "zh"]


# -- By itself, on parts made up -----------------------------------------------------------------------------


def builder_of(
    *speakers: str, language: LanguageDetector | None = None, options: DecodingOptions = ENGLISH
) -> TranscriptBuilder:
    source = ChunkSource(Chunk(0, 0, np.zeros(60 * 16_000, np.float32)))
    return TranscriptBuilder(TOKENIZER, source, options, language or LanguageDetector("en"), speakers)


def part(
    start_s: float, *spans: tuple[float, float, str], duration_s: float = 10.0, channel: int = 0, **more: Any
) -> DecodedPart:
    """Segments from start to end in seconds, each with its digits."""
    result = msgspec.structs.replace(say(*words("1")), language=more.pop("language", None))
    made = tuple(Span(a, b, words(digits), (-0.5,) * len(digits)) for a, b, digits in spans)
    num_read = sum(len(span.tokens) for span in made)
    return DecodedPart(start_s, duration_s, result, made, num_read, channel=channel, **more)


def test_a_delta_counts_the_audio_and_the_tokens_of_its_parts() -> None:
    builder = builder_of()
    parts = [part(30.0, (0, 2, "12"), duration_s=0.1 + 0.2), part(30.3, (0, 2, "3"), duration_s=4.01)]
    delta = builder.delta(parts)
    assert (delta.text, delta.language) == ("one two three", "en")
    assert delta.end_s == pytest.approx(34.31)
    assert (delta.num_audio_tokens, delta.num_text_tokens) == (216, 3)
    assert builder.delta(parts[:1]).num_audio_tokens == 15, "a rounding error is no position"
    assert [entry.token for entry in delta.logprobs] == [" one", " two", " three"]
    empty = builder.delta([])
    assert (empty.text, empty.num_audio_tokens, empty.num_text_tokens, empty.end_s) == ("", 0, 0, 60.0)


def test_an_early_delta_has_the_text_so_far_and_no_segment() -> None:
    builder = builder_of()
    builder.delta([part(0.0, (0, 2, "1"))])
    early = builder.early_delta(
        [part(10.0, (0, 2, "2"), duration_s=5.0), part(15.0, (0, 7, "3"), duration_s=4.0)]
    )
    assert (early.text, early.segments) == (" two three", ())
    assert (early.num_audio_tokens, early.num_text_tokens, early.end_s) == (450, 2, 15.0)
    assert len(early.logprobs) == 2
    assert builder.delta([part(10.0, (0, 2, "4"))]).text == " four", "nothing of it is kept"


def test_segments_of_channels_wait_for_all_that_begin_before() -> None:
    builder = builder_of("ann", "bob")
    first = builder.delta([part(0.0, (1, 2, "1"), (5, 6, "3"))])
    assert (first.text, first.end_s) == ("", 0.0)
    assert builder.delta([part(0.0, (3, 4, "2"), (8, 9, "4"), channel=1)]).segments == ()
    settled = builder.settle(5.0)
    assert [(each.speaker, each.start_s) for each in settled.segments] == [("ann", 1.0), ("bob", 3.0)]
    assert (settled.text, settled.end_s) == ("one two", 5.0)
    rest = builder.settle(math.inf)
    assert [(each.speaker, each.id) for each in rest.segments] == [("ann", 2), ("bob", 3)]
    assert rest.end_s == 60.0


def test_a_transcript_is_all_of_its_deltas_in_the_language_of_most_letters() -> None:
    detector = LanguageDetector(None, per_chunk=True)
    builder = builder_of(language=detector)
    dropped = DroppedSegment(1.0, 2.0, " hm", "echo")
    for made in (
        part(0.0, (0, 2, "1"), (2, 4, "2"), language="de", dropped=(dropped,)),
        part(10.0, (0, 4, "777"), language="en"),
        part(20.0, (0, 2, "1"), language="de"),
        part(30.0, language="zh"),
    ):
        builder.keep(builder.delta([made]))
    transcript = builder.transcript()
    assert transcript.text == "one two seven seven seven one"
    assert (transcript.language, transcript.languages) == ("english", ("de", "en"))
    assert (transcript.num_audio_tokens, transcript.num_text_tokens) == (2000, 6)
    assert [each.id for each in transcript.segments] == [0, 1, 2, 3]
    assert (len(transcript.logprobs), transcript.dropped) == (6, (dropped,))
    assert (transcript.duration_s, transcript.is_cut_short, transcript.tracks) == (60.0, False, ())


def test_a_translation_is_english_and_what_has_no_language_unknown() -> None:
    translated = msgspec.structs.replace(ENGLISH, task="translate")
    assert builder_of(options=translated, language=LanguageDetector("de")).transcript().language == "english"
    assert builder_of(language=LanguageDetector(None)).transcript().language == "unknown"
    assert builder_of(language=LanguageDetector("de")).transcript().language == "german"
