"""A tester's hour on the page by a seeded random walk: nothing of what was done is lost, in both browsers."""

import json
import os
import random
import socket
import time
from contextlib import AbstractContextManager
from typing import Any

import pytest
from msgspec.structs import replace

from asr_server.core import ChunkResult
from asr_server.transport.messages import Submit
from tests.page.both import SPEECH_FOR_A_MICROPHONE, AnyTab, OpenAny, choose, drop, encoded, faults
from tests.page.browsing import LIMIT_MS
from tests.page.firefox import ENTER, ESCAPE, NEEDS_SOUND, TAB
from tests.page.held_app import HeldApp, run_held_app
from tests.page.test_page_corrects import UNDO
from tests.support.fake_replica import say as answer_of
from tests.support.speech import say
from tests.support.tokens import words

LIMIT_S = 3 * 3600
pytestmark = [pytest.mark.trial, pytest.mark.timeout(LIMIT_S), NEEDS_SOUND]

NUM_STEPS = int(os.environ.get("WALK_STEPS", "2000"))
CHECK_EVERY = 25
SEED = int(os.environ.get("WALK_SEED", "61"))
SHORT = say("27", gap_s=0.2)
SPEECH = say("271", gap_s=[0.2, 0.2, 1.5])
# [text, name, whether it has a star, speakers, by how much its subtitles were moved] by id
ENTRIES = """import("/web/store.js").then(async ({ Store }) => {
    window.ownStore ??= new Store(); // one a page: each listens to all others
    const entries = await window.ownStore.entries();
    const movesOf = ({ edits = [] }) => edits.reduce((sum, { by = 0 }) => sum + by, 0);
    const valueOf = (e) => [e.text, e.name, Boolean(e.isStarred), e.speakers.join(), movesOf(e)];
    return Object.fromEntries(entries.map((entry) => [entry.id, valueOf(entry)]));
})"""
SHOWN = "[...document.querySelectorAll('#cards .card:not(.is-working)')].map((card) => card.dataset.id)"
NO_FIELD = "!document.querySelector('#cards :is(.transcript, h2, .speakers) :is(input, textarea)')"
# Leaving the page asks while something is being saved
IS_SAVED = "dispatchEvent(new Event('beforeunload', { cancelable: true }))"
WEIGHTS = {
    "drop": 4,
    "speak": 0.5,
    "correct": 7,
    "write_on": 3,
    "sentence": 4,
    "subtitles": 3,
    "give": 3,
    "rename": 2,
    "star": 2,
    "sort": 2,
    "undo_correction": 2,
    "delete": 3,
    "undo": 3,
    "reload": 1,
    "switch": 3,
    "restart": 0.3,
}
WITHOUT_ENTRIES = {"drop", "speak", "sort", "undo", "reload", "switch", "restart"}
WIDTHS = (360, 768, 1280)


def two_seven_one(_: Submit) -> ChunkResult:
    """An engine would take more time than all else."""
    times = {"token_times_s": (0.2, 0.5, 0.8, 1.0), "token_onsets_s": (0.3, 0.6, 0.9)}
    return replace(answer_of(*words("271")), token_focus=(1.0,) * 3, **times)


