from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import soundfile
from openai import AsyncOpenAI
from playwright.sync_api import Browser, Page, expect, sync_playwright

from asr_server.core import SAMPLE_RATE
from tests.conftest import Server, run_server
from tests.page.browsing import CHROMIUM, LIMIT_MS, OpenPage
from tests.page.held_app import HeldApp, run_held_app
from tests.support.speech import say
from tests.unit.api.running_app import RunningApp, run_app

KEY = "a/key=with+signs-of-base64=="  # that no WebSocket's subprotocol could carry


@pytest.fixture(scope="session")
def locked_server() -> Iterator[Server]:
    """Asks for KEY."""
    with run_server("--api-key", KEY) as server:
        yield server


@pytest.fixture
def held_app() -> Iterator[HeldApp]:
    with run_held_app() as app:
        yield app


@pytest.fixture
async def app() -> AsyncIterator[RunningApp]:
    async with run_app() as opened:
        yield opened


def strict_client(server: Server) -> AsyncOpenAI:
    """The official client, which refuses answers that are not as OpenAI's API describes them."""
    return AsyncOpenAI(
        base_url=f"{server.url}/v1",
        api_key="none",
        max_retries=0,
        timeout=100,
        _strict_response_validation=True,
    )


@pytest.fixture
async def client(server: Server) -> AsyncIterator[AsyncOpenAI]:
    async with strict_client(server) as client:
        yield client


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Its microphone plays a file, again and again."""
    speech = tmp_path_factory.mktemp("microphone") / "speech.wav"
    soundfile.write(speech, say("271", gap_s=[0.2, 0.2, 1.5]).samples, SAMPLE_RATE)
    arguments = ["--no-sandbox", "--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]
    arguments.append("--disable-gpu")  # drawn by the processor, which imitates a GPU at a high price
    arguments.append(f"--use-file-for-fake-audio-capture={speech}")
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
