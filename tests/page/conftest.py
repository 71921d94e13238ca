from collections.abc import Callable, Iterator
from typing import Any

import pytest
import soundfile
from playwright.sync_api import Browser, Page, expect, sync_playwright

from asr_server.core import SAMPLE_RATE
from tests.conftest import Server
from tests.page.both import AnyTab, ChromiumTab, OpenAny
from tests.page.browsing import CHROMIUM, LIMIT_MS, MICROPHONE, NEEDS_CHROMIUM, OpenPage
from tests.page.firefox import NEEDS_FIREFOX, Firefox, OpenTab, run_firefox
from tests.page.held_app import HeldApp, run_held_app
from tests.support.api_fixtures import *  # noqa: F403
from tests.support.speech import say


@pytest.fixture
def held_app() -> Iterator[HeldApp]:
    with run_held_app() as app:
        yield app


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Its microphone plays a file, again and again."""
    speech = tmp_path_factory.mktemp("microphone") / "speech.wav"
    soundfile.write(speech, say("271", gap_s=[0.2, 0.2, 1.5]).samples, SAMPLE_RATE)
    arguments = [*MICROPHONE, f"--use-file-for-fake-audio-capture={speech}"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Browser, server: Server) -> Iterator[OpenPage]:
    """Opens the page in a context of its own; an error in its scripts fails the test."""
    errors: list[str] = []
    contexts = []

    def open_it(
        path: str = "/", mock: Callable[[Page], None] | None = None, url: str = server.url, **options: Any
    ) -> Page:
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.set_default_timeout(LIMIT_MS)
        page.on("pageerror", lambda error: errors.append(str(error)))
        if mock:
            mock(page)
        page.goto(url + path)
        return page

    expect.set_options(timeout=LIMIT_MS)
    yield open_it
    for context in contexts:
        context.close()
    assert errors == []


@pytest.fixture(scope="module")
def firefox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Firefox]:
    with run_firefox(tmp_path_factory.mktemp("firefox")) as firefox:
        yield firefox


@pytest.fixture
def open_tab(firefox: Firefox, server: Server) -> Iterator[OpenTab]:
    """Opens tabs of one user; an error in their scripts fails the test."""
    user = firefox.new_user()
    firefox.errors.clear()
    yield lambda url=server.url: firefox.open(url, user)
    firefox.call("browser.removeUserContext", userContext=user)
    assert firefox.errors == []


@pytest.fixture(
    params=[
        pytest.param("chromium", marks=NEEDS_CHROMIUM),
        pytest.param("firefox", marks=NEEDS_FIREFOX),
    ]
)
def open_any(request: pytest.FixtureRequest, server: Server) -> OpenAny:
    """Opens tabs of one user, in Chromium or in Firefox."""
    if request.param == "firefox":
        open_tab: OpenTab = request.getfixturevalue("open_tab")
        return open_tab
    open_page: OpenPage = request.getfixturevalue("open_page")
    tabs: list[ChromiumTab] = []

    def open_it(url: str = server.url) -> AnyTab:
        if not tabs:
            tabs.append(ChromiumTab(open_page(url=url, permissions=["microphone"])))
        else:
            page = tabs[0].page.context.new_page()
            page.goto(url)
            tabs.append(ChromiumTab(page))
        return tabs[-1]

    return open_it
