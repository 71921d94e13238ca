import asyncio
import io
import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile

from asr_server.api import transcribe
from asr_server.api.events import EventWriter
from asr_server.api.transcribe import answer_headers
from asr_server.config import MIB
from asr_server.core import ChunkResult, Samples
from asr_server.formats.render import render
from asr_server.server.settings import ServerSettings
from asr_server.transport.messages import Submit
from tests.support.embedded import embedded
from tests.support.fake_replica import noise, say, wav
from tests.support.speech import say as say_digits
from tests.support.tokens import words
from tests.support.until import until
from tests.unit.api.running_app import (
    SECOND,
    THREE_CHUNKS,
    RunningApp,
    error_of,
    number_of_the_chunk,
    run_app,
    served,
)
from tests.unit.audio.audio_files import Sound, voice, write_film

SILENCE = wav(np.zeros(16_000, np.float32))
PATH = "/v1/audio/transcriptions"


def events_of(body: str) -> list[Any]:
    """The events' data, the end mark as it is."""
    assert body.endswith("\n\n")
    lines = body.removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") for line in lines)
    data = [line.removeprefix("data: ") for line in lines]
    return [text if text == "[DONE]" else json.loads(text) for text in data]


async def begin(app: RunningApp, file: bytes = SECOND, **fields: str) -> httpx.Response:
    """A request under way, its body not yet read."""
    request = app.client.build_request(
        "POST", PATH, files={"file": file}, data={"model": "whisper-1"} | fields
    )
    return await app.client.send(request, stream=True)


async def begun(app: RunningApp) -> httpx.Response:
    """A stream whose first event has come; the answers to its other chunks are held back."""
    app.replica.holding = True
    asking = asyncio.create_task(begin(app, THREE_CHUNKS, stream="true"))
    await until(lambda: app.replica.held)
    app.replica.release(app.replica.held[0])
    return await asking


# -- Streaming -----------------------------------------------------------------------------------------------


async def test_a_stream_is_deltas_then_one_done_then_the_end(app: RunningApp) -> None:
    reply = await app.post(THREE_CHUNKS, stream="true")
    *deltas, done, end = events_of(reply.text)
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert [delta["type"] for delta in deltas] == ["transcript.text.delta"] * 3
    assert "".join(delta["delta"] for delta in deltas) == done["text"] == "zero one two"
    assert (done["type"], done["usage"]["type"], end) == ("transcript.text.done", "tokens", "[DONE]")


async def test_the_first_event_leaves_while_the_rest_is_being_read(app: RunningApp) -> None:
    reply = await begun(app)
    lines = reply.aiter_lines()
    assert json.loads((await anext(lines)).removeprefix("data: "))["delta"] == "zero"
    await until(lambda: len(app.replica.held) == 2)
    for submit in reversed(app.replica.held):
        app.replica.release(submit)
    rest = [line async for line in lines if line]
    assert json.loads(rest[-2].removeprefix("data: "))["text"] == "zero one two"
    await reply.aclose()


