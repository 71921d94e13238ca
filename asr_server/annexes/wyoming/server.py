"""Serve the Wyoming protocol (Home Assistant's) on a port of its own; audio goes the way of an upload.

One task handles events, another reads ahead, so that a client that leaves is noticed. Events are read here
because the package's reader takes lengths of any size. Imported for `--wyoming-port` alone.
"""

import asyncio
import contextlib
import logging
import time
from contextlib import closing
from typing import Annotated, Any, Final, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from wyoming.asr import Transcript as TranscriptEvent
from wyoming.error import Error
from wyoming.event import Event, Eventable, async_write_event
from wyoming.info import AsrModel, AsrProgram, Attribution, Info
from wyoming.ping import Pong
from wyoming.vad import VoiceStopped

from asr_server import __version__, metrics
from asr_server.annexes.realtime import turn_types as turns
from asr_server.annexes.realtime.audio_in import VoiceActivity
from asr_server.annexes.realtime.server_events import DEFAULT_VAD
from asr_server.annexes.wyoming import WyomingSettings
from asr_server.api.errors import CLIENT_CLOSED_REQUEST, body_of, response_to
from asr_server.api.middleware import new_request_id, report_request
from asr_server.api.request import TranscriptionRequest, read_fields
from asr_server.api.schemas import TranscriptionFields
from asr_server.api.state import AppState
from asr_server.api.transcribe import whole_transcript
from asr_server.api.upload import Form, Upload
from asr_server.audio.stream import Mono16k
from asr_server.audio.wav import pcm_frames, unsized_header
from asr_server.config import MIB, naming
from asr_server.errors import InvalidValue, RequestError, ServiceUnavailable, ShuttingDown, TooSlow
from asr_server.machine import listening_on
from asr_server.telemetry import current_request_id
from asr_server.transcription.transcriber import first_error

MAX_LINE_BYTES: Final = 64 * 1024
MAX_DATA_BYTES: Final = 64 * 1024
MAX_PAYLOAD_BYTES: Final = 256 * 1024  # clients send some thousand bytes at a time

# After so much silence speech has ended, as in Home Assistant.
SILENCE_MS: Final = {"aggressive": 250, "default": 700, "relaxed": 1250}

T = TypeVar("T")


class _Header(msgspec.Struct):
    type: str
    data: dict[str, Any] | None = None
    data_length: Annotated[int, msgspec.Meta(ge=0, le=MAX_DATA_BYTES)] | None = None
    payload_length: Annotated[int, msgspec.Meta(ge=0, le=MAX_PAYLOAD_BYTES)] | None = None


class AudioFormat(msgspec.Struct, frozen=True):
    rate: Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
    width: Annotated[int, msgspec.Meta(ge=1, le=4)]  # bytes of a sample
    channels: Annotated[int, msgspec.Meta(ge=1, le=1024)]


class Transcribe(msgspec.Struct, frozen=True):
    name: str | None = None  # of the model
    language: str | None = None
    transcript_names: tuple[str, ...] | None = None
    transcript_terms: tuple[str, ...] | None = None
    vad_sensitivity: str | None = None  # asks the server to find the end of speech

    @property
    def keywords(self) -> tuple[str, ...]:
        return (*(self.transcript_names or ()), *(self.transcript_terms or ()))


class EndOfSpeech:
    """Find where a voice command ends, for clients that ask the server to. Belongs in threads."""

    def __init__(self, sensitivity: str, audio_format: AudioFormat) -> None:
        silence_ms = SILENCE_MS.get(sensitivity, SILENCE_MS["default"])
        self._activity = VoiceActivity(msgspec.structs.replace(DEFAULT_VAD, silence_duration_ms=silence_ms))
        self._format, self._mono = audio_format, Mono16k(audio_format.rate, audio_format.channels)
        self._rest = b""  # of a frame

    def hears(self, data: bytes) -> bool:
        """Listen on; return whether speech has ended."""
        data, own = self._rest + data, self._format
        num_whole = len(data) - len(data) % (own.width * own.channels)
        self._rest = data[num_whole:]
        samples = self._mono.push(pcm_frames(data[:num_whole], own.rate, own.channels, own.width))
        return turns.Signal.VOICE_STOPPED in self._activity.push(samples)


