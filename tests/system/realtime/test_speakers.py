"""Who speaks in a session: one voice keeps one letter through all turns."""

import asyncio
from collections.abc import Sequence

import pytest

from asr_server.annexes.realtime.reader import SessionSpeakers
from asr_server.core import Samples, Segment
from tests.conftest import Server
from tests.support.speech import say, silence
from tests.unit.api.running_app import RunningApp
from tests.unit.realtime.realtime_client import MANUAL, of_type, open_session, pcm24, transcripts
from tests.unit.speakers.people import TALK, join

DIARIZED = {"model": "gpt-4o-transcribe-diarize", "language": "en"}


def segment(samples: Samples) -> Segment:
    return Segment(0, 0, 0.0, len(samples) / 16_000, "words", (), 0.0, -0.1, 1.0, 0.0)


async def labels(sounds: Sequence[Samples]) -> list[str | None]:
    """Return the speaker of each turn, a segment each."""
    session = SessionSpeakers()
    found = []
    for samples in sounds:
        turn = session.new_turn()
        turn.push(samples)
        found += [each.speaker for each in await turn.label_turn([segment(samples)], lambda _: b"")]
        turn.close()
    return found


@pytest.mark.slow
async def test_a_voice_keeps_its_letter_in_later_turns() -> None:
    assert await labels([join([said])[0] for _, said in TALK]) == [label for label, _ in TALK]


async def test_a_word_is_of_a_person_who_has_spoken_and_silence_of_the_last_one() -> None:
    (_, first), (_, second), *_ = TALK
    sounds = [join([first])[0], join([second])[0], join([say("7", "f3")])[0], silence(1.0)]
    assert await labels(sounds) == ["A", "B", "A", "A"]


async def test_turns_are_labelled_in_their_order() -> None:
    """The second is read first, and its voice is still the second letter."""
    session = SessionSpeakers()
    turns = [(session.new_turn(), join([said])[0]) for _, said in TALK[:2]]
    for turn, samples in turns:
        turn.push(samples)

    async def label(number: int) -> str | None:
        turn, samples = turns[number]
        (found,) = await turn.label_turn([segment(samples)], lambda _: b"")
        turn.close()
        return found.speaker

    assert [*await asyncio.gather(label(1), label(0))] == ["B", "A"]


async def test_a_diarized_session_names_the_speaker_of_each_segment(server: Server) -> None:
    async with open_session(server.url) as client:
        await client.update(transcription=DIARIZED, **MANUAL)
        for _, said in TALK:
            await client.append(pcm24(join([said])[0]), size=48_000)
            await client.commit()
        events = await client.until(".completed", count=len(TALK))
    segments, texts = of_type(events, "transcription.segment"), transcripts(events)
    items = [event["item_id"] for event in of_type(events, ".committed")]
    for item, (label, _) in zip(items, TALK, strict=True):
        own = [each for each in segments if each["item_id"] == item]
        assert {each["speaker"] for each in own} == {label}
        assert " ".join(each["text"] for each in own) == texts[item]
    times = [time for each in segments for time in (each["start"], each["end"])]
    assert times == sorted(times)
    assert times[-1] > times[0] + 10
    assert len({each["id"] for each in segments}) == len(segments)


async def test_sessions_of_other_names_have_no_segments(app: RunningApp) -> None:
    async with open_session(app.url) as client:
        await client.update(transcription={"model": "whisper-1"}, **MANUAL)
        await client.append(pcm24(say("1").samples))
        await client.commit()
        assert not of_type(await client.until(".completed"), ".segment")
