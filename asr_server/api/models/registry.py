"""All models of this server: find one by name, start and stop their replicas."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence

from asr_server.api.models.served_model import LOAD_FAILED, ServedModel
from asr_server.config import naming
from asr_server.errors import EngineUnavailable, ModelNotFound, ShuttingDown


class Models(ABC):
    """Models to choose from by name. The first is the default."""

    @abstractmethod
    def __iter__(self) -> Iterator[ServedModel]: ...

    @property
    def default(self) -> ServedModel:
        """Raises ModelNotFound: of the names that a key may use, none is served."""
        for model in self:
            return model
        raise ModelNotFound("None of the models of this key is served.")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for model in self for name in model.settings.model_names)

    @property
    def take_any_name(self) -> bool:
        return any(model.settings.takes_any_name for model in self)

    def choose(self, name: str) -> ServedModel:
        """Return the model of that name; an empty name means the first. Raises ModelNotFound."""
        if not name:
            return self.default
        for model in self:
            if name in model.settings.model_names:
                return model
        for model in self:
            if name in model.repositories:
                return model
        for model in self:
            if model.settings.takes_any_name:
                return model
        raise ModelNotFound(
            f"The model '{name[:200]}' does not exist. Served here: {', '.join(self.names)}. "
            f"{naming('model_alias')} adds names; '*' takes any."
        )


class AllowedModels(Models):
    """Those models that have one of these names."""

    def __init__(self, models: Models, names: Collection[str]) -> None:
        self._models, self._names = models, frozenset(names)

    def __iter__(self) -> Iterator[ServedModel]:
        return (model for model in self._models if not self._names.isdisjoint(model.settings.model_names))


class ModelRegistry(Models):
    def __init__(self, models: Sequence[ServedModel]) -> None:
        self._models = list(models)

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models)

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

    async def load(self, name: str) -> ServedModel:
        """Load a model and wait for it. Raises ModelNotFound, EngineUnavailable."""
        model = self.choose(name)
        if model.dispatcher.draining:
            raise ShuttingDown
        if not await model.load():
            raise EngineUnavailable(LOAD_FAILED)
        model.require_engine()
        return model

    @property
    def failed_to_start(self) -> ServedModel | None:
        return next((model for model in self if model.failed_to_start), None)

    async def start(self) -> None:
        for model in self:
            await model.start()

    async def until_ready(self) -> None:
        """Wait until each model loaded at the start is ready or given up."""
        starting = [model.dispatcher.supervisor for model in self if model.settings.load != "lazy"]
        await asyncio.gather(*(supervisor.until_ready() for supervisor in starting))

    def expect_ends(self) -> None:
        """Stop reporting ended replicas. Signal-safe."""
        for model in self:
            model.dispatcher.supervisor.expect_ends()

    def drain(self) -> None:
        for model in self:
            model.dispatcher.drain()

    def fail_all(self, error: Callable[[], EngineUnavailable]) -> None:
        for model in self:
            model.dispatcher.fail_all(error)

    async def stop(self) -> None:
        await asyncio.gather(*(model.stop() for model in self))
