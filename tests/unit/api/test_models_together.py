"""Several models of one server: whether it is well, and how one takes another's place."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from asr_server.api.models import Models, ServedModel
from asr_server.audio.recording import PreprocessPool
from asr_server.checkpoint.files import AudioWindow
from asr_server.dispatch.dispatcher import Dispatcher
from asr_server.dispatch.supervisor import ReplicaLimits, StartImpossible
from asr_server.errors import EngineUnavailable, ModelNotFound, ShuttingDown
from tests.support.embedded import embedded
from tests.support.fake_replica import FakeReplica
from tests.support.tokens import make_tokenizer
from tests.support.until import until
from tests.unit.api.running_app import number_of_the_chunk


async def impossible() -> None:
    raise StartImpossible("no such device")


@pytest.fixture
async def make() -> AsyncIterator[Callable[..., ServedModel]]:
    """Makes models, which end with the test. One with `launch` calls that before each launch."""
    pool, made = PreprocessPool(1), list[ServedModel]()

    def of(name: str, launch: Callable[[], Any] | None = None, **values: Any) -> ServedModel:
        replica = FakeReplica(number_of_the_chunk)
        replica.before_launch = launch or replica.before_launch
        settings = embedded(**{"served_model_name": name, "model_alias": ""} | values)
        dispatcher = Dispatcher(settings, replica, limits=ReplicaLimits(pause_s=0.01))
        made.append(ServedModel(settings, dispatcher, pool, make_tokenizer(), AudioWindow()))
        return made[-1]

    yield of
    await asyncio.gather(*(model.stop() for model in made))
    pool.shutdown()


# -- Whether it is well --------------------------------------------------------------------------------------


async def test_a_server_is_well_while_one_of_its_models_is(make: Callable[..., ServedModel]) -> None:
    failing, waiting = make("failing", impossible), make("waiting", asyncio.Event().wait)
    registry = Models([failing, waiting])
    assert registry.failed_to_start is None
    await registry.start()
    await until(lambda: failing.failed_to_start)
    assert registry.failed_to_start is failing
    registry.check_health()
    with pytest.raises(EngineUnavailable, match="has failed and is not being restarted"):
        registry.require_engine()  # the first one's reason
    with pytest.raises(EngineUnavailable):
        Models([failing]).check_health()


async def test_a_server_is_ready_once_all_that_it_loads_at_the_start_have_been(
    make: Callable[..., ServedModel],
) -> None:
    may_launch = asyncio.Event()
    quick, slow, lazy = make("quick"), make("slow", may_launch.wait), make("lazy", impossible, load="lazy")
    registry = Models([quick, slow, lazy])
    await registry.start()
    waiting = asyncio.create_task(registry.until_ready())
    await until(lambda: quick.state == "ready")
    registry.require_engine()
    with pytest.raises(EngineUnavailable, match="The engine is starting"):
        registry.require_ready()
    assert not waiting.done()
    may_launch.set()
    await waiting
    registry.require_ready()
    assert (slow.state, lazy.state) == ("ready", "unloaded")
    await registry.stop()


async def test_the_keys_models_are_those_with_its_names(make: Callable[..., ServedModel]) -> None:
    one, two = make("one", model_alias="first"), make("two", model_alias="*")
    registry = Models([one, two])
    allowed = registry.allowed(["first", "none"])
    assert (list(allowed), allowed.default, allowed.names) == ([one], one, ("one", "first"))
    assert (registry.take_any_name, allowed.take_any_name) == (True, False)
    with pytest.raises(ModelNotFound, match="None of the models of this key is served"):
        _ = registry.allowed(["none"]).default


def test_a_name_or_alias_chooses_its_model_and_no_name_the_first(make: Callable[..., ServedModel]) -> None:
    one, two = make("one", model_alias="first"), make("two")
    registry = Models([one, two])
    assert [registry.choose(name) for name in ("", "one", "first", "two")] == [one, one, one, two]
    with pytest.raises(ModelNotFound, match="Served here: one, first, two"):
        registry.choose("three")
    assert Models([one, make("any", model_alias="*")]).choose("three").name == "any"


async def test_a_model_that_has_lost_its_replicas_is_neither_ready_nor_loaded(
    make: Callable[..., ServedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Models([make("one")])
    await registry.start()
    await registry.until_ready()
    registry.require_ready()
    monkeypatch.setattr(Dispatcher, "ready", False)
    with pytest.raises(EngineUnavailable, match="has ended and is started again"):
        registry.require_ready()
    with pytest.raises(EngineUnavailable, match="has ended and is started again"):
        await registry.load("one")
    await registry.stop()


# -- Load and replace ----------------------------------------------------------------------------------------


async def test_a_model_is_loaded_by_its_name_unless_the_server_ends_or_it_cannot_be(
    make: Callable[..., ServedModel],
) -> None:
    lazy, broken = make("lazy", load="lazy"), make("broken", impossible, load="lazy")
    registry = Models([lazy, broken])
    assert await registry.load("lazy") is lazy
    assert lazy.state == "ready"
    with pytest.raises(EngineUnavailable):
        await registry.load("broken")
    with pytest.raises(ModelNotFound):
        await registry.load("none")
    registry.drain()
    assert lazy.dispatcher.draining
    with pytest.raises(ShuttingDown):
        await registry.load("lazy")
