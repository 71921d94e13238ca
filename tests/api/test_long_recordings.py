"""Long files over HTTP: every format says the same, times run forward, and chunks lose or double nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import pytest
from openai import AsyncOpenAI

from tests.api.official_client import plain, transcribe
from tests.api.sample_files import sound_file
from tests.long_recordings import LongRecording, Turn, long_recording
from tests.speech import digits_of, errors_in

AT_ONCE: Final = 4
WORDS: Final[dict[str, Any]] = {
    "response_format": "verbose_json",
    "timestamp_granularities": ["word", "segment"],
}


async def answers(client: AsyncOpenAI, recording: LongRecording) -> Any:
    """verbose_json with words, once every other format is found to say the same and its times to hold."""
    file = sound_file(recording.samples, "FLAC")
    verbose = await transcribe(client, file, **WORDS)
    for response_format in ("json", "text", "srt", "vtt"):
        answer = await transcribe(client, file, response_format=response_format)
        assert plain(answer, response_format) == verbose.text
    events = [event async for event in await transcribe(client, file, stream=True)]
    assert "".join(event.delta for event in events[:-1]) == events[-1].text == verbose.text
    assert " ".join(word.word for word in verbose.words) == verbose.text
    check_times(verbose, recording)
    return verbose


def check_times(verbose: Any, recording: LongRecording) -> None:
    assert verbose.duration == pytest.approx(recording.duration_s, abs=1e-3)
    assert [segment.id for segment in verbose.segments] == list(range(len(verbose.segments)))
    for parts in (verbose.segments, verbose.words):
        times = [time for part in parts for time in (part.start, part.end)]
        assert times == sorted(times), "they run backwards"
        assert times[0] >= 0
        assert times[-1] <= verbose.duration


class Difference(NamedTuple):
    start_s: float
    said: str
    alone: str
    in_the_file: str


async def differences(client: AsyncOpenAI, recording: LongRecording, verbose: Any) -> list[Difference]:
    """The turns of which a digit is lost or doubled in the file, against each turn as a file of its own."""
    places = asyncio.Semaphore(AT_ONCE)

    async def alone(turn: Turn) -> str:
        async with places:
            return digits_of((await transcribe(client, sound_file(turn.samples))).text)

    heard_alone = await asyncio.gather(*(alone(turn) for turn in recording.turns))
    pairs = zip(recording.turns, heard_alone, words_by_turn(recording.turns, verbose.words), strict=True)
    return [
        Difference(round(turn.start_s, 2), turn.digits, by_itself, in_file)
        for turn, by_itself, in_file in pairs
        if len(in_file) != len(by_itself)
        and errors_in(in_file, turn.digits) > errors_in(by_itself, turn.digits)
    ]


def words_by_turn(turns: Sequence[Turn], words: Sequence[Any]) -> list[str]:
    """The digits of each turn; each word belongs to the turn that its middle is nearest to."""
    found = [""] * len(turns)
    for word in words:
        middle_s = (word.start + word.end) / 2
        distances = [max(turn.start_s - middle_s, middle_s - turn.end_s, 0.0) for turn in turns]
        nearest = min(range(len(turns)), key=distances.__getitem__)
        found[nearest] += digits_of(word.word)
    return found


async def test_turns_and_noises_are_the_same_in_every_format(client: AsyncOpenAI) -> None:
    await answers(client, long_recording(12.0, seed=1))


@pytest.mark.trial
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", range(12))
async def test_two_hours_in_twelve_parts_are_the_same_in_every_format(client: AsyncOpenAI, seed: int) -> None:
    """The embedded model itself hears a turn otherwise when noise or another turn shares its chunk; what it
    loses by that is bounded here, and where chunks are cut is held to the words in tests/audio/test_split.py.
    """
    recording = long_recording(600.0, seed=seed)
    verbose = await answers(client, recording)
    found = await differences(client, recording, verbose)
    assert len(found) <= 0.25 * len(recording.turns), found
