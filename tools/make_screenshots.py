"""The pictures of the page in docs/images, taken of a running server in Chromium.

    python tools/make_screenshots.py http://127.0.0.1:8000

Needs the test dependencies, a chromium (tests/install-browser.sh) and flite (Debian). The server needs the
model base.
"""

import io
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from PIL import Image
from playwright.sync_api import Browser, FilePayload, Locator, Page, ViewportSize, expect, sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1]))
from asr_server.core import SAMPLE_RATE, Samples
from benchmarks.uploads import encode

FOLDER = Path(__file__).parents[1] / "docs" / "images"
DESK: ViewportSize = {"width": 1000, "height": 760}
LIMIT_MS = 180_000  # the machine may be busy
PHONE: ViewportSize = {"width": 390, "height": 720}


def save(page: Page, name: str, **options: Any) -> None:
    """As a small file: 256 colours are enough for it."""
    picture = Image.open(io.BytesIO(page.screenshot(**options))).convert("RGB")
    picture.quantize(256, dither=Image.Dither.NONE).save(FOLDER / f"{name}.png", optimize=True)


SILENCE = np.zeros(int(0.6 * SAMPLE_RATE), np.float32)
MEMO = "Remember to send the minutes to everyone by Friday evening."
INTERVIEW = (
    ("slt", "Thank you for coming. How did you like the new studio?"),
    ("rms", "Very much. I took the early train, and walked the last mile along the river."),
    ("slt", "What have you brought for us today?"),
    ("rms", "A small recorder. It writes down every word that people say."),
)


def say(voice: str, text: str) -> Samples:
    with tempfile.NamedTemporaryFile(suffix=".wav") as file:
        command = ["flite", "-voice", voice, "-t", text, "-o", file.name]
        subprocess.run(command, check=True)  # nosec B603 # our own words, without a shell
        samples, rate = soundfile.read(file.name, dtype="float32")
    assert rate == SAMPLE_RATE
    return np.concatenate([samples, SILENCE])


def file_of(name: str, *spoken: Samples) -> FilePayload:
    return {"name": name, "mimeType": "audio/wav", "buffer": encode(np.concatenate(spoken), "wav")}


def interview() -> FilePayload:
    return file_of("interview.wav", *(say(voice, text) for voice, text in INTERVIEW))


@contextmanager
def chromium() -> Iterator[Browser]:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        speech = Path(folder) / "speech.wav"
        soundfile.write(speech, np.concatenate([say("slt", INTERVIEW[0][1]), say("slt", MEMO)]), SAMPLE_RATE)
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


def fold(done: Locator, is_open: bool) -> None:
    button = done.locator(".fold")
    if (button.get_attribute("aria-expanded") == "true") != is_open:
        button.click()
    if is_open:
        done.locator(".word").first.wait_for()


def transcribe_interview(page: Page, url: str) -> Locator:
    page.goto(url)
    page.get_by_label("Speakers").select_option("labelled")
    page.set_input_files("#files", [interview()])
    done = card(page, "interview.wav")
    for label, name in (("A", "Anna"), ("B", "Ben")):
        done.get_by_role("button", name=f"Rename {label}").click()
        page.get_by_label(f"Name of speaker {label}").fill(name)
        page.keyboard.press("Enter")
    return done


def transcribe_files(browser: Browser, url: str, name: str, searched: str = "", **options: Any) -> None:
    page = new_page(browser, viewport=DESK, **options)
    interview_card = transcribe_interview(page, url)
    bad: FilePayload = {"name": "letter.pdf", "mimeType": "application/pdf", "buffer": b"%PDF-1.7"}
    page.set_input_files("#files", [file_of("memo.wav", say("slt", MEMO)), bad])
    expect(page.locator("#cards .is-working")).to_have_count(0)
    fold(card(page, "memo.wav"), is_open=False)
    fold(interview_card, is_open=True)
    interview_card.locator(".word").nth(5).click()
    page.mouse.move(0, 0)
    if searched:
        page.reload()
        page.get_by_label("Search your transcripts").fill(searched)
        fold(interview_card, is_open=True)
        page.mouse.move(0, 0)
    save(page, name, full_page=True)


def show_server(browser: Browser, url: str) -> None:
    """The server view, with some work to show."""
    worker = new_page(browser)
    worker.goto(url)
    spoken = say("rms", " ".join(text for _, text in INTERVIEW))
    worker.set_input_files("#files", [file_of(f"{number}.wav", spoken) for number in range(32)])
    page = new_page(browser, viewport={"width": 1000, "height": 720}, color_scheme="dark")
    page.goto(f"{url}/#server")
    expect(page.locator("#speed")).not_to_have_text(re.compile("^(0|–)$"))
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
    page.close()
    page = new_page(browser, **phone)
    transcribe_interview(page, url).locator(".word").nth(5).click()
    save(page, "page-phone")


def main(url: str) -> None:
    FOLDER.mkdir(exist_ok=True)
    with chromium() as browser:
        transcribe_files(browser, url, "page-files")
        transcribe_files(browser, url, "page-files-dark", "studio", color_scheme="dark")
        speak(browser, url)
        show_server(browser, url)


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/"))
