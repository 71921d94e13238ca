"""The page with very many files and words: its heap, its frames and its console, in headless Chromium."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import CDPSession, Dialog, Page, Route, expect

from tests.api.browsing import NEEDS_CHROMIUM, OpenPage, choose, end_of_stream, payload
from tests.api.sample_files import sound_file
from tests.speech import say

pytestmark = [pytest.mark.trial, NEEDS_CHROMIUM]

SHARE = float(os.environ.get("PAGE_LOAD_SHARE", "1"))  # of the numbers below, for a short look
MAX_FRAME_MS = 200
MAX_GROWTH_MIB = 8
LIMIT_MS = 600_000
SHORT = say("1", gap_s=0.1)
# Each long frame as {ms, parts}, with its longest scripts, and its layout as far as no script asked for it
WATCH_FRAMES = """
    window.longFrames = [];
    new PerformanceObserver((list) => window.longFrames.push(...list.getEntries().map((frame) => {
        const { duration: ms, blockingDuration, scripts, startTime, styleAndLayoutStart } = frame;
        const parts = scripts.map((script) => {
            const { invoker, sourceFunctionName, duration, forcedStyleAndLayoutDuration: forced } = script;
            const times = `${Math.round(duration)} ms (layout ${Math.round(forced)})`;
            return [duration, `${invoker} ${sourceFunctionName} ${times}`];
        });
        const layout = styleAndLayoutStart ? startTime + ms - styleAndLayoutStart : 0;
        parts.push([layout, `layout ${Math.round(layout)} ms`]);
        parts.push([blockingDuration, `blocked ${Math.round(blockingDuration)} ms`]);
        parts.sort(([one], [other]) => other - one);
        const start = performance.timeOrigin + startTime;
        return { start, ms, parts: parts.slice(0, 4).map(([, text]) => text).join(", ") };
    }))).observe({ type: "long-animation-frame", buffered: false });
"""
NOW = "performance.timeOrigin + performance.now()"


def number(full: int) -> int:
    return max(3, round(full * SHARE))


class Watch:
    """What goes wrong on a page, and what it holds."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.console: list[str] = []
        self.looks: list[tuple[float, float]] = []  # when it looked at the heap, which holds frames up
        self._session: CDPSession = page.context.new_cdp_session(page)
        page.on("console", self._on_console)
        page.on("dialog", Dialog.accept)
        page.set_default_timeout(LIMIT_MS)
        expect.set_options(timeout=LIMIT_MS)
        page.evaluate(WATCH_FRAMES)
        page.add_init_script(WATCH_FRAMES)  # for a reload

    def _on_console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.console.append(message.text)

    def heap_mib(self) -> float:
        since_ms = self.page.evaluate(NOW)
        for _ in range(3):
            self._session.send("HeapProfiler.collectGarbage")
        used: float = self._session.send("Runtime.getHeapUsage")["usedSize"]
        self.looks.append((since_ms, self.page.evaluate(NOW)))
        return used / 2**20

    def frames(self) -> list[dict[str, Any]]:
        """Those over 50 ms, the longest first, without those in which this looked at the heap."""
        found = self.page.evaluate("window.longFrames")
        own = [
            frame
            for frame in found
            if all(
                until < frame["start"] or frame["start"] + frame["ms"] < since for since, until in self.looks
            )
        ]
        return sorted(own, key=lambda frame: -frame["ms"])

    def check(self, name: str, before_mib: float, full_mib: float) -> None:
        """Everything was deleted: the heap is what it was."""
        after_mib = self.heap_mib()
        frames = self.frames()
        too_long = sum(frame["ms"] > MAX_FRAME_MS for frame in frames)
        print(
            f"{name}: heap {before_mib:.1f} MiB before, {full_mib:.1f} full, {after_mib:.1f} after; "
            f"{too_long} frames over {MAX_FRAME_MS} ms; the longest:"
        )
        for frame in frames[:3]:
            print(f"  {frame['ms']:.0f} ms: {frame['parts']} at {frame['start'] - self.looks[0][0]:.0f}")
        assert self.console == []
        assert after_mib - before_mib < MAX_GROWTH_MIB
        assert too_long == 0


def delete_all(page: Page) -> None:
    page.locator("#delete-all").click()  # by its role the browser's driver would look at each element
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


def test_files_dropped_at_once_leave_nothing_behind(open_page: OpenPage, tmp_path: Path) -> None:
    paths = [tmp_path / f"{i}.wav" for i in range(number(100))]
    for path in paths:
        path.write_bytes(sound_file(SHORT.samples))
    page, watch = opened(open_page)
    before = watch.heap_mib()
    page.set_input_files("#files", paths)
    expect(page.locator(".fold:enabled")).to_have_count(len(paths))
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
    expect(page.locator("#cards > li")).to_have_count(number(500))
    page.locator("#search").press_sequentially("nine one")
    expect(page.locator("#found")).to_contain_text(f"{number(500)} of {number(500)}")
    page.locator("#search").fill("")
    full = watch.heap_mib()
    delete_all(page)
    watch.check("kept", before, full)
