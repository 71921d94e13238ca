"""Jobs: the same request with one more field, an id at once, the same answer later."""

import asyncio
import contextlib
import shutil
import sqlite3
import time
from pathlib import Path
from typing import Any, BinaryIO

import httpx
import pytest
import sqlalchemy
from hypothesis import given
from hypothesis import strategies as st

from asr_server.annexes.jobs import runner, store
from asr_server.annexes.jobs.rows import Result
from asr_server.annexes.jobs.store import Store
from asr_server.annexes.jobs.views import JobEvent, events_after
from asr_server.api.models import Models
from asr_server.api.schemas import TextDelta
from asr_server.audio.recording import memory_file
from asr_server.core import ChunkResult
from asr_server.errors import ChunkFailed, EngineUnavailable, StorageUnavailable
from asr_server.transport.messages import Submit
from tests.support.api_fixtures import strict_client
from tests.support.until import until
from tests.unit.api.named_keys import SHOP, WEB, bearer, entry, write
from tests.unit.api.running_app import SECOND, THREE_CHUNKS, error_of, number_of_the_chunk, run_app
from tests.unit.cli.test_options import problems
from tests.unit.jobs.jobs_app import URL, content, finished, hold, jobs_of, post, run_with_jobs

FIELDS: dict[str, Any] = {
    "response_format": "verbose_json",
    "timestamp_granularities[]": ["word", "segment"],
    "prompt": "two three",
    "hotwords": "seven, nine",
    "temperature": "0.4",
    "seed": "7",
    "top_p": "0.9",
    "repetition_penalty": "1.2",
    "max_completion_tokens": "40",
}
SECRET = "whsec_" + "c2VjcmV0" * 4
OTHER = {"x-request-id", "date"}  # headers of a reply that are its own


def two_keys(folder: Path) -> tuple[str, dict[str, str], dict[str, str]]:
    """Return a file of two keys, and a header with each."""
    keys = write(folder / "keys.yaml", entry("web", WEB), entry("shop", SHOP))
    return str(keys), bearer(WEB), bearer(SHOP)


def change(folder: Path, *statements: str) -> None:
    with contextlib.closing(sqlite3.connect(folder / "jobs.sqlite")) as database, database:
        for statement in statements:
            database.execute(statement)


@pytest.mark.parametrize(
    "fields", [{}, FIELDS, *({"response_format": name} for name in ("text", "srt", "vtt", "verbose_json"))]
)
async def test_a_job_is_the_request_and_its_content_the_endpoints_answer(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    async with run_with_jobs(tmp_path) as app:
        direct = await app.client.post(
            URL, files={"file": THREE_CHUNKS}, data={"model": "whisper-1", "language": "en"} | fields
        )
        asked = [submit.options for submit in app.replica.submits]
        accepted = await post(app, THREE_CHUNKS, **fields | {"metadata[case]": "7"})
        assert (accepted.status_code, accepted.json()["object"]) == (202, "transcription.job")
        assert accepted.headers["location"] == f"{URL}/{accepted.json()['id']}"
        job = await finished(app, accepted.json()["id"])
        assert [submit.options for submit in app.replica.submits[len(asked) :]] == asked
        assert (job["status"], job["metadata"], job["seconds_total"]) == ("completed", {"case": "7"}, 75.0)
        answer = await content(app, job["id"])
        assert (answer.status_code, answer.content) == (200, direct.content)
        assert own_headers(answer) == own_headers(direct)


def own_headers(answer: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in answer.headers.items() if name not in OTHER}


async def test_a_client_that_knows_nothing_of_jobs_gets_them_by_one_more_field(tmp_path: Path) -> None:
    async with run_with_jobs(tmp_path) as app, strict_client(app.url) as client:
        answer = await client.audio.transcriptions.create(
            file=SECOND, model="whisper-1", extra_body={"background": True, "metadata": {"case": "7"}}
        )
        assert answer.text == ""
        job = await finished(app, answer.id)  # type: ignore[attr-defined]
        assert (job["status"], job["metadata"]) == ("completed", {"case": "7"})


async def test_a_repeated_request_is_the_same_job_and_says_so(tmp_path: Path) -> None:
    keys, web, shop = two_keys(tmp_path)
    async with run_with_jobs(tmp_path / "jobs", keys_file=keys) as app:
        first, again, other_key, other_field, other_bytes = [
            await post(app, file, headers, **fields)
            for file, headers, fields in (
                (SECOND, web, {}),
                (SECOND, web, {}),
                (SECOND, shop, {}),
                (SECOND, web, {"seed": "1"}),
                (THREE_CHUNKS, web, {}),
            )
        ]
        assert again.json()["id"] == first.json()["id"]
        assert (again.headers["idempotent-replayed"], again.status_code) == ("true", 202)
        others = {answer.json()["id"] for answer in (other_key, other_field, other_bytes)}
        assert len(others) == 3
        assert first.json()["id"] not in others
        named = web | {"idempotency-key": "7"}
        by_name = [(await post(app, SECOND, named)).json()["id"] for _ in range(2)]
        assert by_name[0] == by_name[1] != first.json()["id"]
        assert error_of(await post(app, SECOND, named, seed="1"))["code"] == "invalid_value"


async def test_a_look_that_waits_ends_with_a_change(tmp_path: Path) -> None:
    async with run_with_jobs(tmp_path) as app:
        id = await hold(app, THREE_CHUNKS, 3)
        looking = asyncio.create_task(app.client.get(f"{URL}/{id}?wait=60", timeout=100))
        app.replica.release(app.replica.held[0])
        while (job := (await app.client.get(f"{URL}/{id}")).json())["seconds_done"] == 0:
            pass
        assert (job["status"], job["seconds_total"], job["place"]) == ("in_progress", 75.0, None)
        assert not looking.done()
        for submit in app.replica.held:
            app.replica.release(submit)
        assert (await looking).json()["status"] == "completed"


async def test_jobs_have_a_ceiling_and_places_in_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "AT_ONCE", 1)
    async with run_with_jobs(tmp_path) as app:
        app.replica.holding = True
        ids = [(await post(app, seed=str(seed))).json()["id"] for seed in range(3)]
        await until(lambda: app.replica.held)
        jobs = [(await app.client.get(f"{URL}/{id}")).json() for id in ids]
        assert [(job["status"], job["place"]) for job in jobs] == [
            *(("in_progress", None), ("queued", 1), ("queued", 2))
        ]
        app.replica.stop_holding()
        assert [(await finished(app, id))["status"] for id in ids] == ["completed"] * 3


