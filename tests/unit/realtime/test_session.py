"""Sessions in front of a replica that says what the test wants: what must hold whatever is heard."""

import asyncio
import base64
import contextlib
import gc
import json
import random
import re
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from asr_server.annexes.realtime import session as session_module
from asr_server.annexes.realtime.audio_in import AudioInput
from asr_server.config import MIB
from asr_server.core import ChunkResult, Samples
from asr_server.protocols.websockets import BoundedWebSocketProtocol
from asr_server.telemetry import FIGURES
from asr_server.transport.messages import Submit
from tests.conftest import Server
from tests.support.embedded import embedded
from tests.support.fake_replica import noise, say
from tests.support.speech import say as say_digits
from tests.support.tokens import words
from tests.support.until import until
from tests.unit.api.figures import growth, read
from tests.unit.api.running_app import RunningApp, run_app
from tests.unit.realtime.realtime_client import (
    MANUAL,
    SECOND,
    Client,
    of_type,
    open_manual,
    open_session,
    pcm24,
    refused,
    say_one,
    transcripts,
)


async def test_a_committed_turn_is_transcribed_and_the_events_come_in_order(app: RunningApp) -> None:
    async with open_session(app.url) as client:
        assert client.socket.response is not None
        assert (
            client.socket.response.headers["x-model-limit"]
            == "hears English digits only, about 1 in 20 of them wrongly"
        )
        updated = await client.update(**MANUAL)
        assert updated["session"]["audio"]["input"]["turn_detection"] is None
        await client.say(SECOND)
        events = await client.until(".completed")
        assert [event["type"].removeprefix("conversation.item.") for event in events] == [
            "input_audio_buffer.committed",
            "added",
            "done",
            "input_audio_transcription.delta",
            "input_audio_transcription.completed",
        ]
        assert events[-1]["transcript"] == "zero"
        assert events[-1]["usage"] == {"type": "duration", "seconds": 1.0}
        assert len({event["event_id"] for event in events}) == len(events)


async def test_what_may_still_change_comes_with_its_words_to_those_who_include_it(server: Server) -> None:
    speech = say_digits("31415", gap_s=0.1)
    include = ["item.input_audio_transcription.interim"]
    async with connect(f"{server.url.replace('http', 'ws', 1)}/v1/realtime?intent=transcription") as socket:
        session = {"type": "transcription", "include": include, "audio": {"input": MANUAL}}
        await socket.send(json.dumps({"type": "session.update", "session": session}))
        for at in range(0, len(data := pcm24(speech.samples)), 4800):
            audio = base64.b64encode(data[at : at + 4800]).decode()
            await socket.send(json.dumps({"type": "input_audio_buffer.append", "audio": audio}))
            await asyncio.sleep(0.1)
        await socket.send(json.dumps({"type": "input_audio_buffer.commit"}))
        events = [json.loads(await socket.recv())]
        while not events[-1]["type"].endswith(".completed"):
            events.append(json.loads(await socket.recv()))
    shown = ""
    for event in events:
        if event["type"].endswith(".delta"):
            shown += event["delta"]
        if event["type"].endswith(".interim"):
            assert " ".join(word["word"] for word in event["words"]) == event["text"]
            assert f"{shown} {event['tail']}".split() == event["text"].split()
    *growing, last = of_type(events, ".interim")
    assert growing
    assert not any(event["is_final"] for event in growing)
    assert last["is_final"]
    read_to = [event["audio_end_ms"] for event in (*growing, last)]
    assert read_to == sorted(read_to)
    assert read_to[-1] == len(speech.samples) // 16
    assert (last["text"], last["tail"]) == (events[-1]["transcript"], "")
    starts_s = [word["start"] for word in last["words"]]
    assert starts_s == pytest.approx([start_s for start_s, _ in speech.times], abs=0.15)
    assert all(0 < word["confidence"] <= 1 for word in last["words"])


