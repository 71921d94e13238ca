"""Who speaks, end to end: the official client in strict mode, a real server, digits.

A speaker in each channel, and then voices told apart in one.
"""

import base64
from typing import Any

import numpy as np
import openai
import pytest
from openai import AsyncOpenAI
from openai.types.audio import (
    TranscriptionDiarized,
    TranscriptionTextDeltaEvent,
    TranscriptionTextDoneEvent,
    TranscriptionTextSegmentEvent,
    TranscriptionVerbose,
)

from asr_server.core import SAMPLE_RATE, Samples
from tests.conftest import Server
from tests.contract.official_client import transcribe
from tests.support.speech import Spoken, say, silence
from tests.unit.api.sample_files import sound_file
from tests.unit.speakers.people import TALK, join

SPLIT = {"channels": "split"}
DIARIZED: dict[str, Any] = {"response_format": "diarized_json", "extra_body": SPLIT}
GREETING, REPLY, QUESTION, YES = say("314"), say("2718", "linda"), say("592"), say("4", "linda")
LEFT, RIGHT = 0, 1
Turn = tuple[int, float, Spoken]  # channel, when it begins, what is said
# One after the other; the last turn overlaps the one before it.
TURNS: list[Turn] = [(LEFT, 0.0, GREETING), (RIGHT, 4.0, REPLY), (LEFT, 9.0, QUESTION), (RIGHT, 9.5, YES)]
LABELLED = [("A", GREETING), ("B", REPLY), ("A", QUESTION), ("B", YES)]


def stereo(turns: list[Turn], duration_s: float = 14.0) -> Samples:
    """[num_samples, 2]"""
    samples = np.zeros((round(duration_s * SAMPLE_RATE), 2), np.float32)
    for channel, start_s, said in turns:
        first = round(start_s * SAMPLE_RATE)
        samples[first : first + len(said.samples), channel] = said.samples
    return samples


CALL = sound_file(stereo(TURNS))


def expected(names: tuple[str, str] = ("A", "B")) -> list[tuple[str, str]]:
    return [(names["AB".index(label)], said.text) for label, said in LABELLED]


async def streamed(
    client: AsyncOpenAI, file: bytes, fields: dict[str, Any]
) -> tuple[list[Any], list[TranscriptionTextDeltaEvent], list[TranscriptionTextSegmentEvent]]:
    """All events but the last, the deltas and the segments: together what is said at the end, and at once."""
    *events, done = [event async for event in await transcribe(client, file, **fields, stream=True)]
    deltas = [event for event in events if isinstance(event, TranscriptionTextDeltaEvent)]
    segments = [event for event in events if isinstance(event, TranscriptionTextSegmentEvent)]
    assert isinstance(done, TranscriptionTextDoneEvent)
    assert "".join(delta.delta for delta in deltas) == done.text
    whole = await transcribe(client, file, **fields)
    assert [segment.model_dump() for segment in whole.segments] == [each.model_dump() for each in segments]
    return events, deltas, segments


async def test_diarized_json_has_who_said_what_and_when(client: AsyncOpenAI) -> None:
    answer = await transcribe(client, CALL, **DIARIZED)
    assert isinstance(answer, TranscriptionDiarized)
    assert [(segment.speaker, segment.text) for segment in answer.segments] == expected()
    assert answer.text == " ".join(text for _, text in expected())
    assert len({segment.id for segment in answer.segments}) == 4
    for segment, (_, start_s, said) in zip(answer.segments, TURNS, strict=True):
        assert segment.start == pytest.approx(start_s + said.times[0][0], abs=0.25)
        assert segment.end == pytest.approx(start_s + said.times[-1][1], abs=0.25)
    assert answer.duration == pytest.approx(14.0)
    assert answer.usage
    assert answer.usage.type == "duration"
    assert answer.usage.seconds == 14  # of the file, not of each channel


