"""One set of steps for both browsers: CSS selectors, JavaScript, a mouse and a keyboard."""

import base64
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import axe_playwright_python
from playwright.sync_api import Page

from tests.page.browsing import LIMIT_MS, SPOKEN
from tests.page.firefox import END, ENTER, ESCAPE, POLL_S, TAB, Tab
from tests.support.speech import Spoken
from tests.unit.api.sample_files import sound_file

DROP = """(async (...all) => {
    const bytes = (data) => Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
    const dataTransfer = new DataTransfer();
    const fileOf = ([name, data]) => new File([bytes(data)], name, { type: "audio/wav" });
    for (const each of all) dataTransfer.items.add(fileOf(each));
    document.dispatchEvent(new DragEvent("drop", { dataTransfer, cancelable: true }));
})"""
SPEECH_FOR_A_MICROPHONE = """(async (data) => {
    const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
    navigator.mediaDevices.getUserMedia = async () => {
        const context = new AudioContext();
        const source = context.createBufferSource();
        source.buffer = await context.decodeAudioData(bytes.slice().buffer);
        source.loop = true;
        const destination = context.createMediaStreamDestination();
        source.connect(destination);
        source.start();
        window.track = destination.stream.getTracks()[0];
        return destination.stream;
    };
})"""
# As the answer to each file
ANSWER = """((answer) => {
    const { send, open } = XMLHttpRequest.prototype;
    const done = { type: "transcript.text.done", language: "english", duration: 5, ...answer };
    const body = `data: ${JSON.stringify(done)}\\n\\n`;
    XMLHttpRequest.prototype.send = function () {
        Object.defineProperties(this, { status: { value: 200 }, responseText: { value: body } });
        setTimeout(() => this.onload());
    };
})"""
# What is downloaded: [name, blob] each
WATCH_DOWNLOADS = """(() => {
    window.downloads = [];
    const { createObjectURL } = URL;
    let last = null;
    URL.createObjectURL = (blob) => createObjectURL.call(URL, (last = blob));
    HTMLAnchorElement.prototype.click = function () { window.downloads.push([this.download, last]); };
})()"""
KEYS = {ENTER: "Enter", ESCAPE: "Escape", TAB: "Tab", END: "End"}


class ChromiumTab:
    """A page of Chromium, driven as one of Firefox."""

    COLOURS = ("light", "dark", "forced")

    def __init__(self, page: Page) -> None:
        self.page = page

    def go(self, url: str) -> None:
        self.page.goto(url)

    def reload(self) -> None:
        self.page.reload()

    def close(self) -> None:
        self.page.close()

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression or a promise, by way of JSON."""
        return json.loads(
            self.page.evaluate(f"(async () => JSON.stringify(await ({expression})) ?? 'null')()")
        )

    def wait(self, condition: str) -> None:
        """Until it is true, also of a promise, which Playwright's own wait takes for true."""
        until = time.monotonic() + LIMIT_MS / 1000
        while not self.evaluate(f"Boolean(await ({condition}))"):
            assert time.monotonic() < until, f"{condition}\n{self.page.inner_text('body')}"
            self.page.wait_for_timeout(POLL_S * 1000)

    def wait_for_text(self, selector: str, text: str) -> None:
        self.wait(f"document.querySelector({json.dumps(selector)})?.textContent.includes({json.dumps(text)})")

    def show_as(self, width: int, colours: str) -> None:
        """In "light", "dark" or "forced" colours."""
        self.page.set_viewport_size({"width": width, "height": 800})
        self.page.emulate_media(
            color_scheme="dark" if colours == "dark" else "light",
            forced_colors="active" if colours == "forced" else "none",
            reduced_motion="reduce",
        )

    def click(self, selector: str, times: int = 1) -> None:
        self.page.locator(selector).first.click(click_count=times)

    def type(self, text: str) -> None:
        for key in text:
            self.page.keyboard.press(KEYS.get(key, key))


AnyTab = ChromiumTab | Tab
OpenAny = Callable[..., AnyTab]


def encoded(spoken: Spoken) -> str:
    return base64.b64encode(sound_file(spoken.samples)).decode()


def drop(tab: AnyTab, *names: str, spoken: Spoken = SPOKEN) -> None:
    files = ",".join(json.dumps([name, encoded(spoken)]) for name in names)
    tab.evaluate(f"{DROP}({files})")


def answer_with(tab: AnyTab, **answer: Any) -> None:
    """Answer each file, without the server."""
    tab.evaluate(f"{ANSWER}({json.dumps(answer)})")


def hold_answers(tab: AnyTab) -> None:
    tab.evaluate("(() => { XMLHttpRequest.prototype.send = () => {}; })()")


def choose(tab: AnyTab, selector: str, value: str) -> None:
    """In a list or a field, as somebody who does it by hand."""
    tab.evaluate(
        f"""(() => {{
            const field = document.querySelector({json.dumps(selector)});
            field.value = {json.dumps(value)};
            field.dispatchEvent(new Event("change", {{ bubbles: true }}));
        }})()"""
    )


AXE = Path(axe_playwright_python.__file__).with_name("axe.min.js")
RUN_AXE = """axe.run().then(({ violations }) =>
    violations.map(({ id, impact, nodes }) => [id, impact, nodes[0].html]))"""


def faults(tab: AnyTab) -> list[list[str]]:
    """What axe finds: the rule, how grave it is, and the first place."""
    if not tab.evaluate("'axe' in window"):
        tab.evaluate(f"(() => {{ {AXE.read_text()} }})()")
    found: list[list[str]] = tab.evaluate(RUN_AXE)
    return found


DOCUMENT = """(async (answer) => {
    const { FORMATS } = await import("/web/downloads.js");
    const zip = await (await FORMATS.docx.render(answer)).arrayBuffer();
    const letters = new TextDecoder("latin1").decode(zip);
    const at = letters.indexOf("word/document.xml");
    const [size, start] = [new DataView(zip).getUint32(at - 12, true), at + "word/document.xml".length];
    const inflated = new Blob([zip.slice(start, start + size)]).stream();
    return new Response(inflated.pipeThrough(new DecompressionStream("deflate-raw"))).text();
})"""


def document_of(tab: AnyTab, answer: dict[str, Any]) -> str:
    """The text of an answer as a Word document."""
    return str(tab.evaluate(f"{DOCUMENT}({json.dumps(answer)})"))
