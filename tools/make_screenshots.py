"""The pictures of the page in docs/images, taken of a running server in Chromium.

    python tools/make_screenshots.py http://127.0.0.1:8000

Needs the test dependencies, a chromium (tests/install-browser.sh) and the embedded model on the server.
"""

from __future__ import annotations

import io
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import soundfile
from PIL import Image
from playwright.sync_api import Browser, FilePayload, Locator, Page, ViewportSize, expect, sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.speech.digits import Spoken, say
from benchmarks.uploads import wav

FOLDER = Path(__file__).parents[1] / "docs" / "images"
DESK: ViewportSize = {"width": 1000, "height": 760}
LIMIT_MS = 180_000  # the machine may be busy
PHONE: ViewportSize = {"width": 390, "height": 720}


def save(page: Page, name: str, **options: Any) -> None:
    """As a small file: 256 colours are enough for it."""
    picture = Image.open(io.BytesIO(page.screenshot(**options))).convert("RGB")
    picture.quantize(256, dither=Image.Dither.NONE).save(FOLDER / f"{name}.png", optimize=True)


def file_of(name: str, spoken: Spoken) -> FilePayload:
    return {"name": name, "mimeType": "audio/wav", "buffer": wav(spoken.samples)}


@contextmanager
def chromium() -> Iterator[Browser]:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        speech = Path(folder) / "speech.wav"
        soundfile.write(speech, say("3141592", gap_s=[0.2, 0.2, 0.9, 0.2, 0.2, 0.2, 0.9]).samples, 16_000)
        arguments = ["--no-sandbox", "--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]
        arguments.append(f"--use-file-for-fake-audio-capture={speech}")
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=arguments)
        expect.set_options(timeout=LIMIT_MS)
        yield browser
        browser.close()


def new_page(browser: Browser, **options: Any) -> Page:
    page = browser.new_page(reduced_motion="reduce", **options)  # nothing is caught half way
    page.set_default_timeout(LIMIT_MS)
    return page


def card(page: Page, name: str) -> Locator:
    return page.locator("#cards > li", has=page.get_by_role("heading", name=name, exact=True))


def transcribe_files(browser: Browser, url: str, name: str, searched: str = "", **options: Any) -> None:
    page = new_page(browser, viewport=DESK, **options)
    page.goto(url)
    long = say("31415926535897932384", gap_s=[0.2, 0.2, 0.9] * 6 + [0.2, 0.5])
    bad: FilePayload = {"name": "letter.pdf", "mimeType": "application/pdf", "buffer": b"%PDF-1.7"}
    number = file_of("number.wav", say("271828", gap_s=0.3))
    page.set_input_files("#files", [file_of("order.wav", long)])
    page.locator("#cards .word").nth(7).wait_for()
    page.set_input_files("#files", [number, bad])
    expect(page.locator("#cards .is-working")).to_have_count(0)
    number_card, order_card = (card(page, each) for each in ("number.wav", "order.wav"))
    number_card.locator(".word").first.wait_for()
    number_card.locator(".fold").click()
    order_card.locator(".fold").click()
    order_card.locator(".word").nth(7).click()
    page.mouse.move(0, 0)
    if searched:
        page.reload()
        page.get_by_label("Search your transcripts").fill(searched)
        order_card.locator(".fold").click()
        order_card.locator(".word").first.wait_for()
        page.mouse.move(0, 0)
    save(page, name, full_page=True)


def show_server(browser: Browser, url: str) -> None:
    """The server view, with some work to show."""
    worker = new_page(browser)
    worker.goto(url)
    spoken = say("3141592653" * 6, gap_s=0.3)
    worker.set_input_files("#files", [file_of(f"{number}.wav", spoken) for number in range(32)])
    page = new_page(browser, viewport={"width": 1000, "height": 720}, color_scheme="dark")
    page.goto(f"{url}/#server")
    expect(page.locator("#throughput")).not_to_have_text(re.compile("^(0.0|–)$"))
    page.wait_for_timeout(5_000)
    save(page, "page-server")
    worker.locator("#cards > li:not(.is-working)").nth(7).wait_for()


def speak(browser: Browser, url: str) -> None:
    phone = {"viewport": PHONE, "device_scale_factor": 1.5, "is_mobile": True, "has_touch": True}
    page = new_page(browser, **phone, permissions=["microphone"])
    page.goto(url)
    page.get_by_role("button", name="Speak").click()
    page.locator("#live-text span").first.wait_for()
    page.wait_for_timeout(6_000)
    save(page, "page-phone-live")
    page.get_by_role("button", name="Stop").click()
    page.locator("#cards .word").nth(3).click()
    page.locator("#cards").evaluate("cards => cards.scrollIntoView({ block: 'center' })")
    save(page, "page-phone")


def main(url: str) -> None:
    FOLDER.mkdir(exist_ok=True)
    with chromium() as browser:
        transcribe_files(browser, url, "page-files")
        transcribe_files(browser, url, "page-files-dark", "eight", color_scheme="dark")
        speak(browser, url)
        show_server(browser, url)


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/"))
