"""What people do on the page every day: in headless Chromium, on a real server."""

import csv
import io
from typing import Any
from zipfile import ZipFile

import pytest
from playwright.sync_api import Page, Route, expect

from tests.conftest import Server
from tests.page.browsing import (
    NEEDS_CHROMIUM,
    SPOKEN,
    OpenPage,
    card,
    choose,
    correct,
    payload,
    unlock,
    wait_until_deleted,
    wait_until_kept,
)
from tests.support.speech import say

pytestmark = NEEDS_CHROMIUM

DROP_TEXT = """() => {
    const dataTransfer = new DataTransfer();
    dataTransfer.setData("text/plain", "some words");
    document.dispatchEvent(new DragEvent("drop", { dataTransfer, cancelable: true }));
}"""


def only_with(key: str) -> Any:
    def unless_key(route: Route) -> None:
        if route.request.headers.get("authorization") == f"Bearer {key}":
            route.continue_()
        else:
            route.fulfill(status=401, json={"error": {"message": "Incorrect API key."}})

    return lambda page: page.route("**/v1/models", unless_key)


# -- 9: keys, and a browser that keeps nothing --


def test_a_key_with_other_letters_is_refused_in_words_and_locks_nothing(open_page: OpenPage) -> None:
    page = open_page(mock=only_with("s3cret"))
    for key, why in (
        ("schlüssel–ключ", "#key:invalid[title*='only letters from A to Z']"),
        ("wrong", "#key-error:text('does not take this key')"),
    ):
        page.get_by_label("This server asks for an API key.").fill(key)
        page.get_by_role("button", name="Use this key").click()
        expect(page.locator(why)).to_be_visible()
        assert page.evaluate("sessionStorage.length") == 0  # it is kept only after it was taken
    page.get_by_label("This server asks for an API key.").fill("s3cret")
    page.keyboard.press("Enter")
    expect(page.locator("#model")).to_contain_text("whisper-digits")
    assert page.evaluate("sessionStorage.length") == 1


def test_one_speaks_with_a_key_that_no_websocket_could_carry(
    open_page: OpenPage, locked_server: Server
) -> None:
    page = unlock(open_page, locked_server)
    page.get_by_role("button", name="Speak").click()
    expect(page.locator("#live-text")).to_contain_text("two seven one")


NOTHING_KEPT = """(() => {
    const refuse = { get: () => { throw new DOMException("no", "SecurityError"); } };
    const names = ["sessionStorage", "localStorage", "indexedDB"];
    for (const name of names) Object.defineProperty(window, name, refuse);
})()"""


def test_a_browser_without_storage_works_for_the_visit(open_page: OpenPage) -> None:
    def mock(page: Page) -> None:
        page.add_init_script(NOTHING_KEPT)
        only_with("s3cret")(page)

    page = open_page(mock=mock)
    page.get_by_label("This server asks for an API key.").fill("s3cret")
    page.keyboard.press("Enter")
    choose(page, payload("call.wav"))
    expect(card(page, "call.wav").locator(".transcript")).to_have_text(SPOKEN.text)
    expect(page.locator("#kept")).to_contain_text("keeps nothing")


# -- 10: copying, memory --


