"""One realtime session: one task receives, another owns the state and sends.

All events go through one queue. The next client event is taken when the last is done and the engine keeps
up; faster clients wait in their own connection.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, Final, Protocol

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from asr_server import metrics
from asr_server.annexes.realtime import RealtimeSettings
from asr_server.annexes.realtime import client_events as client
from asr_server.annexes.realtime import config as session_config
from asr_server.annexes.realtime import server_events as out
from asr_server.annexes.realtime import turn_types as turns
from asr_server.annexes.realtime.audio_in import ONSET_MARGIN_MS, AudioBuffer, AudioInput, VoiceActivity
from asr_server.annexes.realtime.config import SessionConfig
from asr_server.annexes.realtime.reader import Outcome, SessionSpeakers, TurnReader
from asr_server.annexes.realtime.turn import next_state
from asr_server.annexes.realtime.turn_types import SAMPLES_PER_MS, State
from asr_server.api.errors import body_of
from asr_server.api.state import AppState, caller_of, models_of
from asr_server.core import SAMPLE_RATE, Samples
from asr_server.errors import InvalidValue, RateLimited, RequestError
from asr_server.transcription.transcriber import task_group

NORMAL: Final = 1000
GOING_AWAY: Final = 1001  # the official client connects again
POLICY: Final = 1008
INTERNAL_ERROR: Final = 1011

PART_BYTES: Final = 32 * 1024  # of an append that are converted at once: 3 MiB of it take 0.2 s
BLOCK: Final = SAMPLE_RATE // 10  # samples that are worked on at once
MAX_UNREAD_CHUNKS: Final = 8  # before no more audio is taken
MAX_SEND_S: Final = 30.0  # for a client that does not read
MAX_IDLE_S: Final = 600.0  # without an event from the client


class End(msgspec.Struct, frozen=True):
    code: int
    reason: str


class Malformed(msgspec.Struct, frozen=True):
    error: InvalidValue
    event_id: str | None


class _Gone(Exception):
    pass


Said = client.ClientEvent | End | Malformed
_Inbox = Said | turns.Event


class Dialect(Protocol):
    """The words in which one client speaks and is spoken to."""

    def read(self, message: Mapping[str, Any]) -> Sequence[Said]:
        """Return what a message of ASGI's says."""

    def write(self, event: out.ServerEvent) -> Sequence[str]:
        """Return the messages that tell an event."""

    def hear(self, position_s: float) -> Sequence[str]:
        """Return messages that are due after so much audio."""
        return ()

    def close(self, position_s: float) -> Sequence[str]:
        """Return the last messages."""
        return ()


class OpenAIDialect(Dialect):
    def __init__(self, tag: str) -> None:
        self._tag, self._num_events = tag, 0

    def read(self, message: Mapping[str, Any]) -> Sequence[Said]:
        if (text := message.get("text")) is None:
            return (Malformed(InvalidValue("Events are JSON text; this message was binary."), None),)
        try:
            return (client.parse_client_event(text),)
        except InvalidValue as error:
            # Its traceback would keep the message, of up to 4 MiB, until the garbage is next collected.
            error.__context__ = error.__traceback__ = None
            return (Malformed(error, client.event_id_of(text)),)

    def write(self, event: out.ServerEvent) -> Sequence[str]:
        self._num_events += 1
        event = msgspec.structs.replace(event, event_id=f"event_{self._tag}{self._num_events:06d}")
        return (msgspec.json.encode(event).decode(),)


