"""Several models of one server, and when one's replicas run: at the start, at a request, until idle."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from asr_server.annexes import model_loading as models_module
from asr_server.api import models as served_model_module
from asr_server.api.models import Models, ServedModel
from asr_server.audio.recording import PreprocessPool
from asr_server.core import AudioWindow
from asr_server.dispatch.dispatcher import Dispatcher
from asr_server.dispatch.supervisor import ReplicaLimits, StartImpossible
from asr_server.errors import EngineUnavailable, ModelNotFound, ShuttingDown
from tests.support.embedded import embedded
from tests.support.fake_replica import FakeReplica, noise
from tests.support.tokens import make_tokenizer
from tests.support.until import until
from tests.unit.api.figures import read
from tests.unit.api.running_app import RunningApp, error_of, number_of_the_chunk, run_app
from tests.unit.realtime.realtime_client import open_session, pcm24


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
        dispatcher = Dispatcher(settings, lambda _: replica, limits=ReplicaLimits(pause_s=0.01))
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


async def test_a_server_is_ready_once_it_has_loaded_its_models(make: Callable[..., ServedModel]) -> None:
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
    assert registry.choose("any") is two
    with pytest.raises(ModelNotFound, match="Served here: one, first"):
        allowed.choose("any")
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
    await registry.default.load()
    with pytest.raises(EngineUnavailable, match="has ended and is started again"):
        registry.default.require_engine()
    await registry.stop()


# -- Load and replace ----------------------------------------------------------------------------------------


async def test_a_model_is_loaded_unless_the_server_ends(make: Callable[..., ServedModel]) -> None:
    lazy, broken = make("lazy", load="lazy"), make("broken", impossible, load="lazy")
    await lazy.load()
    assert lazy.state == "ready"
    with pytest.raises(EngineUnavailable):
        await broken.load()
    lazy.dispatcher.drain()
    with pytest.raises(ShuttingDown):
        await lazy.load()


@pytest.fixture
async def lazy() -> AsyncIterator[RunningApp]:
    async with run_app(embedded(load="lazy")) as app:
        yield app


def model_of(app: RunningApp) -> ServedModel:
    model: ServedModel = app.app.state.server.models.default
    return model


async def test_the_first_request_launches_the_replicas_of_a_lazy_model(lazy: RunningApp) -> None:
    assert (await lazy.client.get("/ready")).status_code == 200
    assert model_of(lazy).state == "unloaded"
    assert not lazy.dispatcher.supervisor.replica_states
    assert (await loaded_and_ready(lazy)) == (0, 1)
    assert await lazy.still_works()
    assert model_of(lazy).state == "ready"
    assert (await loaded_and_ready(lazy)) == (1, 1)


async def loaded_and_ready(app: RunningApp) -> tuple[float, float]:
    figures = await read(app)
    loaded, ready = (figures[f'asr_{name}{{model="whisper-digits"}}'] for name in ("model_loaded", "ready"))
    return loaded, ready


async def test_requests_wait_for_one_load_together_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_model_module, "MAX_LOAD_WAIT_S", 0.2)
    may_launch = asyncio.Event()
    async with run_app(embedded(load="lazy"), before_launch=may_launch.wait) as app:
        refused = await app.post()
        assert refused.status_code == 503
        assert "is not loaded after 0.2 s" in str(error_of(refused)["message"])
        assert float(refused.headers["retry-after"]) > 0
        assert model_of(app).state == "loading"  # which goes on
        may_launch.set()
        await until(lambda: model_of(app).state == "ready")
        assert await app.still_works()


async def test_a_load_that_failed_is_tried_again_by_the_next_request() -> None:
    failures = [StartImpossible("no memory")]

    async def launch() -> None:
        if failures:
            raise failures.pop()

    async with run_app(embedded(load="lazy"), before_launch=launch) as app:
        refused = await app.post()
        assert (refused.status_code, model_of(app).state) == (503, "unloaded")
        assert (await app.client.get("/health")).status_code == 200
        assert await app.still_works()


async def test_a_load_that_the_end_of_the_server_cuts_short_leaves_nothing_loaded() -> None:
    never = asyncio.Event()
    async with run_app(embedded(load="lazy"), before_launch=never.wait) as app:
        waiting = asyncio.create_task(app.post())
        await until(lambda: model_of(app).state == "loading")
        model_of(app).dispatcher.supervisor.expect_ends()
        assert (await waiting).status_code == 503
        assert model_of(app).state == "unloaded"


async def test_an_idle_model_is_unloaded_until_the_next_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models_module, "LOOK_EVERY_S", 0.01)
    async with run_app(embedded(idle_unload_s=0.05, load="lazy")) as app:
        for _ in range(3):
            assert await app.still_works()
            await until(lambda: model_of(app).state == "unloaded")
            assert not app.dispatcher.supervisor.replica_states


async def test_a_model_at_work_is_not_idle_and_a_pinned_one_never_is() -> None:
    async with run_app(embedded(idle_unload_s=1e-6, load="lazy")) as app:
        app.replica.holding = True
        reply = asyncio.create_task(app.post())
        await until(lambda: app.replica.held)
        await model_of(app).unload_if_idle()
        assert model_of(app).state == "ready"
        app.replica.release(app.replica.held[0])
        assert (await reply).status_code == 200
        await model_of(app).unload_if_idle()
        assert model_of(app).state == "unloaded"
    async with run_app(embedded(idle_unload_s=1e-6, load="pinned")) as app:
        await model_of(app).unload_if_idle()
        assert model_of(app).state == "ready"


async def test_an_unload_waits_so_long_for_the_request_under_way_and_loses_none_that_comes() -> None:
    async with run_app(embedded()) as app:
        app.replica.holding = True
        first = asyncio.create_task(app.post())
        await until(lambda: app.replica.held)
        with pytest.raises(EngineUnavailable, match="1 requests to 'whisper-digits' are still under way"):
            await model_of(app).unload(0.01)
        assert model_of(app).state == "ready"
        unloading = asyncio.create_task(model_of(app).unload(20))
        await until(lambda: model_of(app).state == "draining")
        second = asyncio.create_task(app.post())
        await until(lambda: app.app.state.server.admission.num_in_flight == 2)
        app.replica.stop_holding()
        assert (await first).json()["text"] == "zero"
        await unloading
        assert (await second).json()["text"] == "zero"


async def test_live_speech_brings_a_model_back(lazy: RunningApp) -> None:
    async with open_session(lazy.url) as client:
        await until(lambda: model_of(lazy).state == "ready")
        await model_of(lazy).unload(1)
        await client.update(turn_detection=None)
        await client.say(pcm24(noise(1.0)))
        assert (await client.until(".completed"))[-1]["transcript"] == "zero"
