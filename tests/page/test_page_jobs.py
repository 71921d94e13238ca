"""The page where the server keeps jobs: a recording goes on without it, and is there when it comes back."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.page.both import AnyTab, OpenAny, drop
from tests.page.browsing import OpenPage, card, choose, payload
from tests.page.held_app import HeldApp, run_held_app
from tests.support.until import wait_until

JOBS = "/v1/audio/transcriptions"
KEY = {"authorization": "Bearer secret"}


@pytest.fixture
def keeping(tmp_path: Path) -> Iterator[Callable[..., HeldApp]]:
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(
            run_held_app(jobs_dir=str(tmp_path / "jobs"), **settings)
        )


def jobs(app: HeldApp) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.get(app.url + JOBS, headers=KEY).json()["data"]
    return found


def has_text(tab: AnyTab, name: str, text: str) -> None:
    tab.wait_for_text("#cards", name)
    tab.wait_for_text("#cards", text)


def test_a_closed_tab_leaves_its_recordings_to_the_server_and_the_next_one_shows_them(
    open_any: OpenAny, keeping: Callable[..., HeldApp]
) -> None:
    app = keeping()
    tab = open_any(app.url)
    drop(tab, "a.wav", "b.wav", "c.wav")
    wait_until(lambda: len(jobs(app)) == 3)  # though two are sent at a time, and none is done
    tab.close()
    for _ in range(3):
        app.release_chunk()
    wait_until(lambda: all(job["status"] == "completed" for job in jobs(app)))
    again = open_any(app.url)
    for name in ("a.wav", "b.wav", "c.wav"):
        has_text(again, name, "zero")
    assert len(jobs(app)) == 3
    again.wait("document.querySelectorAll('#cards .card:not(.is-working)').length === 3")
    again.reload()
    again.wait("document.querySelectorAll('#cards .card').length === 3")
    again.evaluate(
        "document.querySelectorAll('#cards .card [aria-label^=Delete]').forEach((one) => one.click())"
    )
    wait_until(lambda: not jobs(app))


def test_a_reload_takes_up_what_is_under_way(open_any: OpenAny, keeping: Callable[..., HeldApp]) -> None:
    app = keeping()
    tab = open_any(app.url)
    drop(tab, "talk.wav")
    wait_until(lambda: jobs(app))
    tab.wait_for_text("#cards", "listening")
    tab.reload()
    tab.wait_for_text("#cards", "listening")
    app.release_chunk()
    has_text(tab, "talk.wav", "zero")
    assert len(jobs(app)) == 1


@pytest.mark.parametrize("key", ["secret", ""])
def test_another_computer_shows_it_where_it_has_the_key_and_not_where_there_are_none(
    open_page: OpenPage, keeping: Callable[..., HeldApp], key: str
) -> None:
    app = keeping(api_key=key)
    first, second = (open_page(url=app.url) for _ in range(2))
    for page in (first, second) if key else ():
        page.get_by_label("This server asks for an API key.").fill(key)
        page.get_by_role("button", name="Use this key").click()
        page.get_by_text("Served here").wait_for()
    choose(first, payload("talk.wav"))
    wait_until(lambda: jobs(app))
    app.release_chunk()
    card(first, "talk.wav").locator(".word").first.wait_for()
    with second.expect_response(f"**{JOBS}?*"):
        second.reload()
    if key:
        card(second, "talk.wav").locator(".word").first.wait_for()
    assert second.locator("#cards .card").count() == bool(key)


def test_the_servers_view_shows_the_queue_of_jobs(open_any: OpenAny, keeping: Callable[..., HeldApp]) -> None:
    tab = open_any(keeping().url)
    tab.evaluate("location.hash = '#server'")
    tab.wait("!document.getElementById('jobs-tile').hidden")
    tab.wait_for_text("#jobs", "0")