async def test_a_deleted_job_is_cancelled_and_leaves_nothing(tmp_path: Path) -> None:
    async with run_with_jobs(tmp_path) as app:
        id = await hold(app)
        answer = await app.client.delete(f"{URL}/{id}")
        assert answer.json() == {"id": id, "object": "transcription.job", "deleted": True}
        assert app.replica.cancelled
        for path in ("", "/content", "/events"):
            assert error_of(await app.client.get(f"{URL}/{id}{path}"))["code"] == "not_found"
        assert list((tmp_path / "files").iterdir()) == []
        app.replica.holding = False
        assert (await finished(app, (await post(app)).json()["id"]))["status"] == "completed"


async def test_jobs_are_listed_for_their_key_alone_a_page_at_a_time(tmp_path: Path) -> None:
    keys, web, shop = two_keys(tmp_path)
    async with run_with_jobs(tmp_path / "jobs", keys_file=keys) as app:
        ids = [(await post(app, SECOND, web, seed=str(seed))).json()["id"] for seed in range(5)]

        async def listed(order: str) -> list[str]:
            found: list[str] = []
            page: dict[str, Any] = {"has_more": True, "last_id": ""}
            while page["has_more"]:
                query = f"?limit=2&order={order}&after={page['last_id']}"
                page = (await app.client.get(URL + query, headers=web)).json()
                found += [job["id"] for job in page["data"]]
            return found

        assert (await listed("asc"), await listed("desc")) == (ids, ids[::-1])
        assert (await app.client.get(URL, headers=shop)).json()["data"] == []
        refused = await app.client.get(f"{URL}/{ids[0]}", headers=shop)
        assert (refused.status_code, error_of(refused)["code"]) == (404, "not_found")


