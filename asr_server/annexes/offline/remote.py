"""Transcribe one recording on a server elsewhere.

The answer is a stream, for progress and for proxies that end silent connections.
"""

import asyncio
import hashlib
import json
import math
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import httpx2
import msgspec
from pydantic import ValidationError

from asr_server import errors
from asr_server.annexes.offline import refusals
from asr_server.annexes.offline.local import OnProgress, TranscribeJob
from asr_server.annexes.offline.progress import say
from asr_server.audio.recording import Source, open_source
from asr_server.config import in_mebibytes
from asr_server.core import POSITIONS_PER_S, Segment, Task, Transcript, Word
from asr_server.errors import ChunkFailed, EngineUnavailable, InvalidValue
from asr_server.formats.render import TextDone, VerboseSegment, VerboseWord
from asr_server.machine import is_loopback

T = TypeVar("T")
Answer = AbstractAsyncContextManager[httpx2.Response]

_TIMES: Final = {"start": "start_s", "end": "end_s", "duration": "duration_s", "truncated": "is_cut_short"}


def transcript_from(body: TextDone, task: Task) -> Transcript:
    """Return the transcript that the last event describes. Raises ValueError if it lacks a field."""
    segments, usage = body.segments or [], body.usage
    words = _words_by_segment(segments, body.words or [])
    fields = _own_names(body.model_dump(exclude_none=True, exclude={"segments", "words", "usage"})) | {
        "segments": list(map(_segment, segments, words)),
        "languages": [language.code for language in body.languages],
        "num_audio_tokens": usage.input_tokens if usage else 0,
        "num_text_tokens": usage.output_tokens if usage else 0,
        "logprobs": (),
        "task": task,
    }
    return msgspec.convert(fields, Transcript)


def _own_names(body: Any) -> Any:
    if isinstance(body, dict):
        return {_TIMES.get(name, name): _own_names(value) for name, value in body.items()}
    return [_own_names(entry) for entry in body] if isinstance(body, list) else body


def _segment(body: VerboseSegment, words: tuple[Word, ...]) -> Segment:
    return msgspec.convert(_own_names(body.model_dump()) | {"words": words}, Segment)


def _words_by_segment(
    segments: Sequence[VerboseSegment], words: Sequence[VerboseWord]
) -> Iterator[tuple[Word, ...]]:
    """Give each segment its words and their spaces, which the flat list lacks; speakers overlap."""
    speakers = {word.speaker for word in words}
    remaining = {speaker: iter([word for word in words if word.speaker == speaker]) for speaker in speakers}
    for segment in segments:
        yield tuple(_words_of(segment.text, remaining.get(segment.speaker, iter(()))))


def _words_of(text: str, remaining: Iterator[VerboseWord]) -> Iterator[Word]:
    while text.strip() and (word := next(remaining, None)) is not None:
        end = text.find(word.word) + len(word.word)
        yield Word(text[:end], word.start, word.end, word.probability, word.confidence)
        text = text[end:]


FEWEST_AT_ONCE: Final = 2  # recordings, of any size: one gets three quarters of a server's slots
BYTES_AT_ONCE: Final = 16 << 20  # of more recordings than these


class Turns:
    """Start recordings in order, few at once if long, so that the first finish soon."""

    def __init__(self) -> None:
        self._sizes: list[int] = []  # of those begun
        self._next = asyncio.Lock()  # whoever holds it is the next to begin
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def turn(self, num_bytes: int) -> AsyncIterator[None]:
        async with self._next:
            while len(self._sizes) >= FEWEST_AT_ONCE and sum(self._sizes) + num_bytes > BYTES_AT_ONCE:
                self._changed.clear()
                await self._changed.wait()
            self._sizes.append(num_bytes)
        try:
            yield
        finally:
            self._sizes.remove(num_bytes)
            self._changed.set()


CONNECT_LIMIT_S: Final = 20.0
SILENCE_LIMIT_S: Final = 600.0  # without a byte from the server, as OpenAI's clients wait
MAX_EVENT_BYTES: Final = 1 << 28  # a transcript with every word of twelve hours has some 10 MB
JOBS: Final = "audio/transcriptions"  # of translations too
DIGEST: Final = "recording"  # in a job's metadata
JOBS_AT_ONCE: Final = 100  # that a server lists
LOOK_S: Final = 5  # after which a look at a job comes back


