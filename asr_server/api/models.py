"""The models of this server: each one's replicas and limits, and how one is found by name."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from itertools import chain
from pathlib import Path
from typing import Final, Literal

from asr_server.audio.decoder import AudioLimits
from asr_server.audio.recording import PreprocessPool
from asr_server.checkpoint.sizes import read_window
from asr_server.checkpoint.tokenizer import Tokenizer
from asr_server.config import Settings, naming
from asr_server.core import AudioWindow
from asr_server.dispatch.dispatcher import CreateExecutor, Dispatcher
from asr_server.errors import EngineUnavailable, ModelNotFound, ShuttingDown
from asr_server.transcription.transcriber import Transcriber

RETRY_AFTER_S: Final = 5
MAX_LOAD_WAIT_S: Final = 30.0  # then 503: clients come again, and find the model loaded
SLOTS_PER_INTERIM: Final = 24  # for one interim reading: more at once would be as many a second, each later
ENGINE_LOST: Final = "The engine has ended and is started again; the server's log says why."
LOAD_FAILED: Final = "The model could not be loaded; the server's log says why."
State = Literal["unloaded", "loading", "ready", "draining"]

logger = logging.getLogger(__name__)


class ServedModel:
    def __init__(
        self,
        settings: Settings,
        dispatcher: Dispatcher,
        pool: PreprocessPool,
        tokenizer: Tokenizer,
        window: AudioWindow,
    ) -> None:
        self.settings, self.names = settings, settings.model_names
        self.name = self.names[0]
        self.limit = settings.model_limit
        self.repositories: tuple[str, ...] = ()  # published ones that have it: clients may ask for it by each
        self.dispatcher = dispatcher
        self.transcriber = Transcriber(dispatcher, pool, tokenizer, settings.check_voice)
        self.languages = sorted(self.transcriber.languages.codes)
        self.audio_limits = AudioLimits.from_settings(settings, window)
        self._is_loaded = False  # from the launch of its replicas at the start, or else when one is ready
        self._is_draining = False
        self._num_using = 0
        self._num_interim = 0
        self._interim_ended = asyncio.Condition()
        self._used_at = time.monotonic()
        self._is_unused = asyncio.Event()
        self._is_unused.set()
        self._changing = asyncio.Lock()  # whether replicas run
        self._loading: asyncio.Task[bool] | None = None

    @classmethod
    def from_checkpoint(cls, settings: Settings, pool: PreprocessPool, create: CreateExecutor) -> ServedModel:
        directory = Path(settings.model)
        window, tokenizer = read_window(directory), Tokenizer.from_directory(directory)
        dispatcher = Dispatcher(settings, create, window)
        return cls(settings, dispatcher, pool, tokenizer, window)

    @asynccontextmanager
    async def reading_interim(self) -> AsyncIterator[None]:
        """Wait for a place among the interim readings; beside other work there is one."""
        async with self._interim_ended:
            await self._interim_ended.wait_for(self._may_read_interim)
            self._num_interim += 1
        try:
            yield
        finally:
            self._num_interim -= 1
            async with self._interim_ended:
                self._interim_ended.notify_all()

    def _may_read_interim(self) -> bool:
        is_busy = self.dispatcher.num_chunks > self._num_interim
        return self._num_interim < (1 if is_busy else max(1, self.dispatcher.num_slots // SLOTS_PER_INTERIM))

    @property
    def state(self) -> State:
        if self._is_draining:
            return "draining"
        if self._is_loaded and self.dispatcher.supervisor.was_ready:
            return "ready"
        is_loading = self._is_loaded or (self._loading is not None and not self._loading.done())
        return "loading" if is_loading else "unloaded"

    @property
    def takes_requests(self) -> bool:
        """Return whether a replica takes work, or a request would launch one."""
        return not self._is_loaded or self.dispatcher.ready

    @property
    def failed_to_start(self) -> bool:
        return self._is_loaded and self.dispatcher.supervisor.failed_to_start

    def check_health(self) -> None:
        """Raises EngineUnavailable once every replica has been given up."""
        if self._is_loaded and self.dispatcher.supervisor.given_up:
            raise EngineUnavailable("The engine has failed and is not being restarted.", retry_after_s=60)

    def require_engine(self) -> None:
        """Raises EngineUnavailable if no replica takes work and none would be launched."""
        if self.dispatcher.draining:
            raise ShuttingDown
        self.check_health()
        if not self.takes_requests:
            supervisor = self.dispatcher.supervisor
            reason = ENGINE_LOST if supervisor.was_ready else "The engine is starting."
            raise EngineUnavailable(reason, retry_after_s=max(RETRY_AFTER_S, supervisor.start_s))

    @asynccontextmanager
    async def using(self) -> AsyncIterator[None]:
        """Keep replicas while the block runs; launch and await them. Raises EngineUnavailable."""
        await self._until_loaded()
        self._num_using += 1
        self._is_unused.clear()
        try:
            yield
        finally:
            self._num_using -= 1
            self._used_at = time.monotonic()
            if not self._num_using:
                self._is_unused.set()

    async def _until_loaded(self) -> None:
        if self._is_loaded:
            if not self.dispatcher.supervisor.was_ready:
                self.require_engine()
            return
        try:
            async with asyncio.timeout(MAX_LOAD_WAIT_S):
                while not self._is_loaded:  # an unload may come right behind the load
                    await self.load(retry_after_s=MAX_LOAD_WAIT_S)
        except TimeoutError:
            message = f"The model '{self.name}' is not loaded after {MAX_LOAD_WAIT_S:g} s."
            raise EngineUnavailable(message, retry_after_s=MAX_LOAD_WAIT_S) from None

    async def start(self) -> None:
        if self.settings.load != "lazy":
            self._is_loaded = True
            await self.dispatcher.start()

    async def load(self, retry_after_s: float = RETRY_AFTER_S) -> None:
        """Launch the replicas if needed, and wait for one. Raises EngineUnavailable."""
        if self.dispatcher.draining:
            raise ShuttingDown
        if not await asyncio.shield(self.begin_loading()):
            raise EngineUnavailable(LOAD_FAILED, retry_after_s)

    def begin_loading(self) -> asyncio.Task[bool]:
        if self._loading is None or self._loading.done():
            self._loading = asyncio.create_task(self._load(), name=f"load {self.name}")
        return self._loading

    async def _load(self) -> bool:
        async with self._changing:
            if self._is_loaded:
                return True
            started_at = time.monotonic()
            await self.dispatcher.start()
            supervisor = self.dispatcher.supervisor
            await supervisor.until_ready()
            if not supervisor.was_ready:  # it gave up, or the server ends
                if supervisor.given_up:
                    logger.error("model %s could not be loaded: %s", self.name, supervisor.last_failure)
                await self.dispatcher.end_replicas()
                return False
            self._is_loaded, self._used_at = True, time.monotonic()
            logger.info("model %s loaded in %.1f s", self.name, self._used_at - started_at)
            return True

    async def unload(self, limit_s: float) -> None:
        """Wait for requests under way, then end the replicas.

        Raises EngineUnavailable if they last longer than `limit_s`; nothing has changed then.
        """
        async with self._changing:
            if not self._is_loaded:
                return
            self._is_loaded, self._is_draining, is_unused = False, True, False
            try:
                async with asyncio.timeout(limit_s):
                    is_unused = await self._is_unused.wait()
                await self.dispatcher.end_replicas()
            except TimeoutError:
                raise EngineUnavailable(
                    f"{self._num_using} requests to '{self.name}' are still under way after {limit_s:g} s."
                ) from None
            finally:
                self._is_loaded, self._is_draining = not is_unused, False
            logger.info("model %s unloaded", self.name)

    async def unload_if_idle(self) -> None:
        limit_s, is_pinned = self.settings.idle_unload_s, self.settings.load == "pinned"
        if not limit_s or is_pinned or self._num_using or self._changing.locked():
            return
        if not (self._is_loaded and self.dispatcher.ready):
            return
        if time.monotonic() - self._used_at >= limit_s:
            logger.info("model %s has had no request for %g s", self.name, limit_s)
            await self.unload(0)

    async def stop(self) -> None:
        if self._loading is not None:
            self._loading.cancel()
        await self.dispatcher.stop()


class Models(tuple[ServedModel, ...]):
    """Models to choose from by name. The first is the default."""

    def allowed(self, names: Collection[str] | None) -> Models:
        """Return those that a key may use; None: all."""
        if names is None:
            return self
        return Models(model for model in self if not set(names).isdisjoint(model.names))

    @property
    def default(self) -> ServedModel:
        """Raises ModelNotFound: of the names that a key may use, none is served."""
        for model in self:
            return model
        raise ModelNotFound("None of the models of this key is served.")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for model in self for name in model.names)

    def choose(self, name: str) -> ServedModel:
        """Return the model of that name; an empty name means the first. Raises ModelNotFound."""
        if not name:
            return self.default
        by_name = (model for model in self if name in model.names)
        by_repository = (model for model in self if name in model.repositories)
        by_any_name = (model for model in self if model.settings.takes_any_name)
        for model in chain(by_name, by_repository, by_any_name):
            return model
        raise ModelNotFound(
            f"The model '{name[:200]}' does not exist. Served here: {', '.join(self.names)}. "
            f"{naming('model_alias')} adds names; '*' takes any."
        )

    def check_health(self) -> None:
        """Raises EngineUnavailable once every replica has been given up."""
        self._any(ServedModel.check_health)

    def require_engine(self) -> None:
        """Raises EngineUnavailable while no model can take work."""
        self._any(ServedModel.require_engine)

    def require_ready(self) -> None:
        """Raises EngineUnavailable until all loaded at the start were ready, and while none takes work."""
        for model in self:
            if model.state == "loading":
                model.require_engine()
        self.require_engine()

    def _any(self, check: Callable[[ServedModel], None]) -> None:
        errors = []
        for model in self:
            try:
                return check(model)
            except EngineUnavailable as error:
                errors.append(error)
        raise errors[0]

    @property
    def failed_to_start(self) -> ServedModel | None:
        return next((model for model in self if model.failed_to_start), None)

    async def start(self) -> None:
        for model in self:
            await model.start()

    async def until_ready(self) -> None:
        """Wait until all models loaded at the start are ready, or one has failed to start."""
        starting = [model.dispatcher.supervisor for model in self if model.settings.load != "lazy"]
        for one_is_ready in asyncio.as_completed([supervisor.until_ready() for supervisor in starting]):
            await one_is_ready
            if self.failed_to_start:
                return

    async def stop(self) -> None:
        await asyncio.gather(*(model.stop() for model in self))