async def test_a_stream_names_the_speaker_of_each_segment(client: AsyncOpenAI) -> None:
    _, deltas, segments = await streamed(client, CALL, DIARIZED)
    assert [(segment.speaker, segment.text) for segment in segments] == expected()
    assert [delta.segment_id for delta in deltas] == [segment.id for segment in segments]
    starts_s = [segment.start for segment in segments]
    assert starts_s == sorted(starts_s)


async def test_each_channel_is_heard_as_it_is_alone(client: AsyncOpenAI) -> None:
    samples = stereo(TURNS)
    answer = await transcribe(client, CALL, **DIARIZED)
    for channel, label in enumerate("AB"):
        alone = await transcribe(client, sound_file(samples[:, channel]))
        assert alone.text == " ".join(each.text for each in answer.segments if each.speaker == label)


@pytest.mark.parametrize("channel", [LEFT, RIGHT])
async def test_a_silent_channel_says_nothing(client: AsyncOpenAI, channel: int) -> None:
    answer = await transcribe(client, sound_file(stereo([(channel, 0.0, GREETING)])), **DIARIZED)
    assert [(each.speaker, each.text) for each in answer.segments] == [("AB"[channel], GREETING.text)]


async def test_two_who_speak_at_once_are_both_heard(client: AsyncOpenAI) -> None:
    answer = await transcribe(
        client, sound_file(stereo([(LEFT, 0.0, GREETING), (RIGHT, 0.1, REPLY)])), **DIARIZED
    )
    assert {each.speaker: each.text for each in answer.segments} == {"A": GREETING.text, "B": REPLY.text}


async def test_silence_in_both_channels_has_no_segments(client: AsyncOpenAI) -> None:
    answer = await transcribe(client, sound_file(np.stack([silence(3.0)] * 2, axis=1)), **DIARIZED)
    assert (answer.text, answer.segments) == ("", [])


async def test_subtitles_carry_the_names_of_the_speakers(client: AsyncOpenAI) -> None:
    named: dict[str, Any] = {"known_speaker_names": ["agent", "R & D"], "extra_body": SPLIT}
    srt = await transcribe(client, CALL, response_format="srt", **named)
    vtt = await transcribe(client, CALL, response_format="vtt", **named)
    names = expected(("agent", "R & D"))
    assert [line for line in srt.splitlines() if ": " in line] == [f"{who}: {text}" for who, text in names]
    voiced = [f"<v {who.replace('&', '&amp;')}>{text}</v>" for who, text in names]
    assert [line for line in vtt.splitlines() if line.startswith("<v")] == voiced


async def test_verbose_json_labels_segments_and_words(client: AsyncOpenAI) -> None:
    answer = await transcribe(
        client,
        CALL,
        response_format="verbose_json",
        timestamp_granularities=["segment", "word"],
        extra_body=SPLIT,
    )
    assert isinstance(answer, TranscriptionVerbose)
    assert answer.segments
    assert answer.words
    assert [each.id for each in answer.segments] == [0, 1, 2, 3]
    labelled = [(each.speaker, each.text.strip()) for each in answer.segments]  # type: ignore[attr-defined]
    assert labelled == expected()
    starts_s = [word.start for word in answer.words]
    assert starts_s == sorted(starts_s)
    for label in "AB":
        words = [word.word for word in answer.words if word.speaker == label]  # type: ignore[attr-defined]
        assert words == [word for who, text in expected() if who == label for word in text.split()]


async def test_text_and_its_stream_are_interleaved_too(client: AsyncOpenAI) -> None:
    text = " ".join(said for _, said in expected())
    assert (await transcribe(client, CALL, extra_body=SPLIT)).text == text
    *deltas, done = [event async for event in await transcribe(client, CALL, stream=True, extra_body=SPLIT)]
    assert "".join(delta.delta for delta in deltas) == done.text == text


async def test_a_file_counts_once_whatever_its_channels(client: AsyncOpenAI, server: Server) -> None:
    def seconds(kind: str) -> float:
        lines = server.get("/metrics").text.splitlines()
        found = [line for line in lines if line.startswith(f"asr_audio_{kind}_seconds_total")]
        return sum(float(line.rpartition(" ")[2]) for line in found)  # over all routes and languages

    before = {kind: seconds(kind) for kind in ("received", "transcribed")}
    await transcribe(client, CALL, **DIARIZED)
    assert {kind: seconds(kind) - before[kind] for kind in before} == pytest.approx(
        {"received": 14.0, "transcribed": 14.0}
    )


