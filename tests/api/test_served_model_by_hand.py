"""The states of one model, what it refuses in each, and what it says in the log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from asr_server.api.served_model import ServedModel
from asr_server.audio.pool import PreprocessPool
from asr_server.checkpoint.files import AudioWindow
from asr_server.config import Settings
from asr_server.dispatch.dispatcher import Dispatcher
from asr_server.dispatch.supervisor import ReplicaLimits, StartImpossible
from asr_server.errors import EngineUnavailable, Overloaded, ShuttingDown
from tests.api.running_app import number_of_the_chunk, until
from tests.embedded import embedded
from tests.fake_replica import FakeReplica
from tests.vocabulary import make_tokenizer


class Held:
    """A model whose replica comes when it may."""

    def __init__(self, settings: Settings) -> None:
        self.replica, self.may_launch = FakeReplica(number_of_the_chunk), asyncio.Event()
        self.replica.before_launch = self.may_launch.wait
        self.pool = PreprocessPool(1)
        self.dispatcher = Dispatcher(settings, self.replica, limits=ReplicaLimits(pause_s=0.01))
        self.model = ServedModel(settings, self.dispatcher, self.pool, make_tokenizer(), AudioWindow())

    async def ready(self) -> ServedModel:
        self.may_launch.set()
        await until(lambda: self.dispatcher.ready)
        return self.model


@asynccontextmanager
async def held(**values: object) -> AsyncIterator[Held]:
    made = Held(embedded(**values))
    try:
        yield made
    finally:
        await made.model.stop()
        made.pool.shutdown()


async def test_a_model_is_called_by_its_first_name() -> None:
    async with held(served_model_name="ears", model_alias="whisper-1") as each:
        assert each.model.name == "ears"
        assert each.model.languages == ["de", "en", "zh"]


async def test_a_lazy_model_takes_requests_before_it_is_loaded() -> None:
    async with held(load="lazy") as each:
        model = each.model
        await model.start()
        assert (model.state, model.takes_requests, model.is_retired) == ("unloaded", True, False)
        assert (model.has_failed, model.failed_to_start) == (False, False)
        model.require_engine()
        loading = asyncio.create_task(model.load())
        await until(lambda: model.state == "loading")
        each.may_launch.set()
        assert await loading
        assert (model.state, model.takes_requests) == ("ready", True)
        assert await model.load()  # it is
        await model.unload(1)
        assert (model.state, model.takes_requests) == ("unloaded", True)
        await model.unload(1)  # it is
        assert model.state == "unloaded"


async def test_a_model_that_starts_says_when_to_come_back() -> None:
    async with held() as each:
        await each.model.start()
        assert (each.model.state, each.model.takes_requests) == ("loading", False)
        with pytest.raises(EngineUnavailable, match=r"^The engine is starting\.$") as caught:
            each.model.require_engine()
        assert caught.value.retry_after_s == 5
        each.dispatcher.supervisor.start_s = 25.0
        with pytest.raises(EngineUnavailable) as caught:
            async with each.model.using():
                pass
        assert caught.value.retry_after_s == 25.0
        model = await each.ready()
        model.require_engine()
        assert model.state == "ready"
        each.dispatcher.supervisor.replica_states[0].ready = False
        with pytest.raises(EngineUnavailable, match="The engine has ended and is started again"):
            model.require_engine()
        async with model.using():  # it waits in the queue for the next replica
            pass
        each.dispatcher.drain()
        with pytest.raises(ShuttingDown):
            model.require_engine()


async def test_a_model_that_cannot_start_has_failed_where_it_was_to_start_with_the_server(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def impossible() -> None:
        raise StartImpossible("no such device")

    async with held() as each:
        each.replica.before_launch = impossible
        await each.model.start()
        await until(lambda: each.model.has_failed)
        assert each.model.failed_to_start
        for check in (each.model.check_health, each.model.require_engine):
            with pytest.raises(EngineUnavailable, match="has failed and is not being restarted") as caught:
                check()
            assert caught.value.retry_after_s == 60
    async with held(load="lazy", max_load_wait_s=7.0) as each:
        each.replica.before_launch = impossible
        caplog.clear()
        assert not await each.model.load()
        assert (each.model.state, each.model.has_failed, each.model.failed_to_start) == (
            *("unloaded", False, False),
        )
        assert not each.dispatcher.supervisor.replica_states
        (line,) = [record for record in caplog.records if record.name.endswith("served_model")]
        assert line.getMessage() == "model whisper-digits could not be loaded: no such device"
        with pytest.raises(EngineUnavailable, match="could not be loaded") as caught:
            async with each.model.using():
                pass
        assert caught.value.retry_after_s == 7.0


@pytest.mark.parametrize(
    ("num_chunks", "num_slots", "may"),
    [(0, 0, True), (1, 0, False), (0, 8, True), (1, 8, False), (1, 15, False), (1, 16, True), (2, 16, False)],
)
async def test_an_interim_reading_may_begin_below_an_eighth_of_the_slots(
    num_chunks: int, num_slots: int, may: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Dispatcher, "num_chunks", num_chunks)
    monkeypatch.setattr(Dispatcher, "num_slots", num_slots)
    async with held(load="lazy") as each:
        assert each.model.may_read_interim == may


@pytest.mark.parametrize("limit", [1, 2])
async def test_so_many_requests_use_a_model_at_once(limit: int) -> None:
    async with held(max_model_requests=limit) as each:
        await each.model.start()
        model = await each.ready()
        for _ in range(2):  # those that left make room
            async with AsyncExitStack() as users:
                for _ in range(limit):
                    await users.enter_async_context(model.using())
                with pytest.raises(Overloaded, match=f"{limit} requests to 'whisper-digits'") as caught:
                    await users.enter_async_context(model.using())
                assert caught.value.retry_after_s == 5
    async with held() as each:
        await each.model.start()
        model = await each.ready()
        async with AsyncExitStack() as users:
            for _ in range(50):
                await users.enter_async_context(model.using())


async def test_an_unload_waits_for_the_last_of_those_that_use_the_model(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="asr_server.api.served_model")
    async with held(load="lazy") as each:
        each.may_launch.set()
        async with each.model.using():
            async with each.model.using():
                with pytest.raises(EngineUnavailable, match=r"^2 requests to .* under way after 0\.001 s"):
                    await each.model.unload(0.001)
                unloading = asyncio.create_task(each.model.unload(60))
                await until(lambda: each.model.state == "draining")
            await asyncio.sleep(0)
            assert not unloading.done()
        await unloading
        assert each.model.state == "unloaded"
        assert not each.dispatcher.supervisor.replica_states
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0].startswith("model whisper-digits loaded in 0.")
    assert lines[-1] == "model whisper-digits unloaded"


async def test_a_model_whose_place_was_taken_ends_with_its_last_request() -> None:
    async with held(load="lazy") as each:
        each.may_launch.set()
        async with each.model.using():
            async with each.model.using():
                each.model.retire()
            assert each.model.is_retired
            assert each.model.state == "ready"
        await until(lambda: each.model.state == "unloaded")
    async with held(load="lazy") as each:
        each.may_launch.set()
        assert await each.model.load()
        each.model.retire()
        await until(lambda: each.model.state == "unloaded")


async def test_a_model_is_idle_only_without_requests_and_where_it_may_be(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="asr_server.api.served_model")
    for values, is_unloaded in (
        ({"idle_unload_s": 1e-9}, True),
        ({"idle_unload_s": 3600.0}, False),
        ({"idle_unload_s": 0.0}, False),
        ({"idle_unload_s": 1e-9, "load": "pinned"}, False),
    ):
        async with held(**{"load": "eager"} | values) as each:
            await each.model.start()
            await each.model.unload_if_idle()  # not while it starts
            assert each.model.state == "loading"
            model = await each.ready()
            async with model.using():
                await model.unload_if_idle()
                assert each.dispatcher.supervisor.replica_states
            await model.unload_if_idle()
            assert (model.state == "unloaded") == is_unloaded, values
            await model.unload_if_idle()
    assert [record.getMessage() for record in caplog.records] == [
        *("model whisper-digits has had no request for 1e-09 s", "model whisper-digits unloaded"),
    ]


async def test_a_load_under_way_ends_with_the_server() -> None:
    async with held(load="lazy") as each:
        loading = each.model.begin_loading()
        await until(lambda: each.model.state == "loading")
        assert each.model.begin_loading() is loading
        await each.model.stop()
        await asyncio.gather(loading, return_exceptions=True)
        assert loading.cancelled()


@pytest.mark.parametrize(
    ("is_loaded", "failed", "told"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_a_model_that_was_to_load_later_has_not_failed_to_start(
    is_loaded: bool, failed: bool, told: bool
) -> None:
    supervisor = SimpleNamespace(failed_to_start=failed, given_up=failed)
    model: Any = SimpleNamespace(_is_loaded=is_loaded, dispatcher=SimpleNamespace(supervisor=supervisor))
    assert (ServedModel.failed_to_start.fget(model), ServedModel.has_failed.fget(model)) == (told, told)  # type: ignore[attr-defined]