async def test_what_is_no_recording_is_refused_at_once_and_a_failed_job_has_the_endpoints_error(
    tmp_path: Path,
) -> None:
    def fail_at_two(submit: Submit) -> ChunkResult | Exception:
        return ChunkFailed("by the test") if submit.id.chunk == 2 else number_of_the_chunk(submit)

    async with run_with_jobs(tmp_path, fail_at_two) as app:
        assert error_of(await post(app, b"no audio" * 100))["code"] == "invalid_audio"
        damaged = THREE_CHUNKS[: len(THREE_CHUNKS) // 2]
        job = await finished(app, (await post(app, damaged)).json()["id"])
        assert job["status"] == "incomplete"
        direct = await app.post(THREE_CHUNKS, language="en")
        job = await finished(app, (await post(app, THREE_CHUNKS)).json()["id"])
        assert (job["status"], job["error"]) == ("failed", error_of(direct))
        answer = await content(app, job["id"])
        assert (answer.status_code, answer.content) == (direct.status_code, direct.content)


async def test_a_stream_that_is_left_is_taken_up_where_it_was(tmp_path: Path) -> None:
    async with run_with_jobs(tmp_path) as app:
        app.replica.holding = True
        data = {"language": "en", "background": "true", "stream": "true"}
        request = app.client.build_request("POST", URL, files={"file": THREE_CHUNKS}, data=data)
        sending = asyncio.create_task(app.client.send(request, stream=True))
        await until(lambda: app.replica.held)
        app.replica.stop_holding()
        left = await sending
        first = await anext(left.aiter_lines())
        await left.aclose()
        id = left.headers["location"].rpartition("/")[2]
        await finished(app, id)
        rest = await app.client.get(f"{URL}/{id}/events", headers={"last-event-id": first.split()[1]})
        whole = await app.client.get(f"{URL}/{id}/events")
        direct = await app.post(THREE_CHUNKS, stream="true", language="en")
        without_ids = [line for line in whole.text.splitlines() if not line.startswith("id: ")]
        assert without_ids == direct.text.splitlines()
        assert whole.text.endswith(rest.text)
        assert rest.text != whole.text


@given(st.lists(st.text(max_size=5), max_size=6), st.integers(0, 40))
def test_events_from_any_place_on_are_the_rest_of_the_text(texts: list[str], last_id: int) -> None:
    events, end = [], 0
    for text in texts:
        end += len(text)
        events.append(JobEvent(end, text, TextDelta(delta=text).model_dump_json().encode()))
    assert "".join(each.text for each in events_after(events, last_id)) == "".join(texts)[last_id:]


async def test_an_event_that_no_job_can_have_is_refused(tmp_path: Path) -> None:
    async with run_with_jobs(tmp_path) as app:
        job = (await post(app)).json()
        path = f"/v1/audio/transcriptions/{job['id']}/events"
        for last in ("9" * 5000, "-1", "x"):
            assert (await app.client.get(path, headers={"Last-Event-ID": last})).status_code == 400
        await finished(app, job["id"])
        behind = await app.client.get(path, headers={"Last-Event-ID": "500"})
        assert "[DONE]" in behind.text  # the end is told whatever a client has read before


async def test_without_a_folder_background_is_refused_by_its_setting() -> None:
    async with run_app() as app:
        error = error_of(await post(app))
        assert error["param"] == "background"
        assert "--jobs-dir" in str(error["message"])
        assert error_of(await app.post(metadata='{"a": "b"}'))["param"] == "metadata"
        answer = await app.client.post("/inference", files={"file": SECOND}, data={"background": "true"})
        assert error_of(answer)["param"] == "background"


async def test_quotas_hold_in_all_and_for_each_key(tmp_path: Path) -> None:
    keys, web, shop = two_keys(tmp_path)
    async with run_with_jobs(tmp_path / "jobs", keys_file=keys, max_jobs=4) as app:
        answers = [await post(app, SECOND, web, seed=str(seed)) for seed in range(4)]
        assert [answer.status_code for answer in answers] == [202, 202, 202, 429]
        assert "This key's share" in str(error_of(answers[-1])["message"])
        assert (await post(app, SECOND, shop)).status_code == 202
        assert "--max-jobs" in str(error_of(await post(app, SECOND, shop, seed="1"))["message"])
    limits: list[dict[str, Any]] = [{"max_jobs_bytes": 60}, {"max_jobs_audio_s": 60}]
    for number, limit in enumerate(limits):
        async with run_with_jobs(tmp_path / f"{number}", **limit) as app:
            assert error_of(await post(app, THREE_CHUNKS))["code"] == "server_overloaded"


async def test_finished_jobs_go_by_the_servers_clock_whatever_the_machines_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "SWEEP_S", 0.01)
    async with run_with_jobs(tmp_path, jobs_keep_read_s=0.01) as app:
        unread, read = [(await post(app, seed=str(seed))).json()["id"] for seed in (1, 2)]
        await finished(app, unread)
        await finished(app, read)
        jump_s = 86_400.0
        monkeypatch.setattr(time, "time", lambda real=time.time: real() + jump_s)
        await content(app, read)
        while (await app.client.get(f"{URL}/{read}")).status_code != 404:
            await asyncio.sleep(0.01)
        assert (await finished(app, unread))["status"] == "completed"
    async with run_with_jobs(tmp_path, jobs_keep_s=0.01) as app:
        while (await app.client.get(f"{URL}/{unread}")).status_code != 404:
            await asyncio.sleep(0.01)


