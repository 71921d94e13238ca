"""Start replicas as actors of a Ray cluster, for many hosts. Imported for `--executor ray` alone.

Each replica has its own placement group. Ray starts and watches processes; all else is as in
`dispatch/executors.py`, over TCP. Ray's calls block, some for ever, so each runs in a thread with a limit.
"""

import asyncio
import atexit
import contextlib
import logging
import math
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from asr_server import __version__
from asr_server.annexes.model_sources.find import resolve_checkpoint
from asr_server.annexes.ray import RaySettings
from asr_server.annexes.ray.cluster import check_answers, cluster_address
from asr_server.annexes.ray.tcp import TcpEngineClient, TcpEngineServer
from asr_server.checkpoint.files import name_elsewhere
from asr_server.dispatch.executors import RemoteReplica
from asr_server.dispatch.supervisor import StartImpossible
from asr_server.errors import CheckpointError
from asr_server.machine import in_daemon_thread
from asr_server.replica import CannotStart, create_engine, run
from asr_server.telemetry import configure_logging
from asr_server.transport.messages import Event, LogLine
from asr_server.transport.zeromq import ReplicaSpec

JOIN_LIMIT_S: Final = 300.0
CALL_LIMIT_S: Final = 10.0
LEAVE_LIMIT_S: Final = 30.0
CALL_THREAD: Final = "ray call"
KILL_LIMIT_S: Final = 10.0
PLACE_WAIT_S: Final = 1.0
PLACE_LOG_S: Final = 20.0
_HOST: Final = os.uname().nodename

logger = logging.getLogger(__name__)

T = TypeVar("T")


class RayExecutor:
    def __init__(self, settings: RaySettings) -> None:
        self._settings = replace(settings.core, model=name_elsewhere(Path(settings.model)))
        self._ray_address = settings.ray_address
        self._cluster = contextlib.ExitStack()  # ends the cluster of this machine, where one was started
        self._address = ""
        self._places: list[Any] = []  # by replica
        self._resources: dict[str, float] = {}
        self._num_on_device = 1
        self._host = ""

    async def start(self) -> int:
        """Raises StartImpossible where there is no cluster."""
        try:
            return await _in_thread(self._join, JOIN_LIMIT_S)
        except StartImpossible:
            raise
        except Exception as error:  # of any kind, as Ray has it
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise StartImpossible(f"no Ray cluster at {self._ray_address}: {reason}") from error

    async def launch(self, index: int) -> RemoteReplica:
        """Wait for a place as long as it takes. Raises OSError and Ray's errors."""
        client = TcpEngineClient(self._host)
        try:
            spec = ReplicaSpec(index, client.address, self._settings, self._num_on_device)
            await self._check_answers()
            actor, began, end = await _in_thread(lambda: self._start_actor(index, spec), CALL_LIMIT_S)
            await self._until_begun(index, asyncio.wrap_future(began))
        except BaseException:
            client.close()  # Ray ends an actor that nobody holds
            raise
        return RayReplica(f"replica {index}", actor, asyncio.wrap_future(end), client)

    async def stop(self) -> None:
        try:
            await _in_thread(self._leave, LEAVE_LIMIT_S)
        except Exception as error:
            logger.warning("the Ray cluster could not be left in order: %s: %s", type(error).__name__, error)
            atexit.unregister(_ray().shutdown)  # which would wait again, for good perhaps
        await asyncio.to_thread(self._cluster.close)

    # -- In the thread --

    def _join(self) -> int:
        self._address = self._cluster.enter_context(cluster_address(self._ray_address))
        ray = _ray()
        ray.init(address=self._address, log_to_driver=False, logging_level=logging.ERROR)
        self._host = ray.util.get_node_ip_address()
        num_hosts = sum(node["Alive"] for node in ray.nodes())
        gpus = int(ray.cluster_resources().get("GPU", 0))
        use_gpus = self._settings.device == "cuda" or (self._settings.device == "auto" and gpus > 0)
        num_ranks = self._settings.tensor_parallel_size
        num_replicas = self._settings.replicas or (gpus // num_ranks if use_gpus else num_hosts)
        if not num_replicas:
            raise StartImpossible(f"each replica needs {num_ranks} GPUs: the Ray cluster has {gpus}")
        num_on_host = math.ceil(num_replicas / num_hosts)
        shared_by = math.ceil(num_replicas / gpus) if gpus and num_ranks == 1 else 1
        self._num_on_device = shared_by if use_gpus else num_on_host
        threads = max(1, self._settings.cpu_threads)
        self._resources = {"GPU": num_ranks / shared_by} if use_gpus else {"CPU": num_ranks * threads}
        self._settings = replace(self._settings, replicas=num_on_host)  # what shares a host's cores
        self._places = [
            ray.util.placement_group([self._resources], strategy="SPREAD") for _ in range(num_replicas)
        ]
        return num_replicas

    def _start_actor(self, index: int, spec: ReplicaSpec) -> tuple[Any, Future[None], Future[None]]:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        actor_class = _ray().remote(
            num_cpus=self._resources.get("CPU", 0),
            num_gpus=self._resources.get("GPU", 0),
            max_restarts=0,  # the supervisor replaces it
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._places[index]),
        )(ReplicaActor)
        actor = actor_class.remote()
        # The keys are an argument of the call: those of the constructor would be kept by the cluster.
        call = actor.run.options(name=f"asr-server replica {index}")  # in the process's title, too
        began = actor.__ray_ready__.remote().future()
        return actor, began, call.remote(spec.to_line(), __version__).future()

    async def _until_begun(self, index: int, began: asyncio.Future[None]) -> None:
        waited_s = 0.0
        while not (await asyncio.wait((began,), timeout=PLACE_WAIT_S))[0]:
            await self._check_answers()
            waited_s += PLACE_WAIT_S
            if waited_s % PLACE_LOG_S == 0:
                logger.warning(
                    "replica %d waits for a place in the Ray cluster: it needs %s", index, self._resources
                )
        began.result()

    async def _check_answers(self) -> None:
        await _in_thread(lambda: check_answers(self._address), CALL_LIMIT_S)

    def _leave(self) -> None:
        """Disconnect when no call is under way: Ray would close its connection, and neither might return."""
        for thread in threading.enumerate():
            if thread.name == CALL_THREAD and thread is not threading.current_thread():
                thread.join(CALL_LIMIT_S)
        if "ray" in sys.modules:
            check_answers(self._address)
            with contextlib.suppress(Exception):  # the cluster may be gone
                for place in self._places:
                    _ray().util.remove_placement_group(place)
            _ray().shutdown()