class Walk:
    """Two tabs, a server that is killed now and then, and what must be kept after each step."""

    def __init__(self, open_any: OpenAny, seed: int) -> None:
        self.random = random.Random(seed)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.open_any = open_any
        self.kept: dict[str, list[Any]] = {}
        self.deleted: dict[str, list[Any]] = {}
        self.num_files = 0
        self.looked_at: set[str] = set()
        self._server: AbstractContextManager[HeldApp] | None = None

    def start(self) -> None:
        self._server = run_held_app(two_seven_one, self.port, LIMIT_S)
        self._server.__enter__().answer_at_once()

    def stop(self) -> None:
        if self._server:
            self._server.__exit__(None, None, None)
            self._server = None

    def open_tabs(self) -> None:
        self.tabs = [self.open_any(f"http://127.0.0.1:{self.port}") for _ in range(2)]
        for tab in self.tabs:
            self.give_microphone(tab)
        self.tab = self.tabs[0]

    def give_microphone(self, tab: AnyTab) -> None:
        tab.wait_for_text("#model", "whisper-digits")
        tab.evaluate(f"{SPEECH_FOR_A_MICROPHONE}({json.dumps(encoded(SPEECH))})")

    def entries(self) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = self.tab.evaluate(ENTRIES)
        return found

    def new_entry(self) -> None:
        """Waits for the text of one more recording."""
        self.settle(len(self.kept) + 1)
        self.tab.wait(f"{ENTRIES}.then((entries) => Object.keys(entries).length === {len(self.kept) + 1})")
        self.kept = self.entries() | self.kept

    def settle(self, number: int) -> None:
        for tab in self.tabs:
            tab.wait(f"{SHOWN}.length === {number}")

    def card(self, id: str) -> str:
        return f"#cards [data-id='{id}']"

    def any_id(self) -> str:
        return self.random.choice(sorted(self.kept))

    def unfold(self, id: str) -> int:
        """Return how many words it has."""
        if self.tab.evaluate(
            f"document.querySelector(\"{self.card(id)} .fold[aria-expanded='false']\") !== null"
        ):
            self.tab.click(f"{self.card(id)} .fold")
        self.tab.wait(f'(document.querySelector("{self.card(id)} .transcript")?.textContent ?? "") !== ""')
        num_words: int = self.tab.evaluate(f'document.querySelectorAll("{self.card(id)} .word").length')
        return num_words

    def word(self, id: str, index: int) -> str:
        self.tab.evaluate(
            f"""(() => {{
                document.querySelector("[data-at]")?.removeAttribute("data-at");
                document.querySelectorAll("{self.card(id)} .word")[{index}].setAttribute("data-at", "");
            }})()"""
        )
        return ".word[data-at]"

    def wait_for(self, id: str, field: int, value: Any) -> None:
        """Until it is kept."""
        self.kept[id][field] = value
        entry = f"{ENTRIES}.then((entries) => entries[{json.dumps(id)}]?.[{field}])"
        self.tab.wait(f"{entry}.then((found) => found === {json.dumps(value)})")

    def look(self, kind: str) -> None:
        """Has axe look at each kind of state once, in all widths and colours; nothing scrolls sideways."""
        if kind in self.looked_at:
            return
        self.looked_at.add(kind)
        for width in WIDTHS:
            for colours in self.tab.COLOURS:
                self.tab.show_as(width, colours)
                assert faults(self.tab) == [], (kind, width, colours)
            assert self.tab.evaluate("document.documentElement.scrollWidth") <= width, (kind, width)
        self.tab.show_as(1280, "light")

    # -- Steps --

    def drop(self) -> None:
        self.num_files += 1
        drop(self.tab, f"{self.num_files}.wav", spoken=SHORT)
        self.new_entry()

    def speak(self) -> None:
        self.tab.click("#record")
        self.tab.wait_for_text("#live-text", "two seven one")
        assert not self.tab.evaluate("document.querySelector('#cards').checkVisibility()")
        self.look("speaking")
        if self.random.random() < 0.5:
            self.tab.click("#pause")
            self.tab.click("#pause")
        self.tab.click("#stop")
        self.new_entry()

    def open_field(self, id: str, index: int) -> None:
        self.tab.click(self.word(id, index), times=2)
        self.tab.wait("document.activeElement.matches('.word input')")
        self.look("a word's field")

    def correct(self, *, goes_on: bool = False) -> None:
        id = self.any_id()
        num_words = self.unfold(id)
        if not num_words or "" in (words := self.texts(id)):
            return
        index = self.random.randrange(num_words)
        self.open_field(id, index)
        for i in range(index, min(num_words, index + 2) if goes_on else index + 1):
            words[i] = f"w{self.random.randrange(1000)}"
            self.tab.type(words[i] + (TAB if goes_on else ENTER))
        if goes_on:
            self.tab.type(ESCAPE)
        self.wait_for(id, 0, " ".join(words))

    def texts(self, id: str) -> list[str]:
        words = f'[...document.querySelectorAll("{self.card(id)} .word")]'
        found: list[str] = self.tab.evaluate(f"{words}.map(({{ textContent }}) => textContent)")
        return found

    def write_on(self) -> None:
        self.correct(goes_on=True)

    def sentence(self) -> None:
        """Taken by Enter, or by a click elsewhere; Escape leaves it as it was."""
        id = self.any_id()
        num_words = self.unfold(id)
        if not num_words or "" in (words := self.texts(id)):
            return
        self.open_field(id, self.random.randrange(num_words))
        self.tab.type(ESCAPE)
        self.tab.evaluate(f'document.querySelector("{self.card(id)} [data-part=sentence]").click()')
        self.tab.wait("document.activeElement.matches('.transcript textarea')")
        self.look("a sentence's field")
        before = self.tab.evaluate("document.activeElement.value")
        text = " ".join(f"s{self.random.randrange(1000)}" for _ in range(self.random.randrange(1, 5)))
        way = self.random.choice([ENTER, ESCAPE, ""])
        self.tab.type(text + way)
        if not way:
            self.tab.click(".brand")
        kept = self.kept[id][0]
        self.wait_for(id, 0, kept if way == ESCAPE else self.replaced(id, words, before, text))

    def replaced(self, id: str, words: list[str], before: str, text: str) -> str:
        """The text of a card with another sentence in the place of one."""
        self.tab.wait(NO_FIELD)
        self.tab.wait(IS_SAVED)
        shown = " ".join(" ".join(self.texts(id)).split())
        whole = " ".join(words)
        places = [i for i in range(len(whole)) if whole.startswith(before, i)]
        assert shown in [whole[:i] + text + whole[i + len(before) :] for i in places]
        return shown

    def subtitles(self) -> None:
        """Their times are moved, and back sometimes."""
        id = self.any_id()
        if not self.unfold(id):
            return
        card = f'document.querySelector("{self.card(id)}")'
        if self.tab.evaluate(f"{card}.querySelector('.cues').hidden"):
            self.tab.evaluate(f"{card}.querySelector('[data-part=subtitling]').click()")
        if not self.tab.evaluate(f"{card}.querySelector('.cues li') !== null"):
            return
        self.look("subtitles")
        choose(self.tab, f"{self.card(id)} .cues select", self.random.choice(["all", "start", "end"]))
        choose(self.tab, f"{self.card(id)} .cues [type=number]", "0.5")
        step = self.random.choice([-1, 1])
        self.tab.evaluate(f"{card}.querySelector('[data-step=\"{step}\"]').click()")
        self.wait_for(id, 4, self.kept[id][4] + 0.5 * step)
        if self.random.random() < 0.5:
            self.tab.evaluate(UNDO)
            self.wait_for(id, 4, self.kept[id][4] - 0.5 * step)
        if self.random.random() < 0.5:
            self.tab.evaluate(f"{card}.querySelector('[data-part=subtitling]').click()")

    def give(self) -> None:
        """A turn begins at a word, or is somebody else's."""
        id = self.any_id()
        num_words = self.unfold(id)
        if not num_words:
            return
        index = self.random.choice([i for i, text in enumerate(self.texts(id)) if text])
        self.tab.click(self.word(id, index))
        if self.random.random() < 0.5:
            self.tab.evaluate(f'document.querySelector("{self.card(id)} [data-part=split]").click()')
        else:
            choose(self.tab, f"{self.card(id)} [data-part=giveTo]", "somebody else")
        self.tab.wait(f'document.querySelector("{self.card(id)} .speaker") !== null')
        self.tab.wait(IS_SAVED)
        self.kept[id][3] = self.entries()[id][3]  # it may be the same

    def rename(self) -> None:
        id = self.any_id()
        name = f"n{self.random.randrange(1000)}"
        self.tab.click(f"{self.card(id)} [data-part=pen]")
        self.tab.wait("document.activeElement.matches('h2 input')")
        self.look("a name's field")
        self.tab.type(name + ENTER)
        self.wait_for(id, 1, name)

    def star(self) -> None:
        id = self.any_id()
        self.tab.click(f"{self.card(id)} .star")
        self.wait_for(id, 2, not self.kept[id][2])

    def sort(self) -> None:
        choose(self.tab, "#sort", self.random.choice(["newest", "oldest", "name", "longest", "starred"]))

    def undo_correction(self) -> None:
        """Only what is open in this tab; a text that was corrected at random gets its words of before."""
        id = self.any_id()
        if not self.unfold(id):
            return
        text, words = self.kept[id][0], self.texts(id)
        index = next(i for i, word in enumerate(words) if word)
        self.open_field(id, index)
        self.tab.type("other" + ENTER)
        self.wait_for(id, 0, " ".join(["other", *filter(None, words[index + 1 :])]))
        self.tab.evaluate(UNDO)
        self.wait_for(id, 0, text)

    def delete(self) -> None:
        id = self.any_id()
        self.tab.click(f"{self.card(id)} button[title=Delete]")
        self.deleted[id] = self.kept.pop(id)
        self.settle(len(self.kept))

    def undo(self) -> None:
        if not self.tab.evaluate("document.querySelector('#undo').checkVisibility()"):
            return
        before = set(self.kept)
        self.tab.click("#undo")
        self.settle(len(self.kept) + 1)
        (id,) = set(self.tab.evaluate(SHOWN)) - before
        self.kept[id] = self.deleted.pop(id)

    def reload(self) -> None:
        self.check()
        self.tab.reload()
        self.give_microphone(self.tab)
        self.settle(len(self.kept))

    def switch(self) -> None:
        self.tab = self.tabs[1 - self.tabs.index(self.tab)]

    def restart(self) -> None:
        """A file is dropped while the server is away."""
        self.stop()
        self.num_files += 1
        drop(self.tab, f"{self.num_files}.wav", spoken=SHORT)
        self.tab.wait_for_text("#queue-text", "The server is away")
        self.look("a server that is away")
        self.start()
        self.new_entry()

    def check(self) -> None:
        self.tab.wait(NO_FIELD)
        until = time.monotonic() + LIMIT_MS / 1000
        while self.entries() != self.kept and time.monotonic() < until:
            time.sleep(0.05)
        assert self.entries() == self.kept
        for tab in self.tabs:
            assert set(tab.evaluate(SHOWN)) == set(self.kept)

    def take(self, number: int) -> None:
        steps = {name: weight for name, weight in WEIGHTS.items() if self.kept or name in WITHOUT_ENTRIES}
        (name,) = self.random.choices(list(steps), list(steps.values()))
        if len(self.kept) > 30:
            name = "delete"
        getattr(self, name)()
        self.look("a list with something open" if self.kept else "an empty page")
        if number % CHECK_EVERY == 0:
            self.check()


def test_nothing_that_was_done_is_lost_on_a_random_walk(open_any: OpenAny) -> None:
    walk = Walk(open_any, SEED)
    walk.start()
    try:
        walk.open_tabs()
        for number in range(1, NUM_STEPS + 1):
            try:
                walk.take(number)
            except Exception as error:
                raise AssertionError(f"step {number} of seed {SEED}") from error
        walk.check()
    finally:
        walk.stop()