@pytest.mark.parametrize("num_channels", [1, 3])
async def test_a_file_without_two_channels_is_refused(client: AsyncOpenAI, num_channels: int) -> None:
    file = sound_file(np.stack([GREETING.samples] * num_channels, axis=1))
    with pytest.raises(openai.BadRequestError, match=rf"has {num_channels} channel") as caught:
        await transcribe(client, file, **DIARIZED)
    assert (caught.value.code, caught.value.param) == ("invalid_value", "channels")


# -- Voices in one channel --

VOICES: dict[str, Any] = {"response_format": "diarized_json", "chunking_strategy": "auto"}
MIXED = sound_file(join([said for _, said in TALK])[0])
NUM_DIGITS = sum(len(said.digits) for _, said in TALK)


def data_url(samples: Samples) -> str:
    return f"data:audio/wav;base64,{base64.b64encode(sound_file(samples)).decode()}"


def changes(speakers: list[str]) -> list[str]:
    """The speakers as they take turns."""
    return [one for one, before in zip(speakers, [None, *speakers], strict=False) if one != before]


async def test_diarized_json_has_the_voices_as_they_take_turns(client: AsyncOpenAI) -> None:
    answer = await transcribe(client, MIXED, **VOICES)
    assert isinstance(answer, TranscriptionDiarized)
    assert changes([segment.speaker for segment in answer.segments]) == ["A", "B", "A", "B"]
    assert " ".join(segment.text for segment in answer.segments) == answer.text
    assert len(answer.text.split()) >= NUM_DIGITS - 2
    times_s = [time for segment in answer.segments for time in (segment.start, segment.end)]
    assert times_s == sorted(times_s)
    assert [segment.id for segment in answer.segments] == [
        f"seg_{n + 1:03d}" for n in range(len(times_s) // 2)
    ]


async def test_a_stream_has_its_text_first_and_its_speakers_at_the_end(client: AsyncOpenAI) -> None:
    events, deltas, segments = await streamed(client, MIXED, VOICES)
    assert events == [*deltas, *segments]


async def test_known_speakers_get_their_names_and_a_stranger_s_is_not_given(client: AsyncOpenAI) -> None:
    answer = await transcribe(
        client,
        MIXED,
        **VOICES,
        known_speaker_names=["Ann", "Zoe"],
        known_speaker_references=[
            data_url(say("4567890", "f3").samples),
            data_url(say("90909090", "linda").samples),
        ],
    )
    assert changes([segment.speaker for segment in answer.segments]) == ["Ann", "A", "Ann", "A"]


async def test_subtitles_and_words_have_the_labels_too(client: AsyncOpenAI) -> None:
    extra: dict[str, Any] = {"extra_body": {"diarize": "true"}}
    srt = await transcribe(client, MIXED, response_format="srt", **extra)
    assert changes([line[0] for line in srt.splitlines() if line[1:2] == ":"]) == ["A", "B", "A", "B"]
    words = await transcribe(
        client, MIXED, response_format="verbose_json", timestamp_granularities=["word"], **extra
    )
    assert changes([word.speaker for word in words.words]) == ["A", "B", "A", "B"]


async def test_the_number_of_speakers_can_be_given(client: AsyncOpenAI) -> None:
    answer = await transcribe(client, MIXED, **VOICES, extra_body={"num_speakers": 1})
    assert {segment.speaker for segment in answer.segments} == {"A"}


async def test_the_alias_of_the_field_is_served(client: AsyncOpenAI) -> None:
    file = sound_file(say("314").samples)
    answer = await client.audio.transcriptions.create(
        file=("upload", file), model="gpt-4o-transcribe-diarize", **VOICES
    )
    assert answer.segments
