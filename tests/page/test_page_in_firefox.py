"""The main ways over the page in Debian's Firefox, on a real server."""

import base64
import json

from tests.conftest import Server
from tests.page.both import DROP, SPEECH_FOR_A_MICROPHONE, drop, encoded
from tests.page.browsing import SPOKEN
from tests.page.firefox import ENTER, NEEDS_FIREFOX, NEEDS_SOUND, OpenTab, Tab
from tests.page.held_app import HeldApp
from tests.support.api_fixtures import KEY
from tests.support.speech import say
from tests.unit.api.running_app import THREE_CHUNKS

pytestmark = NEEDS_FIREFOX

CORRECTED = SPOKEN.text.replace("one", "won", 1)
KEPT = """(async () => {
    const { Store } = await import("/web/store.js");
    const store = new Store();
    const entries = await store.entries();
    store.database.close();
    return entries.map(({ text }) => text);
})()"""

LIVE_FOR_TWO_SECONDS = "/[1-9]:|:[1-9]|0[2-9]/.test(document.querySelector('#live-time').textContent)"
SECOND_CLICK = """new MouseEvent("click", { detail: 2 })"""


def wait_until_kept(tab: Tab, text: str) -> None:
    tab.wait(f"{KEPT}.then((texts) => texts.includes({json.dumps(text)}))")


def correct(tab: Tab, word: int, text: str) -> None:
    open_correction(tab, word, text)
    tab.type(ENTER)


def open_correction(tab: Tab, word: int, text: str) -> None:
    tab.wait(f"document.querySelectorAll('.word').length > {word}")
    tab.evaluate(f"document.querySelectorAll('.word')[{word}].setAttribute('data-chosen', '')")
    tab.click(".word[data-chosen]", times=2)
    tab.wait("document.activeElement.matches('.word input')")
    tab.type(text)  # what stood there is selected
    tab.evaluate("document.querySelector('.word[data-chosen]').removeAttribute('data-chosen')")


def unfold(tab: Tab) -> None:
    tab.click(".fold[aria-expanded=false]")
    tab.wait("document.querySelector('.word')")


def test_a_dropped_file_becomes_words_as_they_are_recognised(open_tab: OpenTab, held_app: HeldApp) -> None:
    tab = open_tab(held_app.url)
    tab.evaluate(f"{DROP}({json.dumps(['talk.wav', base64.b64encode(THREE_CHUNKS).decode()])})")
    for number, text in enumerate(("zero", "zero one", "zero one two")):
        held_app.release_chunk()
        tab.wait(f"document.querySelector('#cards .transcript')?.textContent.trim() === {json.dumps(text)}")
        assert bool(tab.evaluate("document.querySelector('.card.is-working') !== null")) or number == 2
    tab.wait_for_text("#cards .facts", "× real time")


def test_a_word_that_is_clicked_plays_and_is_lit(open_tab: OpenTab) -> None:
    tab = open_tab()
    drop(tab, "call.wav", spoken=say("314159265358979323", gap_s=0.6))
    tab.wait_for_text("#cards .facts", "× real time")
    tab.wait("document.querySelector('#cards .wave').checkVisibility()")
    tab.click(".word:nth-child(3)")
    tab.wait("document.querySelector('.word.is-lit') && document.querySelector('audio').currentTime > 0")


def test_a_correction_is_there_after_a_reload_and_can_be_undone_by_keys(open_tab: OpenTab) -> None:
    tab = open_tab()
    drop(tab, "call.wav")
    tab.wait_for_text("#cards .transcript", SPOKEN.text)
    correct(tab, 1, "won")
    tab.wait_for_text("#cards .transcript", CORRECTED)
    wait_until_kept(tab, CORRECTED)
    tab.reload()
    tab.wait_for_text(".preview", CORRECTED)
    unfold(tab)
    correct(tab, 0, "Thirty")
    tab.wait_for_text("#cards .transcript", CORRECTED.replace("three", "Thirty"))
    tab.evaluate(
        "document.dispatchEvent(new KeyboardEvent('keydown', { key: 'z', ctrlKey: true, bubbles: true }))"
    )
    tab.wait_for_text("#cards .transcript", CORRECTED)
    wait_until_kept(tab, CORRECTED)


