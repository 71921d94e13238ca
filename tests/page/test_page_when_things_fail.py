"""The page while the server, the store or another tab fails it: in headless Chromium, on a real server."""

import json
from typing import Any

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
    wait_until_kept,
)
from tests.page.test_page_keeps_work import (
    LIVE_TRACKS,
    PUT_ODD,
    WATCH_TRACKS,
    asks_before_leaving,
    second_tab,
    speak,
)

pytestmark = NEEDS_CHROMIUM

REFUSAL = {"error": {"message": "Incorrect API key.", "type": "invalid_request_error"}}


def refuse_key(route: Route) -> None:
    route.fulfill(status=401, json=REFUSAL)


# -- 1, 3, 7: while one speaks --


def test_a_refused_key_gives_the_microphone_back(open_page: OpenPage, locked_server: Server) -> None:
    page = unlock(open_page, locked_server)
    page.evaluate(WATCH_TRACKS)
    page.route("**/v1/realtime/client_secrets", refuse_key)
    for _ in range(2):
        speak(page)
        expect(page.locator("#message")).to_contain_text("Incorrect API key")
    assert page.evaluate("window.tracks.length") == 2
    assert page.evaluate(LIVE_TRACKS) == 0


def test_an_open_correction_and_what_has_the_focus_stay_when_a_recording_ends(open_page: OpenPage) -> None:
    page = open_page(permissions=["microphone"])
    done = choose(page, payload("one.wav"))
    done.locator(".word").first.wait_for()
    assert not asks_before_leaving(page)
    speak(page)
    expect(page.locator("#live-text")).to_contain_text("two seven one")
    assert asks_before_leaving(page)
    page.locator("#stop").click()
    expect(card(page, "Recording 1").locator(".transcript")).to_contain_text("two seven one")
    held: list[Route] = []
    page.route("**/v1/audio/transcriptions", lambda route: route.continue_() if held else held.append(route))
    choose(page, payload("held.wav"))
    while not held:
        page.wait_for_timeout(50)
    if done.locator(".fold").get_attribute("aria-expanded") == "false":
        done.locator(".fold").click()
    done.locator(".word").nth(1).dblclick()
    done.locator(".word input").fill("won")
    held[0].continue_()
    expect(card(page, "held.wav").locator(".preview")).to_have_text(SPOKEN.text)
    expect(done.locator(".word input")).to_have_value("won")
    done.locator(".word input").press("Enter")
    corrected = SPOKEN.text.replace("one", "won", 1)
    wait_until_kept(page, corrected)
    expect(done.locator(".transcript")).to_be_focused()
    choose(page, payload("two.wav"))
    expect(card(page, "two.wav").locator(".preview")).to_have_text(SPOKEN.text)
    expect(done.locator(".transcript")).to_have_text(corrected)  # unfolded


# -- 5, 6: another tab, and a store that is gone --


def test_a_correction_of_what_another_tab_deletes_comes_back_with_it(
    open_page: OpenPage, server: Server
) -> None:
    page = open_page()
    choose(page, payload("one.wav"))
    wait_until_kept(page, SPOKEN.text)
    other = second_tab(page, server)
    card(page, "one.wav").locator(".word").nth(1).dblclick()
    card(page, "one.wav").locator(".word input").fill("won")
    other.get_by_role("button", name="Delete one.wav").click()
    expect(page.locator("#undo-text")).to_have_text("one.wav was deleted in another tab.")
    expect(other.locator("#cards > li")).to_have_count(0)
    page.get_by_role("button", name="Undo").click()
    corrected = SPOKEN.text.replace("one", "won", 1)
    wait_until_kept(page, corrected)
    expect(card(other, "one.wav").locator(".preview")).to_have_text(corrected)


