"""What each batch of windows is given, when the decoder waits, and how a transcript is labelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import pytest

from asr_server.annexes.speakers import track as track_module
from asr_server.annexes.speakers.segmentation import NUM_FRAMES, STEP, WINDOW, Floats
from asr_server.annexes.speakers.track import SpeakerTrack, reference_embeddings
from asr_server.annexes.speakers.voices import Heard, Stretch, Voice
from asr_server.core import Samples, Segment, Transcript, Word
from tests.support.tokens import make_tokenizer, words

BATCH = WINDOW + 3 * STEP
ANN, BOB = np.eye(192, dtype=np.float32)[:2]


class Pending(ThreadPoolExecutor):
    """Keeps what it is given, and does it when a test says so."""

    def __init__(self) -> None:
        super().__init__(1)
        self.futures: list[Future[Any]] = []

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        self.futures.append(Future())
        return self.futures[-1]


@pytest.mark.parametrize("num_batches", [2, 3, 4])
async def test_a_decoder_waits_until_two_batches_at_most_are_not_heard(num_batches: int) -> None:
    executor = Pending()
    track = SpeakerTrack(executor=executor)
    track.push(np.zeros(WINDOW + (4 * num_batches - 1) * STEP, np.float32))
    assert len(executor.futures) == num_batches
    waiting = asyncio.create_task(track.wait_for_room())
    await asyncio.sleep(0)
    for future in executor.futures[: num_batches - 2]:
        assert not waiting.done()
        future.set_result([])
        for _ in range(3):  # the task's future is told, then the task
            await asyncio.sleep(0)
    assert waiting.done()


async def test_each_window_is_heard_behind_the_one_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    segmented: list[int] = []
    heard: list[tuple[int, int, int, list[Stretch]]] = []

    def segment(samples: Samples) -> Floats:
        segmented.append(len(samples))
        num_windows = max(1, -(-(len(samples) - WINDOW) // STEP) + 1)
        return np.tile(np.arange(num_windows, dtype=np.float32)[:, None, None], (1, NUM_FRAMES, 7))

    def hear(window: Samples, likely: Floats, start: int, before: list[Stretch]) -> Heard:
        heard.append((round(float(window[0])), len(window), start, before))
        return Heard([], [Stretch(start, start + 1, int(likely[0, 0]), ANN, False)], [])

    monkeypatch.setattr(track_module, "segment", segment)
    monkeypatch.setattr(track_module, "hear", hear)
    with ThreadPoolExecutor(1) as executor:
        track = SpeakerTrack(executor=executor)
        samples = np.arange(BATCH + STEP + 1000, dtype=np.float64)
        for first in range(0, len(samples), 100_000):
            track.push((samples[first : first + 100_000] / STEP).astype(np.float32))
        assert await track.turns() == []
    assert segmented == [BATCH, len(samples) - 4 * STEP]
    starts = [start for _, _, start, _ in heard]
    assert starts == [STEP * number for number in range(6)]
    assert [first for first, *_ in heard] == list(range(6))
    assert [size for _, size, *_ in heard] == [WINDOW] * 5 + [WINDOW - STEP + 1000]
    assert heard[0][3] == []
    assert [[each.start for each in before] for *_, before in heard[1:]] == [[start] for start in starts[:-1]]


async def test_a_transcript_is_labelled_word_by_word(monkeypatch: pytest.MonkeyPatch) -> None:
    def voice(person: Floats, first: int, end: int) -> Voice:
        activity = np.zeros(NUM_FRAMES, np.float16)
        activity[first:end] = 1
        return Voice(activity, person, 5.0)

    heard = Heard([voice(ANN, 20, 150), voice(BOB, 200, 400)], [], [])
    monkeypatch.setattr(track_module, "segment", lambda samples: np.zeros((1, NUM_FRAMES, 7), np.float32))
    monkeypatch.setattr(track_module, "hear", lambda *_: heard)
    said = Word(" one", 1.0, 2.0), Word(" two", 4.0, 5.0)
    segment = Segment(0, 0, 1.0, 5.0, " one two", words("12"), 0.0, -0.1, 1.0, 0.0, said)
    transcript = Transcript(" one two", (segment,), (), "english", 10.0, 500, 2)
    with ThreadPoolExecutor(1) as executor:
        track = SpeakerTrack(executor=executor)
        track.push(np.ones(WINDOW, np.float32))
        labelled = await track.label(transcript, make_tokenizer())
    assert [(each.speaker, each.text, each.tokens) for each in labelled.segments] == [
        ("A", " one", words("1")),
        ("B", " two", words("2")),
    ]
    assert msgspec.structs.replace(labelled, segments=()) == msgspec.structs.replace(transcript, segments=())


async def test_each_reference_is_heard_in_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(track_module, "hear_reference", lambda samples: samples * 2)
    given = [np.full(3, number, np.float32) for number in range(3)]
    assert [found.tolist() for found in await reference_embeddings(given)] == [[0] * 3, [2] * 3, [4] * 3]