@dataclass(frozen=True)
class RemoteServer:
    url: str  # with or without /v1
    api_key: str = ""
    model: str = ""  # empty: the first that the server names

    @property
    def base_url(self) -> httpx2.URL:
        """Raises InvalidValue."""
        with suppress(httpx2.InvalidURL):
            url = httpx2.URL(self.url.rstrip("/").removesuffix("/v1") + "/v1/")
            if url.scheme in ("http", "https") and url.host:
                return url
        raise InvalidValue(f"--url {self.url!r} is no address of a server, such as http://gpu-host:8000")


class RemoteTranscriber:
    def __init__(self, server: RemoteServer, job: TranscribeJob) -> None:
        self._task, self._quiet, self._background = job.task, job.quiet, job.background
        self._path = "audio/translations" if job.task == "translate" else JOBS
        self._fields = _form_fields(job)
        self.model = server.model
        self._max_upload_bytes = math.inf  # unless the server says how much it takes
        self._turns = Turns()
        self._known_jobs: dict[str, str] = {}  # ids, by the digest of recording and options
        self._last_wait = ""
        url = server.base_url
        self._client = httpx2.AsyncClient(
            base_url=url,
            trust_env=not is_loopback(url.host),  # HTTP_PROXY is for other hosts
            headers={"authorization": f"Bearer {server.api_key}"} if server.api_key else {},
            timeout=httpx2.Timeout(SILENCE_LIMIT_S, connect=CONNECT_LIMIT_S),
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """Raises EngineUnavailable, InvalidValue: no such server, or a refused key."""
        async with self._client:
            try:
                model = await refusals.with_retries(self._first_model, self._report_wait)
            except errors.RequestError as error:
                raise InvalidValue(error.message) from None
            except ChunkFailed as error:
                raise EngineUnavailable(str(error)) from None
            except httpx2.TransportError as error:
                raise refusals.lost_connection(error) from None
            self.model = self.model or model
            if self._background:
                await self._retried(self._find_jobs)
            yield self

    async def _first_model(self) -> str:
        response = await self._client.get("models")
        if response.next_request is not None:  # one redirect, for all that follows; the key stays at its host
            target = response.next_request.url
            if target.host != response.url.host or not target.path.endswith("/models"):
                message = f"{response.url} redirects to {target}: give --url the server's own address"
                raise InvalidValue(message)
            self._client.base_url = target.copy_with(path=target.path.removesuffix("models"), query=None)
            response = await self._client.get("models")
        if response.status_code != HTTPStatus.OK:
            raise refusals.refusal_by(response, response.content)
        try:
            model = response.json()["data"][0]
            self._max_upload_bytes = float(model.get("max_upload_bytes", math.inf))
            return str(model["id"])
        except (ValueError, TypeError, LookupError, AttributeError):
            raise EngineUnavailable(f"{response.url} is not answered as an asr-server does") from None

    def _report_wait(self, error: Exception) -> None:
        line = f"waiting for {self._client.base_url.host}: {error}"
        if not self._quiet and line != self._last_wait:
            say(line)
        self._last_wait = line

    async def transcribe(self, source: Source, on_progress: OnProgress) -> Transcript:
        num_bytes = os.stat(source if isinstance(source, Path) else source.fileno()).st_size
        if num_bytes > self._max_upload_bytes:  # known before it is sent
            most = in_mebibytes(self._max_upload_bytes)
            raise errors.UploadTooLarge(
                f"The file has {in_mebibytes(num_bytes)}, and the server takes {most} at most (its "
                "--max-upload-bytes). A compressed format, such as mp3 or opus, is smaller."
            )
        if self._background:
            return await self._as_job(source, num_bytes, on_progress)
        async with self._turns.turn(num_bytes):
            return await self._retried(self._read, partial(self._sent, source, self._fields), on_progress)

    async def _retried(self, attempt: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        return await refusals.with_retries(partial(attempt, *arguments), self._report_wait)

    async def _read(self, ask: Callable[[], Answer], on_progress: OnProgress) -> Transcript:
        async with ask() as response:
            return transcript_from(await _last_event(response, on_progress), self._task)

    @asynccontextmanager
    async def _sent(
        self, source: Source, fields: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[httpx2.Response]:
        data = {**fields, "model": self.model}
        with open_source(source) as file:
            files = {"file": ("recording", file)}
            request = self._answered("POST", self._path, data=data, files=files, headers=headers)
            async with request as response:
                yield response

    @asynccontextmanager
    async def _answered(self, method: str, path: str, **request: Any) -> AsyncIterator[httpx2.Response]:
        """Raises what an answer means that is none, or that breaks off."""
        try:
            async with self._client.stream(method, path, **request) as response:
                if response.status_code != HTTPStatus.OK:
                    raise refusals.refusal_by(response, await response.aread())
                yield response
        except (httpx2.SSEError, ValueError, LookupError, TypeError) as error:
            url = self._client.base_url.join(path)
            raise ChunkFailed(f"{url} is not answered as an asr-server does: {error!r}") from error
        except httpx2.ReadTimeout:
            raise ChunkFailed(f"the server has sent nothing for {SILENCE_LIMIT_S:.0f} s") from None
        except httpx2.TransportError as error:
            raise refusals.TryAgain(refusals.lost_connection(error)) from error

    # -- As a job, which goes on without this command --

    async def _as_job(self, source: Source, num_bytes: int, on_progress: OnProgress) -> Transcript:
        digest = await asyncio.to_thread(self._digest_of, source)
        if known := self._known_jobs.get(digest):
            with suppress(errors.NotFound):  # deleted since
                return await self._end_of(known, on_progress)
        async with self._turns.turn(num_bytes):
            id = await self._retried(self._hand_over, source, digest)
        return await self._end_of(id, on_progress)

    async def _find_jobs(self) -> None:
        """Learn which recordings earlier commands have handed over, so that none is sent twice."""
        page: dict[str, Any] = {"has_more": True, "last_id": ""}
        with suppress(errors.NotFound):  # the job was deleted that the next page would follow
            while page["has_more"]:
                page = await self._json(f"{JOBS}?limit={JOBS_AT_ONCE}&after={page['last_id']}")
                for job in page["data"]:
                    digest = job["metadata"].get(DIGEST)
                    if digest and job["status"] not in ("failed", "cancelled"):
                        self._known_jobs.setdefault(digest, job["id"])

    def _digest_of(self, source: Source) -> str:
        """Return the same for the same recording and options."""
        with open_source(source) as file:
            digest = hashlib.file_digest(file, "sha256")
        digest.update(json.dumps([self._path, self.model, self._fields]).encode())
        return digest.hexdigest()

    async def _hand_over(self, source: Source, digest: str) -> str:
        """Return the job's id. A repeated request makes no second job."""
        fields = self._fields | {"background": "true", f"metadata[{DIGEST}]": digest}
        async with self._sent(source, fields, {"idempotency-key": digest}) as response:
            return response.headers["location"].rpartition("/")[2]

    async def _end_of(self, id: str, on_progress: OnProgress) -> Transcript:
        """Raises NotFound: it was deleted."""
        path, job = f"{JOBS}/{id}", dict[str, Any](completed_at=None)
        while job["completed_at"] is None:
            job = await self._retried(self._json, f"{path}?wait={LOOK_S}")
            on_progress(job["seconds_done"], job["seconds_total"])
        ask = partial(self._answered, "GET", f"{path}/events")
        return await self._retried(self._read, ask, lambda *_: None)

    async def _json(self, path: str) -> dict[str, Any]:
        async with self._answered("GET", path) as response:
            body: dict[str, Any] = json.loads(await response.aread())
            return body


async def _last_event(response: httpx2.Response, on_progress: OnProgress) -> TextDone:
    async for event in httpx2.EventSource(response, MAX_EVENT_BYTES):
        body: Any = event.json()
        if "error" in body:
            raise refusals.refusal_in_stream(body["error"])
        if body["type"] == "transcript.text.done":
            try:
                return TextDone.model_validate(body)
            except ValidationError as error:
                raise ValueError(
                    f"{error.error_count()} fields of its last event are not as expected"
                ) from None
        on_progress(body["usage"]["input_tokens"] / POSITIONS_PER_S, None)
    raise refusals.TryAgain(EngineUnavailable(f"{response.url}: the answer ended too early"))


def _form_fields(job: TranscribeJob) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "stream": "true",
        "stream_include_segments": "true",
        "stream_continuous_usage_stats": "true",  # they tell how far the server is
        "language": job.language,
        "prompt": job.prompt,
        "hotwords": ",".join(job.hotwords),
        "temperature": job.temperature,
        "condition_on_previous_text": "true" if job.condition_on_previous_text else None,
        "multilingual": "true" if job.multilingual else None,
        "timestamp_granularities[]": ["segment", "word"] if job.needs_words else None,
        "channels": "split" if job.speakers else None,
        "track": job.track,
        "known_speaker_names[]": list(job.speakers),
        "diarize": "true" if job.voices else None,
        "min_speakers": f"{job.voices.least}" if job.voices and job.voices.least > 1 else None,
        "max_speakers": f"{job.voices.most}" if job.voices and job.voices.most else None,
    }
    return {name: value for name, value in fields.items() if value}