async def test_a_client_that_does_not_read_its_stream_holds_up_neither_its_work_nor_others(
    app: RunningApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each event is made larger than what the system's buffers take."""
    delta = EventWriter.delta
    comment = b": " + b"x" * (8 * MIB) + b"\n\n"
    monkeypatch.setattr(EventWriter, "delta", lambda writer, said: delta(writer, said) + comment)
    admission = app.app.state.server.admission
    form: dict[str, Any] = {"files": {"file": THREE_CHUNKS}, "data": {"model": "whisper-1", "stream": "true"}}
    async with app.client.stream("POST", "/v1/audio/transcriptions", **form) as reply:
        await until(lambda: not admission.num_in_flight)  # all has been read by the engine
        assert admission.num_open == 1  # and not by the client
        assert await app.still_works()
        text = (await reply.aread()).decode()
    *deltas, done, _ = (line for line in text.splitlines() if line.startswith("data: "))
    joined = "".join(json.loads(line.removeprefix("data: "))["delta"] for line in deltas)
    assert joined == json.loads(done.removeprefix("data: "))["text"] == "zero one two"


@pytest.mark.parametrize("fields", [{"response_format": "verbose_json"}, {"stream": "true"}])
async def test_the_reply_of_a_long_transcript_is_made_in_a_thread(
    app: RunningApp, monkeypatch: pytest.MonkeyPatch, fields: dict[str, str]
) -> None:
    threads: list[threading.Thread] = []

    def noting(make: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            threads.append(threading.current_thread())
            return make(*args)

        return noted

    monkeypatch.setattr(transcribe, "render", noting(render))
    monkeypatch.setattr(EventWriter, "done", noting(EventWriter.done))
    inline = await app.post(THREE_CHUNKS, **fields)
    monkeypatch.setattr(transcribe, "SEGMENTS_INLINE", 2)
    in_a_thread = await app.post(THREE_CHUNKS, **fields)
    assert inline.text == in_a_thread.text
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


async def test_an_error_after_the_first_event_is_an_event() -> None:
    def answer(submit: Submit) -> ChunkResult | Exception:
        return RuntimeError("lost") if submit.id.chunk == 1 else number_of_the_chunk(submit)

    async with run_app(answer=answer) as app:
        reply = await begun(app)
        await until(lambda: len(app.replica.held) == 2)
        app.replica.release(app.replica.held[0])
        delta, failure = events_of((await reply.aread()).decode())
        assert delta["delta"] == "zero"
        assert set(failure["error"]) == {"message", "type", "param", "code"}
        assert failure["error"]["type"] == "server_error"
        assert app.dispatcher.num_chunks == 0


# -- Errors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "fields", "status", "code", "param"),
    [
        (b"not audio", {}, 400, "invalid_audio", "file"),
        (b"", {}, 400, "invalid_audio", "file"),
        (wav(np.zeros(1500, np.float32)), {}, 400, "audio_too_short", "file"),
        (SECOND, {"model": "whisper-9"}, 404, "model_not_found", "model"),
        (SECOND, {"language": "klingon"}, 400, "invalid_value", "language"),
        (SECOND, {"languages[]": "en,klingon"}, 400, "invalid_value", "languages[]"),
        (SECOND, {"colour": "red"}, 400, "invalid_value", "colour"),
        (SECOND, {"temperature": "2"}, 400, "invalid_value", "temperature"),
    ],
)
async def test_what_the_sender_must_mend_is_never_a_5xx(
    app: RunningApp, file: bytes, fields: dict[str, str], status: int, code: str, param: str
) -> None:
    reply = await app.post(file, **fields)
    error = error_of(reply)
    assert (reply.status_code, error["code"], error["param"]) == (status, code, param)
    assert error["type"] == "invalid_request_error"
    assert await app.still_works()


async def test_a_recording_over_the_limit_names_limit_and_setting() -> None:
    async with run_app(embedded(max_audio_s=0.5)) as app:
        error = error_of(await app.post())
        assert error["code"] == "audio_too_long"
        assert "0.5" in str(error["message"])
        assert "--max-audio-s" in str(error["message"])


# -- Clients that leave --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", ["true", "false"])
async def test_a_client_that_leaves_has_its_work_cancelled(app: RunningApp, stream: str) -> None:
    app.replica.holding = True
    asking = asyncio.create_task(begin(app, THREE_CHUNKS, stream=stream))
    await until(lambda: len(app.replica.held) >= (1 if stream == "true" else 2))
    asking.cancel()
    await until(lambda: app.replica.cancelled)
    assert app.dispatcher.num_chunks == 0
    await until(lambda: app.app.state.server.admission.num_in_flight == 0)
    app.replica.holding = False
    assert await app.still_works()


async def test_a_client_that_leaves_in_the_middle_of_a_stream_has_its_work_cancelled(
    app: RunningApp, caplog: pytest.LogCaptureFixture
) -> None:
    reply = await begun(app)
    await until(lambda: len(app.replica.held) == 2)
    with caplog.at_level(logging.WARNING):
        await reply.aclose()
        await until(lambda: app.replica.cancelled)
    await until(lambda: app.app.state.server.admission.num_in_flight == 0)
    assert caplog.text == ""  # it is no failure of anybody's


async def test_a_client_that_leaves_during_its_upload_leaves_nothing_behind(app: RunningApp) -> None:
    _, writer = await asyncio.open_connection(app.host, app.port)
    writer.write(
        f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n"
        "Content-Type: multipart/form-data; boundary=b\r\n\r\n--b\r\n".encode()
    )
    await until(lambda: app.server.server_state.tasks)
    writer.close()
    await until(lambda: not app.server.server_state.tasks)
    assert await app.still_works()


@pytest.mark.slow
async def test_a_request_that_the_servers_end_cuts_off_is_told_to_come_back() -> None:
    async with run_app() as app:
        app.replica.holding = True
        asking = asyncio.create_task(app.post())
        await until(lambda: app.replica.held)
        app.server.should_exit = True
        reply = await asking
        assert (reply.status_code, error_of(reply)["type"]) == (503, "service_unavailable_error")
        assert 5 <= int(reply.headers["retry-after"]) <= 7


@pytest.mark.slow
async def test_a_stream_that_the_servers_end_cuts_off_says_so() -> None:
    async with run_app() as app:
        reply = await begun(app)
        app.server.should_exit = True
        delta, failure = events_of((await reply.aread()).decode())
        assert delta["delta"] == "zero"
        assert failure["error"]["type"] == "service_unavailable_error"


# -- What a request asks of the engine -----------------------------------------------------------------------


async def test_verbose_json_says_how_probable_the_language_is_where_it_was_detected() -> None:
    async with run_app(languages=("en", "de", "zh")) as app:
        app.replica.probabilities = {"zh": 0.05, "en": 0.05, "de": 0.9}
        body = (await app.post(response_format="verbose_json")).json()
        assert (body["language"], body["language_probability"]) == ("german", pytest.approx(0.9))
        given = (await app.post(response_format="verbose_json", language="de")).json()
        assert "language_probability" not in given


async def test_the_answer_names_the_languages_spoken(app: RunningApp) -> None:
    assert (await app.post()).json()["languages"] == [{"code": "en"}]
    assert (await app.post(SILENCE)).json()["languages"] == []
    done = events_of((await app.post(stream="true")).text)[-2]
    assert done["languages"] == [{"code": "en"}]


@pytest.mark.parametrize("stream", ["true", "false"])
async def test_ignored_fields_are_named_in_the_reply(stream: str) -> None:
    async with run_app(embedded(unknown_fields="ignore")) as app:
        reply = await app.post(stream=stream, beam_size="5", **{"vad[on]": "1", "a b é": "2"})
        assert reply.status_code == 200
        assert reply.headers["x-ignored-fields"] == "beam_size, vad[on], a%20b%20%C3%A9"
        for name, value in (("temperature", "2"), ("known_speaker_names[]", "Ann")):
            assert error_of(await app.post(**{name: value}))["param"] == name
        many = await app.post(**{"x" * 200 + str(i): "1" for i in range(300)})
        assert len(many.headers["x-ignored-fields"]) < 3000
        assert "x-ignored-fields" not in (await app.post()).headers


def test_no_ignored_field_can_add_a_header() -> None:
    assert answer_headers(served(embedded()), ["a\r\nx-y: 1"])["x-ignored-fields"] == "a%0D%0Ax-y%3A%201"


@pytest.mark.parametrize("stream", ["true", "false"])
async def test_the_embedded_model_says_what_it_hears_in_every_answer(
    app: RunningApp, tmp_path: Path, stream: str
) -> None:
    reply = await app.post(stream=stream)
    assert reply.headers["x-model-limit"] == "hears English digits only, about 1 in 20 of them wrongly"
    async with run_app(ServerSettings(model=str(tmp_path))) as other:
        assert "x-model-limit" not in (await other.post(stream=stream)).headers


async def test_a_model_of_several_languages_translates_into_english() -> None:
    async with run_app(languages=("en", "de", "zh")) as app:
        app.replica.probabilities = {"zh": 0.9, "en": 0.1}
        reply = await app.post(path="/v1/audio/translations", response_format="verbose_json")
        assert (reply.json()["task"], reply.json()["language"]) == ("translate", "english")
        assert app.replica.submits[0].options.task == "translate"
        await app.post(path="/v1/audio/translations", language="german", hotwords="one")
        assert app.replica.submits[-1].options.language == "de"
        assert app.replica.submits[-1].options.keywords == ("one",)
        refused = await app.post(path="/v1/audio/translations", to_language="de")
        assert error_of(refused)["param"] == "to_language"


# -- What was read -------------------------------------------------------------------------------------------


def cut_short() -> bytes:
    """A WAV whose header promises more than there is."""
    return SECOND[:-2]


@pytest.mark.parametrize("response_format", ["json", "verbose_json", "diarized_json", "text", "srt"])
async def test_every_answer_says_that_a_recording_is_cut_short(app: RunningApp, response_format: str) -> None:
    channels = {"channels": "split"} if response_format == "diarized_json" else {}
    file = stereo(cut=True) if channels else cut_short()
    reply = await app.post(file, response_format=response_format, **channels)
    assert reply.headers["x-truncated"] == "true"
    if response_format.endswith("json"):
        assert reply.json()["truncated"] is True
    done = events_of((await app.post(cut_short(), stream="true")).text)[-2]
    assert done["truncated"] is True


async def test_text_that_is_left_out_is_listed() -> None:
    listed = [{"start": 0.0, "end": 1.0, "text": " nine", "reason": "judged_silence"}]
    async with run_app(answer=lambda _: say(*words("9"), no_speech_prob=0.9, avg_logprob=-2)) as app:
        reply = await app.post(response_format="verbose_json")
        assert (reply.json()["text"], reply.json()["dropped"]) == ("", listed)
        assert reply.headers["x-dropped-segments"] == "1"
        done = events_of((await app.post(stream="true")).text)[-2]
        assert done["dropped"] == listed


def stereo(cut: bool = False) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, np.full((16_000, 2), 0.1), 16_000, format="WAV", subtype="PCM_16")
    return buffer.getvalue()[: -2 if cut else None]