async def test_a_job_whose_replica_dies_is_done_by_its_successor(tmp_path: Path) -> None:
    async with run_with_jobs(tmp_path) as app:
        id = await hold(app)
        app.replica.holding = False
        app.replica.die()
        assert (await finished(app, id))["status"] == "completed"


async def test_a_recording_that_is_gone_fails_its_job_and_no_other(tmp_path: Path) -> None:
    async with run_with_jobs(tmp_path) as app:
        id = await hold(app)
    (recording,) = (tmp_path / "files").iterdir()
    recording.unlink()
    async with run_with_jobs(tmp_path) as app:
        job = await finished(app, id)
        assert (job["status"], job["error"]["code"]) == ("failed", "recording_lost")
        assert (await finished(app, (await post(app, seed="1")).json()["id"]))["status"] == "completed"


async def test_a_folder_that_vanishes_and_comes_back_loses_no_job(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "jobs", tmp_path / "elsewhere"
    async with run_with_jobs(folder) as app:
        id = await hold(app)
        folder.rename(elsewhere)
        app.replica.stop_holding()
        for answer in (await post(app), await app.client.get(f"{URL}/{id}")):
            assert (answer.status_code, error_of(answer)["code"]) == (503, "storage_unavailable")
        assert await app.still_works()
        elsewhere.rename(folder)
        assert (await finished(app, id))["status"] == "completed"


async def test_a_chunk_that_is_known_is_not_sent_again_and_an_endless_crash_ends(tmp_path: Path) -> None:
    async with run_with_jobs(tmp_path) as app:
        id = await hold(app, THREE_CHUNKS, 3)
        app.replica.release(app.replica.held[1])
        store = jobs_of(app).store
        while not await store.run(lambda session: session.scalars(sqlalchemy.select(Result)).all()):
            await asyncio.sleep(0.001)
    async with run_with_jobs(tmp_path) as app:
        assert (await finished(app, id))["status"] == "completed"
        assert sorted(submit.id.chunk for submit in app.replica.submits) == [0, 2]
        assert (await content(app, id)).json() == (await app.post(THREE_CHUNKS, language="en")).json()
    change(tmp_path, "delete from contents", "update jobs set status = 'in_progress', num_starts = 10")
    async with run_with_jobs(tmp_path) as app:
        assert (await finished(app, id))["error"]["code"] == "server_ended"


async def test_only_a_job_that_ends_the_server_by_itself_is_blamed(tmp_path: Path) -> None:
    async with run_with_jobs(tmp_path) as app:
        app.replica.holding = True
        ids = [(await post(app, THREE_CHUNKS, seed=str(seed))).json()["id"] for seed in range(3)]
        await until(lambda: app.replica.held)
    change(tmp_path, f"update jobs set num_starts = 9 where id = '{ids[0]}'")
    async with run_with_jobs(tmp_path) as app:
        app.replica.holding = True
        await until(lambda: len(app.replica.held) == 3)
        jobs = [(await app.client.get(f"{URL}/{id}")).json() for id in ids]
        assert [job["status"] for job in jobs] == ["in_progress", "queued", "queued"]
        app.replica.release(app.replica.held[0])
        await until(lambda: len(app.replica.held) == 2 + 3 + 3)  # it gets further: the others start
        app.replica.stop_holding()
        assert {(await finished(app, id))["status"] for id in ids} == {"completed"}


async def test_a_server_that_ends_while_its_engine_loads_blames_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "MIN_PAUSE_S", 0.01)
    async with run_with_jobs(tmp_path) as app:
        id = await hold(app)
    asked = []

    def load(models: Models) -> None:
        asked.append(models)
        raise EngineUnavailable("The engine is starting.")

    with monkeypatch.context() as patched:
        patched.setattr(Models, "require_engine", load)
        async with run_with_jobs(tmp_path) as app:
            await until(lambda: len(asked) > 2)
            assert (await app.client.get(f"{URL}/{id}")).json()["status"] == "queued"
    async with run_with_jobs(tmp_path) as app:
        assert (await finished(app, id))["status"] == "completed"


