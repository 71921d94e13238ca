"""How a turn that is under way takes new options, by sessions in front of a fake replica."""

from __future__ import annotations

from typing import Any

from asr_server.channel.messages import Submit
from asr_server.core import ChunkResult
from tests.api.running_app import RunningApp, run_app, until
from tests.embedded import embedded
from tests.fake_replica import noise, say
from tests.realtime.realtime_client import MANUAL, Client, open_session, pcm24
from tests.speech import say as say_digits
from tests.speech import silence
from tests.vocabulary import words

SECOND = pcm24(noise(1.0))
LOGPROBS = ["item.input_audio_transcription.logprobs"]


def one(submit: Submit) -> ChunkResult:
    return say(*words("1"))


def url(app: RunningApp) -> str:
    return f"http://{app.host}:{app.port}"


async def include(client: Client, fields: list[str]) -> list[dict[str, Any]]:
    """Update what the session includes; return the events up to the answer."""
    await client.send({"type": "session.update", "session": {"type": "transcription", "include": fields}})
    return await client.until("session.updated")


async def test_log_probabilities_asked_for_before_a_chunk_was_read_come_with_the_turn() -> None:
    async with run_app(embedded(realtime_interim_s=0), one) as app, open_session(url(app)) as client:
        await client.update(**MANUAL)
        await client.append(SECOND)
        await include(client, LOGPROBS)
        await client.commit()
        assert (await client.until(".completed"))[-1]["logprobs"]


async def test_what_was_read_ahead_in_a_pause_is_read_again_by_an_updates_options() -> None:
    speech = say_digits("123", gap_s=[0.2, 0.2, 1.4])
    pausing = {"turn_detection": {"type": "server_vad", "silence_duration_ms": 2000}}
    async with run_app(embedded(realtime_interim_s=0), one) as app:
        async with open_session(url(app)) as client:
            await client.update(**pausing)
            await client.append(pcm24(speech.samples))
            await until(lambda: app.replica.submits)
            await client.update(transcription={"prompt": "seven"})
            await client.append(pcm24(silence(2.0)))
            await client.until(".completed")
        ahead, again = app.replica.submits[0], app.replica.submits[-1]
        assert not ahead.options.prompt_tokens
        assert again.options.prompt_tokens
