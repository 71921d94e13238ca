"""The page with very many files and words: its heap, its frames and its console, in headless Chromium."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from playwright.sync_api import CDPSession, Dialog, Page, Route, expect

from tests.api.browsing import NEEDS_CHROMIUM, OpenPage, choose, end_of_stream, payload
from tests.speech import say

pytestmark = [pytest.mark.trial, NEEDS_CHROMIUM]

SHARE = float(os.environ.get("PAGE_LOAD_SHARE", "1"))  # of the numbers below, for a short look
MAX_FRAME_MS = 200
MAX_GROWTH_MIB = 8
LIMIT_MS = 600_000
SHORT = say("1", gap_s=0.1)
WATCH_FRAMES = """() => {
    window.frames_ms = [];
    new PerformanceObserver((list) => window.frames_ms.push(...list.getEntries().map((one) => one.duration)))
        .observe({ type: "long-animation-frame", buffered: false });
}"""


def number(full: int) -> int:
    return max(3, round(full * SHARE))


class Watch:
    """What goes wrong on a page, and what it holds."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.console: list[str] = []
        self._session: CDPSession = page.context.new_cdp_session(page)
        page.on("console", self._on_console)
        page.on("dialog", Dialog.accept)
        page.set_default_timeout(LIMIT_MS)
        expect.set_options(timeout=LIMIT_MS)
        page.evaluate(WATCH_FRAMES)

    def _on_console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.console.append(message.text)

    def heap_mib(self) -> float:
        for _ in range(3):
            self._session.send("HeapProfiler.collectGarbage")
        used: float = self._session.send("Runtime.getHeapUsage")["usedSize"]
        return used / 2**20

    def check(self, name: str, before_mib: float, full_mib: float) -> None:
        """Everything was deleted: the heap is what it was."""
        after_mib = self.heap_mib()
        frames_ms = sorted(self.page.evaluate("window.frames_ms"))
        longest_ms = frames_ms[-1] if frames_ms else 0
        too_long = sum(ms > MAX_FRAME_MS for ms in frames_ms)
        print(
            f"{name}: heap {before_mib:.1f} MiB before, {full_mib:.1f} full, {after_mib:.1f} after; "
            f"longest frame {longest_ms:.0f} ms, {too_long} over {MAX_FRAME_MS}"
        )
        assert self.console == []
        assert after_mib - before_mib < MAX_GROWTH_MIB


def delete_all(page: Page) -> None:
    page.get_by_role("button", name="Delete all").click()
    expect(page.locator("#cards > li")).to_have_count(0)


def opened(open_page: OpenPage, **options: Any) -> tuple[Page, Watch]:
    page = open_page(**options)
    expect(page.locator("#model")).to_contain_text("Served here")
    expect(page.locator("#kept")).not_to_have_text("")
    return page, Watch(page)


def test_files_one_after_another_leave_nothing_behind(open_page: OpenPage) -> None:
    page, watch = opened(open_page)
    before = watch.heap_mib()
    for i in range(number(200)):
        choose(page, payload(f"{i}.wav", SHORT))
        expect(page.locator(".fold:enabled")).to_have_count(i + 1)
    full = watch.heap_mib()
    delete_all(page)
    watch.check("one after another", before, full)


def test_files_dropped_at_once_leave_nothing_behind(open_page: OpenPage) -> None:
    page, watch = opened(open_page)
    before = watch.heap_mib()
    files = number(100)
    choose(page, *(payload(f"{i}.wav", SHORT) for i in range(files)))
    expect(page.locator(".fold:enabled")).to_have_count(files)
    full = watch.heap_mib()
    delete_all(page)
    watch.check("dropped at once", before, full)


def streamed(num_words: int) -> str:
    """The events of a long recording: a delta for each word, then all of it."""
    texts = [f"word{i % 97}" for i in range(num_words)]
    deltas = [{"type": "transcript.text.delta", "delta": f"{text} "} for text in texts]
    events = [*deltas, end_of_stream(texts)]
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"


def test_many_words_stream_and_are_freed(open_page: OpenPage) -> None:
    body = streamed(number(30_000))

    def answer(route: Route) -> None:
        route.fulfill(body=body, headers={"content-type": "text/event-stream"})

    page, watch = opened(open_page, mock=lambda page: page.route("**/v1/audio/transcriptions", answer))
    before = watch.heap_mib()
    choose(page, payload("long.wav", SHORT))
    expect(page.locator(".word")).to_have_count(number(30_000))
    page.locator(".transcript.is-long").evaluate("(box) => { box.scrollTop = box.scrollHeight; }")
    full = watch.heap_mib()
    delete_all(page)
    watch.check("words", before, full)


KEEP = """async (number) => {
    const { Store } = await import("/web/store.js");
    const store = new Store();
    const text = "one two three four five six seven eight nine ".repeat(50);
    const put = (i) => store.put({ id: `${i}`, name: `${i}.wav`, order: i, text, duration: 60 }, { text });
    await Promise.all(Array.from({ length: number }, (_, i) => put(i)));
    store.database.close();
}"""


def test_many_kept_transcripts_are_shown_searched_and_freed(open_page: OpenPage) -> None:
    page, watch = opened(open_page)
    before = watch.heap_mib()
    page.evaluate(KEEP, number(500))
    page.reload()
    page.evaluate(WATCH_FRAMES)
    expect(page.locator("#cards > li")).to_have_count(number(500))
    page.get_by_label("Search your transcripts").press_sequentially("nine one")
    expect(page.locator("#found")).to_contain_text(f"{number(500)} of {number(500)}")
    page.get_by_label("Search your transcripts").fill("")
    full = watch.heap_mib()
    delete_all(page)
    watch.check("kept", before, full)
