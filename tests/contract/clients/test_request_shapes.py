"""What programs that do not install here send, byte by byte, by their own source."""

import http.client
import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.conftest import Server
from tests.support.embedded import embedded
from tests.support.speech import say
from tests.unit.api.running_app import run_app
from tests.unit.api.sample_files import mp3, opus, sound_file, webm
from tests.unit.realtime.realtime_client import open_session, pcm24, transcripts

SPOKEN = say("314159")
PATH = "/v1/audio/transcriptions"
Part = tuple[dict[str, str], bytes]


def field(name: str, value: str) -> Part:
    return {"Content-Disposition": f'form-data; name="{name}"'}, value.encode()


def file_part(content: bytes, filename: str | None, content_type: str | None) -> Part:
    named = "" if filename is None else f'; filename="{filename}"'
    headers = {"Content-Disposition": f'form-data; name="file"{named}'}
    return headers | ({"Content-Type": content_type} if content_type else {}), content


def multipart(boundary: str, *parts: Part) -> bytes:
    lines = []
    for headers, content in parts:
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        lines.append(f"--{boundary}\r\n{head}\r\n".encode() + content + b"\r\n")
    return b"".join(lines) + f"--{boundary}--\r\n".encode()


def post(
    server: Server, headers: Mapping[str, str], body: bytes | Iterator[bytes], path: str = PATH
) -> tuple[int, dict[str, Any]]:
    """Send these headers and no other but Host; a body in pieces is chunked."""
    address = urlsplit(server.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
    connection.putrequest("POST", path, skip_accept_encoding=True)
    length = (
        {"Content-Length": str(len(body))} if isinstance(body, bytes) else {"Transfer-Encoding": "chunked"}
    )
    for name, value in {**headers, **length}.items():
        connection.putheader(name, value)
    connection.endheaders(body, encode_chunked=not isinstance(body, bytes))
    reply = connection.getresponse()
    answer: dict[str, Any] = json.loads(reply.read())
    connection.close()
    return reply.status, answer


def requests_headers(boundary: str) -> dict[str, str]:
    """Of the library `requests`."""
    return {
        "User-Agent": "python-requests/2.32.5",
        "Accept-Encoding": "gzip, deflate, br",
        "Accept": "*/*",
        "Connection": "keep-alive",
        "Authorization": "Bearer none",
        "Content-Type": f"multipart/form-data; boundary={boundary}",
    }


@pytest.mark.parametrize("language", ["en", None])
def test_open_webui_sends_files_without_type_and_user_headers(server: Server, language: str | None) -> None:
    """open-webui 0.7.0, backend/open_webui/routers/audio.py: transcription_handler, engine `openai`."""
    boundary = "0f3a9d5c2b7e48619aa1c4d7e6f80b21"
    languages = [field("language", language)] if language else []
    recording = file_part(mp3(SPOKEN.samples), "1f0e2d3c-4b5a-6978-8796-a5b4c3d2e1f0.mp3", None)
    body = multipart(boundary, field("model", "whisper-1"), *languages, recording)
    user = {"Name": "Ada%20Lovelace", "Id": "7", "Email": "ada@example.com", "Role": "user"}
    headers = requests_headers(boundary) | {f"X-OpenWebUI-User-{name}": value for name, value in user.items()}
    status, answer = post(server, headers, body)
    assert (status, answer["text"]) == (200, SPOKEN.text)


def test_open_webui_shows_the_message_of_an_error_and_asks_again_without_a_language(server: Server) -> None:
    boundary = "0f3a9d5c2b7e48619aa1c4d7e6f80b21"
    recording = file_part(sound_file(SPOKEN.samples), "recording.wav", None)
    body = multipart(boundary, field("model", "whisper-1"), field("language", "klingon"), recording)
    status, answer = post(server, requests_headers(boundary), body)
    assert status == 400
    assert "klingon" in answer["error"]["message"]
    status, answer = post(server, requests_headers(boundary), multipart(boundary, recording))
    assert (status, answer["text"]) == (200, SPOKEN.text)


def test_librechat_streams_webm_before_the_fields_and_tells_no_length(server: Server) -> None:
    """LibreChat 0.8.1, api/server/services/Files/Audio/STTService.js, through axios and form-data."""
    boundary = "--------------------------740825639130857326198045"
    recording = file_part(webm(SPOKEN.samples), "audio.webm", "video/webm")
    body = multipart(boundary, recording, field("model", "whisper-1"), field("language", "en"))
    headers = {
        "Accept": "application/json, text/plain, */*",
        "Content-Type": f"multipart/form-data; boundary={boundary}",
        "Authorization": "Bearer none",
        "User-Agent": "axios/1.12.1",
        "Accept-Encoding": "gzip, compress, deflate, br",
        "Connection": "close",
    }
    pieces = (body[at : at + 4096] for at in range(0, len(body), 4096))
    status, answer = post(server, headers, pieces)
    assert (status, answer["text"].strip()) == (200, SPOKEN.text)


@pytest.mark.parametrize(("filename", "content_type"), [("voice.oga", "audio/ogg"), (None, "audio/ogg")])
def test_n8n_sends_its_fields_first_and_perhaps_no_name_of_the_file(
    server: Server, filename: str | None, content_type: str
) -> None:
    """n8n, nodes-langchain: OpenAi/v2/actions/audio/transcribe.operation.ts; binary data may have no name."""
    boundary = "--------------------------515890814546601021194782"
    fields = [field("model", "whisper-1"), field("language", "en"), field("temperature", "0.2")]
    body = multipart(boundary, *fields, file_part(opus(SPOKEN.samples), filename, content_type))
    headers = {
        "content-type": f"multipart/form-data; boundary={boundary}",
        "Authorization": "Bearer none",
        "accept": "application/json",
        "User-Agent": "n8n",
    }
    status, answer = post(server, headers, body)
    assert status == 200
    assert len(answer["text"].split()) >= len(SPOKEN.digits) - 1  # it is drawn at the client's temperature


@pytest.mark.parametrize("language", ["en", "en-US"])
def test_home_assistants_openai_whisper_api_sends_every_field_as_a_file_without_a_name(
    server: Server, language: str
) -> None:
    """openai_stt_ha 1.1, custom_components/openai_stt/http_client.py, whose library is httpx."""
    wav = sound_file(SPOKEN.samples)
    files: dict[str, Any] = {
        "file": ("whisper_audio.wav", wav, "audio/wav"),
        "model": (None, "gpt-4o-mini-transcribe"),
        "language": (None, language),
        "prompt": (None, ""),
        "temperature": (None, "0"),
        "response_format": (None, "json"),
    }
    headers = {"Authorization": "Bearer none"}
    reply = httpx.post(f"{server.url}{PATH}", headers=headers, files=files, timeout=60)
    assert (reply.status_code, reply.json()["text"].strip()) == (200, SPOKEN.text)


async def test_home_assistants_openai_whisper_api_opens_an_old_session(server: Server) -> None:
    """openai_stt_ha 1.1, custom_components/openai_stt/websocket_client.py, with `realtime: true`."""
    headers = {"Authorization": "Bearer none", "OpenAI-Beta": "realtime=v1"}
    session = {
        "input_audio_format": "pcm16",
        "input_audio_transcription": {"model": "gpt-4o-mini-transcribe", "prompt": "", "language": "en"},
        "turn_detection": {"type": "server_vad"},
        "input_audio_noise_reduction": None,
    }
    async with open_session(server.url, additional_headers=headers) as client:
        await client.send({"type": "transcription_session.update", "session": session})
        await client.append(pcm24(SPOKEN.samples))
        await client.commit()
        events: list[dict[str, Any]] = []
        while not events or not events[-1]["type"].endswith(".completed"):
            events.append(json.loads(await client.socket.recv()))
    assert list(transcripts(events).values()) == [SPOKEN.text]


@pytest.mark.parametrize(
    "name",
    [
        *("whisper-large-v3", "whisper-large-v3-turbo", "distil-whisper-large-v3-en"),  # Groq's
        *("Systran/faster-whisper-large-v3", "Systran/faster-distil-whisper-small.en"),  # speaches'
        *("openai/whisper-large-v3-turbo", "accounts/fireworks/models/whisper-v3"),
    ],
)
async def test_the_models_of_other_services_are_taken_by_the_alias_of_all_names(name: str) -> None:
    async with run_app(embedded(model_alias="whisper-1,*")) as app:
        reply = await app.post(model=name)
        assert (reply.status_code, reply.json()["text"]) == (200, "zero")
    async with run_app() as app:
        refused = await app.post(model=name)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
