import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from asr_server.api.models import Models, ServedModel
from asr_server.audio.recording import PreprocessPool
from asr_server.config import MIB
from asr_server.core import AudioWindow
from asr_server.dispatch.dispatcher import Dispatcher
from asr_server.dispatch.supervisor import StartImpossible
from asr_server.server import app as module
from asr_server.server.app import create_app
from tests.support.embedded import embedded
from tests.support.fake_replica import FakeReplica
from tests.support.raw_client import RawClient
from tests.support.tokens import make_tokenizer
from tests.support.until import until
from tests.unit.api.running_app import RunningApp, error_of, number_of_the_chunk, run_app

PATHS_OF_V1 = [
    *("/v1/activity", "/v1/models", "/v1/models/whisper-1"),
    *("/v1/audio/transcriptions", "/v1/audio/translations"),
]


async def test_every_reply_has_a_request_id(app: RunningApp) -> None:
    replies = [
        await app.client.get("/health"),
        await app.client.get("/nowhere"),
        await app.client.get("/v1/audio/transcriptions"),
        await app.client.get("/v1/models/none"),
        await app.post(),
        await app.post(b"no audio"),
        await app.post(stream="true"),
    ]
    assert [reply.status_code for reply in replies] == [200, 404, 405, 404, 200, 400, 200]
    ids = {reply.headers["x-request-id"] for reply in replies}
    assert len(ids) == len(replies)


async def test_the_clients_own_request_id_is_kept(app: RunningApp) -> None:
    reply = await app.client.get("/health", headers={"x-request-id": "mine-1"})
    assert reply.headers["x-request-id"] == "mine-1"


@pytest.mark.parametrize("given", ["", "a b", "x" * 200, "<script>"])
async def test_a_request_id_that_is_not_sane_is_replaced(app: RunningApp, given: str) -> None:
    reply = await app.client.get("/health", headers={"x-request-id": given})
    assert reply.headers["x-request-id"].startswith("req_")


async def test_a_key_is_asked_for_under_v1_and_not_at_the_probes() -> None:
    async with run_app(embedded(api_key="s3cret")) as app:
        for path in PATHS_OF_V1:
            reply = await app.client.request("POST" if "audio" in path else "GET", path)
            assert reply.status_code == 401
            assert reply.headers["www-authenticate"] == "Bearer"
            assert error_of(reply)["code"] == "invalid_api_key"
        for path in ("/health", "/ready", "/ping", "/version", "/load"):
            assert (await app.client.get(path)).status_code == 200


async def test_no_engine_is_503_and_not_ready_but_alive() -> None:
    async with run_app() as app:
        app.dispatcher.supervisor.replica_states[0].ready = False
        for reply in (await app.post(), await app.client.get("/ready")):
            assert reply.status_code == 503
            assert reply.headers["retry-after"].isdecimal()
            assert error_of(reply)["type"] == "service_unavailable_error"
        assert (await app.client.get("/health")).status_code == 200


async def test_clients_are_asked_back_when_an_engine_that_starts_slowly_should_be_ready() -> None:
    async with run_app() as app:
        supervisor = app.dispatcher.supervisor
        (state,) = supervisor.replica_states
        assert supervisor.start_s == state.ready_at_s
        state.ready, supervisor.start_s = False, 25.0
        assert 25 <= int((await app.post()).headers["retry-after"]) <= 32


@pytest.mark.parametrize("path", ["/health", "/ping", "/ready", "/version", "/load", "/metrics"])
async def test_the_probes_answer_head_as_they_answer_get(app: RunningApp, path: str) -> None:
    head, get = await app.client.head(path), await app.client.get(path)
    assert head.status_code == get.status_code == 200
    assert head.content == b""
    assert head.headers["content-type"] == get.headers["content-type"]


async def test_an_engine_given_up_is_not_healthy() -> None:
    async def impossible() -> None:
        raise StartImpossible("the device is gone")

    async with run_app(before_launch=impossible) as app:
        for path in ("/health", "/ping", "/ready"):
            assert (await app.client.get(path)).status_code == 503
        assert (await app.post()).status_code == 503


