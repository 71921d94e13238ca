"""Deepgram's `/v1/listen`, by its own client: recordings by POST, live speech over a WebSocket."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy as np
import pytest
from deepgram import AsyncDeepgramClient
from deepgram.core.api_error import ApiError
from deepgram.environment import DeepgramClientEnvironment
from deepgram.listen.v1.types import (
    ListenV1Metadata,
    ListenV1Results,
    ListenV1SpeechStarted,
    ListenV1UtteranceEnd,
)
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from asr_server.core import SAMPLE_RATE, Samples
from tests.conftest import Server
from tests.support.embedded import embedded
from tests.support.speech import say
from tests.unit.api.running_app import run_app
from tests.unit.api.sample_files import sound_file

# The client imports names of websockets that are old by now, at its first use.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

TWO_TURNS = say("31415", gap_s=[0.2, 0.2, 1.6, 0.2, 1.6])
LIVE: dict[str, Any] = {
    "model": "nova-3",
    "encoding": "linear16",
    "sample_rate": SAMPLE_RATE,
    "endpointing": 500,
}


@asynccontextmanager
async def deepgram_client(url: str, key: str = "none") -> AsyncIterator[AsyncDeepgramClient]:
    live = url.replace("http", "ws", 1)
    places = DeepgramClientEnvironment(base=url, production=live, agent=live, agent_rest=url)
    async with httpx.AsyncClient(timeout=60) as http:
        yield AsyncDeepgramClient(api_key=key, environment=places, httpx_client=http)


@pytest.fixture
async def client(server: Server) -> AsyncIterator[AsyncDeepgramClient]:
    async with deepgram_client(server.url) as client:
        yield client


def pcm16(samples: Samples) -> bytes:
    return bytes((samples * 32767).astype("<i2").tobytes())


async def messages_of(connection: Any, data: bytes, *last: str, pace_s: float = 0.02) -> list[Any]:
    """Send the audio, then the controls; return what comes until the stream ends."""

    async def send() -> None:
        for at in range(0, len(data), 3200):  # 100 ms
            await connection.send_media(data[at : at + 3200])
            await asyncio.sleep(pace_s)
        for control in last:
            await getattr(connection, f"send_{control}")()

    sending = asyncio.create_task(send())
    messages = [message async for message in connection]
    await sending
    return messages


def finals(messages: list[Any]) -> list[ListenV1Results]:
    return [each for each in messages if isinstance(each, ListenV1Results) and each.is_final]


def texts(results: list[ListenV1Results]) -> list[str]:
    return [each.channel.alternatives[0].transcript for each in results]


async def test_live_speech_comes_by_turns_with_words_and_ends_of_speech(client: AsyncDeepgramClient) -> None:
    options = LIVE | {"interim_results": True, "vad_events": True, "utterance_end_ms": 1000}
    async with client.listen.v1.connect(**options) as connection:
        messages = await messages_of(connection, pcm16(TWO_TURNS.samples), "keep_alive", "close_stream")
    said = [each for each in finals(messages) if each.channel.alternatives[0].transcript]
    assert texts(said) == ["three one four", "one five"]
    assert all(each.speech_final and not each.from_finalize for each in said)
    words = [word for each in said for word in each.channel.alternatives[0].words]
    assert [word.word for word in words] == [word.punctuated_word for word in words]
    assert [word.start for word in words] == pytest.approx([start for start, _ in TWO_TURNS.times], abs=0.15)
    assert all(0 < word.confidence <= 1 and word.speaker is None for word in words)
    assert said[1].start == words[3].start
    kinds = [type(each) for each in messages]
    assert kinds.count(ListenV1SpeechStarted) == 2
    ends = [each.last_word_end for each in messages if isinstance(each, ListenV1UtteranceEnd)]
    assert ends == [words[2].end, words[4].end]
    last = messages[-1]
    assert isinstance(last, ListenV1Metadata)
    assert last.duration == pytest.approx(len(TWO_TURNS.samples) / SAMPLE_RATE, abs=0.01)
    assert last.request_id == said[0].metadata.request_id


async def test_results_that_change_come_where_they_are_asked_for_alone(client: AsyncDeepgramClient) -> None:
    speech = pcm16(say("31415", gap_s=0.1).samples)
    counts = []
    for wanted in (True, False):
        async with client.listen.v1.connect(**LIVE, interim_results=wanted) as connection:
            messages = await messages_of(connection, speech, "close_stream", pace_s=0.1)
        results = [each for each in messages if isinstance(each, ListenV1Results)]
        assert " ".join(texts(finals(messages))) == "three one four one five"
        counts.append(len([each for each in results if not each.is_final]))
    assert counts[1] == 0 < counts[0]


async def test_what_was_said_is_final_as_soon_as_the_client_asks(client: AsyncDeepgramClient) -> None:
    data = pcm16(say("27").samples)
    async with client.listen.v1.connect(**LIVE | {"endpointing": "false"}) as connection:
        await connection.send_media(data)
        await connection.send_finalize()
        first = await anext(aiter(connection))
        assert texts([first]) == ["two seven"]
        assert first.is_final
        assert first.from_finalize
        assert first.speech_final
        await connection.send_finalize()  # with nothing behind it
        again = await anext(aiter(connection))
        assert texts([again]) == [""]
        assert again.from_finalize
        await connection.send_close_stream()
        assert [type(each) async for each in connection][-1] is ListenV1Metadata


@pytest.mark.parametrize("encoding", ["mulaw", "alaw"])
async def test_telephone_audio_is_heard_at_its_rate(client: AsyncDeepgramClient, encoding: str) -> None:
    import soxr

    samples = soxr.resample(say("27").samples, SAMPLE_RATE, 8000)
    file = sound_file_of_g711(samples, encoding)
    options = LIVE | {"encoding": encoding, "sample_rate": 8000}
    async with client.listen.v1.connect(**options) as connection:
        messages = await messages_of(connection, file, "close_stream")
    assert " ".join(texts(finals(messages))) == "two seven"


def sound_file_of_g711(samples: Samples, encoding: str) -> bytes:
    import io

    import soundfile

    file = io.BytesIO()
    subtype = {"mulaw": "ULAW", "alaw": "ALAW"}[encoding]
    soundfile.write(file, samples, 8000, format="RAW", subtype=subtype)
    return file.getvalue()


async def test_a_recording_has_words_utterances_and_paragraphs(client: AsyncDeepgramClient) -> None:
    answer = await client.listen.v1.media.transcribe_file(
        request=sound_file(TWO_TURNS.samples),
        model="nova-3",
        utterances=True,
        paragraphs=True,
        detect_language=True,
        smart_format=True,
    )
    own = answer.results.channels[0].alternatives[0]
    assert own.transcript == "three one four one five"
    assert [word.word for word in own.words] == own.transcript.split()
    assert [word.start for word in own.words] == pytest.approx(
        [start for start, _ in TWO_TURNS.times], abs=0.15
    )
    assert answer.metadata.duration == pytest.approx(len(TWO_TURNS.samples) / SAMPLE_RATE, abs=0.01)
    assert answer.metadata.channels == 1
    assert answer.results.channels[0].detected_language == "en"
    assert " ".join(each.transcript for each in answer.results.utterances) == own.transcript
    sentences = [each.text for part in own.paragraphs.paragraphs for each in part.sentences]
    assert " ".join(sentences) == own.transcript


async def test_channels_apart_are_channels_of_the_answer(client: AsyncDeepgramClient) -> None:
    left, right = say("314").samples, say("27").samples
    length = max(len(left), len(right))
    both = np.stack([np.pad(each, (0, length - len(each))) for each in (left, right)], 1)
    answer = await client.listen.v1.media.transcribe_file(request=sound_file(both), multichannel=True)
    assert [each.alternatives[0].transcript for each in answer.results.channels] == [
        "three one four",
        "two seven",
    ]


async def test_samples_without_a_header_are_read_by_their_encoding(client: AsyncDeepgramClient) -> None:
    answer = await client.listen.v1.media.transcribe_file(
        request=pcm16(say("314").samples),
        encoding="linear16",
        request_options={"additional_query_parameters": {"sample_rate": SAMPLE_RATE}},
    )
    assert answer.results.channels[0].alternatives[0].transcript == "three one four"


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ({"redact": "pci"}, "does not offer 'redact'"),
        ({"model": "ours"}, "'ours' does not exist"),
        ({"colour": "red"}, "colour"),
        ({"language": "klingon"}, "'klingon' is not known"),
    ],
)
async def test_what_cannot_be_done_is_refused(server: Server, query: dict[str, str], said: str) -> None:
    async with httpx.AsyncClient(base_url=server.url) as http:
        reply = await http.post("/v1/listen", params=query, content=sound_file(say("3").samples))
    assert reply.status_code in (400, 404)
    assert {*reply.json()} == {"err_code", "err_msg", "request_id"}
    assert said in reply.json()["err_msg"]
    live = httpx.QueryParams({"encoding": "linear16", "sample_rate": "16000"} | query)
    with pytest.raises(InvalidStatus) as refused:
        async with connect(f"{server.url.replace('http', 'ws', 1)}/v1/listen?{live}"):
            pass
    assert said in refused.value.response.body.decode()
    assert refused.value.response.headers["dg-request-id"]


async def test_a_url_is_not_fetched(client: AsyncDeepgramClient) -> None:
    with pytest.raises(ApiError, match="fetches no URL"):
        await client.listen.v1.media.transcribe_url(url="http://example.com/a.wav")


async def test_keys_come_in_the_header_or_in_a_browsers_subprotocols() -> None:
    async with run_app(embedded(api_key="the-right-key-of-deepgram")) as app:
        url = app.url
        recording = sound_file(say("3").samples)
        async with deepgram_client(url, "the-right-key-of-deepgram") as client:
            assert (await client.listen.v1.media.transcribe_file(request=recording)).results.channels
        async with deepgram_client(url, "another") as client:
            with pytest.raises(ApiError) as refused:
                await client.listen.v1.media.transcribe_file(request=recording)
        assert refused.value.status_code == 401
        address = f"ws://{app.host}:{app.port}/v1/listen?encoding=linear16&sample_rate=16000"
        async with connect(address, subprotocols=["token", "the-right-key-of-deepgram"]) as socket:  # type: ignore[list-item]
            assert socket.subprotocol == "token"
        with pytest.raises(InvalidStatus):
            async with connect(address, subprotocols=["token", "another"]):  # type: ignore[list-item]
                pass
