"""Takes one recording to its transcript on a server elsewhere. `offline.batch` keeps several under way.

The answer is asked for as a stream: it tells how far the server is, and no proxy takes a long recording's
silence for the end. Recordings are sent as they are read, and read again for another try.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import httpx2
from pydantic import ValidationError

from asr_server.audio.source import Source
from asr_server.core import POSITIONS_PER_S, Transcript
from asr_server.errors import ChunkFailed, EngineUnavailable, InvalidValue
from asr_server.offline.job import TranscribeJob
from asr_server.offline.transcriber import OnProgress
from asr_server.remote.answer import Done, transcript_of
from asr_server.remote.refusals import TryAgain, lost_connection, refusal, refusal_in_stream, with_retries

CONNECT_LIMIT_S: Final = 20.0
SILENCE_LIMIT_S: Final = 600.0  # without a byte from the server, as OpenAI's clients wait
MAX_EVENT_BYTES: Final = 1 << 28  # a transcript with every word of twelve hours has some 10 MB
LOST: Final = (httpx2.NetworkError, httpx2.ConnectTimeout, httpx2.RemoteProtocolError)


@dataclass(frozen=True)
class RemoteServer:
    url: str  # with or without /v1
    api_key: str = ""
    model: str = ""  # empty: the first that the server names

    @property
    def base_url(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1") + "/v1/"


class RemoteTranscriber:
    """A `FileTranscriber` that asks an asr-server."""

    def __init__(self, server: RemoteServer, job: TranscribeJob) -> None:
        """Connects to nothing yet. Raises InvalidValue: this is no address of a server."""
        self._task = job.task
        self._path = "audio/translations" if job.task == "translate" else "audio/transcriptions"
        self._fields = _form_fields(job)
        self._model = server.model
        self._client = httpx2.AsyncClient(
            base_url=_checked_url(server),
            headers={"authorization": f"Bearer {server.api_key}"} if server.api_key else {},
            timeout=httpx2.Timeout(SILENCE_LIMIT_S, connect=CONNECT_LIMIT_S),
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[RemoteTranscriber]:
        """Raises EngineUnavailable, InvalidValue: there is no such server, or it does not take the key."""
        async with self._client:
            try:
                model = await with_retries(self._first_model)
            except httpx2.TransportError as error:
                raise lost_connection(error) from None
            self._model = self._model or model
            yield self

    async def _first_model(self) -> str:
        response = await self._client.get("models")
        if response.status_code != 200:
            raise refusal(response.status_code, response.headers, response.content)
        try:
            return str(response.json()["data"][0]["id"])
        except (ValueError, TypeError, LookupError):
            raise EngineUnavailable(f"{response.url} is not answered as an asr-server does") from None

    async def transcribe(self, source: Source, on_progress: OnProgress) -> Transcript:
        return await with_retries(lambda: self._transcribe_once(source, on_progress))

    async def _transcribe_once(self, source: Source, on_progress: OnProgress) -> Transcript:
        """One try. Raises TryAgain beside what `FileTranscriber` names."""
        with _opened(source) as file:
            fields = self._fields | {"model": self._model}
            try:
                async with self._client.stream(
                    "POST", self._path, data=fields, files={"file": ("recording", file)}
                ) as response:
                    return transcript_of(await _last_event(response, on_progress), self._task)
            except LOST as error:
                raise TryAgain(lost_connection(error)) from error
            except httpx2.ReadTimeout:
                raise ChunkFailed(f"the server has sent nothing for {SILENCE_LIMIT_S:.0f} s") from None
            except (httpx2.SSEError, ValueError) as error:
                raise ChunkFailed(f"the server does not answer as an asr-server does: {error}") from error


def _checked_url(server: RemoteServer) -> httpx2.URL:
    with contextlib.suppress(httpx2.InvalidURL):
        url = httpx2.URL(server.base_url)
        if url.scheme in ("http", "https") and url.host:
            return url
    raise InvalidValue(f"--url {server.url!r} is no address of a server, such as http://gpu-host:8000")


async def _last_event(response: httpx2.Response, on_progress: OnProgress) -> Done:
    """Raises the exception for an answer, or an event, that says what went wrong."""
    if response.status_code != 200:
        raise refusal(response.status_code, response.headers, await response.aread())
    async for event in httpx2.EventSource(response, MAX_EVENT_BYTES):
        body: Any = event.json()
        if "error" in body:
            raise refusal_in_stream(body["error"])
        if body["type"] == "transcript.text.done":
            return _checked(body)
        on_progress(body["usage"]["input_tokens"] / POSITIONS_PER_S, None)
    raise TryAgain(EngineUnavailable("the server's answer ended too early"))


def _checked(body: Any) -> Done:
    try:
        return Done.model_validate(body)
    except ValidationError as error:
        raise ValueError(f"{error.error_count()} fields of its last event are not as expected") from None


def _form_fields(job: TranscribeJob) -> dict[str, Any]:
    """All but the file and the model. What is left to the server's defaults is left out."""
    fields: dict[str, Any] = {
        "stream": "true",
        "stream_include_segments": "true",
        "stream_continuous_usage_stats": "true",  # they tell how far the server is
        "language": job.language,
        "prompt": job.prompt,
        "temperature": job.temperature,
        "condition_on_previous_text": "true" if job.condition_on_previous_text else None,
        "multilingual": "true" if job.multilingual else None,
        "timestamp_granularities[]": ["segment", "word"] if job.needs_words else None,
        "channels": "split" if job.speakers else None,
        "known_speaker_names[]": list(job.speakers),
    }
    return {name: value for name, value in fields.items() if value}


@contextmanager
def _opened(source: Source) -> Iterator[BinaryIO]:
    """A file from its start. One that is open already stays open, for another try. Raises OSError."""
    assert not isinstance(source, bytes)
    with contextlib.ExitStack() as stack:
        yield stack.enter_context(source.open("rb")) if isinstance(source, Path) else source