async def test_models_are_listed_under_every_name_they_answer_to() -> None:
    async with run_app(embedded(served_model_name="org/ears", model_alias="whisper-1,asr")) as app:
        listed = (await app.client.get("/v1/models")).json()
        assert [model["id"] for model in listed["data"]] == ["org/ears", "whisper-1", "asr"]
        assert (await app.client.get("/v1/models/org%2Fears")).json()["id"] == "org/ears"
        missing = await app.client.get("/v1/models/nobody")
        assert (missing.status_code, error_of(missing)["code"]) == (404, "model_not_found")
        assert "--model-alias" in str(error_of(missing)["message"])


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        *(
            ("GET", path, 200)
            for path in ("/", "/docs", "/openapi.json", "/web/app.js", "/metrics", "/health")
        ),
        ("GET", "/static-offline-docs/swagger-ui-bundle.js", 200),
        ("GET", "/v1/models", 401),
        ("GET", "/nowhere", 404),
        ("POST", "/v1/audio/transcriptions", 401),
        ("OPTIONS", "/v1/models", 405),
        ("GET", "/%zz\r\nno header\r\n", 400),
    ],
)
async def test_no_reply_is_shown_in_a_frame_or_as_another_type(method: str, path: str, status: int) -> None:
    async with run_app(embedded(api_key="s3cret")) as app:
        client = await RawClient.connect(app.host, app.port)
        client.send(f"{method} {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
        reply = await client.reply()
        await client.close()
    assert reply.status == status
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    assert "frame-ancestors 'none'" in reply.headers["content-security-policy"]


async def test_the_page_of_the_api_loads_nothing_from_other_hosts() -> None:
    async with run_app(embedded(root_path="/asr")) as app:
        page = (await app.client.get("/docs")).text
        assert "SwaggerUIBundle" in page
        assert "://" not in page
        assets = re.findall(r'(?:src|href)="([^"]+)"', page)
        assert len(assets) == 3
        for asset in assets:
            assert asset.startswith("/asr/")
            reply = await app.client.get(asset.removeprefix("/asr"))
            assert reply.status_code == 200
            assert len(reply.content) > 1000


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        *(("GET", path, 200) for path in ("/", "/docs", "/metrics", "/v1/activity", "/load")),
        *(("GET", path, 200) for path in ("/health", "/health/", "/v1/models/")),
        *(("GET", path, 404) for path in ("/redoc", "/static", "/v1", "/nowhere/", "/static-offline-docs")),
        *(("POST", path, 400) for path in ("/asr", "/inference", "/v1/audio/transcriptions/")),
        ("POST", "/openai/deployments/whisper-1/audio/transcriptions", 400),
        ("POST", "/v1/realtime/client_secrets", 200),
        ("GET", "/v1/realtime", 426),
        ("POST", "/v1/models/whisper-1/load", 403),
    ],
)
async def test_each_part_answers_and_no_other(app: RunningApp, method: str, path: str, status: int) -> None:
    assert (await app.client.request(method, path)).status_code == status


async def test_everything_that_was_started_ends_with_the_server() -> None:
    before = asyncio.all_tasks()
    async with run_app(embedded(idle_unload_s=600.0)) as app:
        assert await app.still_works()
        assert {task.get_name() for task in asyncio.all_tasks()} >= {"unload idle models"}
    await until(lambda: {task for task in asyncio.all_tasks() - before if not task.done()} == set())
    with pytest.raises(RuntimeError):
        await app.pool.run(len, b"")


@pytest.mark.parametrize("shares", [True, False])
async def test_a_server_that_shares_its_port_listens_once_its_models_are_ready(shares: bool) -> None:
    settings, replica, may_launch = (
        embedded(reuse_port=shares),
        FakeReplica(number_of_the_chunk),
        asyncio.Event(),
    )
    replica.before_launch = may_launch.wait
    dispatcher, pool = Dispatcher(settings, lambda _: replica), PreprocessPool(1)
    model = ServedModel(settings, dispatcher, pool, make_tokenizer(), AudioWindow())
    app = create_app(settings, Models([model]), pool)
    lifespan = app.router.lifespan_context(app)
    opening = asyncio.create_task(lifespan.__aenter__())
    if shares:
        for _ in range(100):
            await asyncio.sleep(0)
        assert not opening.done()
        may_launch.set()
    await opening
    assert dispatcher.ready == shares
    may_launch.set()
    await lifespan.__aexit__(None, None, None)


async def test_memory_that_grew_is_given_back_while_idle_and_what_stays_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Libraries that load keep their memory: an idle server must not ask for it again for ever."""
    resident, trims = 100 * MIB, list[int]()

    def trim(_: int) -> None:
        trims.append(resident)

    monkeypatch.setattr(module, "resident_bytes", lambda: resident)
    monkeypatch.setattr("asr_server.server.app.ctypes.CDLL", lambda _: SimpleNamespace(malloc_trim=trim))
    idle, num_looks = False, 0

    def is_idle() -> bool:
        nonlocal num_looks
        num_looks += 1
        return idle

    with loop_clock() as clock:
        watching = asyncio.create_task(module.release_memory_when_idle(is_idle))
        for grown, is_quiet, num_trims in [
            (104 * MIB, True, 0),
            (150 * MIB, False, 0),
            (150 * MIB, True, 1),  # for good, as it turns out
            (154 * MIB, True, 1),
            (160 * MIB, True, 2),
        ]:
            resident, idle = grown, is_quiet
            enough = num_looks + 3  # the second look may trim again, the third one comes behind that
            while num_looks < enough:
                await clock.advance(2.0)
            assert len(trims) == num_trims
        watching.cancel()


ROUNDS = 50  # of the event loop, in which whoever was woken goes on


class LoopClock:
    def __init__(self, now: float) -> None:
        self.now = now

    async def advance(self, seconds: float) -> None:
        """Let time pass, and then all that was waiting for it."""
        for passed in (0.0, seconds):
            self.now += passed
            for _ in range(ROUNDS):
                await asyncio.sleep(0)


@contextmanager
def loop_clock() -> Iterator[LoopClock]:
    """Stop the clock of the running loop. Real sockets and threads must not be waited for meanwhile."""
    loop = asyncio.get_running_loop()
    clock = LoopClock(loop.time())
    loop.time = lambda: clock.now  # type: ignore[method-assign]
    try:
        yield clock
    finally:
        del loop.time