class RayReplica(RemoteReplica):
    def __init__(self, name: str, actor: Any, end: asyncio.Future[None], client: TcpEngineClient) -> None:
        super().__init__(name, client, end)
        self._actor = actor

    async def receive(self) -> list[Event]:
        events = await super().receive()
        for event in events:
            if isinstance(event, LogLine):
                print(event.text, file=sys.stderr)
        return events

    def _exit_message(self) -> str:
        error = None if self._end.cancelled() else self._end.exception()
        if error is None:
            return f"{self.name} has ended"
        return f"{self.name} has ended: {' '.join(str(error).split())}"

    async def close(self, drain_s: float = 0.0) -> None:
        await self._drain(drain_s)
        with contextlib.suppress(Exception):  # the cluster may be gone
            await _in_thread(lambda: _ray().kill(self._actor), CALL_LIMIT_S)
        await asyncio.wait((self._end,), timeout=KILL_LIMIT_S)
        if self._end.done():
            self._exit_message()  # which takes note of the error
        self._client.close()  # a replica that Ray cannot reach ends by this


def _ray() -> Any:
    import ray

    return ray


async def _in_thread(function: Callable[[], T], limit_s: float) -> T:
    return await asyncio.wait_for(asyncio.wrap_future(in_daemon_thread(function, CALL_THREAD)), limit_s)


# -- In a process of the cluster. Ray carries the call of `run` alone; it ends when our connection breaks. ---


class ReplicaActor:
    def run(self, spec_line: bytes, version: str) -> None:
        """Serve until drained. The server's `version` must be this host's."""
        if version != __version__:
            raise RuntimeError(f"{_HOST} has asr-server {__version__}, the server is {version}")
        spec = ReplicaSpec.from_line(spec_line)
        server = TcpEngineServer(spec.address, on_lost=lambda: os._exit(1))
        settings, name = spec.settings, f"replica {spec.index}"
        configure_logging(settings.log_level, settings.log_format, name, server.log_handler)
        logger.info("starts on %s as process %d", _HOST, os.getpid())
        run(server, lambda: create_engine(_with_model_of_here(spec)))


def _with_model_of_here(spec: ReplicaSpec) -> ReplicaSpec:
    try:
        model = resolve_checkpoint(spec.settings.model)
    except CheckpointError as error:
        raise CannotStart(f"on {_HOST}: {error}") from error
    return msgspec.structs.replace(spec, settings=replace(spec.settings, model=str(model)))