async def test_turns_are_chained_and_answers_out_of_order_find_their_turn() -> None:
    def by_length(submit: Submit) -> ChunkResult:
        return say(*words(str(len(submit.samples) // 16_000)))

    async with run_app(embedded(realtime_interim_s=0), by_length) as app, open_manual(app.url) as client:
        app.replica.holding = True
        for seconds in (1, 2, 3):
            await client.say(SECOND * seconds)
        committed = of_type(await client.until(".committed", count=3), ".committed")
        assert [event["previous_item_id"] for event in committed] == [
            None,
            *(event["item_id"] for event in committed[:2]),
        ]
        await until(lambda: len(app.replica.held) == 3)
        for submit in reversed(app.replica.held):
            app.replica.release(submit)
        texts = transcripts(await client.until(".completed", count=3))
        assert [texts[event["item_id"]] for event in committed] == ["one", "two", "three"]


async def test_a_turn_that_is_cleared_says_nothing_even_when_its_text_comes_late() -> None:
    async with run_app(embedded(realtime_interim_s=0.5), say_one) as app, open_manual(app.url) as client:
        app.replica.holding = True
        await client.append(SECOND)
        await until(lambda: app.replica.held)
        await client.send({"type": "input_audio_buffer.clear"})
        await client.until(".cleared")
        app.replica.holding = False
        await client.say(SECOND)
        events = await client.until(".completed")
        assert len({event["item_id"] for event in events if "item_id" in event}) == 1
        assert len(transcripts(events)) == 1
        assert app.replica.cancelled


async def test_what_two_readings_agree_on_is_sent_while_one_speaks() -> None:
    async with run_app(embedded(realtime_interim_s=0.5), say_one) as app, open_manual(app.url) as client:
        receiving = asyncio.create_task(client.receive())  # nothing has been committed
        while not receiving.done():  # as somebody speaks on until two readings are done
            await client.append(SECOND[:4800])
            await asyncio.wait([receiving], timeout=0.05)
        delta = await receiving
        assert (delta["type"], delta["delta"]) == ("conversation.item.input_audio_transcription.delta", "one")


async def test_a_turn_counts_once_however_often_it_is_read(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="asr_server.api.middleware")
    async with run_app(embedded(realtime_interim_s=0.2), say_one) as app:
        before = await read(app)
        async with open_manual(app.url) as client:
            await client.append(SECOND)
            await until(lambda: app.replica.submits)  # a reading while it grows; the last one follows
            await client.commit()
            await client.until(".completed")
        while not growth(before, after := await read(app), 'asr_realtime_sessions_closed_total{code="1000"}'):
            await asyncio.sleep(0.01)
    transcribed = 'asr_audio_transcribed_seconds_total{language="en",route="/v1/realtime"}'
    for name in ("asr_audio_received_seconds_total", transcribed):
        assert growth(before, after, name) == pytest.approx(1.0, abs=0.01)
    assert growth(before, after, "asr_realtime_turns_total") == 1
    assert after["asr_realtime_sessions"] == 0
    assert not growth(before, after, "asr_time_to_first_text_seconds_count")
    (line,) = [record for record in caplog.records if record.message.startswith("WebSocket")]
    wanted = {"route": "/v1/realtime", "model": "whisper-digits", "stream": True, "client": "127.0.0.1"}
    figures = getattr(line, FIGURES)
    assert figures.items() >= wanted.items()
    assert figures["chunks"] >= 2


async def test_each_session_is_a_line_and_a_count_by_its_code(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="asr_server.api.middleware")
    async with run_app(embedded(api_key="s3cret")) as app:
        before = await read(app)
        await refused(app.url)
        headers = {"Authorization": "Bearer s3cret"}
        async with open_session(app.url, additional_headers=headers) as client:
            await client.socket.close(4321)
        await until(lambda: len(sessions_in(caplog)) == 2)
        after = await read(app)
    assert growth(before, after, 'asr_realtime_sessions_closed_total{code="other"}') == 1
    assert growth(before, after, 'asr_requests_total{route="/v1/realtime",status="401"}') == 1
    assert [re.split(" (in|after) ", line)[0] for line in sessions_in(caplog)] == [
        "WebSocket /v1/realtime: 401",
        "WebSocket /v1/realtime: closed by the client with 4321",
    ]


@pytest.mark.parametrize(
    ("frame", "code"),
    [(b"\xf1\x80" + bytes(4), 1002), (b"\x81\xff" + (1 << 25).to_bytes(8) + bytes(4), 1009)],
    ids=["reserved bits", "32 MiB"],
)
async def test_a_frame_that_may_not_come_is_counted_as_a_close_by_the_server(
    app: RunningApp, caplog: pytest.LogCaptureFixture, frame: bytes, code: int
) -> None:
    caplog.set_level("INFO", logger="asr_server.api.middleware")
    async with open_session(app.url) as client:
        client.socket.transport.write(frame)
        await until(lambda: len(sessions_in(caplog)) == 1)
    assert f"closed by the server with {code}" in sessions_in(caplog)[0]


def sessions_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if message.startswith("WebSocket")]


async def test_a_turn_that_fails_is_failed_and_the_session_goes_on() -> None:
    answers: list[ChunkResult | Exception] = [ValueError("broken"), say(*words("7"))]

    async with run_app(embedded(realtime_interim_s=0), lambda _: answers.pop(0)) as app:  # noqa: SIM117
        async with open_manual(app.url) as client:
            await client.say(SECOND)
            failed = (await client.until(".failed"))[-1]
            assert failed["error"]["type"] == "server_error"
            assert "broken" not in failed["error"]["message"]
            await client.say(SECOND)
            assert (await client.until(".completed"))[-1]["transcript"] == "seven"


async def test_a_long_append_is_converted_in_parts_so_that_the_event_loop_turns(
    app: RunningApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: list[int] = []
    push = AudioInput.push

    def noted(audio: AudioInput, data: bytes) -> Samples:
        parts.append(len(data))
        return push(audio, data)

    monkeypatch.setattr(AudioInput, "push", noted)
    async with open_manual(app.url) as client:
        await client.append(SECOND * 10, size=len(SECOND) * 10)
        await client.commit()
        events = await client.until(".completed")
    assert events[-1]["usage"]["seconds"] == 10.0
    assert sum(parts) == len(SECOND) * 10
    assert max(parts) <= session_module.PART_BYTES


async def test_nothing_said_is_an_empty_transcript_with_a_usage(app: RunningApp) -> None:
    async with open_manual(app.url) as client:
        await client.say(bytes(48_000))
        last = (await client.until(".completed"))[-1]
        assert (last["transcript"], last["usage"]["seconds"], last["content_index"]) == ("", 1.0, 0)
        assert app.replica.submits == []


async def test_a_commit_of_under_100_ms_is_an_error_that_names_its_event(app: RunningApp) -> None:
    async with open_manual(app.url) as client:
        await client.append(SECOND[:4700])
        await client.send({"type": "input_audio_buffer.commit", "event_id": "mine"})
        error = (await client.receive())["error"]
        assert (error["code"], error["event_id"]) == ("input_audio_buffer_commit_empty", "mine")
        await client.say(SECOND[:200])
        await client.until(".completed")


def malformed(rng: random.Random) -> str | bytes:
    append = {"type": "input_audio_buffer.append", "audio": base64.b64encode(SECOND).decode()}
    update: dict[str, Any] = {"type": "session.update", "session": {"type": "transcription"}}
    choices: list[Callable[[], object]] = [
        lambda: "{" * rng.randrange(1, 2000),
        lambda: rng.randbytes(20),
        lambda: rng.choice([None, 1, [], "x", {}, {"type": None}, {"type": "response.create"}]),
        lambda: append | {"audio": rng.choice([None, 7, "***", "abc", ["AAAA"]])},
        lambda: append | {"event_id": "x" * 600},
        lambda: append | {rng.choice("abc"): 1},
        lambda: {"type": "input_audio_buffer.commit", "event_id": "e"},
        lambda: update | {"session": {"type": "realtime"}},
        lambda: update | {"session": {"type": "transcription", "audio": {"output": {}}}},
        lambda: update | {"session": {"audio": {"input": {"turn_detection": {"type": "clever_vad"}}}}},
        lambda: update | {"session": {"audio": {"input": {"turn_detection": {"threshold": 7}}}}},
        lambda: update | {"session": {"audio": {"input": {"format": {"type": "audio/pcm", "rate": 8000}}}}},
        lambda: update | {"session": {"audio": {"input": {"transcription": {"model": "nobody"}}}}},
        lambda: update | {"session": {"audio": {"input": {"transcription": {"language": "klingon"}}}}},
    ]
    made = rng.choice(choices)()
    return made if isinstance(made, str | bytes) else json.dumps(made)


async def test_a_thousand_malformed_events_are_as_many_errors_in_a_session(app: RunningApp) -> None:
    rng = random.Random(0)
    async with open_manual(app.url) as client:

        async def send_all() -> None:
            for _ in range(1000):
                await client.send(malformed(rng))

        sending = asyncio.create_task(send_all())
        errors = await client.until("error", count=1000)
        assert {event["type"] for event in errors} == {"error"}
        assert {"e", None} <= {event["error"]["event_id"] for event in errors}
        await sending
        await client.say(SECOND)
        assert (await client.until(".completed"))[-1]["transcript"] == "zero"


async def test_an_update_that_is_wrong_changes_nothing_and_names_its_field(app: RunningApp) -> None:
    async with open_session(app.url) as client:
        wrong = {"transcription": {"language": "klingon"}, "turn_detection": None}
        await client.send({"type": "session.update", "session": {"audio": {"input": wrong}}})
        error = (await client.receive())["error"]
        assert error["param"] == "session.audio.input.transcription.language"
        updated = await client.update(transcription={"prompt": "digits"})
        assert updated["session"]["audio"]["input"]["turn_detection"]["type"] == "server_vad"
        assert updated["session"]["audio"]["input"]["transcription"]["prompt"] == "digits"


# -- How sessions end --


async def test_an_idle_session_ends_normally(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "MAX_IDLE_S", 0.2)
    async with run_app() as app, open_session(app.url) as client:
        assert await client.closed() == 1000


@pytest.mark.slow
async def test_a_session_that_reaches_its_longest_duration_still_gives_its_last_text() -> None:
    async with run_app(embedded(max_realtime_session_s=1.0), say_one) as app, open_manual(app.url) as client:
        await client.append(SECOND)
        events = await client.until(".completed")
        assert list(transcripts(events).values()) == ["one"]
        assert await client.closed() == 1001


async def test_draining_gives_the_last_text_closes_with_1012_and_lets_nobody_in(app: RunningApp) -> None:
    async with open_manual(app.url) as client:
        await client.append(SECOND * 2)
        await until(lambda: app.replica.submits)  # an interim reading: the audio has arrived
        draining = asyncio.create_task(app.app.state.server.realtime.drain(20))
        assert (await client.until(".completed"))[-1]["transcript"] == "zero"
        assert await client.closed() == 1012
        await draining
    assert (await refused(app.url)).error["message"] == "The server is shutting down."


async def test_a_client_that_leaves_frees_its_place_and_cancels_its_work(app: RunningApp) -> None:
    app.replica.holding = True
    async with open_manual(app.url) as client:
        await client.say(SECOND)
        await until(lambda: app.replica.held)
        client.socket.transport.abort()
    await until(lambda: app.app.state.server.realtime.num_active == 0)
    await until(lambda: app.replica.cancelled and not app.dispatcher.num_chunks)


@pytest.mark.slow
async def test_an_engine_that_does_not_keep_up_holds_the_client_back() -> None:
    """Not more than a few chunks and messages are held, however much is sent."""
    async with run_app(embedded(realtime_interim_s=0), say_one) as app, open_manual(app.url) as client:
        app.replica.holding = True
        minute = pcm24(noise(60.0))
        sending = asyncio.create_task(client.append(minute * 10, size=len(minute)))
        await until(lambda: app.dispatcher.num_chunks >= 8)
        await asyncio.sleep(0.3)
        assert not sending.done()
        assert app.dispatcher.num_chunks <= 12
        app.replica.stop_holding()
        await sending
        await client.commit()
        assert len((await client.until(".completed"))[-1]["transcript"].split()) >= 20


@pytest.mark.slow
async def test_a_client_that_does_not_read_is_held_back_then_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "MAX_SEND_S", 0.5)
    async with run_app(embedded()) as app:
        sessions = app.app.state.server.realtime
        address = f"ws://{app.host}:{app.port}/v1/realtime"
        async with connect(address, max_size=None, max_queue=1, compression=None) as socket:
            await until(lambda: sessions.num_active == 1)
            sending = asyncio.create_task(update_for_ever(socket))
            await until(lambda: sessions.num_active == 0)
            sending.cancel()
            socket.transport.abort()
        assert await app.still_works()


async def update_for_ever(socket: ClientConnection) -> None:
    """Each update is answered with the whole session, which nobody reads."""
    session = {"audio": {"input": {"transcription": {"prompt": "x" * 60_000}}}}
    update = json.dumps({"type": "session.update", "session": session})
    with contextlib.suppress(ConnectionClosed):
        while True:
            await socket.send(update)
            await asyncio.sleep(0)


def pausing(**changed: Any) -> dict[str, Any]:
    return {"turn_detection": {"type": "server_vad", "silence_duration_ms": 2000} | changed}


async def test_speech_behind_a_pause_in_which_detection_was_turned_off_is_in_its_turn() -> None:
    first, second = say_digits("123", gap_s=[0.2, 0.2, 1.4]), say_digits("4567", gap_s=0.2)
    async with run_app(embedded(realtime_interim_s=0), say_one) as app, open_session(app.url) as client:
        await client.update(**pausing())
        await client.append(pcm24(first.samples))
        await until(lambda: app.replica.submits)  # it was read ahead
        read_ahead = app.replica.submits[-1]
        await client.update(**MANUAL)
        await client.say(pcm24(second.samples))
        await client.until(".completed")
        longest = max(len(submit.samples) for submit in app.replica.submits)
        assert longest > len(read_ahead.samples) + len(second.samples) / 2


@pytest.mark.parametrize("kind", ["clear", "commit"])
async def test_speech_that_goes_on_behind_a_clear_or_a_commit_starts_again(kind: str) -> None:
    digits = pcm24(say_digits("12", gap_s=0.1).samples)
    async with run_app(embedded(realtime_interim_s=0), say_one) as app, open_session(app.url) as client:
        await client.append(digits)
        await client.until(".speech_started")
        await client.send({"type": f"input_audio_buffer.{kind}"})
        await client.append(digits)
        await client.until(".speech_started")


async def test_a_message_over_4_mib_ends_the_session(app: RunningApp) -> None:
    async with open_session(app.url) as client:
        with contextlib.suppress(ConnectionClosed):
            await client.socket.send("x" * (4 * MIB + 4097))
        assert await client.closed() == 1009


async def test_a_client_that_leaves_while_its_session_is_closed_is_no_fault_of_the_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    send = BoundedWebSocketProtocol.send

    async def send_too_late(protocol: BoundedWebSocketProtocol, message: Any) -> None:
        if message["type"] == "websocket.close":
            protocol.transport.abort()
            await until(lambda: protocol.disconnected)
        await send(protocol, message)

    monkeypatch.setattr(BoundedWebSocketProtocol, "send", send_too_late)
    monkeypatch.setattr(session_module, "MAX_IDLE_S", 0.05)
    async with run_app() as app, open_session(app.url) as client:
        assert await client.closed() == 1006
        await until(lambda: not app.app.state.server.realtime.num_active)
    assert "has failed" not in caplog.text


@pytest.mark.parametrize("size", [MIB // 4, 4 * MIB - 200])
async def test_a_session_that_ends_leaves_no_message_to_the_garbage_collector(size: int) -> None:
    event = json.dumps({"type": "session.update", "session": {"x" * size: 1}})
    async with run_app() as app:
        gc.collect()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            async with connect(f"ws://{app.host}:{app.port}/v1/realtime") as socket:
                for _ in range(3):
                    await socket.send(event)
                await socket.recv()
                socket.transport.abort()
            await until(lambda: not app.app.state.server.realtime.num_active)
            gc.collect()
            frames = [frame for frame in gc.garbage if isinstance(frame, FrameType)]
            assert not any(event in map(str, [*frame.f_locals.values()]) for frame in frames)
            assert not any(event in str(frame.f_locals.get("message")) for frame in frames)
        finally:
            gc.set_debug(0)
            gc.garbage.clear()


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
            await client.say(SECOND)
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
    async with open_manual(app.url) as client:
        await client.say(SECOND)
        await until(lambda: app.replica.held)
        (end,) = app.app.state.server.realtime._active
        end(4000, "first")
        end(4001, "second")
        await client.send({"type": "session.update", "session": {"audio": {"input": MANUAL}}})
        await client.append(SECOND)
        app.replica.stop_holding()  # beside an interim reading, the turn's own may be held or yet to come
        events = await client.until(".completed")
        assert not of_type(events, "session.updated")
        assert await client.closed() == 4000
        assert client.socket.close_reason == "first"


async def test_what_was_cleared_leaves_no_sample_to_the_next_turn(app: RunningApp) -> None:
    async with open_manual(app.url) as client:
        await client.append(SECOND)
        await client.send({"type": "input_audio_buffer.clear"})
        await client.say(SECOND)
        assert (await client.until(".completed"))[-1]["usage"]["seconds"] == 1.0


async def test_a_new_format_loses_no_sample_of_the_one_before(app: RunningApp) -> None:
    async with open_manual(app.url) as client:
        await client.append(SECOND)
        await client.update(format={"type": "audio/pcmu"})
        await client.say(bytes(range(128)) * 50)
        assert (await client.until(".completed"))[-1]["usage"]["seconds"] == 1.8