def test_a_text_is_copied_without_https(open_page: OpenPage) -> None:
    page = open_page(permissions=["clipboard-read"])
    choose(page, payload("call.wav")).locator(".word").first.wait_for()
    page.evaluate("() => Object.defineProperty(navigator.clipboard, 'writeText', { value: undefined })")
    card(page, "call.wav").get_by_role("button", name="Copy text").click()
    expect(card(page, "call.wav").get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == SPOKEN.text


WATCH_READING = """() => {
    const { arrayBuffer } = Blob.prototype;
    window.reading = { now: 0, most: 0 };
    const { decodeAudioData } = BaseAudioContext.prototype;
    BaseAudioContext.prototype.decodeAudioData = async function (...all) {
        window.reading.most = Math.max(window.reading.most, ++window.reading.now);
        try { return await decodeAudioData.apply(this, all); } finally { window.reading.now--; }
    };
    const { createObjectURL, revokeObjectURL } = URL;
    window.urls = new Set();
    URL.createObjectURL = (blob) => { const url = createObjectURL(blob); window.urls.add(url); return url; };
    URL.revokeObjectURL = (url) => { window.urls.delete(url); revokeObjectURL(url); };
}"""


def test_files_are_read_one_after_the_other_and_deleted_cards_are_freed(open_page: OpenPage) -> None:
    page = open_page()
    page.evaluate(WATCH_READING)
    page.route("**/v1/audio/transcriptions", lambda route: route.fulfill(status=500))
    spoken = say("1", gap_s=0.1)
    choose(page, *(payload(f"{number}.wav", spoken) for number in range(10)))
    expect(page.locator("#queue-text")).to_have_text("10 files could not be transcribed.")
    page.evaluate(
        "() => { window.cards = [...document.querySelectorAll('.card')].map((c) => new WeakRef(c)); }"
    )
    for number in range(10):
        card(page, f"{number}.wav").get_by_role("button", name=f"Delete {number}.wav").click()
    expect(page.locator("#cards > li")).to_have_count(0)
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.collectGarbage")
    assert page.evaluate("window.cards.filter((card) => card.deref()).length") <= 2
    assert page.evaluate("window.reading.most") <= 1
    assert page.evaluate("window.urls.size") == 0


def test_a_deleted_recording_is_not_uploaded_again(open_page: OpenPage) -> None:
    sent: list[str] = []

    def busy(route: Route) -> None:
        sent.append(route.request.url)
        route.fulfill(status=429, json={"error": {"message": "Full."}}, headers={"retry-after": "30"})

    def mock(page: Page) -> None:
        page.clock.install()
        page.route("**/v1/audio/transcriptions", busy)

    page = open_page(mock=mock)
    choose(page, payload("call.wav"))
    expect(card(page, "call.wav").locator(".facts")).to_contain_text("the server is busy")
    card(page, "call.wav").get_by_role("button", name="Delete call.wav").click()
    page.clock.run_for(60_000)
    expect(page.locator("#cards > li")).to_have_count(0)
    assert len(sent) == 1


# -- 11: everyday --


def test_dropped_text_folds_nothing_and_a_search_hides_nothing_new(open_page: OpenPage) -> None:
    page = open_page()
    choose(page, payload("one.wav")).locator(".word").first.wait_for()
    page.evaluate(DROP_TEXT)
    expect(card(page, "one.wav").locator(".word").first).to_be_visible()
    page.get_by_label("Search your transcripts").fill("nowhere")
    expect(card(page, "one.wav")).to_be_hidden()
    choose(page, payload("two.wav"))
    expect(card(page, "two.wav")).to_be_visible()
    expect(card(page, "one.wav")).to_be_visible()


def test_deletions_are_undone_one_after_the_other_and_a_double_click_deletes_one(open_page: OpenPage) -> None:
    page = open_page()
    names = ["a.wav", "b.wav", "c.wav"]
    choose(page, *(payload(name) for name in names))
    for name in names:
        wait_until_kept(page, name, "name")
    for name in names[:2]:
        card(page, name).get_by_role("button", name=f"Delete {name}").click()
    for name in reversed(names[:2]):
        expect(page.locator("#undo-text")).to_have_text(f"{name} is deleted.")
        page.get_by_role("button", name="Undo").click()
    expect(page.locator("#cards .fold")).to_have_text(names)
    expect(page.locator("#undo-row")).to_be_hidden()
    card(page, "b.wav").locator(".fold").click()
    expect(card(page, "b.wav").locator(".transcript")).to_have_text(SPOKEN.text)  # not its preview alone
    box = card(page, "a.wav").get_by_role("button", name="Delete a.wav").bounding_box()
    assert box
    page.mouse.dblclick(box["x"] + 10, box["y"] + 10)
    expect(page.locator("#cards > li")).to_have_count(2)
    wait_until_deleted(page, "a.wav")
    page.reload()
    expect(page.locator("#cards .fold")).to_have_text(["b.wav", "c.wav"])


def test_letters_that_grow_in_lower_case_do_not_shift_the_marks(open_page: OpenPage) -> None:
    page = open_page()
    found = page.evaluate(
        """async () => {
            const { previewOf, has } = await import("/web/entry.js");
            const entry = { name: "x", text: "İİİİ İstanbul here" };
            return [previewOf(entry, "here")[2].textContent, has(entry, "istanbul")];
        }"""
    )
    assert found == ["here", True]


def test_one_card_plays_at_a_time(open_page: OpenPage) -> None:
    page = open_page()
    long = say("3141592653" * 3, gap_s=0.5)
    choose(page, payload("one.wav", long)).locator(".word").first.wait_for()
    card(page, "one.wav").get_by_role("button", name="Play one.wav").click()
    expect(card(page, "one.wav").get_by_role("button", name="Pause one.wav")).to_be_visible()
    choose(page, payload("two.wav", long)).locator(".fold:enabled").click()
    card(page, "two.wav").get_by_role("button", name="Play two.wav").click()
    expect(card(page, "two.wav").get_by_role("button", name="Pause two.wav")).to_be_visible()
    expect(card(page, "one.wav").get_by_role("button", name="Play one.wav")).to_be_visible()


def test_the_view_of_a_frozen_server_piles_up_no_requests(open_page: OpenPage) -> None:
    asked: list[str] = []

    def freeze(route: Route) -> None:
        asked.append(route.request.url)

    def mock(page: Page) -> None:
        page.clock.install()
        page.add_init_script("AbortSignal.timeout = () => new AbortController().signal")  # of the real clock
        page.route("**/v1/activity", freeze)

    page = open_page("/#server", mock=mock)
    while not asked:
        page.wait_for_timeout(20)
    page.clock.run_for(60_000)
    assert len(asked) == 1


# -- 12: for everybody --


def test_print_shows_all_words_and_the_skip_link_works_in_each_view(open_page: OpenPage) -> None:
    page = open_page()
    choose(page, payload("long.wav", say("3141592653" * 8, gap_s=0.1)))
    words = card(page, "long.wav").locator(".transcript")
    card(page, "long.wav").locator(".word").first.wait_for()
    page.evaluate("() => document.querySelector('.transcript').classList.add('is-long')")
    page.emulate_media(media="print")
    assert words.evaluate("(box) => box.scrollHeight <= box.clientHeight + 1")
    expect(page.locator("#drop")).to_be_hidden()
    page.emulate_media(media="screen")
    for view in ("server", "transcribe"):
        page.locator(f"nav a[data-view={view}]").click()
        page.locator(".skip").press("Enter")
        expect(page.locator(f"#{view}-view")).to_be_visible()
        expect(page.locator("main")).to_be_focused()


def test_texts_have_a_language_and_a_direction(open_page: OpenPage) -> None:
    page = open_page()
    choose(page, payload("call.wav"))
    word = card(page, "call.wav").locator(".word").first
    word.wait_for()
    assert word.evaluate("(word) => word.closest('[lang]').lang") == "en"
    assert word.evaluate("(word) => word.closest('[dir]').dir") == "auto"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_forced_colours_show_what_is_lit_and_the_picture(open_page: OpenPage, scheme: Any) -> None:
    page = open_page(forced_colors="active", color_scheme=scheme)
    done = choose(page, payload("call.wav"))
    done.locator(".word").nth(1).click()
    background = "(word) => getComputedStyle(word).backgroundColor"
    assert done.locator(".word.is-lit").evaluate(background) != done.locator(".word").nth(3).evaluate(
        background
    )
    colours = done.locator(".wave").evaluate(
        """(wave) => {
            const { backgroundImage } = getComputedStyle(wave.querySelector(".bands"));
            const bands = backgroundImage.match(/rgb\\([^)]+\\)/g);
            return new Set([...bands, getComputedStyle(wave).backgroundColor]).size;
        }"""
    )
    assert colours >= 2


def test_what_is_said_is_announced_turn_by_turn(open_page: OpenPage) -> None:
    page = open_page(permissions=["microphone"])
    page.evaluate(
        """() => {
            window.removed = 0;
            new MutationObserver((all) => all.forEach((one) => (window.removed += one.removedNodes.length)))
                .observe(document.getElementById("live-said"), { childList: true });
        }"""
    )
    page.get_by_role("button", name="Speak").click()
    expect(page.locator("#live-said p")).not_to_have_count(0)
    expect(page.locator("#live-said p").nth(1)).to_have_text("two seven one ")
    assert page.evaluate("window.removed") == 0


# -- What people love elsewhere --


def test_corrections_are_undone_and_redone_by_keys(open_page: OpenPage) -> None:
    page = open_page()
    done = choose(page, payload("call.wav"))
    for word, text in ((0, "Thirty"), (1, "won")):
        correct(page, "call.wav", word, text)
    both = SPOKEN.text.replace("three one", "Thirty won")
    one = SPOKEN.text.replace("three", "Thirty")
    for keys, text in (("z", one), ("z", SPOKEN.text), ("Shift+z", one), ("y", both), ("z", one)):
        page.keyboard.press(f"Control+{keys}")
        expect(done.locator(".transcript")).to_have_text(text)
    wait_until_kept(page, one)


def test_space_and_arrows_play_from_anywhere_at_the_chosen_speed(open_page: OpenPage) -> None:
    page = open_page()
    done = choose(page, payload("call.wav", say("3141592653" * 4, gap_s=0.5)))
    done.locator(".word").first.wait_for()
    done.get_by_label("Speed of call.wav").select_option("2 ×")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(done.locator(".clock")).to_contain_text("0:10 /")
    page.keyboard.press(" ")
    expect(done.get_by_role("button", name="Pause call.wav")).to_be_visible()
    assert done.locator("audio").evaluate("(audio) => audio.playbackRate") == 2
    page.keyboard.press(" ")
    expect(done.get_by_role("button", name="Play call.wav")).to_be_visible()


def test_all_are_downloaded_as_one_zip(open_page: OpenPage) -> None:
    page = open_page(accept_downloads=True)
    choose(page, payload("one.wav"), payload("one.wav"))
    expect(page.locator(".fold:enabled")).to_have_count(2)
    with page.expect_download() as download:
        page.get_by_role("button", name="Download all").click()
    with ZipFile(download.value.path()) as archive:
        assert archive.testzip() is None
        assert {"one.txt", "one (2).txt", "one.srt", "one.csv", "one.json"} <= set(archive.namelist())
        assert archive.read("one (2).txt").decode() == f"{SPOKEN.text}\n"
        rows = list(csv.DictReader(io.StringIO(archive.read("one.csv").decode())))
    assert " ".join(row["text"] for row in rows) == SPOKEN.text


def test_a_recording_is_transcribed_anew_with_other_options(open_page: OpenPage) -> None:
    page = open_page()
    choose(page, payload("call.wav")).locator(".word").first.wait_for()
    page.locator("summary", has_text="Choices").click()
    page.get_by_label("Names and words to expect").fill("Oberursel")
    page.evaluate(
        """() => {
            const { send } = XMLHttpRequest.prototype;
            XMLHttpRequest.prototype.send = function (form) {
                window.prompted = form.get("hotwords");
                return send.call(this, form);
            };
        }"""
    )
    card(page, "call.wav").get_by_role("button", name="Transcribe again").click()
    expect(page.locator(".fold:enabled")).to_have_text(["call.wav", "call.wav"])
    assert page.evaluate("window.prompted") == "Oberursel"
