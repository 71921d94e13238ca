"""Which name a voice gets, by its likeness to those heard before and how long they were heard."""

import asyncio
import math
from typing import Any

import numpy as np
import pytest

from asr_server.annexes.realtime.reader import SessionSpeakers
from asr_server.annexes.speakers.labels import Turn
from asr_server.annexes.speakers.track import Person, Spoken
from asr_server.core import Segment


class Track:
    """Hears one turn of each of these people, half a second each."""

    def __init__(self, **people: Person) -> None:
        self.people = people
        self.known: dict[str, Person] = {}

    async def spoken(self, known: dict[str, Person]) -> Spoken:
        self.known = dict(known)
        turns = [Turn(at / 2, at / 2 + 0.5, name) for at, name in enumerate(self.people)]
        return Spoken(turns, self.people)


def person(angle: float | None, clean_s: float) -> Person:
    """One whose voice lies at this angle; None: too little was heard."""
    voice = [0.0, 0.0] if angle is None else [math.cos(angle), math.sin(angle)]
    return Person(np.asarray(voice, np.float32), clean_s)


def segment(number: int) -> Segment:
    return Segment(number, 0, number / 2, number / 2 + 0.5, "words", (), 0.0, -0.1, 1.0, 0.0)


async def heard(session: SessionSpeakers, num_segments: int = 1, **people: Person) -> list[str | None]:
    track: Any = Track(**people)
    segments = [segment(number) for number in range(num_segments)]
    return [each.speaker for each in await session.label(track, segments, lambda _: b"")]


def at_cosine(cosine: float) -> float:
    return math.acos(cosine)


@pytest.mark.parametrize(
    ("known_s", "cosine", "clean_s", "name"),
    [
        (10.0, 0.9, 1.49, "A"),  # too short for somebody new
        (10.0, -0.9, 1.49, "A"),
        (10.0, 0.9, 1.5, "B"),  # whom the track has told from a known voice
        (1.49, 0.36, 1.5, "A"),  # of whom little is known
        (1.49, 0.34, 1.5, "B"),
        (1.5, 0.36, 1.5, "B"),
    ],
)
async def test_a_voice_is_known_or_new(known_s: float, cosine: float, clean_s: float, name: str) -> None:
    session = SessionSpeakers()
    assert await heard(session, A=person(0.0, known_s)) == ["A"]
    assert await heard(session, B=person(at_cosine(cosine), clean_s)) == [name]


async def test_the_nearest_of_several_is_chosen() -> None:
    session = SessionSpeakers()
    assert await heard(session, 2, A=person(0.0, 5.0), B=person(1.5, 5.0)) == ["A", "B"]
    assert await heard(session, C=person(1.2, 1.0)) == ["B"]
    assert await heard(session, C=person(0.2, 1.0)) == ["A"]


async def test_a_voice_that_is_too_short_for_any_likeness_and_silence_are_of_the_last_speaker() -> None:
    session = SessionSpeakers()
    assert await heard(session) == ["A"]  # of nobody yet
    assert await heard(session, 2, A=person(0.0, 5.0), B=person(1.5, 5.0)) == ["A", "B"]
    assert await heard(session, C=person(None, 0.1)) == ["B"]
    assert await heard(session) == ["B"]
    assert await heard(session, A=person(0.0, 1.0)) == ["A"]
    assert await heard(session, 0) == []
    assert await heard(session) == ["A"]


async def known_after(*people: Person) -> Person:
    session = SessionSpeakers()
    for each in people:
        await heard(session, A=each)
    track = Track()
    unchecked: Any = track
    await session.label(unchecked, [], lambda _: b"")
    return track.known["A"]


async def test_a_known_voice_follows_its_speaker_by_how_long_each_was_heard() -> None:
    known = await known_after(person(0.0, 3.0), person(math.pi / 2, 1.0))
    assert known.clean_s == 4.0
    np.testing.assert_allclose(known.embedding, [3 / math.sqrt(10), 1 / math.sqrt(10)], rtol=1e-6)
    assert known.embedding.dtype == np.float32


async def test_a_turn_waits_for_the_one_before_it_to_be_closed() -> None:
    session = SessionSpeakers()
    first, second = session.new_turn(), session.new_turn()
    waiting = asyncio.create_task(second.label_turn([], lambda _: b""))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not waiting.done()
    first.close()
    assert await waiting == []
    second.close()
    assert await session.new_turn().label_turn([], lambda _: b"") == []
