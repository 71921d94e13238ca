"""To read, follow and correct a text: in both browsers, with answers that need no engine."""

import json
from typing import Any

from asr_server.language_codes import NAMES
from tests.page.both import AnyTab, OpenAny, answer_with, document_of, drop
from tests.page.browsing import words_at
from tests.page.firefox import ENTER, ESCAPE, TAB
from tests.support.speech import say

TEXTS = "this is a sentence whose words are wide enough to stand beside one another".split()  # noqa: SIM905
WORDS = words_at(*((text, 0.3 * i) for i, text in enumerate(TEXTS)))
LONG = words_at(*((f"word{i}", 0.1 * i) for i in range(390)))
LONG["segments"][0]["end"] = 39.0
SPEECH = say("3141592653" * 4, gap_s=0.6)
WORD = "#cards .word:nth-of-type({})"
VALUE = "document.querySelector('.word input')?.value"


def open_text(open_any: OpenAny, answer: dict[str, Any], **options: Any) -> AnyTab:
    tab = open_any()
    tab.wait_for_text("#model", "whisper-digits")
    answer_with(tab, **answer)
    drop(tab, "call.wav", **options)
    tab.wait("document.querySelector('.fold:enabled')")
    return tab


def press_button(tab: AnyTab, text: str) -> None:
    """By its text, as a script does: nothing is pressed."""
    found = f"[...document.querySelectorAll('button')].find((b) => b.textContent === {json.dumps(text)})"
    tab.evaluate(f"{found}.click()")


# -- The word that is pressed --


def test_with_a_field_open_the_word_that_is_pressed_opens(open_any: OpenAny) -> None:
    tab = open_text(open_any, WORDS)
    press_button(tab, "Correct words")
    for number in (3, 6, 2, 8):
        tab.click(WORD.format(number))
        tab.wait(f"{VALUE} === {json.dumps(TEXTS[number - 1])}")
    tab.type(ESCAPE)
    press_button(tab, "Correct words")
    for number in (3, 6, 2, 8):
        tab.click(WORD.format(number), times=2)
        tab.wait(f"{VALUE} === {json.dumps(TEXTS[number - 1])}")


# -- What plays --

IS_SEEN = """(() => {
    const { top, bottom } = document.querySelector(".word.is-lit").getBoundingClientRect();
    return top >= 0 && bottom <= innerHeight;
})()"""
LIT_AFTER = "Number(document.querySelector('.word.is-lit')?.textContent.slice(4)) >= {}"
BACK = "document.querySelector('.bar .back')"


def play_at(tab: AnyTab, seconds: float) -> None:
    tab.evaluate(f"document.querySelector('audio').currentTime = {seconds}")
    tab.wait(LIT_AFTER.format(10 * seconds - 2))


def test_the_playing_word_is_followed_until_one_looks_elsewhere(open_any: OpenAny) -> None:
    tab = open_text(open_any, LONG, spoken=SPEECH)
    tab.evaluate("(document.querySelector('#cards').style.width = '22rem', 0)")
    tab.wait("document.querySelector('.player .clock').textContent.includes('/')")
    tab.click(".play")
    play_at(tab, 30)
    tab.wait(IS_SEEN)
    tab.evaluate("document.querySelector('#cards').dispatchEvent(new WheelEvent('wheel', { bubbles: true }))")
    tab.evaluate("scrollTo(0, 0)")
    play_at(tab, 33)
    assert not tab.evaluate(IS_SEEN)
    tab.wait(f"{BACK}.checkVisibility()")
    tab.evaluate(f"{BACK}.click()")
    tab.wait(IS_SEEN)
    assert not tab.evaluate(f"{BACK}.checkVisibility()")
    tab.evaluate(
        "document.querySelector('.word').dispatchEvent(new MouseEvent('mousedown', { bubbles: true }))"
    )
    tab.evaluate(
        "document.querySelector('.word').dispatchEvent(new MouseEvent('dblclick', { bubbles: true }))"
    )
    tab.evaluate("scrollTo(0, 0)")
    play_at(tab, 36)
    assert not tab.evaluate(IS_SEEN)  # one writes