async def test_a_job_that_is_tried_again_is_paid_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "MIN_PAUSE_S", 0.01)
    tries = []

    def fail_once(*stored: Any, finish: Any = runner._finish) -> Any:
        tries.append(stored)
        if len(tries) == 1:
            raise StorageUnavailable("by the test")
        return finish(*stored)

    monkeypatch.setattr(runner, "_finish", fail_once)
    keys, web, _ = two_keys(tmp_path)
    async with run_with_jobs(tmp_path / "jobs", keys_file=keys) as app:
        await finished(app, (await post(app, THREE_CHUNKS, web)).json()["id"], **web)
        assert len(tries) == 2
        account, _ = app.app.state.server.api_keys.accounts
        await until(lambda: account.audio_s)
        assert account.audio_s == 75.0


async def test_a_drain_waits_for_no_stream_of_a_job(tmp_path: Path) -> None:
    async with run_with_jobs(tmp_path) as app:
        app.replica.holding = True
        data = {"language": "en", "background": "true", "stream": "true"}
        async with app.client.stream("POST", URL, files={"file": THREE_CHUNKS}, data=data):
            assert app.app.state.server.admission.num_open == 0


async def test_a_recording_stays_where_a_stop_hides_whether_its_job_was_stored(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.open()

    async def stop_at_the_commit(file: BinaryIO) -> None:
        async with store.keeping("file-1", file, len(SECOND)):
            raise asyncio.CancelledError

    with memory_file() as file:
        file.write(SECOND)
        with pytest.raises(asyncio.CancelledError):
            await stop_at_the_commit(file)
    assert (store.files / "file-1").read_bytes() == SECOND
    await store.remove_orphans()  # the next start knows
    assert not (store.files / "file-1").exists()
    store.close()


async def test_a_full_disk_refuses_new_jobs_and_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "MIN_PAUSE_S", 0.01)
    async with run_with_jobs(tmp_path) as app:
        store = jobs_of(app).store
        id = await hold(app, THREE_CHUNKS, 3)

        async def limit_pages(most: int) -> None:
            await store.run(lambda session: session.execute(sqlalchemy.text(f"PRAGMA max_page_count={most}")))

        await limit_pages(1)  # SQLite takes as many as there are: it says that the disk is full
        app.replica.stop_holding()
        refused = [await post(app, seed=str(seed), prompt="nine " * 10_000) for seed in range(3)]
        assert refused[-1].status_code == 503
        assert error_of(refused[-1])["code"] == "storage_unavailable"
        await limit_pages(10**6)
        assert (await finished(app, id))["status"] == "completed"
        disk = shutil.disk_usage(tmp_path)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: disk._replace(free=disk.total // 20))
        assert "full" in str(error_of(await post(app, seed="9"))["message"])


def test_a_broken_database_or_a_folder_in_use_ends_the_start_with_a_reason(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.open()
    assert "another server uses it" in problems(jobs_dir=str(tmp_path))[0]
    store.close()
    change(tmp_path, "pragma user_version = 99")
    assert "newer version" in problems(jobs_dir=str(tmp_path))[0]
    (tmp_path / "jobs.sqlite").write_bytes(b"no database" * 1000)
    (line,) = problems(jobs_dir=str(tmp_path))
    assert line.startswith("--jobs-dir")
    assert "not a database" in line
    assert "callback_secret" in str(problems(callback_hosts="*")).lower()
    assert SECRET not in str(problems(callback_secret=SECRET[:-1] + "\n"))


async def test_the_metrics_say_what_waits_and_for_how_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "SWEEP_S", 0.01)
    monkeypatch.setattr(runner, "AT_ONCE", 1)
    async with run_with_jobs(tmp_path) as app:
        app.replica.holding = True
        for seed in range(3):
            await post(app, THREE_CHUNKS, seed=str(seed))

        async def metrics() -> str:
            return (await app.client.get("/metrics")).text

        while 'asr_jobs{status="queued"} 2.0' not in await metrics():
            await asyncio.sleep(0.01)
        text = await metrics()
        assert 'asr_jobs{status="in_progress"} 1.0' in text
        assert "asr_jobs_queued_audio_seconds 150.0" in text
        assert "asr_jobs_oldest_queued_seconds 0.0\n" not in text
