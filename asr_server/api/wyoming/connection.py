"""One Wyoming client: what it asks is answered, and what it says transcribed as a file sent by HTTP is.

Events are taken in order by one task; another reads ahead by one event, so that a client that leaves is
noticed while its audio is transcribed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import closing
from typing import Any, Final

from starlette.requests import ClientDisconnect
from wyoming.asr import Transcript as TranscriptEvent
from wyoming.error import Error
from wyoming.event import Event, Eventable, async_write_event
from wyoming.info import AsrModel, AsrProgram, Attribution, Info
from wyoming.ping import Pong

from asr_server import __version__, metrics
from asr_server.api.disconnect import cancel_on_disconnect
from asr_server.api.errors import CLIENT_CLOSED_REQUEST, body_of, response_to
from asr_server.api.request import check_model
from asr_server.api.request_id import new_request_id
from asr_server.api.request_log import report_request
from asr_server.api.state import AppState
from asr_server.api.upload import Upload
from asr_server.api.wyoming.events import AudioFormat, Transcribe, content_of, read_event
from asr_server.audio import Recording
from asr_server.config import naming
from asr_server.core import DecodingOptions, Transcript
from asr_server.errors import InvalidValue, RequestError, ServiceUnavailable, ShuttingDown, TooSlow
from asr_server.telemetry import current_request_id
from asr_server.transcription import first_error, prompt_tokens

ATTRIBUTION: Final = Attribution("asr-server", "")
AUDIO: Final = ("audio-start", "audio-chunk")
ROUTE: Final = "wyoming"  # among those of HTTP, in the log and the metrics
LAST_WORDS_S: Final = 0.2  # in which who is cut off by the server's end is told so
GONE: Final = (ClientDisconnect, ConnectionError, TimeoutError)

logger = logging.getLogger(__name__)


class WyomingConnection:
    def __init__(self, state: AppState, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._state = state
        self._reader, self._writer = reader, writer
        self._events: asyncio.Queue[Event | None] = asyncio.Queue(maxsize=1)
        self._has_left = asyncio.Event()
        self._wanted = Transcribe()
        self._asked_at: float | None = None  # when the utterance under way began
        self._stats = metrics.RequestStats()  # of that utterance

    async def run(self) -> None:
        """Until the client leaves, or is told an error: then the connection is of no more use to it."""
        try:
            async with asyncio.TaskGroup() as group:
                reading = group.create_task(self._read())
                while (event := await self._next_event()) is not None:
                    await self._handle(event)
                reading.cancel()
        except asyncio.CancelledError:  # the server's end
            if self._asked_at is not None:
                await self._refuse(ShuttingDown(), LAST_WORDS_S)
            raise
        except BaseExceptionGroup as errors:
            await self._refuse(first_error(errors), self._state.settings.client_grace_s)

    async def _read(self) -> None:
        """Raises InvalidValue."""
        while (event := await read_event(self._reader)) is not None:
            await self._events.put(event)
        self._has_left.set()
        await self._events.put(None)

    async def _next_event(self) -> Event | None:
        """Raises TooSlow."""
        limit_s = self._state.settings.keep_alive_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._events.get()
        except TimeoutError:
            raise TooSlow(f"No event has come for {limit_s} s: {naming('keep_alive_s')}.") from None

    async def _handle(self, event: Event) -> None:
        """Events of other services are let pass, as the protocol asks."""
        grace_s = self._state.settings.client_grace_s
        if event.type == "describe":
            await self._write(self._info(), grace_s)
        elif event.type == "ping":
            await self._write(Pong(text=event.data.get("text")), grace_s)
        elif event.type == "transcribe":
            self._wanted = content_of(event, Transcribe)
        elif event.type in AUDIO:
            await self._answer(event)

    # -- What was said -------------------------------------------------------------------------------------

    async def _answer(self, first: Event) -> None:
        """Takes the audio to its end and writes its transcript.

        Raises RequestError, ServiceUnavailable, ChunkFailed, ClientDisconnect.
        """
        state = self._state
        current_request_id.set(new_request_id())
        self._stats = metrics.begin_request_stats(lambda: ROUTE)
        self._asked_at = time.monotonic()
        state.require_engine()
        options = self._decoding_options()
        with (
            state.admission.enter(),
            closing(Upload(state.settings.max_upload_bytes, state.upload_memory)) as upload,
        ):
            await self._receive_audio(first, upload)
            transcript = await self._transcribe(upload, options)
            answer = TranscriptEvent(transcript.text, language=_language_of(transcript))
            await self._write(answer, state.settings.client_grace_s)
        self._report(200)

    async def _receive_audio(self, first: Event, upload: Upload) -> None:
        audio_format = content_of(first, AudioFormat)
        upload.add(audio_format.wav_header())
        event: Event | None = first
        while event is not None and event.type != "audio-stop":
            if event.type in AUDIO and content_of(event, AudioFormat) != audio_format:
                raise InvalidValue(
                    "The audio's rate, width and channels may not change within one recording."
                )
            upload.add(event.payload or b"")
            await upload.spill_to_disk()
            event = await self._next_event()
        if event is None:
            raise ClientDisconnect

    async def _transcribe(self, upload: Upload, options: DecodingOptions) -> Transcript:
        with self._state.admission.acquire():
            recording = Recording(await upload.source(), self._state.audio_limits)
            async with (
                cancel_on_disconnect(self._wait_until_left),
                self._state.transcriber.transcribe(recording, options) as session,
            ):
                async for _ in session:
                    pass
                return session.transcript()

    async def _wait_until_left(self) -> dict[str, Any]:
        await self._has_left.wait()
        return {"type": "http.disconnect"}

    def _decoding_options(self) -> DecodingOptions:
        """Raises InvalidValue, ModelNotFound."""
        wanted, transcriber = self._wanted, self._state.transcriber
        if wanted.name:
            check_model(wanted.name, self._state.settings)
        return DecodingOptions(
            language=transcriber.languages.given_code(wanted.language),
            prompt_tokens=prompt_tokens(transcriber.tokenizer, "", wanted.keywords),
            timestamps=True,
            temperatures=self._state.settings.temperatures,
        )

    # -- What is written -----------------------------------------------------------------------------------

    async def _write(self, event: Eventable, limit_s: float) -> None:
        async with asyncio.timeout(limit_s):
            await async_write_event(event.event(), self._writer)

    async def _refuse(self, error: BaseException, limit_s: float) -> None:
        if isinstance(error, GONE):
            self._report(CLIENT_CLOSED_REQUEST)
            logger.info("wyoming: the client has left, or does not read")
            return
        if not isinstance(error, Exception):
            raise error
        self._report(response_to(error).status_code)
        is_expected = isinstance(error, RequestError | ServiceUnavailable)
        logger.log(
            logging.INFO if is_expected else logging.ERROR,
            "wyoming: refused: %s",
            error,
            exc_info=None if is_expected else error,
        )
        detail = body_of(error).error
        try:
            await self._write(Error(detail.message, detail.code or detail.type), limit_s)
        except (OSError, TimeoutError):
            return  # nobody is left to tell

    def _report(self, status: int) -> None:
        """The utterance under way, if there is one, has come to its end."""
        if self._asked_at is not None:
            report_request(ROUTE, ROUTE, status, time.monotonic() - self._asked_at, self._stats)
            self._asked_at = None

    def _info(self) -> Info:
        settings = self._state.settings
        about = {"attribution": ATTRIBUTION, "installed": True, "version": __version__}
        languages = sorted(self._state.transcriber.languages.codes)
        name = settings.model_names[0]
        model = AsrModel(name=name, description=settings.model_description, languages=languages, **about)  # type: ignore[arg-type]
        program = AsrProgram(name="asr-server", description="asr-server", models=[model], **about)  # type: ignore[arg-type]
        return Info(asr=[program])


def _language_of(transcript: Transcript) -> str | None:
    return transcript.languages[0] if transcript.languages else None