class RealtimeSession:
    def __init__(
        self, socket: WebSocket, app: AppState, config: SessionConfig, dialect: Dialect | None = None
    ) -> None:
        self.id = f"sess_{uuid.uuid4().hex}"
        self._socket, self._app, self._dialect = socket, app, dialect or OpenAIDialect(self.id[5:13])
        self._config = config
        self._models, self._account = models_of(socket), caller_of(socket).account
        self.model = self._models.choose(config.transcription.model)
        self._options = session_config.decoding_options(config, self._models)
        self._settings = app.settings.part(RealtimeSettings)
        self._expires_at = int(time.time() + self._settings.max_realtime_session_s)
        self._inbox: asyncio.Queue[_Inbox] = asyncio.Queue()
        self._state = self._configured(State(tag=self.id[5:13]))
        self._speakers = SessionSpeakers()
        self._buffer = AudioBuffer()
        self._audio = AudioInput(config.format, config.sample_rate)
        self._activity: VoiceActivity | None = None
        self._open: TurnReader | None = None  # the reader of the turn that is growing
        self._readers: dict[str, TurnReader] = {}
        self._ending: End | None = None
        self._group: asyncio.TaskGroup  # while it runs

    def end(self, code: int, reason: str) -> None:
        self._inbox.put_nowait(End(code, reason))

    async def run(self) -> None:
        self._note_model()
        with contextlib.suppress(_Gone):
            async with task_group() as group:
                self._group = group
                helpers = [group.create_task(self._receive()), group.create_task(self._watch_the_clock())]
                try:
                    await self._write()
                finally:
                    for helper in helpers:
                        helper.cancel()
                    for reader in self._readers.values():
                        reader.cancel()

    async def _receive(self) -> None:
        try:
            while True:
                for said in self._dialect.read(await self._next_message()):
                    self._inbox.put_nowait(said)
                    await self._inbox.join()
                    while len(unread := self._unread_chunks()) >= MAX_UNREAD_CHUNKS:
                        await asyncio.wait(unread, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            self.end(NORMAL, "Nothing was sent for too long.")

    def _unread_chunks(self) -> list[asyncio.Task[Outcome]]:
        return [chunk for reader in self._readers.values() for chunk in reader.unread]

    async def _next_message(self) -> MutableMapping[str, Any]:
        async with asyncio.timeout(MAX_IDLE_S):
            message = await self._socket.receive()
        if message["type"] == "websocket.disconnect":
            raise _Gone
        return message

    async def _watch_the_clock(self) -> None:
        await asyncio.sleep(self._settings.max_realtime_session_s)
        self.end(GOING_AWAY, "The session has reached its longest duration.")

    async def _write(self) -> None:
        await self._send(out.SessionCreated(session=self._described()))
        await self._set_detection()
        while self._ending is None or self._state.committed:
            event = await self._inbox.get()
            try:
                await self._on_event(event)
            finally:
                self._inbox.task_done()
        if self._socket.application_state is WebSocketState.CONNECTED:
            with contextlib.suppress(WebSocketDisconnect):  # the client may have left
                await self._say(self._dialect.close(self._position_s))
                await self._socket.close(self._ending.code, self._ending.reason)

    async def _on_event(self, event: _Inbox) -> None:
        match event:
            case End():
                self._ending = self._ending or event
                await self._write_audio(self._audio.flush())
                await self._step(turns.Signal.INPUT_ENDED)
            case Malformed():
                await self._send_error(event.error, event.event_id)
            case _ if self._ending and isinstance(event, client.ClientEvent):
                pass  # too late
            case client.AppendAudio():
                for first in range(0, len(event.audio), PART_BYTES):
                    await self._write_audio(self._audio.push(event.audio[first : first + PART_BYTES]))
            case client.CommitAudio():
                await self._write_audio(self._audio.flush())
                await self._step(turns.CommitRequested(event.event_id))
            case client.ClearAudio():
                await self._write_audio(self._audio.flush())
                await self._step(turns.Signal.CLEAR_REQUESTED)
            case client.SessionUpdate():
                if await self._update(event.session, event.event_id):
                    await self._send(out.SessionUpdated(session=self._described()))
            case client.OldSessionUpdate():
                if await self._update(event.session.renamed(), event.event_id):
                    session = session_config.described_for_beta_clients(self._described())
                    await self._send(out.OldSessionUpdated(session=session))
            case _:
                await self._step(event)

    async def _write_audio(self, samples: Samples) -> None:
        metrics.audio_received_seconds.inc(len(samples) / SAMPLE_RATE)
        for first in range(0, len(samples), BLOCK):
            block = samples[first : first + BLOCK]
            self._buffer.push(block)
            if self._open:
                self._open.push(block)
            await self._step(turns.AudioWritten(len(block)))
            for event in self._activity.push(block) if self._activity else []:
                await self._step(event)
            if len(samples) > len(block):
                await asyncio.sleep(0)  # others' turn
        await self._say(self._dialect.hear(self._position_s))

    @property
    def _position_s(self) -> float:
        return self._state.num_samples / SAMPLE_RATE

    async def _update(self, fields: client.SessionFields, event_id: str | None) -> bool:
        try:
            config = session_config.update_config(self._config, fields, self._models)
            options = session_config.decoding_options(config, self._models)
        except RequestError as error:
            await self._send_error(error, event_id)
            return False
        before, self._config, self._options = self._config, config, options
        self.model = self._models.choose(config.transcription.model)
        self._state = self._configured(self._state)
        self._note_model()
        if config.format != before.format:
            await self._write_audio(self._audio.flush())
            self._audio = AudioInput(config.format, config.sample_rate)
        if config.vad != before.vad:
            await self._set_detection()
        if self._open and self._open.model is self.model:  # else the turn is read as it began
            self._open.set_options(options)
        return True

    def _configured(self, state: State) -> State:
        interval_s = session_config.interim_interval_s(self._config, self._settings.realtime_interim_s)
        interim_samples, shows_interim = round(interval_s * SAMPLE_RATE), self._config.shows_interim
        return msgspec.structs.replace(state, interim_samples=interim_samples, shows_interim=shows_interim)

    def _note_model(self) -> None:
        stats = metrics.current_request_stats()
        stats.asked_for |= {"model": self._config.transcription.model, "stream": True}
        stats.model = self.model.name

    async def _set_detection(self) -> None:
        vad = self._config.vad
        if vad is None:
            self._activity = None
            await self._step(turns.DetectionSet(False))
            return
        padding = vad.prefix_padding_ms * SAMPLES_PER_MS
        self._buffer.num_kept = padding + ONSET_MARGIN_MS * SAMPLES_PER_MS
        if self._activity:
            self._activity.configure(vad)
        else:  # the detector is loaded with the first session
            self._activity = await asyncio.to_thread(VoiceActivity, vad, self._buffer.end)
        await self._step(turns.DetectionSet(True, padding))

    async def _step(self, event: turns.Event) -> None:
        self._state, effects = next_state(self._state, event)
        for effect in effects:
            await self._apply(effect)

    async def _apply(self, effect: turns.Effect) -> None:
        match effect:
            case turns.Send():
                await self._send(effect.event)
            case turns.OpenTurn():
                self._open = self._readers[effect.item_id] = self._new_reader(effect.item_id)
                self._open.push(self._buffer.since(effect.start))
            case turns.FinishTurn():
                self._readers[effect.item_id].finish()
                self._open = None
            case turns.DropTurn():
                self._readers.pop(effect.item_id).cancel()
                self._open = None
            case turns.ReadInterim():
                self._readers[effect.item_id].read_interim()
            case turns.ReadAhead():
                self._readers[effect.item_id].read_ahead()
            case turns.GoOn():
                self._readers[effect.item_id].go_on(effect.is_shown)
            case turns.RestartDetection():
                if self._activity:
                    self._activity.restart()

    def _new_reader(self, item_id: str) -> TurnReader:
        return TurnReader(
            item_id,
            self.model,
            self._options,
            report=self._inbox.put_nowait,
            spawn=self._group.create_task,
            speakers=self._speakers.new_turn() if self._config.is_diarized else None,
            shows_interim=self._config.shows_interim,
        )

    async def _send(self, event: out.ServerEvent) -> None:
        if isinstance(event, out.Completed | out.Failed):
            self._readers.pop(event.item_id)
            self._app.realtime.num_turns += 1
        if isinstance(event, out.Completed):
            languages = event.languages or ()
            metrics.current_request_stats().on_audio(
                event.usage.seconds, languages[0].code if languages else None
            )
        await self._say(self._dialect.write(event))
        if isinstance(event, out.Completed) and self._account and self._ending is None:
            try:
                self._account.require_audio()
            except RateLimited as error:
                await self._send_error(error, None)
                self.end(POLICY, "The audio of this key is used up for now.")

    async def _say(self, messages: Sequence[str]) -> None:
        try:
            for message in messages:
                async with asyncio.timeout(MAX_SEND_S):
                    await self._socket.send_text(message)
        except (WebSocketDisconnect, RuntimeError, TimeoutError) as error:
            raise _Gone from error

    async def fail(self, error: Exception) -> None:
        with contextlib.suppress(Exception):  # the client may have left
            await self._say(self._dialect.write(out.error_event(body_of(error).error)))
            await self._socket.close(INTERNAL_ERROR, "The server had an error.")

    async def _send_error(self, error: RequestError, event_id: str | None) -> None:
        await self._send(out.error_event(body_of(error).error, event_id))

    def _described(self) -> out.Session:
        return session_config.describe(self._config, self.id, self._expires_at)
