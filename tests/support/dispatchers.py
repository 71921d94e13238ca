"""Dispatchers with the real engine on the embedded model, and the processes of their replicas."""

import asyncio
import os
from contextlib import suppress
from typing import Any, Literal

import psutil
import pytest

from asr_server.annexes.ray.executor import RayExecutor
from asr_server.checkpoint.tokenizer import Tokenizer
from asr_server.config import EMBEDDED_MODEL
from asr_server.core import Chunk, ChunkResult, DecodingOptions
from asr_server.dispatch.dispatcher import Dispatcher
from asr_server.dispatch.executors import create_local_executor
from tests.support.embedded import embedded
from tests.support.speech import Spoken, digits_of

OPTIONS = DecodingOptions(language="en")
IN_MODULE = pytest.mark.asyncio(loop_scope="module")


class running:  # noqa: N801 (reads as a phrase: `async with running("inline")`)
    def __init__(
        self,
        executor: Literal["inline", "multiprocess", "ray"],
        replicas: int = 1,
        ray_address: str = "auto",
        **settings: Any,
    ) -> None:
        common: dict[str, Any] = {"executor": executor, "replicas": replicas, "dtype": "float32"}
        chosen = embedded(ray_address=ray_address, **common, **settings)
        create = (lambda _: RayExecutor(chosen)) if executor == "ray" else create_local_executor
        self._dispatcher = Dispatcher(chosen, create)

    async def __aenter__(self) -> Dispatcher:
        await self._dispatcher.start()
        await until_ready(self._dispatcher)
        return self._dispatcher

    async def __aexit__(self, *_: object) -> None:
        await self._dispatcher.stop()


async def until_ready(dispatcher: Dispatcher) -> None:
    """Until every replica takes chunks: credits that earlier ones were sent for may still be on their way."""
    async with asyncio.timeout(250):
        while (
            sum(state.ready and state.credit > 0 for state in dispatcher.supervisor.replica_states)
            < dispatcher.supervisor.num_replicas
        ):
            assert not dispatcher.supervisor.given_up, dispatcher.supervisor.last_failure
            await asyncio.sleep(0.02)


def chunk(spoken: Spoken, index: int = 0) -> Chunk:
    return Chunk(index, 0, spoken.samples)


def heard(result: ChunkResult) -> str:
    return digits_of(Tokenizer.from_directory(EMBEDDED_MODEL).decode(result.tokens))


def named_replicas() -> list[psutil.Process]:
    """The processes that carry a replica's number in their title: our children, and those of our raylets."""
    children = psutil.Process().children(recursive=True)
    raylets = [child.pid for child in children if child.name() == "raylet"]
    return [
        child
        for child in children
        if child.ppid() in (os.getpid(), *raylets) and "asr-server replica " in title_of(child)
    ]


def title_of(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess, IndexError):
        return str(process.cmdline()[0])
    return ""