def content_of(event: Event, content_type: type[T]) -> T:
    """Return the event's data as this type. Raises InvalidValue."""
    try:
        return msgspec.convert(event.data, content_type)
    except msgspec.ValidationError as error:
        raise InvalidValue(f"The event '{event.type[:80]}' is not valid: {error}.") from None


async def read_event(reader: asyncio.StreamReader) -> Event | None:
    """Read an event; None if the client has left. Raises InvalidValue."""
    try:
        header = msgspec.json.decode(await reader.readuntil(b"\n"), type=_Header)
        data = header.data or {}
        if header.data_length:
            data |= msgspec.json.decode(await reader.readexactly(header.data_length), type=dict[str, Any])
        payload = await reader.readexactly(header.payload_length) if header.payload_length else None
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    except asyncio.LimitOverrunError:
        raise InvalidValue(f"The line of an event is longer than {MAX_LINE_BYTES} bytes.") from None
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise InvalidValue(f"Not an event of the Wyoming protocol: {error}.") from None
    return Event(header.type, data, payload)


ATTRIBUTION: Final = Attribution("asr-server", "")
ROUTE: Final = "wyoming"  # among those of HTTP, in the log and the metrics
CLOSING_S: Final = 0.2  # in which a recording that the server's end cuts off is answered
MAX_LET_PASS_BYTES: Final = 64 * MIB  # half an hour of 16 bits at 16 kHz
GONE: Final = (ClientDisconnect, ConnectionError, TimeoutError)

logger = logging.getLogger(__name__)


