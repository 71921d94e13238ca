"""Which samples are heard together, and what becomes of the voices of windows, on windows made up."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from asr_server.annexes.speakers.segmentation import NUM_FRAMES, STEP, STEP_FRAMES, WINDOW, Floats
from asr_server.annexes.speakers.track import Person, SpeakerTrack
from asr_server.annexes.speakers.voices import Heard, Stretch, Voice
from asr_server.core import SAMPLE_RATE

FRAME_S = 270 / SAMPLE_RATE
ANN, BOB, EVE = np.eye(192, dtype=np.float32)[:3]


class Listener(ThreadPoolExecutor):
    """Notes the batches that it is given, and answers with the windows of the test."""

    def __init__(self, *windows: list[Heard]) -> None:
        super().__init__(1)
        self._windows = list(windows)
        self.batches: list[tuple[int, int]] = []  # first sample of each, and their number

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        if getattr(function, "__name__", "") != "_unless_closed":
            return super().submit(function, *arguments, **named)
        samples, start, _ = arguments
        self.batches.append((start, len(samples)))
        future: Future[Any] = Future()
        future.set_result(self._windows.pop(0) if self._windows else [Heard([], [], [])])
        return future


def heard(*voices: Voice) -> Heard:
    return Heard(list(voices), [], [])


def voice(person: Floats, *frames: tuple[int, int], clean_s: float = 5.0, **more: Any) -> Voice:
    activity = np.zeros(NUM_FRAMES, np.float16)
    for first, end in frames:
        activity[first:end] = 1
    return Voice(activity, person, clean_s, **more)


def second(frame: int) -> float:
    """Where a frame begins: the middle of its field of view is that of its 270 samples."""
    return (495 - 135 + frame * 270) / SAMPLE_RATE


async def turns_of(*windows: Heard, **more: Any) -> list[tuple[float, float, str]]:
    with Listener(list(windows)) as listener:
        track = SpeakerTrack(executor=listener, **more)
        track.push(np.zeros(WINDOW, np.float32))
        return [(turn.start_s, turn.end_s, turn.speaker) for turn in await track.turns()]


@pytest.mark.parametrize(
    ("num_samples", "batches"),
    [
        (4001, [(0, 4001)]),
        (WINDOW + 3 * STEP - 1, [(0, WINDOW + 3 * STEP - 1)]),
        (WINDOW + 3 * STEP, [(0, WINDOW + 3 * STEP)]),
        (WINDOW + 3 * STEP + 1, [(0, WINDOW + 3 * STEP), (4 * STEP, WINDOW - STEP + 1)]),
        (WINDOW + 7 * STEP, [(0, WINDOW + 3 * STEP), (4 * STEP, WINDOW + 3 * STEP)]),
    ],
)
async def test_four_windows_are_heard_at_once_and_the_rest_at_the_end(
    num_samples: int, batches: list[tuple[int, int]]
) -> None:
    for block in (num_samples, 30_000):
        with Listener() as listener:
            track, samples = SpeakerTrack(executor=listener), np.zeros(num_samples, np.float32)
            for first in range(0, num_samples, block):
                track.push(samples[first : first + block])
            assert await track.turns() == []
            assert listener.batches == batches


async def test_a_turn_lasts_a_little_longer_than_its_frames() -> None:
    (start_s, end_s, speaker), *others = await turns_of(heard(voice(ANN, (100, 200))))
    assert (start_s, end_s) == pytest.approx((second(100) - 0.02, second(200) + 0.04))
    assert (speaker, others) == ("A", [])


async def test_where_two_windows_disagree_the_one_whose_middle_is_nearer_decides() -> None:
    overlap = STEP_FRAMES + (NUM_FRAMES - STEP_FRAMES) // 2
    ((start_s, end_s, _),) = await turns_of(heard(voice(ANN, (10, NUM_FRAMES))), heard())
    assert start_s == pytest.approx(second(10) - 0.02)
    assert end_s == pytest.approx(second(overlap) + 0.04, abs=3 * FRAME_S)
    ((start_s, end_s, _),) = await turns_of(heard(), heard(voice(ANN, (0, 400))))
    assert start_s == pytest.approx(second(overlap) - 0.02, abs=3 * FRAME_S)
    assert end_s == pytest.approx(second(STEP_FRAMES + 400) + 0.04)
    both = await turns_of(heard(voice(ANN, (10, NUM_FRAMES))), heard(voice(ANN, (0, 400))))
    assert len(both) == 1


async def test_people_are_letters_by_who_spoke_first_and_references_have_their_names() -> None:
    windows = heard(voice(BOB, (20, 100)), voice(ANN, (150, 300)), voice(EVE, (350, 500)))
    turns = await turns_of(windows, names=["ann"], references=[ANN])
    assert [turn[2] for turn in turns] == ["A", "ann", "B"]
    assert [turn[0] for turn in turns] == sorted(turn[0] for turn in turns)


async def test_two_halves_of_a_local_speaker_may_be_one_person() -> None:
    near = np.asarray(0.55 * ANN + np.sqrt(1 - 0.55**2) * BOB, np.float32)
    for is_half, num_people in ((False, 2), (True, 1)):
        windows = heard(voice(ANN, (20, 150), is_half=is_half), voice(near, (200, 400), is_half=is_half))
        assert len({turn[2] for turn in await turns_of(windows)}) == num_people


@pytest.mark.parametrize(("nearer", "is_other"), [(0.06, True), (0.04, False)])
async def test_a_stretch_is_said_by_whom_it_sounds_like(nearer: float, is_other: bool) -> None:
    """In the second window the segmentation takes Ann for three stretches, and for Bob's too."""
    between = np.asarray(0.5 * ANN + (0.5 + nearer) * BOB, np.float32)
    own = Stretch(STEP + 13_500, STEP + 54_000, 250, ANN, False)  # frames 48 to 198, and so on
    middle = Stretch(STEP + 54_000, STEP + 94_500, 250, between, False)
    last = Stretch(STEP + 94_500, STEP + 135_000, 250, ANN, False)
    both = heard(voice(ANN, (0, 100)), voice(BOB, (200, 290)))
    turns = await turns_of(both, heard(voice(ANN, (50, 500), stretches=(own, middle, last))))
    behind = [turn for turn in turns if turn[0] > second(STEP_FRAMES + 30)]
    assert [turn[2] for turn in behind] == (["A", "B", "A"] if is_other else ["A"])
    if is_other:
        assert behind[1][0] == pytest.approx((STEP + 54_000) / SAMPLE_RATE, abs=0.05)
        assert behind[1][1] == pytest.approx((STEP + 94_500) / SAMPLE_RATE, abs=0.05)


