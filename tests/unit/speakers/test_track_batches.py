"""What each batch of windows is given, when the decoder waits, and how a transcript is labelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from asr_server.annexes.speakers import track as track_module
from asr_server.annexes.speakers.segmentation import STEP, WINDOW
from asr_server.annexes.speakers.track import SpeakerTrack, reference_embeddings

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


async def test_each_reference_is_heard_in_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(track_module, "hear_reference", lambda samples: samples * 2)
    given = [np.full(3, number, np.float32) for number in range(3)]
    assert [found.tolist() for found in await reference_embeddings(given)] == [[0] * 3, [2] * 3, [4] * 3]
