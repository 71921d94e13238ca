"""The official Node client on a real server with the embedded model; `install.sh` fetches it."""

import asyncio
import json
import os
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from openai.types import Batch, FileDeleted, FileObject
from openai.types.realtime import RealtimeServerEvent
from pydantic import TypeAdapter

from tests.conftest import Server
from tests.contract.official_client import FORMATS, SPOKEN, plain_text
from tests.support.embedded import embedded
from tests.support.speech import say
from tests.support.until import until
from tests.unit.api.running_app import SECOND, RunningApp, run_app
from tests.unit.api.sample_files import sound_file
from tests.unit.jobs.jobs_app import run_with_jobs
from tests.unit.realtime.realtime_client import of_type, pcm24, transcripts

HERE = Path(__file__).parent
LIMIT_S = 100
NODE = shutil.which("node") or "node"

pytestmark = pytest.mark.skipif(
    not (HERE / "node_modules" / "openai").exists(),
    reason="the Node client is not installed: tests/contract/node/install.sh fetches it, given node and npm",
)


async def node(script: str, *arguments: str | Path, **environment: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *(NODE, str(HERE / script), *map(str, arguments)),
        env=os.environ | environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(LIMIT_S):
            written, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, errors.decode()
    return written.decode()


async def test_every_format_every_kind_of_file_and_a_stream(server: Server, tmp_path: Path) -> None:
    recording = tmp_path / "speech.wav"
    recording.write_bytes(sound_file(SPOKEN.samples))
    results = json.loads(await node("transcribe.mjs", f"{server.url}/v1", recording))
    for response_format in FORMATS:
        answer = results[response_format]
        body = answer["text"] if isinstance(answer, dict) else answer
        assert plain_text(body) == SPOKEN.text
    assert [word["word"] for word in results["words"]["words"]] == SPOKEN.text.split()
    assert len(results["words"]["segments"]) == 2
    assert "".join(entry["token"] for entry in results["logprobs"]["logprobs"]).strip() == SPOKEN.text
    assert results["files"] == dict.fromkeys(results["files"], SPOKEN.text)
    *deltas, done = results["events"]
    assert {event["type"] for event in deltas} == {"transcript.text.delta"}
    assert done["type"] == "transcript.text.done"
    assert "".join(event["delta"] for event in deltas) == done["text"] == SPOKEN.text
    assert results["options"]["text"] == SPOKEN.text
    assert "whisper-1" in results["models"]
    client_saw, header = results["request_id"]
    assert client_saw == header
    assert header


# -- Refusals: the class of each error, and what is sent again -----------------------------------------------


@asynccontextmanager
async def one_place(**settings: Any) -> AsyncIterator[RunningApp]:
    async with run_app(replace(embedded(), max_concurrent_requests=1, **settings)) as app:
        yield app


async def ask(
    app: RunningApp, file: Path, max_retries: int = 2, api_key: str = "none", **fields: Any
) -> dict[str, Any]:
    url = f"{app.url}/v1"
    written = await node("refusals.mjs", url, file, str(max_retries), json.dumps(fields), api_key)
    result: dict[str, Any] = json.loads(written)
    return result


@pytest.fixture
def second(tmp_path: Path) -> Path:
    path = tmp_path / "second.wav"
    path.write_bytes(SECOND)
    return path


@pytest.mark.slow
async def test_each_refusal_is_of_its_class_and_is_not_sent_again(second: Path, tmp_path: Path) -> None:
    letter = tmp_path / "letter.wav"
    letter.write_bytes(b"no audio")
    async with one_place(api_key="secret") as app:
        refused = await ask(app, second, api_key="wrong")
        assert (refused["error"], refused["status"], refused["code"]) == (
            "AuthenticationError",
            401,
            "invalid_api_key",
        )
        assert (refused["numSent"], bool(refused["requestID"])) == (1, True)
        refused = await ask(app, second, api_key="secret", model="nobody")
        assert (refused["error"], refused["code"], refused["param"]) == (
            "NotFoundError",
            "model_not_found",
            "model",
        )
        refused = await ask(app, letter, api_key="secret")
        assert (refused["error"], refused["code"], refused["param"]) == (
            "BadRequestError",
            "invalid_audio",
            "file",
        )
        assert refused["numSent"] == 1


@pytest.mark.slow
async def test_a_429_is_sent_again_when_the_server_said(second: Path) -> None:
    async with one_place() as app:
        app.replica.holding = True
        before = [asyncio.create_task(app.post()) for _ in range(2)]
        await until(lambda: app.replica.held and app.app.state.server.admission.num_waiting)
        asking = asyncio.create_task(ask(app, second))
        await until(lambda: app.app.state.server.admission.num_rejected)
        app.replica.stop_holding()
        assert [(await reply).status_code for reply in before] == [200, 200]
        answered = await asking
    assert (answered["text"], answered["numSent"]) == ("zero", 2)
    assert answered["took_s"] >= 1.0  # Retry-After is a whole second at least


# -- Jobs, files and batches ---------------------------------------------------------------------------------


async def test_jobs_and_batches_have_each_field_that_the_client_has(second: Path, tmp_path: Path) -> None:
    async with run_with_jobs(tmp_path / "jobs") as app:
        results = json.loads(await node("jobs.mjs", f"{app.url}/v1", second))
    job, output = results["job"], [json.loads(line) for line in results["output"].splitlines()]
    assert results["accepted"]["text"] == ""
    assert (job["id"], job["metadata"]) == (results["accepted"]["id"], {"case": "7"})
    assert (job["status"], results["content"]["text"]) == ("completed", "zero")
    assert [(line["custom_id"], line["response"]["body"]["text"]) for line in output] == [
        ("a", "zero"),
        ("b", "zero"),
    ]
    batches = TypeAdapter(list[Batch]).validate_python(results["batches"], strict=True)
    assert [(batch.status, batch.metadata) for batch in batches] == [("completed", {"case": "7"})] * 3
    files = TypeAdapter(list[FileObject]).validate_python(results["files"], strict=True)
    talk, lines, _, *listed = files
    assert listed == [talk, lines]
    assert results["recording"]
    assert FileDeleted.model_validate(results["deleted"], strict=True).id == talk.id


# -- Realtime ------------------------------------------------------------------------------------------------


async def test_a_realtime_session_hears_two_turns(server: Server, tmp_path: Path) -> None:
    """The client speaks wss alone, so that a relay with a certificate of its own stands before the server."""
    spoken = say("31415", gap_s=[0.2, 0.2, 1.2, 0.2, 1.0])
    recording = tmp_path / "speech.pcm"
    recording.write_bytes(pcm24(spoken.samples))
    certificate = self_signed(tmp_path)
    async with tls_relay(server.url, certificate) as url:
        written = await node("realtime.mjs", url, recording, "2", NODE_EXTRA_CA_CERTS=str(certificate))
    events = [json.loads(line) for line in written.splitlines()]
    adapter: TypeAdapter[Any] = TypeAdapter(RealtimeServerEvent)
    for event in events:
        adapter.validate_python(event)
    texts = transcripts(events)
    assert [texts[event["item_id"]] for event in of_type(events, "speech_started")] == [
        "three one four",
        "one five",
    ]


def self_signed(folder: Path) -> Path:
    """A file with a certificate for 127.0.0.1 and its key."""
    path = folder / "server.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=127.0.0.1 -keyout - -out -"
    command += " -addext subjectAltName=IP:127.0.0.1"
    path.write_bytes(subprocess.run(command.split(), check=True, capture_output=True).stdout)
    return path


@asynccontextmanager
async def tls_relay(url: str, certificate: Path) -> AsyncIterator[str]:
    """Hands on what it decrypts, both ways, until the block ends."""
    address = urlsplit(url)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection(address.hostname, address.port)
        await asyncio.gather(copy(reader, inner_writer), copy(inner_reader, writer), return_exceptions=True)

    listener = await asyncio.start_server(relay, "127.0.0.1", 0, ssl=context)
    async with listener:
        yield f"https://127.0.0.1:{listener.sockets[0].getsockname()[1]}/v1"