def test_a_correction_that_the_store_does_not_take_is_named_and_stays_here(open_page: OpenPage) -> None:
    page = open_page()
    choose(page, payload("one.wav"))
    wait_until_kept(page, SPOKEN.text)
    page.evaluate(PUT_ODD, 7)  # a newer page has taken the store over
    expect(page.locator("#kept")).to_contain_text("keeps nothing")
    correct(page, "one.wav", 1, "won")
    expect(page.locator("#message")).to_contain_text(
        "The transcript of one.wav could not be kept in this browser: its store was closed; reload the page."
    )
    expect(card(page, "one.wav").locator(".transcript")).to_have_text(SPOKEN.text.replace("one", "won", 1))
    for _ in range(2):
        card(page, "one.wav").locator(".fold").click()  # not freed: nobody else has the correction
    expect(card(page, "one.wav").locator(".transcript")).to_have_text(SPOKEN.text.replace("one", "won", 1))


# -- 8: no card waits for ever --


def stop_refusing(page: Page) -> None:
    for path in ("**/v1/models", "**/v1/audio/transcriptions"):
        page.unroute(path)
    page.get_by_label("This server asks for an API key.").fill("s3cret")
    page.keyboard.press("Enter")


@pytest.mark.parametrize("path", ["**/v1/models", "**/v1/audio/transcriptions"])
def test_files_wait_for_a_key_and_go_on_with_it(open_page: OpenPage, path: str) -> None:
    page = open_page(mock=lambda page: page.route(path, refuse_key))
    names = ["1.wav", "2.wav", "3.wav"]
    choose(page, payload("0.wav"))
    expect(page.locator("#queue-text")).to_have_text(
        "The server asks for a key: 1 file will go on by itself."
    )
    choose(page, *(payload(name) for name in names))
    expect(page.locator("#queue-text")).to_have_text(
        "The server asks for a key: 4 files will go on by themselves."
    )
    stop_refusing(page)
    for name in names:
        expect(card(page, name)).to_contain_text(SPOKEN.text)


# -- 12: for everybody --


LOOK = """(element) => {
    const style = getComputedStyle(element);
    const { color, backgroundColor, textDecorationLine, outlineStyle, borderBottomColor } = style;
    return [color, backgroundColor, textDecorationLine, outlineStyle, borderBottomColor].join();
}"""


def test_forced_colours_show_what_is_found_and_the_view(open_page: OpenPage) -> None:
    page = open_page(forced_colors="active")
    choose(page, payload("call.wav"))
    words = card(page, "call.wav").locator(".word")
    words.first.wait_for()
    page.get_by_label("Search your transcripts").fill("four")
    assert card(page, "call.wav").locator(".word.is-found").evaluate(LOOK) != words.first.evaluate(LOOK)
    views = page.locator("nav a")
    assert views.nth(0).evaluate(LOOK) != views.nth(1).evaluate(LOOK)
    page.get_by_label("Search your transcripts").fill("")
    card(page, "call.wav").locator(".fold").click()
    page.get_by_label("Search your transcripts").fill("four")
    preview = card(page, "call.wav").locator(".preview")
    assert preview.locator("mark").evaluate(LOOK) != preview.evaluate(LOOK)


DIRECTION = "(element) => getComputedStyle(element).direction"
SPEAKING: dict[str, dict[str, object]] = {
    "input_audio_buffer.speech_started": {"audio_start_ms": 0},
    "conversation.item.input_audio_transcription.delta": {"delta": "שלום"},
}


def test_names_previews_and_what_is_spoken_have_a_direction_of_their_own(open_page: OpenPage) -> None:
    def serve(socket: Any) -> None:
        for type, fields in SPEAKING.items():
            socket.send(json.dumps({"type": type, "item_id": "a", **fields}))

    def mock(page: Page) -> None:
        def on_open(socket: Any) -> None:
            socket.on_message(lambda _: None)
            socket.send(json.dumps({"type": "session.created"}))
            serve(socket)

        page.route_web_socket("**/v1/realtime*", on_open)

    page = open_page(permissions=["microphone"], mock=mock)
    done = choose(page, payload("שלום.wav"))
    done.locator(".word").first.wait_for()
    assert done.locator(".fold").evaluate(DIRECTION) == "rtl"
    done.locator(".fold").click()
    assert done.locator(".preview").evaluate(DIRECTION) == "ltr"
    assert done.locator(".preview").get_attribute("lang") == "en"
    speak(page)
    spoken = page.locator("#live-text span")
    expect(spoken).to_contain_text("שלום")
    assert spoken.evaluate(DIRECTION) == "rtl"
