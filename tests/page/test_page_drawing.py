"""What the page draws and when, of many cards and of long texts: in headless Chromium, on a real server."""

import json
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from tests.page.browsing import (
    NEEDS_CHROMIUM,
    SPOKEN,
    OpenPage,
    answering,
    card,
    choose,
    end_of_stream,
    payload,
    words_at,
)
from tests.support.speech import say

pytestmark = NEEDS_CHROMIUM

SHORT = say("1", gap_s=0.1)
ONE = answering(**words_at(("one", 0.0)))
NUM_WORDS = 10_000
TEXTS = [*(f"word{i % 97}" for i in range(NUM_WORDS - 1)), "last"]


def opened_with_long_text(open_page: OpenPage, **fields: Any) -> Page:
    page = open_page(mock=answering(**{**end_of_stream(TEXTS), **fields}))
    choose(page, payload("long.wav", SHORT))
    expect(page.locator(".word")).to_have_count(NUM_WORDS)
    return page


# -- Cards --

WATCH_PREVIEWS = """() => {
    window.drawn = [];
    for (const preview of document.querySelectorAll("#cards .preview")) {
        new MutationObserver((all) => window.drawn.push(...all.map(() => preview.textContent)))
            .observe(preview, { subtree: true, childList: true, characterData: true });
    }
}"""


def test_a_card_is_not_drawn_again_because_of_another_one(open_page: OpenPage) -> None:
    page = open_page(mock=ONE)
    choose(page, payload("one.wav", SHORT), payload("two.wav", SHORT))
    expect(page.locator(".fold:enabled")).to_have_count(2)
    page.locator(".fold[aria-expanded=true]").click()
    page.evaluate(WATCH_PREVIEWS)
    choose(page, payload("three.wav", SHORT))
    expect(page.locator(".fold:enabled")).to_have_count(3)
    assert page.evaluate("window.drawn") == []
    page.get_by_label("Search your transcripts").fill("one")
    expect(card(page, "one.wav").locator("mark")).to_have_text("one")
    page.wait_for_function("window.drawn.length >= 2")


NUM_KEPT = 300
KEEP = """async (number) => {
    const { Store } = await import("/web/store.js");
    const store = new Store();
    const entry = (i) => ({ id: `${i}`, name: `${i}.wav`, order: i, text: "one", duration: 60 });
    const put = (i) => store.put(entry(i), { text: "one" });
    await Promise.all(Array.from({ length: number }, (_, i) => put(i)));
    store.database.close();
}"""
DELETE_ELSEWHERE = """new MutationObserver((_, observer) => {
    if (!document.querySelector("#cards > li")) return;
    observer.disconnect();
    new BroadcastChannel("asr-server").postMessage({ what: "removed", ids: ["1"] });
}).observe(document, { subtree: true, childList: true })"""


def test_what_another_tab_deletes_while_the_list_is_being_shown_does_not_come(open_page: OpenPage) -> None:
    page = open_page("/version", bypass_csp=True)  # of the same origin, without a list
    page.evaluate(KEEP, NUM_KEPT)
    page.add_init_script(DELETE_ELSEWHERE)
    page.goto(page.url.replace("/version", "/"))
    expect(card(page, "0.wav")).to_have_count(1)  # the last to be shown
    expect(card(page, "1.wav")).to_have_count(0)
    expect(page.locator("#cards > li")).to_have_count(NUM_KEPT - 1)


def test_a_menu_lies_over_the_cards_below_it(open_page: OpenPage) -> None:
    page = open_page(mock=ONE, viewport={"width": 1000, "height": 1400})
    choose(page, payload("one.wav", SHORT), payload("two.wav", SHORT))
    expect(page.locator(".fold:enabled")).to_have_count(2)
    page.locator(".fold[aria-expanded=true]").click()
    card(page, "one.wav").locator(".menu").click()
    last = card(page, "one.wav").locator(".menu-choices button").last
    seen = last.evaluate(
        """(button) => {
            const { left, right, top, bottom } = button.getBoundingClientRect();
            return button.contains(document.elementFromPoint((left + right) / 2, (top + bottom) / 2));
        }"""
    )
    assert seen


# -- Text that comes --