# -- A store that is full --


def test_what_the_store_refuses_is_marked_and_leaving_asks(open_any: OpenAny) -> None:
    tab = open_any()
    tab.wait_for_text("#model", "whisper-digits")
    answer_with(tab, **WORDS)
    tab.evaluate(
        """(() => {
            const { put } = IDBObjectStore.prototype;
            IDBObjectStore.prototype.put = () => { throw new DOMException("full", "QuotaExceededError"); };
            window.makeSpace = () => { IDBObjectStore.prototype.put = put; };
        })()"""
    )
    asks = "!dispatchEvent(new Event('beforeunload', { cancelable: true }))"
    drop(tab, "one.wav", "two.wav")
    tab.wait("document.querySelectorAll('.card.is-unkept').length === 2")
    tab.wait_for_text("#kept", "2 transcripts could not be kept")
    tab.wait_for_text(".card .facts", "not kept in this browser")
    assert tab.evaluate(asks)
    tab.evaluate("window.makeSpace()")
    tab.click("[aria-label='Delete two.wav']")
    tab.wait("document.querySelectorAll('.card.is-unkept').length === 0")
    tab.wait_for_text("#kept", "nowhere else")
    assert not tab.evaluate(asks)


# -- Right to left --

HEBREW = {
    "text": "שלום לך מה שלומך",
    "segments": [
        {"id": 0, "seek": 0, "start": 0.0, "end": 2.0, "text": " שלום לך", "speaker": "Ann"},
        {"id": 1, "seek": 0, "start": 2.0, "end": 4.0, "text": " מה שלומך", "speaker": "Ben"},
    ],
    "language": "hebrew",
}


def test_a_text_from_right_to_left_is_laid_out_so_with_its_speakers(open_any: OpenAny) -> None:
    tab = open_text(open_any, HEBREW)
    style = "getComputedStyle(document.querySelector('.transcript .turn'))"
    assert tab.evaluate(f"{style}.direction") == "rtl"
    assert tab.evaluate(f"{style}.borderRightWidth") == "3px"
    assert tab.evaluate(f"{style}.borderLeftWidth") == "0px"
    right_of = "(selector) => document.querySelector(selector).getBoundingClientRect().right"
    is_right = f"({right_of})('.transcript .speaker') - ({right_of})('.transcript .speaker bdi') > 5"
    assert tab.evaluate(is_right)  # its dot stands there
    tab.evaluate("document.querySelector('#cards .transcript').focus()")
    left = "new KeyboardEvent('keydown', { key: 'ArrowLeft', bubbles: true })"
    for _ in range(2):
        tab.evaluate(f"document.activeElement.dispatchEvent({left})")
    assert tab.evaluate("document.querySelector('.word.is-reached').textContent") == "לך"
    document = document_of(tab, HEBREW)
    assert "<w:bidi/>" in document
    assert "<w:rtl/>" in document


def test_each_language_that_whisper_names_has_its_code(open_any: OpenAny) -> None:
    tab = open_any()
    tab.wait_for_text("#model", "whisper-digits")
    found = tab.evaluate(
        f"""import("/web/options.js").then(({{ codeOf, offerOptions }}) => {{
            const names = {json.dumps(dict(NAMES))};
            offerOptions({{ languages: Object.keys(names) }});
            return Object.values(names).filter((name) => !codeOf(name));
        }})"""
    )
    assert found == []


# -- Keys and the focus --


def test_a_composition_ends_in_the_field_not_with_it(open_any: OpenAny) -> None:
    tab = open_text(open_any, WORDS)
    tab.click(WORD.format(3), times=2)
    for key in ("Enter", "Escape"):
        event = f"new KeyboardEvent('keydown', {{ key: '{key}', isComposing: true, bubbles: true }})"
        tab.evaluate(f"document.querySelector('.word input').dispatchEvent({event})")
        assert tab.evaluate(VALUE) == TEXTS[2]
    tab.type(ESCAPE)
    tab.wait(f"{VALUE} === undefined")


RINGS = """[...document.querySelectorAll(":not(#files)")]
    .filter((element) => getComputedStyle(element).outlineStyle === "solid")
    .map((element) => element.textContent.trim())"""