class WyomingConnection:
    def __init__(self, state: AppState, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._state = state
        self._reader, self._writer = reader, writer
        self._events: asyncio.Queue[Event | None] = asyncio.Queue(maxsize=1)
        self._has_left = asyncio.Event()
        self._wanted = Transcribe()
        self._takes_audio = True  # not behind `audio-stop`: some clients send the rest of their buffer there
        self._began_at: float | None = None  # the recording under way
        self._stats = metrics.RequestStats()  # of that recording

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                reading = group.create_task(self._read())
                while (event := await self._next_event()) is not None:
                    await self._handle(event)
                reading.cancel()
        except asyncio.CancelledError:  # the server's end
            if self._began_at is not None:
                await self._refuse(ShuttingDown(), CLOSING_S)
            raise
        except BaseExceptionGroup as errors:
            await self._refuse(first_error(errors), self._state.settings.client_grace_s)

    async def _read(self) -> None:
        while (event := await read_event(self._reader)) is not None:
            await self._events.put(event)
        self._has_left.set()
        await self._events.put(None)

    async def _next_event(self) -> Event | None:
        limit_s = self._state.settings.keep_alive_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._events.get()
        except TimeoutError:
            raise TooSlow(f"No event has come for {limit_s} s: {naming('keep_alive_s')}.") from None

    async def _handle(self, event: Event) -> None:
        grace_s = self._state.settings.client_grace_s
        if event.type == "describe":
            await self._write(self._info(), grace_s)
        elif event.type == "ping":
            await self._write(Pong(text=event.data.get("text")), grace_s)
        elif event.type == "transcribe":
            self._wanted, self._takes_audio = content_of(event, Transcribe), True
        elif event.type == "audio-start" or (event.type == "audio-chunk" and self._takes_audio):
            await self._answer(event)

    async def _answer(self, first: Event) -> None:
        state, wanted = self._state, self._wanted
        current_request_id.set(new_request_id())
        self._stats = metrics.begin_request_stats(lambda: ROUTE)
        client, *_ = self._writer.get_extra_info("peername") or ("",)
        self._stats.asked_for |= {"client": client, "model": state.models.default.name}
        self._began_at = time.monotonic()
        state.models.require_engine()
        model = state.models.choose(wanted.name or "")
        self._stats.asked_for["model"] = model.name
        options = model.transcriber.options(
            language=wanted.language, keywords=wanted.keywords, text_only=True
        )
        request = TranscriptionRequest(model, read_fields((), TranscriptionFields), options)
        with (
            state.admission.enter(),
            closing(Form(state.settings.max_upload_bytes, state.uploads)) as form,
        ):
            with self._stats.stage("upload"):
                await self._receive_audio(first, form.upload)
            transcript = await whole_transcript(state, form, request, self._wait_until_left)
            answer = TranscriptEvent(transcript.text, language=next(iter(transcript.languages), None))
            await self._write(answer, state.settings.client_grace_s)
        self._report(200)

    async def _receive_audio(self, first: Event, upload: Upload) -> None:
        audio_format, sensitivity = content_of(first, AudioFormat), self._wanted.vad_sensitivity
        # The first one loads the detector.
        end = await asyncio.to_thread(EndOfSpeech, sensitivity, audio_format) if sensitivity else None
        upload.add(unsized_header(audio_format.rate, audio_format.channels, audio_format.width))
        event = first if first.type == "audio-chunk" else await self._next_event()
        while event is not None and event.type != "audio-stop":
            if event.type == "audio-start":
                raise InvalidValue("'audio-start' came within a recording: send 'audio-stop' first.")
            if event.type != "audio-chunk":
                await self._handle(event)
            elif content_of(event, AudioFormat) != audio_format:
                raise InvalidValue(
                    "The audio's rate, width and channels may not change within one recording."
                )
            else:
                upload.add(event.payload or b"")
                await upload.spill_to_disk()
                if end is not None and await asyncio.to_thread(end.hears, event.payload or b""):
                    await self._write(VoiceStopped(), self._state.settings.client_grace_s)
                    break
            event = await self._next_event()
        if event is None:
            raise ClientDisconnect
        self._takes_audio = False

    async def _wait_until_left(self) -> dict[str, Any]:
        await self._has_left.wait()
        return {"type": "http.disconnect"}

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
        if isinstance(error, RequestError | ServiceUnavailable):
            logger.info("wyoming: refused: %s", error)
        else:
            logger.error("wyoming: refused: %s", error, exc_info=error)
        detail = body_of(error).error
        try:
            await self._write(Error(detail.message, detail.code or detail.type), limit_s)
            self._writer.write_eof()
            await self._let_pass(limit_s)
        except (OSError, TimeoutError):
            return  # nobody is left to tell

    async def _let_pass(self, limit_s: float) -> None:
        """Discard further input: a reset would hide the error from clients that send everything first."""
        num_bytes = 0
        while num_bytes < MAX_LET_PASS_BYTES:
            async with asyncio.timeout(limit_s):
                data = await self._reader.read(MAX_LINE_BYTES)
            if not data:
                return
            num_bytes += len(data)

    def _report(self, status: int) -> None:
        if self._began_at is not None:
            figures = report_request(ROUTE, ROUTE, status, time.monotonic() - self._began_at, self._stats)
            self._state.history.add(ROUTE, self._stats, figures)
            self._began_at = None

    def _info(self) -> Info:
        about: dict[str, Any] = {"attribution": ATTRIBUTION, "installed": True, "version": __version__}
        models = [
            AsrModel(name=m.name, description=m.settings.model_description, languages=m.languages, **about)
            for m in self._state.models
        ]
        program = AsrProgram(name="asr-server", description="asr-server", models=models, **about)
        return Info(asr=[program])


class WyomingServer:
    """Accept up to `max_connections`; close what comes beyond that."""

    def __init__(self, state: AppState) -> None:
        self._state = state
        self.connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._listener: asyncio.Server | None = None

    async def start(self) -> tuple[str, int]:
        """Raises OSError."""
        settings = self._state.settings.part(WyomingSettings)
        where = listening_on(settings.host, settings.wyoming_port, settings.reuse_port)
        self._listener = await asyncio.start_server(self._connect, **where, limit=MAX_LINE_BYTES)
        host, port = self._listener.sockets[0].getsockname()[:2]
        return host, port

    async def close(self) -> None:
        """Close every connection; `server.run` has waited for transcripts."""
        if self._listener is not None:
            self._listener.close()
        tasks = list(self.connections)
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSING_S)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=2 * CLOSING_S)
        for writer in self.connections.values():  # of clients that do not read
            writer.transport.abort()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self.connections) >= self._state.settings.max_connections:
            writer.close()
            return
        task = asyncio.create_task(self._serve(reader, writer))
        self.connections[task] = writer
        task.add_done_callback(self.connections.pop)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await WyomingConnection(self._state, reader, writer).run()
        except Exception:
            logger.exception("wyoming: a connection has failed")
        finally:
            writer.close()
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(self._state.settings.client_grace_s):
                    await writer.wait_closed()
