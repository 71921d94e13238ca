"""Voices told apart in one channel, end to end: the official client in strict mode, a real server, digits."""

import base64
from typing import Any

from openai import AsyncOpenAI
from openai.types.audio import (
    TranscriptionDiarized,
    TranscriptionTextDeltaEvent,
    TranscriptionTextDoneEvent,
    TranscriptionTextSegmentEvent,
)

from asr_server.core import Samples
from tests.conftest import Server
from tests.contract.official_client import transcribe
from tests.support.speech import say
from tests.unit.api.sample_files import sound_file
from tests.unit.speakers.people import TALK, join

DIARIZED: dict[str, Any] = {"response_format": "diarized_json", "chunking_strategy": "auto"}
MIXED = sound_file(join([said for _, said in TALK])[0])
NUM_DIGITS = sum(len(said.digits) for _, said in TALK)


def data_url(samples: Samples) -> str:
    return f"data:audio/wav;base64,{base64.b64encode(sound_file(samples)).decode()}"


def changes(speakers: list[str]) -> list[str]:
    """The speakers as they take turns."""
    return [one for one, before in zip(speakers, [None, *speakers], strict=False) if one != before]


async def test_diarized_json_has_who_said_what_and_when(client: AsyncOpenAI) -> None:
    answer = await transcribe(client, MIXED, **DIARIZED)
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
    *events, done = [event async for event in await transcribe(client, MIXED, **DIARIZED, stream=True)]
    deltas = [event for event in events if isinstance(event, TranscriptionTextDeltaEvent)]
    segments = [event for event in events if isinstance(event, TranscriptionTextSegmentEvent)]
    assert isinstance(done, TranscriptionTextDoneEvent)
    assert events == [*deltas, *segments]
    assert "".join(delta.delta for delta in deltas) == done.text
    whole = await transcribe(client, MIXED, **DIARIZED)
    assert [segment.model_dump() for segment in whole.segments] == [each.model_dump() for each in segments]


async def test_known_speakers_get_their_names_and_a_stranger_s_is_not_given(client: AsyncOpenAI) -> None:
    answer = await transcribe(
        client,
        MIXED,
        **DIARIZED,
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
    answer = await transcribe(client, MIXED, **DIARIZED, extra_body={"num_speakers": 1})
    assert {segment.speaker for segment in answer.segments} == {"A"}


async def test_the_alias_of_the_field_is_served(server: Server, client: AsyncOpenAI) -> None:
    file = sound_file(say("314").samples)
    answer = await client.audio.transcriptions.create(
        file=("upload", file), model="gpt-4o-transcribe-diarize", **DIARIZED
    )
    assert answer.segments
