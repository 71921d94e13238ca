"""Steps of the tests that drive the page in a browser."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import FilePayload, Locator, Page, Route, expect

from tests.conftest import Server
from tests.support.api_fixtures import KEY
from tests.support.speech import Spoken, say
from tests.unit.api.sample_files import sound_file

# The shell has no windows, and takes a third of the others' time for a page.
_BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, _BROWSERS)), None)
NEEDS_CHROMIUM = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium here: tests/install-browser.sh fetches it"
)
LIMIT_MS = 60_000
# Drawn by the processor, which would imitate a GPU at a high price; and a microphone that plays a file.
MICROPHONE = (
    *("--no-sandbox", "--disable-gpu"),
    *("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"),
)
SPOKEN = say("314159", gap_s=[0.2, 0.2, 1.2, 0.2, 0.2, 0.5])
OpenPage = Callable[..., Page]


def payload(name: str, spoken: Spoken = SPOKEN) -> FilePayload:
    return {"name": name, "mimeType": "audio/wav", "buffer": sound_file(spoken.samples)}


def choose(page: Page, *files: FilePayload) -> Locator:
    """Return the card of the first file."""
    page.set_input_files("#files", list(files))
    return card(page, files[0]["name"])


def unlock(open_page: OpenPage, server: Server) -> Page:
    """Open the page of a server with a key, and type the key."""
    page = open_page(permissions=["microphone"], url=server.url)
    page.get_by_label("This server asks for an API key.").fill(KEY)
    page.keyboard.press("Enter")
    expect(page.locator("#model")).to_contain_text("whisper-digits")
    return page


def card(page: Page, name: str) -> Locator:
    return page.locator("#cards .card", has=page.get_by_role("heading", name=name, exact=True))


def correct(page: Page, name: str, word: int, text: str) -> None:
    card(page, name).locator(".word").nth(word).dblclick()
    field = card(page, name).locator(".word input")
    field.fill(text)
    field.press("Enter")


def downloaded(page: Page, name: str, suffix: str) -> str:
    """The file behind a choice of the card's menu."""
    found = card(page, name)
    found.get_by_role("button", name="Download").click()
    with page.expect_download() as download:
        found.get_by_role("button", name=suffix).click()
    assert download.value.suggested_filename == f"{name.rpartition('.')[0]}{suffix}"
    return Path(download.value.path()).read_text()


def wait_until_deleted(page: Page, name: str) -> None:
    """A reload may be sooner."""
    wait_until_kept(page, name, "name", is_kept=False)


def wait_until_kept(page: Page, value: str | list[str], field: str = "text", is_kept: bool = True) -> None:
    page.evaluate(
        """async ([field, value, wanted]) => {
            const { Store } = await import("/web/store.js");
            const store = new Store();
            const isIt = (entry) => `${entry[field]}` === `${value}`;
            const isKept = async () => (await store.entries()).some(isIt);
            while ((await isKept()) !== wanted) await new Promise((resolve) => setTimeout(resolve, 50));
            store.database.close();
        }""",
        [field, value, is_kept],
    )


def wait_until_promised(page: Page, expression: str) -> None:
    """Until the promise is of something true. Playwright's own wait takes each promise for true."""
    for _ in range(LIMIT_MS // 50):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(50)
    raise AssertionError(expression)


def answering(**answer: Any) -> Any:
    done = {"type": "transcript.text.done", "language": "english", "duration": 5.0, **answer}
    events = f"data: {json.dumps(done)}\n\ndata: [DONE]\n\n"

    def answer_it(route: Route) -> None:
        route.fulfill(body=events, headers={"content-type": "text/event-stream"})

    return lambda page: page.route("**/v1/audio/transcriptions", answer_it)


def words_at(*words: tuple[str, float]) -> dict[str, Any]:
    text = " ".join(word for word, _ in words)
    return {
        "text": text,
        "segments": [{"id": 0, "seek": 0, "start": 0.0, "end": 5.0, "text": f" {text}"}],
        "words": [{"word": word, "start": at, "end": at + 0.1} for word, at in words],
    }


def end_of_stream(texts: Sequence[str]) -> dict[str, Any]:
    """The last event of a long recording's stream: sentences of twelve words, 0.36 s each."""
    words = [{"word": text, "start": i * 0.36, "end": i * 0.36 + 0.3} for i, text in enumerate(texts)]
    sentences = [words[first : first + 12] for first in range(0, len(words), 12)]
    segments = [
        {
            "id": i,
            "seek": 0,
            "start": sentence[0]["start"],
            "end": sentence[-1]["end"],
            "text": "".join(f" {word['word']}" for word in sentence),
        }
        for i, sentence in enumerate(sentences)
    ]
    return {
        "type": "transcript.text.done",
        "text": " ".join(texts),
        "language": "english",
        "duration": len(texts) * 0.36,
        "segments": segments,
        "words": words,
    }
