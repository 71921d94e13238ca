"""What messages say where nothing is given, and the ends within one process."""

from __future__ import annotations

import asyncio
import threading
from itertools import pairwise

from asr_server.channel.messages import (
    FROZEN_AFTER_S,
    HEARTBEAT_S,
    STEP_TIME_BOUNDS_S,
    Cancel,
    Credit,
    Drain,
    Heartbeat,
    InlineEngineClient,
    InlineEngineServer,
    StepTimes,
)


def test_an_engine_that_hangs_is_noticed_within_five_seconds() -> None:
    assert HEARTBEAT_S + FROZEN_AFTER_S <= 5


def test_the_bounds_of_step_times_go_from_1_ms_to_5_s_by_a_factor_of_two_or_so() -> None:
    """So a quantile that is read from them is right within that factor."""
    assert (STEP_TIME_BOUNDS_S[0], STEP_TIME_BOUNDS_S[-1], len(STEP_TIME_BOUNDS_S)) == (0.001, 5.0, 12)
    for lower, upper in pairwise(STEP_TIME_BOUNDS_S):
        assert 2 <= round(upper / lower, 6) <= 2.5


def test_a_heartbeat_without_work_counts_nothing_and_progress_is_by_steps_and_layers() -> None:
    assert Heartbeat(3) == Heartbeat(3, 0, 0, 0, StepTimes((), 0.0), 0)
    assert [beat.progress for beat in (Heartbeat(3, num_layers=7), Heartbeat(4))] == [(3, 7), (4, 0)]
    assert Credit(2) == Credit(2, 0, None)


async def test_commands_are_taken_all_at_once_and_waited_for_no_longer_than_asked() -> None:
    client = InlineEngineClient()
    server = InlineEngineServer(client)
    assert server.receive(wait_s=0.0) == server.receive(wait_s=0.01) == []
    for command in (Cancel("a"), Cancel("b"), Drain()):
        client.send(command)
    assert server.receive(wait_s=0.0) == [Cancel("a"), Cancel("b"), Drain()]
    for wait_s in (0.9, 60.0):
        threading.Timer(0.01, lambda: client.send(Drain())).start()
        assert server.receive(wait_s) == [Drain()]
    server.close()


async def test_heartbeats_go_the_way_of_events_and_the_end_is_none() -> None:
    client = InlineEngineClient()
    server = InlineEngineServer(client)
    with server.heartbeats() as send:
        await asyncio.to_thread(send, Heartbeat(1))
    client.deliver(None)
    assert [await client.receive(), await client.receive()] == [Heartbeat(1), None]


def test_what_comes_behind_the_end_of_the_event_loop_is_dropped() -> None:
    async def make() -> InlineEngineServer:
        return InlineEngineServer(InlineEngineClient())

    asyncio.run(make()).send(Credit(1))