@NEEDS_SOUND
def test_the_microphone_of_the_browser_gives_a_recording_to_play(open_tab: OpenTab) -> None:
    tab = open_tab()
    tab.wait_for_text("#model", "whisper-digits")
    tab.click("#record")
    tab.wait(LIVE_FOR_TWO_SECONDS)
    tab.click("#stop")
    tab.wait_for_text(".fold", "Recording 1")
    tab.wait("document.querySelector('#message').hidden")
    tab.wait("document.querySelector('.player').checkVisibility()")


@NEEDS_SOUND
def test_what_is_spoken_becomes_text_and_the_microphone_is_given_back(open_tab: OpenTab) -> None:
    tab = open_tab()
    tab.evaluate(f"{SPEECH_FOR_A_MICROPHONE}({json.dumps(encoded(say('271', gap_s=[0.2, 0.2, 1.5])))})")
    tab.click("#record")
    tab.wait_for_text("#live-text", "two seven one")
    tab.click("#stop")
    tab.wait_for_text("#cards .transcript", "two seven one")
    assert tab.evaluate("window.track.readyState") == "ended"
    assert tab.evaluate("document.querySelector('#record-label').textContent") == "Speak"


@NEEDS_SOUND
def test_a_key_is_refused_or_taken_and_one_speaks_with_it(open_tab: OpenTab, locked_server: Server) -> None:
    tab = open_tab(locked_server.url)
    for typed, answer in (("schlüssel–ключ", ""), ("wrong", "The server does not take this key.")):
        tab.click("#key")
        tab.evaluate("document.querySelector('#key').select()")
        tab.type(typed + ENTER)
        tab.wait(f"document.querySelector('#key-error').textContent === {json.dumps(answer)}")
        assert tab.evaluate("document.querySelector('#key').validity.patternMismatch") == (not answer)
    tab.evaluate("document.querySelector('#key').select()")
    tab.type(KEY + ENTER)
    tab.wait_for_text("#model", "whisper-digits")
    drop(tab, "call.wav")
    tab.wait_for_text("#cards .transcript", SPOKEN.text)
    tab.click("#record")
    tab.wait(LIVE_FOR_TWO_SECONDS)


def test_a_deleted_transcript_comes_back_and_a_double_click_deletes_one(open_tab: OpenTab) -> None:
    tab = open_tab()
    drop(tab, "one.wav", "two.wav")
    tab.wait("document.querySelectorAll('.fold:enabled').length === 2")
    tab.click("[aria-label='Delete one.wav']", times=2)
    tab.wait("document.querySelectorAll('.fold').length === 1")
    tab.wait_for_text("#undo-text", "one.wav is deleted.")
    tab.evaluate(f"document.querySelector('#undo').dispatchEvent({SECOND_CLICK})")
    assert tab.evaluate("document.querySelectorAll('.fold').length") == 1
    tab.click("#undo")
    tab.wait("document.querySelectorAll('.fold:enabled').length === 2")
    tab.wait(f"{KEPT}.then((texts) => texts.length === 2)")
    tab.reload()
    tab.wait("[...document.querySelectorAll('.fold')].map((f) => f.textContent).join() === 'one.wav,two.wav'")


def test_two_tabs_keep_each_others_corrections_and_what_one_writes_in_a_deleted_one(
    open_tab: OpenTab,
) -> None:
    tab = open_tab()
    drop(tab, "one.wav")
    tab.wait_for_text("#cards .transcript", SPOKEN.text)
    wait_until_kept(tab, SPOKEN.text)
    other = open_tab()
    unfold(other)
    correct(tab, 0, "Thirty")
    correct(other, 1, "won")
    both = CORRECTED.replace("three", "Thirty")
    for each in (tab, other):
        each.wait_for_text("#cards .transcript", both)
    open_correction(tab, 2, "vier")
    other.click("[aria-label='Delete one.wav']")
    tab.wait_for_text("#undo-text", "one.wav was deleted in another tab.")
    tab.click("#undo")
    wait_until_kept(tab, both.replace("four", "vier"))