async def test_the_track_that_was_read_is_named(app: RunningApp, tmp_path: Path) -> None:
    film = write_film(
        tmp_path / "a.mkv",
        "matroska",
        [Sound(voice(48_000, 1, 1.0), language="eng"), Sound(voice(48_000, 1, 1.0), language="ger")],
    ).read_bytes()
    default = await app.post(film, response_format="verbose_json")
    german = await app.post(film, response_format="verbose_json", track="de")
    assert default.json()["tracks"] == [{"number": 1, "language": "eng"}]
    assert german.json()["tracks"] == [{"number": 2, "language": "ger"}]
    assert german.headers["x-audio-tracks"] == "2"
    done = events_of((await app.post(film, stream="true", track="2")).text)[-2]
    assert done["tracks"] == [{"number": 2, "language": "ger"}]
    both = await app.post(film, response_format="diarized_json", channels="split", track="2,1")
    assert both.headers["x-audio-tracks"] == "2,1"


@pytest.mark.parametrize("track", ["2", "fra", "1,2", "nonsense!"])
async def test_a_track_that_is_not_there_is_a_400_that_names_the_field(app: RunningApp, track: str) -> None:
    reply = await app.post(track=track)
    assert (reply.status_code, error_of(reply)["param"]) == (400, "track")


