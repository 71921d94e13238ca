"""Name the people of one session, turn by turn. A name that was sent stays with its voice.

Embeddings live as long as the session and are never written.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from asr_server.annexes.speakers.labels import UNKNOWN, Turn, label_segments
from asr_server.annexes.speakers.track import Person, SpeakerTrack
from asr_server.core import Samples, Segment

NEW_PERSON_S: Final = 1.5  # of clean speech: a shorter new voice is the nearest known person
LIKE_SHORT: Final = 0.35  # cosine from which a voice is a person of whom less than that is known
MOST_S: Final = 60.0  # that a known voice counts, so that it follows its speaker


BytesOf = Callable[[int], bytes]  # a token's text, empty for a special one


class SessionSpeakers:
    def __init__(self) -> None:
        self._people: dict[str, Person] = {}
        self._last = UNKNOWN
        self._newest: TurnSpeakers | None = None

    def new_turn(self) -> TurnSpeakers:
        self._newest = TurnSpeakers(self, self._newest.is_closed if self._newest else None)
        return self._newest

    async def label(
        self, track: SpeakerTrack, segments: Sequence[Segment], bytes_of: BytesOf
    ) -> list[Segment]:
        turns, people = await track.spoken(self._people)
        names = {name: self._name(name, person) for name, person in people.items()}
        for name, person in people.items():
            self._remember(names[name], person)
        named = [turn._replace(speaker=names[turn.speaker]) for turn in turns]
        labelled = label_segments(segments, named or [Turn(0.0, math.inf, self._last)], bytes_of)
        if labelled:
            self._last = labelled[-1].speaker or UNKNOWN
        return labelled

    def _name(self, name: str, person: Person) -> str:
        if name in self._people or not self._people:
            return name
        likeness = {known: float(own.embedding @ person.embedding) for known, own in self._people.items()}
        nearest = max(likeness, key=likeness.__getitem__)
        if person.clean_s < NEW_PERSON_S:
            return nearest if person.embedding.any() else self._last
        is_little_known = self._people[nearest].clean_s < NEW_PERSON_S
        return nearest if is_little_known and likeness[nearest] >= LIKE_SHORT else name

    def _remember(self, name: str, person: Person) -> None:
        if not person.embedding.any():
            return
        before = self._people.get(name, Person(np.zeros_like(person.embedding), 0.0))
        mean = before.embedding * before.clean_s + person.embedding * person.clean_s
        total_s = min(before.clean_s + person.clean_s, MOST_S)
        length = max(float(np.linalg.norm(mean)), 1e-9)
        self._people[name] = Person(np.asarray(mean / length, np.float32), total_s)


class TurnSpeakers:
    """Follow the speakers of one turn. Turns are labelled in their order, so that letters are too."""

    def __init__(self, session: SessionSpeakers, is_closed_before: asyncio.Event | None) -> None:
        self.is_closed = asyncio.Event()
        self._session = session
        self._is_closed_before = is_closed_before
        self._track = SpeakerTrack()

    def push(self, samples: Samples) -> None:
        self._track.push(samples)

    async def wait_for_room(self) -> None:
        await self._track.wait_for_room()

    async def label(self, segments: Sequence[Segment], bytes_of: BytesOf) -> list[Segment]:
        """Return the turn's segments with speakers."""
        if self._is_closed_before:
            await self._is_closed_before.wait()
        return await self._session.label(self._track, segments, bytes_of)

    def close(self) -> None:
        self._track.close()
        self.is_closed.set()
