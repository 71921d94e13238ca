"""The text of all chunks and channels, joined."""

import logging

import msgspec
import numpy as np
import pytest

from asr_server.core import ChunkResult, DecodingOptions
from asr_server.transport.messages import Submit
from tests.support.fake_replica import noise, say, wav
from tests.support.tokens import spell, t, words
from tests.unit.transcription.running_app import (
    ENGLISH,
    THREE_CHUNKS,
    RunningApp,
    number_of_the_chunk,
    two_channels,
)


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


async def test_a_truncated_file_is_in_the_log(app: RunningApp, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        _, transcript = await app.transcribe(wav(noise(4))[: 2 * 32_000])
    assert transcript.text == "zero"
    assert "ends early" in caplog.text


async def test_a_mixed_recording_is_read_chunk_by_chunk_in_the_language_of_each(app: RunningApp) -> None:
    spoken = ["de", "en", "en"]
    app.replica.probabilities_of = lambda submit: (
        {code: 0.9 if code == spoken[submit.id.chunk] else 0.1 for code in ("de", "en")} | {"fr": 1.0}
    )  # which is no candidate
    app.answer = lambda submit: msgspec.structs.replace(
        number_of_the_chunk(submit), language=spoken[submit.id.chunk]
    )
    asked = DecodingOptions(multilingual=True, candidate_languages=("de", "en"))
    deltas, transcript = await app.transcribe(THREE_CHUNKS, asked)
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
