"""The list of transcripts, and how they are written: in both browsers, with answers that need no engine."""

from itertools import pairwise
from typing import Any

from tests.page.both import AnyTab, OpenAny, answer_with, choose, document_of, drop, hold_answers
from tests.page.browsing import words_at
from tests.page.firefox import ENTER
from tests.page.test_page_reads import open_text

NAMES = "[...document.querySelectorAll('#cards .fold')].map(({ textContent }) => textContent).join()"
TALK: dict[str, Any] = {
    "text": "Good morning. How are you? Fine.",
    "segments": [
        {"id": 0, "start": 0.0, "end": 2.0, "text": " Good morning. How are you?", "speaker": "Ann"},
        {"id": 1, "start": 65.0, "end": 66.0, "text": " Fine.", "speaker": "Bob"},
    ],
    "words": [],
}


def open_list(open_any: OpenAny, *names: str) -> AnyTab:
    tab = open_any()
    tab.wait_for_text("#model", "whisper-digits")
    answer_with(tab, **words_at(("one", 0.0)))
    drop(tab, *names)
    tab.wait(f"document.querySelectorAll('.fold:enabled').length === {len(names)}")
    return tab


def test_a_transcript_gets_another_name_that_is_kept_and_found(open_any: OpenAny) -> None:
    tab = open_list(open_any, "a.wav", "b.wav")
    tab.click("[aria-label='Change the name of b.wav']")
    tab.wait("document.activeElement.getAttribute('aria-label') === 'Name of b.wav'")
    tab.type("Interview" + ENTER)
    tab.wait(f"{NAMES} === 'a.wav,Interview'")
    tab.wait("document.querySelector('[aria-label=\"Delete Interview\"]')")
    tab.wait(
        """import("/web/store.js").then(async ({ Store }) => {
            const store = new Store();
            const entries = await store.entries();
            store.database.close();
            return entries.some(({ name }) => name === "Interview");
        })"""
    )
    tab.reload()
    tab.wait(f"{NAMES} === 'a.wav,Interview'")
    tab.click("#search")
    tab.type("interv")
    tab.wait_for_text("#found", "1 of 2")


def test_the_list_is_sorted_and_stars_come_first_also_after_a_reload(open_any: OpenAny) -> None:
    tab = open_list(open_any, "b.wav", "c.wav", "a.wav")
    assert tab.evaluate(NAMES) == "b.wav,c.wav,a.wav"
    choose(tab, "#sort", "name")
    tab.wait(f"{NAMES} === 'a.wav,b.wav,c.wav'")
    tab.click("[aria-label='Star c.wav']")
    tab.wait("document.querySelector('[aria-label=\"Star c.wav\"][aria-pressed=true]')")
    choose(tab, "#sort", "starred")
    tab.wait(f"{NAMES} === 'c.wav,b.wav,a.wav'")
    tab.reload()
    tab.wait(f"{NAMES} === 'c.wav,b.wav,a.wav'")
    answer_with(tab, **words_at(("one", 0.0)))
    drop(tab, "d.wav")
    tab.wait(f"{NAMES} === 'c.wav,d.wav,b.wav,a.wav'")


def test_a_card_says_when_it_came(open_any: OpenAny) -> None:
    tab = open_list(open_any, "a.wav")
    day = tab.evaluate("new Date().getFullYear()")
    tab.wait_for_text("#cards .facts", f", {day}")


def test_texts_and_documents_have_the_times_that_one_chooses(open_any: OpenAny) -> None:
    tab = open_text(open_any, TALK)
    copied = """(async () => {
        let copied = "";
        navigator.clipboard.writeText = async (text) => { copied = text; };
        document.querySelector("[data-part=copying]").click();
        return copied;
    })()"""
    assert tab.evaluate(copied) == "Ann: Good morning. How are you?\nBob: Fine."
    choose(tab, "#times", "with")
    assert tab.evaluate(copied) == "[0:00] Ann: Good morning. How are you?\n\n[1:05] Bob: Fine."
    found = document_of(tab, TALK)
    assert "[0:00] Ann: " in found
    assert "[1:05] Bob: " in found
    tab.reload()
    tab.wait("document.querySelector('#times').value === 'with'")


def test_the_tabs_title_is_the_progress(open_any: OpenAny) -> None:
    tab = open_any()
    tab.wait_for_text("#model", "whisper-digits")
    title = tab.evaluate("document.title")
    hold_answers(tab)
    drop(tab, "a.wav", "b.wav")
    tab.wait("document.title.startsWith('0 % and 1 more')")
    for name in ("a.wav", "b.wav"):
        tab.click(f"[aria-label='Delete {name}']")
    tab.wait(f"document.title === '{title}'")


# -- Subtitles --

SENTENCES = (
    "It was late when we came home. The house was dark, and nobody had left a light on for us. We went in."
)
CUES = """import("/web/subtitles.js").then(({ cuesOf }) => cuesOf(ANSWER, LAYOUT, true))"""


def cues_of(tab: AnyTab, answer: dict[str, Any], width: int, lines: int) -> list[dict[str, Any]]:
    layout = f"{{ width: {width}, lines: {lines} }}"
    asked = CUES.replace("ANSWER", str(answer).replace("'", '"')).replace("LAYOUT", layout)
    found: list[dict[str, Any]] = tab.evaluate(asked)
    return found


def test_subtitles_have_the_lines_that_one_chooses_and_end_with_sentences(open_any: OpenAny) -> None:
    tab = open_any()
    spoken = words_at(*((word, 0.3 * i) for i, word in enumerate(SENTENCES.split())))
    answer = {**spoken, "duration": 9}
    for width, lines in ((42, 2), (42, 1), (20, 2)):
        cues = cues_of(tab, answer, width, lines)
        assert " ".join(line for cue in cues for line in cue["lines"]) == SENTENCES
        assert all(len(cue["lines"]) <= lines for cue in cues)
        assert all(len(line) <= width for cue in cues for line in cue["lines"])
        assert all(0 < cue["end"] - cue["start"] <= 7 for cue in cues)
        assert all(cue["end"] <= after["start"] for cue, after in pairwise(cues))
    assert cues_of(tab, answer, 42, 2)[0]["lines"] == ["It was late when we came home."]


def test_a_pause_and_another_speaker_end_a_subtitle(open_any: OpenAny) -> None:
    tab = open_any()
    cues = cues_of(tab, {**TALK, "duration": 70}, 42, 2)
    assert [(cue["speaker"], cue["lines"]) for cue in cues] == [
        ("Ann", ["Good morning."]),
        ("Ann", ["How are you?"]),
        ("Bob", ["Fine."]),
    ]
