"""The API on a real port, in the test's own event loop, in front of a replica."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
import uvicorn
from fastapi import FastAPI

from asr_server.annexes.realtime.client_events import MAX_MESSAGE_BYTES
from asr_server.api.models import Models, ServedModel
from asr_server.audio.recording import PreprocessPool
from asr_server.core import AudioWindow, ChunkResult
from asr_server.dispatch.dispatcher import Dispatcher
from asr_server.dispatch.supervisor import ReplicaLimits
from asr_server.protocols.tls import http_protocol
from asr_server.protocols.websockets import BoundedWebSocketProtocol
from asr_server.server.app import create_app
from asr_server.server.settings import ServerSettings
from asr_server.transport.messages import Submit
from tests.support.embedded import embedded
from tests.support.fake_replica import FakeReplica, noise, say, wav
from tests.support.tokens import make_tokenizer, words
from tests.support.until import until

MODEL = {"model": "whisper-1"}
SECOND = wav(noise(1.0))
THREE_CHUNKS = wav(noise(75))


def number_of_the_chunk(submit: Submit) -> ChunkResult:
    return say(*words(str(submit.id.chunk)))


@dataclass
class RunningApp:
    app: FastAPI
    replica: FakeReplica
    dispatcher: Dispatcher
    pool: PreprocessPool
    client: httpx.AsyncClient
    server: uvicorn.Server
    host: str
    port: int

    async def post(
        self, file: bytes = SECOND, /, *, path: str = "/v1/audio/transcriptions", **fields: str
    ) -> httpx.Response:
        return await self.client.post(path, files={"file": file}, data=MODEL | fields)

    async def still_works(self, file: bytes = SECOND) -> bool:
        """Whether the server still does its work."""
        text: str = (await self.post(file)).json()["text"]
        return text == "zero"

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def cut_off(self) -> None:
        """What clients see of a server that is killed: it listens no more, and every connection is gone."""
        for listener in self.server.servers:
            listener.close()
        for connection in list(self.server.server_state.connections):
            connection.transport.abort()


def served(settings: ServerSettings) -> ServedModel:
    """A model whose replicas do not run: for what its names and settings decide."""
    return ServedModel(
        settings,
        Dispatcher(settings, lambda _: FakeReplica(number_of_the_chunk)),
        PreprocessPool(1),
        make_tokenizer(),
        AudioWindow(),
    )


class QuickServer(uvicorn.Server):
    """uvicorn's, which waits a tenth of a second here and there, where there is nothing to wait for."""

    async def main_loop(self) -> None:
        running = asyncio.create_task(super().main_loop())
        while not self.should_exit and not running.done():
            await asyncio.sleep(0.005)
        running.cancel()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.02):
                while self.server_state.connections or self.server_state.tasks:
                    await asyncio.sleep(0.001)
        if self.server_state.connections or self.server_state.tasks:
            await super().shutdown(sockets)
            return
        for server in self.servers:
            server.close()
        await self.lifespan.shutdown()


@asynccontextmanager
async def run_app(
    settings: ServerSettings | None = None,
    answer: Callable[[Submit], ChunkResult | Exception] = number_of_the_chunk,
    credit: int = 100,
    languages: tuple[str, ...] = ("en",),
    port: int = 0,
    before_launch: Callable[[], Awaitable[object]] | None = None,
) -> AsyncIterator[RunningApp]:
    settings = settings or embedded()
    replica = FakeReplica(answer, credit)
    replica.before_launch = before_launch or replica.before_launch
    dispatcher = Dispatcher(settings, lambda _: replica, limits=ReplicaLimits(pause_s=0.01))
    pool = PreprocessPool(2)
    model = ServedModel(settings, dispatcher, pool, make_tokenizer(languages), AudioWindow())
    app = create_app(settings, Models([model]), pool)
    server = QuickServer(
        uvicorn.Config(
            app,
            port=port,
            root_path=settings.root_path,
            ws=BoundedWebSocketProtocol,
            ws_max_size=MAX_MESSAGE_BYTES,
            ws_per_message_deflate=False,
            http=http_protocol(settings),  # type: ignore[arg-type]  # uvicorn only calls it
            timeout_keep_alive=settings.keep_alive_s,
            log_config=None,
            timeout_graceful_shutdown=1,
        )
    )
    serving = asyncio.create_task(server.serve())
    is_lazy = settings.load == "lazy"
    await until(lambda: server.started and (is_lazy or dispatcher.ready or dispatcher.supervisor.given_up))
    host, port = server.servers[0].sockets[0].getsockname()[:2]
    scheme = "https" if settings.ssl_certfile else "http"
    try:
        async with httpx.AsyncClient(
            base_url=f"{scheme}://{host}:{port}", timeout=30, verify=False
        ) as client:
            yield RunningApp(app, replica, dispatcher, pool, client, server, host, port)
    finally:
        server.should_exit = True
        await serving


def error_of(response: httpx.Response) -> dict[str, str | None]:
    error: dict[str, str | None] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error
