"""A tester's hour on the page by a seeded random walk: nothing of what was done is lost."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import pytest
from playwright.sync_api import Browser, Locator, expect

from tests.conftest import Server, run_server
from tests.page.browsing import LIMIT_MS, NEEDS_CHROMIUM, choose, payload
from tests.support.speech import say

pytestmark = [pytest.mark.trial, NEEDS_CHROMIUM]

NUM_STEPS = int(os.environ.get("WALK_STEPS", "2000"))
CHECK_EVERY = 25
SEED = int(os.environ.get("WALK_SEED", "61"))
SHORT = say("27", gap_s=0.2)
ENTRIES = """async () => {
    const { Store } = await import("/web/store.js");
    const store = new Store();
    const entries = await store.entries();
    store.database.close();
    return Object.fromEntries(entries.map(({ id, text }) => [id, text]));
}"""
SHOWN = "[...document.querySelectorAll('#cards .card:not(.is-working)')].map((card) => card.dataset.id)"
WEIGHTS = {
    "drop": 4,
    "speak": 1,
    "correct": 10,
    "delete": 3,
    "undo": 3,
    "reload": 1,
    "switch": 3,
    "restart": 0.3,
}


class Walk:
    """Two tabs, a server that is killed now and then, and what must be kept after each step."""

    def __init__(self, browser: Browser, seed: int) -> None:
        self.random = random.Random(seed)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.context = browser.new_context(permissions=["microphone"])
        self.kept: dict[str, str] = {}  # text by id
        self.deleted: dict[str, str] = {}
        self.errors: list[str] = []
        self.num_files = 0
        self._server: AbstractContextManager[Server] | None = None

    def start(self) -> None:
        self._server = run_server("--port", str(self.port))
        self._server.__enter__()

    def stop(self) -> None:
        if self._server:
            self._server.__exit__(None, None, None)
            self._server = None

    def open_tabs(self) -> None:
        self.tabs = [self.context.new_page() for _ in range(2)]
        for tab in self.tabs:
            tab.set_default_timeout(LIMIT_MS)
            tab.on("pageerror", lambda error: self.errors.append(str(error)))
            tab.on("dialog", lambda dialog: dialog.accept())
            tab.goto(f"http://127.0.0.1:{self.port}")
        self.page = self.tabs[0]

    def entries(self) -> dict[str, str]:
        found: dict[str, str] = self.page.evaluate(ENTRIES)
        return found

    def new_entry(self) -> None:
        """Waits for the text of one more recording."""
        self.page.wait_for_function(f"(number) => {SHOWN}.length > number", arg=len(self.kept))
        self.settle(len(self.kept) + 1)
        self.kept = self.entries() | self.kept

    def settle(self, number: int) -> None:
        for tab in self.tabs:
            tab.wait_for_function(f"(number) => {SHOWN}.length === number", arg=number)

    def card(self, id: str) -> Locator:
        return self.page.locator(f"#cards [data-id='{id}']")

    def any_id(self) -> str:
        return self.random.choice(sorted(self.kept))

    # -- Steps --

    def drop(self) -> None:
        self.num_files += 1
        choose(self.page, payload(f"{self.num_files}.wav", SHORT))
        self.new_entry()

    def speak(self) -> None:
        self.page.get_by_role("button", name="Speak").click()
        expect(self.page.locator("#live-text")).to_contain_text("two seven one")
        self.page.get_by_role("button", name="Stop").click()
        self.new_entry()

    def correct(self) -> None:
        id = self.any_id()
        words = self.kept[id].split()
        if not words:
            return
        if self.card(id).locator(".fold").get_attribute("aria-expanded") == "false":
            self.card(id).locator(".fold").click()
        index = self.random.randrange(len(words))
        text = f"w{self.random.randrange(1000)}"
        self.card(id).locator(".word").nth(index).dblclick()
        field = self.card(id).locator(".word input")
        field.fill(text)
        field.press("Enter")
        expect(self.card(id).locator(".word").nth(index)).to_have_text(text)
        self.kept[id] = " ".join([*words[:index], text, *words[index + 1 :]])

    def delete(self) -> None:
        id = self.any_id()
        self.card(id).locator("button[title=Delete]").click()
        self.deleted[id] = self.kept.pop(id)
        self.settle(len(self.kept))

    def undo(self) -> None:
        button = self.page.get_by_role("button", name="Undo")
        if not button.is_visible():
            return
        before = set(self.kept)
        button.click()
        self.page.wait_for_function(f"(number) => {SHOWN}.length > number", arg=len(before))
        (id,) = set(self.page.evaluate(SHOWN)) - before
        self.kept[id] = self.deleted.pop(id)
        self.settle(len(self.kept))

    def reload(self) -> None:
        self.check()
        self.page.reload()
        self.settle(len(self.kept))

    def switch(self) -> None:
        self.page = self.tabs[1 - self.tabs.index(self.page)]
        self.page.bring_to_front()

    def restart(self) -> None:
        """A file is dropped while the server is away."""
        self.stop()
        self.num_files += 1
        choose(self.page, payload(f"{self.num_files}.wav", SHORT))
        expect(self.page.locator("#queue-text")).to_contain_text("The server is away")
        self.start()
        self.new_entry()

    def check(self) -> None:
        self.page.wait_for_function("() => !document.querySelector('.word input')")
        for _ in range(100):
            if self.entries() == self.kept:
                break
            self.page.wait_for_timeout(50)
        assert self.entries() == self.kept
        for tab in self.tabs:
            assert set(tab.evaluate(SHOWN)) == set(self.kept)
        assert self.errors == []

    def take(self, number: int) -> None:
        steps = {
            name: weight for name, weight in WEIGHTS.items() if self.kept or name not in ("correct", "delete")
        }
        (name,) = self.random.choices(list(steps), list(steps.values()))
        if len(self.kept) > 30:
            name = "delete"
        getattr(self, name)()
        if number % CHECK_EVERY == 0:
            self.check()


@contextmanager
def walking(browser: Browser, seed: int) -> Iterator[Walk]:
    walk = Walk(browser, seed)
    with ExitStack() as stack:
        stack.callback(walk.context.close)
        stack.callback(walk.stop)
        walk.start()
        walk.open_tabs()
        yield walk


def test_nothing_that_was_done_is_lost_on_a_random_walk(browser: Browser) -> None:
    expect.set_options(timeout=LIMIT_MS)
    with walking(browser, SEED) as walk:
        for number in range(1, NUM_STEPS + 1):
            try:
                walk.take(number)
            except Exception as error:
                raise AssertionError(f"step {number} of seed {SEED}") from error
        walk.check()