def speech_beside(other: Samples, num_channels: int = 2) -> bytes:
    """Digits in the last channel, and `other` in each of the rest."""
    spoken = say_digits("314159", gap_s=0.3).samples
    rest = [np.resize(other, len(spoken))] * (num_channels - 1)
    buffer = io.BytesIO()
    soundfile.write(buffer, np.stack([*rest, spoken], axis=1), 16_000, format="WAV", subtype="PCM_16")
    return buffer.getvalue()


def hears_clean_speech(submit: Submit) -> ChunkResult:
    """Silent between digits: nothing covers the speech."""
    quiet = np.quantile(np.abs(submit.samples), 0.1)
    return say(*words("3")) if quiet < 0.01 else say()


@pytest.mark.parametrize("num_channels", [2, 6])
@pytest.mark.parametrize("fields", [{}, {"stream": "true"}, {"response_format": "verbose_json"}])
async def test_clear_speech_in_one_channel_is_read_where_the_mix_gave_nothing(
    fields: dict[str, str], num_channels: int
) -> None:
    file = speech_beside(noise(5.0) * 5, num_channels)
    async with run_app(answer=hears_clean_speech) as app:
        reply = await app.post(file, **fields)
        body = events_of(reply.text)[-2] if fields.get("stream") else reply.json()
        assert body["text"] == "three"


async def test_a_mix_with_text_is_read_once(app: RunningApp) -> None:
    assert (await app.post(speech_beside(noise(5.0) * 5))).json()["text"] == "zero"
    assert len(app.replica.submits) == 1


async def test_noise_in_two_channels_is_nothing() -> None:
    buffer = io.BytesIO()
    soundfile.write(buffer, np.stack([noise(2.0), -noise(2.0)[::-1]], axis=1), 16_000, format="WAV")
    async with run_app(answer=lambda _: say()) as app:
        assert (await app.post(buffer.getvalue())).json()["text"] == ""
