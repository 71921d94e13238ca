"""`asr-server transcribe --background`: handed over once, taken up by the same command."""

import asyncio
from pathlib import Path

import pytest

from asr_server.annexes.offline.local import TranscribeJob
from asr_server.annexes.offline.remote import RemoteServer, RemoteTranscriber
from asr_server.errors import ChunkFailed, InvalidValue
from tests.support.until import until
from tests.unit.api.running_app import THREE_CHUNKS, RunningApp, run_app
from tests.unit.jobs.jobs_app import URL, run_with_jobs


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    path = tmp_path / "talk.wav"
    path.write_bytes(THREE_CHUNKS)
    return path


def command(app: RunningApp, recording: Path, **options: str) -> RemoteTranscriber:
    job = TranscribeJob((str(recording),), language="en", background=True, **options)  # type: ignore[arg-type]
    return RemoteTranscriber(RemoteServer(f"http://{app.host}:{app.port}"), job)


async def transcribe(app: RunningApp, recording: Path, **options: str) -> tuple[str, list[float | None]]:
    """Return the text, and of how many seconds the command was told."""
    lengths: list[float | None] = []
    transcriber = command(app, recording, **options)
    async with transcriber.running():
        transcript = await transcriber.transcribe(recording, lambda _, total_s: lengths.append(total_s))
    return transcript.text, lengths


def num_sent(app: RunningApp) -> int:
    return sum(each.figures["method"] == "POST" for each in app.app.state.server.history.recent)


async def test_the_same_command_takes_its_jobs_up_and_sends_nothing_again(
    tmp_path: Path, recording: Path
) -> None:
    async with run_with_jobs(tmp_path / "jobs") as app:
        app.replica.holding = True
        first = asyncio.create_task(transcribe(app, recording))
        await until(lambda: app.replica.held)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        app.replica.holding = False
        again = asyncio.create_task(transcribe(app, recording))
        app.replica.release(app.replica.held[0])
        text, lengths = await again
        assert (text, lengths[-1]) == ("zero one two", 75.0)
        assert await transcribe(app, recording) == (text, [75.0])
        assert num_sent(app) == 1
        await transcribe(app, recording, prompt="other")
        assert num_sent(app) == 2


async def test_a_job_that_was_deleted_meanwhile_is_sent_again(tmp_path: Path, recording: Path) -> None:
    async with run_with_jobs(tmp_path / "jobs") as app:
        text, _ = await transcribe(app, recording)
        transcriber = command(app, recording)
        async with transcriber.running():
            (job,) = (await app.client.get(URL)).json()["data"]
            await app.client.delete(f"{URL}/{job['id']}")
            transcript = await transcriber.transcribe(recording, lambda *_: None)
        assert (transcript.text, num_sent(app)) == (text, 2)


async def test_a_failed_job_fails_its_recording_alone_and_is_tried_again(
    tmp_path: Path, recording: Path
) -> None:
    async with run_with_jobs(tmp_path / "jobs", lambda submit: ChunkFailed("broken")) as app:
        for _ in range(2):
            with pytest.raises(ChunkFailed, match="had an error"):
                await transcribe(app, recording)
        assert num_sent(app) == 2


async def test_a_server_without_jobs_says_so(recording: Path) -> None:
    async with run_app() as app:
        with pytest.raises(InvalidValue, match="jobs-dir"):
            await transcribe(app, recording)
