"""Transcribe one recording on a server elsewhere.

The answer is a stream, for progress and for proxies that end silent connections.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, TypeVar

import httpx2
import msgspec
from pydantic import ValidationError

from asr_server import errors
from asr_server.annexes.offline.local import OnProgress, TranscribeJob
from asr_server.annexes.offline.progress import say
from asr_server.audio.recording import Source, open_source
from asr_server.config import in_mebibytes
from asr_server.core import POSITIONS_PER_S, Segment, Task, Transcript, Word
from asr_server.errors import ChunkFailed, EngineUnavailable, InvalidValue
from asr_server.formats.render import TextDone, VerboseSegment, VerboseWord
from asr_server.machine import is_loopback

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


PATIENCE_S: Final = 900.0  # as long as a server may take to load its model
MAX_UNASKED: Final = 8  # tries in a row after which the server has not said when to come back
MAX_RETRY_AFTER_S: Final = 120.0  # a server that wants more is asked sooner
MAX_BACKOFF_S: Final = 30.0  # between tries where the server says nothing
RETRIED: Final = frozenset({408, 409, 429})  # and everything from 500 on, as OpenAI's clients do
OF_ONE_FILE: Final = frozenset({413, 415, 422})  # a proxy's own, whatever it says
PARAMS_OF_ONE_FILE: Final = frozenset({"file", "channels", "track"})

T = TypeVar("T")


class TryAgain(Exception):
    """Another try may succeed, after `wait_s` if given. `error` is raised after the last."""

    def __init__(self, error: Exception, wait_s: float | None = None) -> None:
        super().__init__(str(error))
        self.error = error
        self.wait_s = wait_s


async def with_retries(attempt: Callable[[], Awaitable[T]], on_wait: Callable[[Exception], None]) -> T:
    started_at, num_unasked = time.monotonic(), 0
    while True:
        try:
            return await attempt()
        except TryAgain as reason:
            num_unasked = num_unasked + 1 if reason.wait_s is None else 0
            if num_unasked == MAX_UNASKED or time.monotonic() - started_at > PATIENCE_S:
                raise reason.error from None
            on_wait(reason.error)
            await asyncio.sleep(_backoff_s(num_unasked) if reason.wait_s is None else reason.wait_s)


def _backoff_s(num_tries: int) -> float:
    return min(MAX_BACKOFF_S, 0.5 * 2.0 ** (num_tries - 1)) * random.uniform(1.0, 1.25)  # nosec B311


def refusal(status: int, detail: Mapping[str, Any], message: str, headers: Mapping[str, str]) -> Exception:
    """Return the error that an answer means: of this recording, of all, or one that may pass."""
    if (status in RETRIED or status >= 500) and headers.get("x-should-retry") != "false":
        is_of_all = status in (429, 503)
        return TryAgain(EngineUnavailable(message) if is_of_all else ChunkFailed(message), _wait_s(headers))
    if status >= 500:
        return ChunkFailed(message)
    is_of_one_file = status in OF_ONE_FILE or (status == 403 and not detail)  # a proxy that looks into files
    is_of_one_file |= detail.get("param") in PARAMS_OF_ONE_FILE
    return errors.InvalidAudio(message) if is_of_one_file else InvalidValue(message)


def refusal_by(response: httpx2.Response, body: bytes) -> Exception:
    detail = _detail_of(body)
    answer = f"{response.status_code} {response.reason_phrase}".strip()
    message = str(detail.get("message") or f"{response.url} answered {answer}, without a reason")
    return refusal(response.status_code, detail, message, response.headers)


def refusal_in_stream(detail: Mapping[str, Any]) -> Exception:
    status = _STATUSES.get(detail.get("type", ""), 500)
    headers = {} if status == 503 else {"x-should-retry": "false"}
    return refusal(status, detail, str(detail.get("message")), headers)


_STATUSES: Final = {"service_unavailable_error": 503, "invalid_request_error": 400}


def lost_connection(error: httpx2.TransportError) -> EngineUnavailable:
    return EngineUnavailable(f"cannot reach {error.request.url}: {str(error) or type(error).__name__}")


def _detail_of(body: bytes) -> dict[str, Any]:
    try:
        detail = json.loads(body)["error"]
    except (ValueError, TypeError, LookupError):
        return {}
    return detail if isinstance(detail, dict) else {}


def _wait_s(headers: Mapping[str, str]) -> float | None:
    for name, per_s in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        with suppress(KeyError, ValueError):
            return min(MAX_RETRY_AFTER_S, max(0.0, float(headers[name]) / per_s))
    return None


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
        self._path = "audio/translations" if job.task == "translate" else "audio/transcriptions"
        self._fields = _form_fields(job)
        self.model = server.model
        self._max_upload_bytes = math.inf  # unless the server says how much it takes
        self._turns = Turns()
        self._last_wait = ""
        url = server.base_url
        self._client = httpx2.AsyncClient(
            base_url=url,
            trust_env=not is_loopback(url.host),  # HTTP_PROXY is for other hosts
            headers={"authorization": f"Bearer {server.api_key}"} if server.api_key else {},
            timeout=httpx2.Timeout(SILENCE_LIMIT_S, connect=CONNECT_LIMIT_S),
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[RemoteTranscriber]:
        """Raises EngineUnavailable, InvalidValue: no such server, or a refused key."""
        async with self._client:
            try:
                model = await with_retries(self._first_model, self._report_wait)
            except errors.RequestError as error:
                raise InvalidValue(error.message) from None
            except ChunkFailed as error:
                raise EngineUnavailable(str(error)) from None
            except httpx2.TransportError as error:
                raise lost_connection(error) from None
            self.model = self.model or model
            yield self

    async def _first_model(self) -> str:
        response = await self._client.get("models")
        if response.next_request is not None:
            response = await self._redirected(response)
        if response.status_code != HTTPStatus.OK:
            raise refusal_by(response, response.content)
        try:
            model = response.json()["data"][0]
            self._max_upload_bytes = float(model.get("max_upload_bytes", math.inf))
            return str(model["id"])
        except (ValueError, TypeError, LookupError, AttributeError):
            raise EngineUnavailable(f"{response.url} is not answered as an asr-server does") from None

    async def _redirected(self, response: httpx2.Response) -> httpx2.Response:
        """Follow one redirect on the same host, also for all that follows. The key goes to no other."""
        assert response.next_request is not None
        target = response.next_request.url
        if target.host != response.url.host or not target.path.endswith("/models"):
            raise InvalidValue(f"{response.url} redirects to {target}: give --url the server's own address")
        self._client.base_url = target.copy_with(path=target.path.removesuffix("models"), query=None)
        return await self._client.get("models")

    def _report_wait(self, error: Exception) -> None:
        line = f"waiting for {self._client.base_url.host}: {error}"
        if not self._quiet and line != self._last_wait:
            say(line)
        self._last_wait = line

    async def transcribe(self, source: Source, on_progress: OnProgress) -> Transcript:
        num_bytes = _num_bytes(source)
        if num_bytes > self._max_upload_bytes:  # known before it is sent
            most = in_mebibytes(self._max_upload_bytes)
            raise errors.UploadTooLarge(
                f"The file has {in_mebibytes(num_bytes)}, and the server takes {most} at most (its "
                "--max-upload-bytes). A compressed format, such as mp3 or opus, is smaller."
            )
        async with self._turns.turn(num_bytes):
            headers = await self._job_headers(source) if self._background else {}
            attempt = partial(self._transcribe_once, source, on_progress, headers)
            return await with_retries(attempt, self._report_wait)

    async def _job_headers(self, source: Source) -> dict[str, str]:
        """Return the same for the same recording and options: the server has one job for them."""
        with source.open("rb") if isinstance(source, Path) else open_source(source) as file:
            digest = await asyncio.to_thread(hashlib.file_digest, file, "sha256")
        digest.update(json.dumps([self._path, self.model, self._fields]).encode())
        return {"idempotency-key": digest.hexdigest()}

    async def _transcribe_once(
        self, source: Source, on_progress: OnProgress, headers: Mapping[str, str]
    ) -> Transcript:
        with source.open("rb") if isinstance(source, Path) else nullcontext(source) as file:
            fields = self._fields | {"model": self.model}
            try:
                async with self._client.stream(
                    "POST", self._path, data=fields, files={"file": ("recording", file)}, headers=headers
                ) as response:
                    return transcript_from(await _last_event(response, on_progress), self._task)
            except (httpx2.SSEError, ValueError, LookupError, TypeError) as error:
                url = self._client.base_url.join(self._path)
                raise ChunkFailed(f"{url} is not answered as an asr-server does: {error!r}") from error
            except httpx2.ReadTimeout:
                raise ChunkFailed(f"the server has sent nothing for {SILENCE_LIMIT_S:.0f} s") from None
            except httpx2.TransportError as error:
                raise TryAgain(lost_connection(error)) from error


async def _last_event(response: httpx2.Response, on_progress: OnProgress) -> TextDone:
    if response.status_code != HTTPStatus.OK:
        raise refusal_by(response, await response.aread())
    async for event in httpx2.EventSource(response, MAX_EVENT_BYTES):
        body: Any = event.json()
        if "error" in body:
            raise refusal_in_stream(body["error"])
        if body["type"] == "transcript.text.done":
            try:
                return TextDone.model_validate(body)
            except ValidationError as error:
                raise ValueError(
                    f"{error.error_count()} fields of its last event are not as expected"
                ) from None
        on_progress(body["usage"]["input_tokens"] / POSITIONS_PER_S, None)
    raise TryAgain(EngineUnavailable(f"{response.url}: the answer ended too early"))


def _form_fields(job: TranscribeJob) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "stream": "true",
        "stream_include_segments": "true",
        "stream_continuous_usage_stats": "true",  # they tell how far the server is
        "background": "true" if job.background else None,
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


def _num_bytes(source: Source) -> int:
    return (os.stat(source) if isinstance(source, Path) else os.fstat(source.fileno())).st_size
