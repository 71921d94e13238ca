"""What a chunk costs its request, counted in the checkpoint's windows."""

from __future__ import annotations

import asyncio

import pytest

from asr_server.checkpoint.files import AudioWindow
from asr_server.dispatch.queue import DECODE_COST, ENCODE_COST
from tests.dispatch.scripted import RunningDispatcher, until


@pytest.mark.parametrize(
    ("window", "encoded"), [(AudioWindow(400), 275 / 400), (AudioWindow(1500), 900 / 1500)]
)
async def test_a_chunk_costs_what_it_takes_of_the_checkpoints_window(
    window: AudioWindow, encoded: float
) -> None:
    """Half a window and 1.5 s, rounded up to half a second, or between 6 and 20 s to two."""
    app = await RunningDispatcher(credit=2, window=window).open()
    request = app.dispatcher.open("one full chunk, one half full")
    tasks = [app.send(request, i, window.duration_s * share) for i, share in enumerate((1.0, 0.5))]
    await until(lambda: len(app.replica.submitted) == 2)
    assert request.last_finish_tag == pytest.approx((1 + encoded) * ENCODE_COST + 1.5 * DECODE_COST)
    request.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await app.dispatcher.stop()