NUM_DELTAS = 2_000
WATCH_TEXT = """() => {
    window.drawn = 0;
    const isText = ({ target, addedNodes: [added] }) =>
        target.closest?.(".transcript") && added?.nodeType === Node.TEXT_NODE;
    new MutationObserver((all) => (window.drawn += all.filter(isText).length))
        .observe(document.getElementById("cards"), { subtree: true, childList: true });
}"""


def test_many_words_that_come_at_once_are_not_drawn_one_by_one(open_page: OpenPage) -> None:
    texts = TEXTS[:NUM_DELTAS]
    events = [{"type": "transcript.text.delta", "delta": f"{text} "} for text in texts]
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in [*events, end_of_stream(texts)])

    def answer(route: Route) -> None:
        route.fulfill(body=f"{body}data: [DONE]\n\n", headers={"content-type": "text/event-stream"})

    page = open_page(mock=lambda page: page.route("**/v1/audio/transcriptions", answer))
    page.evaluate(WATCH_TEXT)
    choose(page, payload("call.wav", SHORT))
    expect(page.locator(".word")).to_have_count(NUM_DELTAS)
    assert page.evaluate("window.drawn") < NUM_DELTAS / 10


def test_a_tab_that_draws_no_frames_has_the_text_in_the_end(open_page: OpenPage) -> None:
    page = open_page()
    page.evaluate("() => { window.requestAnimationFrame = () => 1; }")  # as in a hidden tab
    choose(page, payload("call.wav"))
    expect(card(page, "call.wav").locator(".transcript")).to_have_text(SPOKEN.text)
    expect(card(page, "call.wav").locator(".facts")).to_contain_text("× real time")


# -- Long texts --

BELOW_TOP = """(word) => {
    const top = (element) => element.getBoundingClientRect().top;
    return top(word) - top(word.closest(".transcript"));
}"""


def test_a_word_far_down_is_found_before_the_rest_is_shown(open_page: OpenPage) -> None:
    page = opened_with_long_text(open_page)
    done = card(page, "long.wav")
    done.locator(".fold").click()
    expect(page.locator(".word")).to_have_count(0)
    page.get_by_label("Search your transcripts").fill("last")
    done.locator(".fold").click()
    expect(done.locator(".word.is-found")).to_have_text(["last"])
    expect(page.locator(".word")).to_have_count(NUM_WORDS)
    height = done.locator(".transcript").evaluate("(box) => box.clientHeight")
    assert 0 <= done.locator(".word.is-found").evaluate(BELOW_TOP) < height
    assert done.locator(".transcript").text_content() == " ".join(TEXTS)


FOLD_EARLY = """async () => {
    const fold = document.querySelector(".fold");
    const later = () => new Promise((resolve) => setTimeout(resolve));
    const words = () => document.querySelectorAll(".word").length;
    fold.click();
    while (!words()) await later();
    fold.click();
    for (let i = 0; i < 20; i++) await later();
    return words();
}"""


def test_a_text_that_is_folded_while_it_is_being_shown_is_gone_and_comes_whole(open_page: OpenPage) -> None:
    page = opened_with_long_text(open_page)
    done = card(page, "long.wav")
    done.locator(".fold").click()
    assert page.evaluate(FOLD_EARLY) == 0
    done.locator(".fold").click()
    expect(page.locator(".word")).to_have_count(NUM_WORDS)
    assert done.locator(".transcript").text_content() == " ".join(TEXTS)


def test_the_place_in_a_long_text_stays_when_a_speaker_gets_another_name(open_page: OpenPage) -> None:
    segments = [
        {**segment, "speaker": "AB"[i // 5 % 2]} for i, segment in enumerate(end_of_stream(TEXTS)["segments"])
    ]
    page = opened_with_long_text(open_page, segments=segments)
    word = page.locator(".word").nth(NUM_WORDS // 2)
    word.evaluate("(word) => word.scrollIntoView({ block: 'center' })")
    before = word.evaluate(BELOW_TOP)
    page.get_by_role("button", name="Rename A").focus()
    page.get_by_role("button", name="Rename A").press("Enter")
    page.get_by_label("Name of speaker A").fill("Ann")
    page.keyboard.press("Enter")
    expect(page.locator(".transcript .speaker").first).to_have_text("Ann")
    expect(page.locator(".word")).to_have_count(NUM_WORDS)
    assert word.evaluate(BELOW_TOP) == pytest.approx(before, abs=2)
