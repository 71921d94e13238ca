"""How many readings a chunk takes, and what is counted as read again or dropped."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from asr_server.channel.messages import Submit
from asr_server.core import SAMPLE_RATE, ChunkResult, DecodingOptions, Samples
from asr_server.metrics import REGISTRY
from asr_server.transcription import Transcriber
from tests.fake_replica import noise, say, wav
from tests.speech import say as speak
from tests.transcription.running_app import ENGLISH, THREE_CHUNKS, TOKENIZER, RunningApp, t
from tests.vocabulary import words

Answer = Callable[[Submit], ChunkResult]


def counts(name: str, label: str) -> dict[str, float]:
    """Each value of the label that was counted, and how often."""
    return {
        sample.labels[label]: sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == name and sample.value
    }


class Counted:
    def __init__(self) -> None:
        self._before = self._all()

    def _all(self) -> tuple[dict[str, float], dict[str, float]]:
        names = "asr_chunks_read_again_total", "asr_segments_dropped_total"
        again, dropped = (counts(name, "reason") for name in names)
        return again, dropped

    def more(self) -> tuple[dict[str, float], dict[str, float]]:
        """What was counted since it was made: read again, and dropped."""
        again, dropped = (
            {
                reason: num - before.get(reason, 0)
                for reason, num in now.items()
                if num != before.get(reason, 0)
            }
            for now, before in zip(self._all(), self._before, strict=True)
        )
        return again, dropped


def unread(submit: Submit) -> ChunkResult:
    """Half a segment at the end of the first part."""
    if submit.id.part == 0:
        return say(t(0), *words("1"), t(4), t(4.5), *words("9"))
    return say(t(0.5), *words("2"), t(3))


def repeated(submit: Submit) -> ChunkResult:
    """A tail that says its prompt once more."""
    return (
        say(t(0), *words("3141"), t(1.5), t(1.5)) if submit.id.part == 0 else say(t(0), *words("3141"), t(1))
    )


def beside_a_pause(submit: Submit) -> ChunkResult:
    return say(t(0.3), *words("2" if submit.id.part else "1"), t(0.7))


PAUSED = np.concatenate([speak("1").samples, np.zeros(2 * SAMPLE_RATE, np.float32), speak("2").samples])


@pytest.mark.parametrize(
    ("answer", "sound", "reasons"),
    [
        (unread, noise(12), {"unread_tail": 1}),
        (repeated, noise(4), {"unread_tail": 1, "prompt_repeated": 1}),
        (beside_a_pause, PAUSED, {"speech_passed_over": 1}),
        (lambda _: say(t(0), *words("1"), t(2)), noise(4), {}),
    ],
)
async def test_why_audio_is_read_again_is_counted(
    app: RunningApp, answer: Answer, sound: Samples, reasons: dict[str, int]
) -> None:
    app.answer = answer
    counted = Counted()
    await app.transcribe(wav(sound))
    assert counted.more() == (reasons, {})


@pytest.mark.parametrize(
    ("tokens", "figures", "reasons"),
    [
        ((t(0), *words("1"), t(1), t(1), *words("2"), t(2)), {"avg_logprob": -0.9}, {"no_voice": 2}),
        (
            (t(0), *words("1"), t(1), t(1), *words("2"), t(2)),
            {"avg_logprob": -2.0, "no_speech_prob": 0.9},
            {"judged_silence": 2},
        ),
    ],
)
async def test_why_segments_are_dropped_is_counted(
    app: RunningApp, tokens: tuple[int, ...], figures: dict[str, float], reasons: dict[str, int]
) -> None:
    app.answer = lambda _: say(*tokens, **figures)  # type: ignore[arg-type]
    counted = Counted()
    _, transcript = await app.transcribe(wav(noise(4)))
    assert counted.more() == ({}, reasons)
    assert [each.reason for each in transcript.dropped] == [*reasons] * 2
    unchecked = Transcriber(app.dispatcher, app.pool, TOKENIZER, check_voice=False)
    app.transcriber, counted = unchecked, Counted()
    await app.transcribe(wav(noise(4)))
    assert counted.more() == ({}, {reason: n for reason, n in reasons.items() if reason != "no_voice"})


async def test_a_second_reading_of_a_chunk_has_numbers_of_its_own(app: RunningApp) -> None:
    """A replica knows a part by its number: none has that of a part that it may still hold."""
    told = [{"de": 0.5, "en": 0.4, "zh": 0.1}, {"de": 0.02, "en": 0.97, "zh": 0.01}]
    app.replica.probabilities_of = lambda submit: told[min(submit.id.chunk, 1)]
    counted = Counted()
    await app.transcribe(THREE_CHUNKS, DecodingOptions())
    assert counted.more()[0] == {"language_outvoted": 1}
    numbers = [submit.id.part for submit in app.replica.submits if submit.id.chunk == 0]
    assert numbers == [0, 1000]


async def test_a_chunk_is_read_in_eight_parts_of_which_the_last_has_no_tail(app: RunningApp) -> None:
    app.answer = lambda submit: say(t(0), *words("1"), t(0.5), t(0.5), *words("2"))
    options = msgspec.structs.replace(ENGLISH, early_results=True, streams=True)
    await app.transcribe(wav(noise(20)), options)
    asked = [submit.options for submit in app.replica.submits]
    assert [each.is_last_part for each in asked] == [False] * 7 + [True]
    assert [each.early_results for each in asked] == [True] * 7 + [False]
    app.replica.submits.clear()
    await app.transcribe(wav(noise(50)), options)
    second = [submit.options for submit in app.replica.submits if submit.id.chunk == 1]
    assert (second[0].is_last_part, second[0].early_results) == (False, True), "as of any chunk"


async def test_words_whose_times_a_replica_did_not_tell_are_counted(app: RunningApp) -> None:
    def guessed() -> float:
        return REGISTRY.get_sample_value("asr_words_guessed_total") or 0.0

    app.answer = lambda _: say(t(0), *words("123"), t(2))
    before = guessed()
    _, transcript = await app.transcribe(
        wav(noise(4)), msgspec.structs.replace(ENGLISH, word_timestamps=True)
    )
    assert len(transcript.segments[0].words) == 3
    assert guessed() == before + 3
    await app.transcribe(wav(noise(4)), msgspec.structs.replace(ENGLISH, segment_times=False))
    assert guessed() == before + 3