def test_one_focus_has_one_ring(open_any: OpenAny) -> None:
    tab = open_any()
    tab.wait_for_text("#model", "whisper-digits")
    for _ in range(10):
        tab.type(TAB)
        if tab.evaluate("document.activeElement.id") == "files":
            break
    assert tab.evaluate(RINGS) == ["Choose files"]


def test_replacing_all_leaves_the_focus_in_the_row(open_any: OpenAny) -> None:
    tab = open_text(open_any, WORDS)
    press_button(tab, "Find and replace")
    tab.type("wide")
    tab.type(ENTER)
    tab.wait_for_text(".replace [role=status]", "1 replaced")
    tab.evaluate("document.querySelector('.replace input').select()")
    tab.type("words")
    tab.click(".replace button.all")
    tab.wait_for_text(".replace [role=status]", "1 replaced")
    assert tab.evaluate("document.activeElement.closest('.replace') !== null")


def test_a_deletion_far_down_leaves_the_page_where_it_is(open_any: OpenAny) -> None:
    tab = open_any()
    tab.wait_for_text("#model", "whisper-digits")
    answer_with(tab, **WORDS)
    drop(tab, *(f"{number}.wav" for number in range(30)))
    tab.wait("document.querySelectorAll('.fold:enabled').length === 30")
    tab.evaluate(
        "document.querySelector('[aria-label=\"Delete 15.wav\"]').scrollIntoView({ block: 'center' })"
    )
    tab.evaluate("document.querySelector('[aria-label=\"Delete 15.wav\"]').click()")
    tab.wait_for_text("#undo-text", "15.wav is deleted.")
    tab.wait("document.activeElement.id === 'undo'")
    for selector in ('[aria-label="Delete 14.wav"]', "#undo"):
        box = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        assert tab.evaluate(f"{box}.top >= 0 && {box}.bottom <= innerHeight")


def test_a_menu_opens_within_the_window(open_any: OpenAny) -> None:
    tab = open_text(open_any, WORDS)
    press_button(tab, "call.wav")
    tab.evaluate("(document.querySelector('#cards').style.marginTop = '200vh', 0)")
    tab.evaluate("document.querySelector('.menu').scrollIntoView({ block: 'end' })")
    tab.evaluate("document.querySelector('.menu').click()")
    choices = "document.querySelector('.menu-choices:popover-open')"
    tab.wait(f"{choices}?.getBoundingClientRect().bottom <= innerHeight + 1")


def test_a_key_that_has_expired_is_asked_for_again_on_each_view(open_any: OpenAny) -> None:
    tab = open_any()
    tab.wait_for_text("#model", "whisper-digits")
    tab.evaluate(
        """(() => {
            const { fetch } = window;
            const refusal = JSON.stringify({ error: { message: "Incorrect API key." } });
            window.fetch = async (path, options) =>
                `${path}`.startsWith("v1/") ? new Response(refusal, { status: 401 }) : fetch(path, options);
        })()"""
    )
    tab.evaluate("(location.hash = '#server', 0)")
    tab.wait("document.querySelector('#key').checkVisibility()")


def test_a_text_that_one_reads_stays_open_when_it_is_done(open_any: OpenAny) -> None:
    tab = open_text(open_any, WORDS)
    tab.evaluate(
        """(() => {
            const { send } = XMLHttpRequest.prototype;
            XMLHttpRequest.prototype.send = function (form) {
                this.upload.onload?.();
                window.release = () => send.call(this, form);
            };
        })()"""
    )
    drop(tab, "two.wav")
    tab.wait("window.release")
    press_button(tab, "call.wav")
    tab.wait("document.querySelectorAll('.fold[aria-expanded=true]').length === 2")
    text = "document.querySelector('#cards .card .transcript')"
    tab.evaluate(f"{text}.dispatchEvent(new WheelEvent('wheel', {{ bubbles: true }}))")
    tab.evaluate("window.release()")
    tab.wait("document.querySelectorAll('.fold:enabled').length === 2")
    tab.wait("document.querySelectorAll('.fold[aria-expanded=true]').length === 2")
