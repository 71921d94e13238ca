"""What a session numbers, what its key may use, and what it does once its end has begun."""

import json
import time

from websockets.asyncio.client import connect

from tests.support.embedded import embedded
from tests.support.fake_replica import noise
from tests.support.until import until
from tests.unit.api.running_app import RunningApp, run_app
from tests.unit.realtime.realtime_client import MANUAL, Client, of_type, open_session, pcm24

SECOND = pcm24(noise(1.0))


async def test_events_and_items_are_numbered_under_the_sessions_own_letters() -> None:
    async with (
        run_app(embedded(max_realtime_session_s=1000)) as app,
        connect(app.url.replace("http", "ws") + "/v1/realtime") as socket,
    ):
        created = json.loads(await socket.recv())
        now = time.time()
        client = Client(socket)
        await client.update(**MANUAL)
        for _ in range(2):
            await client.append(SECOND)
            await client.commit()
        events = await client.until(".completed", count=2)
        tag = created["session"]["id"].removeprefix("sess_")[:8]
        assert created["event_id"] == f"event_{tag}000001"
        assert [event["event_id"] for event in events] == [
            f"event_{tag}{number:06d}" for number in range(3, 3 + len(events))
        ]
        items = [event["item_id"] for event in of_type(events, ".committed")]
        assert items == [f"item_{tag}000000", f"item_{tag}000001"]
        assert now + 990 < created["session"]["expires_at"] <= now + 1000


async def test_the_first_end_counts_and_the_committed_turn_is_still_read(app: RunningApp) -> None:
    app.replica.holding = True
    async with open_session(app.url) as client:
        await client.update(**MANUAL)
        await client.append(SECOND)
        await client.commit()
        await until(lambda: app.replica.held)
        (end,) = app.app.state.server.realtime._active
        end(4000, "first")
        end(4001, "second")
        await client.send({"type": "session.update", "session": {"audio": {"input": MANUAL}}})
        await client.append(SECOND)
        for submit in app.replica.held:
            app.replica.release(submit)
        events = await client.until(".completed")
        assert not of_type(events, "session.updated")
        assert await client.closed() == 4000
        assert client.socket.close_reason == "first"


async def test_what_was_cleared_leaves_no_sample_to_the_next_turn(app: RunningApp) -> None:
    async with open_session(app.url) as client:
        await client.update(**MANUAL)
        await client.append(SECOND)
        await client.send({"type": "input_audio_buffer.clear"})
        await client.append(SECOND)
        await client.commit()
        assert (await client.until(".completed"))[-1]["usage"]["seconds"] == 1.0


async def test_a_new_format_loses_no_sample_of_the_one_before(app: RunningApp) -> None:
    async with open_session(app.url) as client:
        await client.update(**MANUAL)
        await client.append(SECOND)
        await client.update(format={"type": "audio/pcmu"})
        await client.append(bytes(range(128)) * 50)
        await client.commit()
        assert (await client.until(".completed"))[-1]["usage"]["seconds"] == 1.8