async def test_who_is_known_by_telephone_or_by_what_is_alike_is_told_apart_by_less_or_more() -> None:
    near = np.asarray(0.5 * ANN + np.sqrt(0.75) * BOB, np.float32)
    for is_narrow, num_people in ((False, 2), (True, 1)):
        windows = heard(voice(ANN, (20, 150))), heard(voice(near, (100, 400), is_narrow=is_narrow))
        assert len({turn[2] for turn in await turns_of(*windows)}) == num_people
    alike = np.asarray(0.56 * ANN + np.sqrt(1 - 0.56**2) * BOB, np.float32)
    for cosines, num_people in (([], 1), ([0.95] * 20, 2)):
        first, last = Heard([voice(ANN, (20, 150))], [], cosines), heard(voice(alike, (100, 400)))
        assert len({turn[2] for turn in await turns_of(first, last)}) == num_people


async def test_people_are_known_by_the_mean_of_their_voices_and_what_they_say() -> None:
    with Listener(
        [heard(voice(ANN, (20, 250), clean_s=3.0)), heard(voice(ANN, (300, 500), clean_s=2.0))]
    ) as of:
        track = SpeakerTrack(executor=of)
        track.push(np.zeros(WINDOW, np.float32))
        spoken = await track.spoken({"zoe": Person(BOB, 5.0), "ann": Person(ANN, 9.0)})
    assert {turn.speaker for turn in spoken.turns} == {"ann"}
    assert list(spoken.people) == ["ann"]
    assert spoken.people["ann"].clean_s == 5.0
    assert np.allclose(spoken.people["ann"].embedding, ANN)


async def test_nobody_speaks_where_no_voice_is_clean() -> None:
    assert await turns_of(heard(voice(ANN, (20, 250), clean_s=0.0))) == []
    silent = np.zeros(192, np.float32)
    turns = await turns_of(heard(voice(silent, (300, 400), clean_s=0.2)), heard(voice(ANN, (20, 250))))
    assert {turn[2] for turn in turns} == {"A"}


async def test_what_is_closed_keeps_nothing() -> None:
    with Listener([heard(voice(ANN, (20, 250)))]) as listener:
        track = SpeakerTrack(executor=listener)
        track.push(np.zeros(WINDOW + 3 * STEP, np.float32))
        track.close()
        assert track._unless_closed(np.zeros(WINDOW, np.float32), 0, None) == []
        await track.wait_for_room()
