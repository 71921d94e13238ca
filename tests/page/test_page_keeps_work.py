"""Nothing that people did on the page is lost: in headless Chromium, on a real server."""

import json
import re
from typing import Any

from playwright.sync_api import Dialog, Page, Route, WebSocketRoute, expect

from tests.conftest import Server
from tests.page.browsing import (
    NEEDS_CHROMIUM,
    SPOKEN,
    OpenPage,
    answering,
    card,
    choose,
    correct,
    payload,
    wait_until_kept,
    words_at,
)

pytestmark = NEEDS_CHROMIUM

TURN = "conversation.item.input_audio_transcription"
WATCH_TRACKS = """() => {
    window.tracks = [];
    const real = navigator.mediaDevices.getUserMedia.bind(navigator.mediaDevices);
    navigator.mediaDevices.getUserMedia = async (asked) => {
        const stream = await real(asked);
        window.tracks.push(...stream.getTracks());
        return stream;
    };
}"""
LIVE_TRACKS = "window.tracks.filter((track) => track.readyState === 'live').length"


def speak(page: Page) -> None:
    page.get_by_role("button", name="Speak").click()


def second_tab(page: Page, server: Server) -> Page:
    other = page.context.new_page()
    other.goto(server.url)
    expect(other.locator("#kept")).to_have_text(re.compile("."))
    expect(other.locator("#cards > li")).not_to_have_count(0)
    return other


def unfold_alone(page: Page, name: str) -> None:
    for fold in page.locator(".fold").all():
        is_open = fold.get_attribute("aria-expanded") == "true"
        if is_open != (fold.text_content() == name):
            fold.click()
    card(page, name).locator(".word").first.wait_for()


# -- 1, 2: the microphone --


def test_a_failed_start_gives_the_microphone_back(open_page: OpenPage) -> None:
    page = open_page(permissions=["microphone"])
    page.evaluate(WATCH_TRACKS)
    page.evaluate(
        "() => { AudioWorklet.prototype.addModule = () => Promise.reject(new DOMException('404')); }"
    )
    speak(page)
    expect(page.locator("#message")).to_contain_text("reload it")
    page.route_web_socket("**/v1/realtime*", lambda socket: socket.close(code=1006))
    speak(page)
    expect(page.locator("#message")).to_contain_text("a proxy in between may not pass it on")
    assert page.evaluate("window.tracks.length") == 2
    assert page.evaluate(LIVE_TRACKS) == 0
    expect(page.get_by_role("button", name="Speak")).to_be_visible()


def talking(events: dict[str, Any], close: bool) -> Any:
    """A server of live sessions that recognises one word, sends `events` and goes away."""

    def serve(socket: WebSocketRoute) -> None:
        def on_message(message: str | bytes) -> None:
            if json.loads(message)["type"] != "input_audio_buffer.append" or socket in started:
                return
            started.append(socket)
            for type, fields in {
                "input_audio_buffer.speech_started": {"audio_start_ms": 0},
                f"{TURN}.delta": {"delta": "one"},
                **events,
            }.items():
                socket.send(json.dumps({"type": type, "item_id": "a", **fields}))
            if close:
                socket.close(code=1012, reason="The server is stopping.")

        socket.on_message(on_message)
        socket.send(json.dumps({"type": "session.created"}))

    started: list[WebSocketRoute] = []
    return serve


def test_a_session_that_breaks_is_followed_by_another_and_the_whole_sound_is_read(
    open_page: OpenPage,
) -> None:
    def mock(page: Page) -> None:
        page.route_web_socket("**/v1/realtime*", talking({}, close=True))
        page.route("**/v1/audio/transcriptions", fail)

    def fail(route: Route) -> None:
        route.fulfill(status=500)

    page = open_page(permissions=["microphone"], mock=mock)
    speak(page)
    expect(page.locator("#live-text")).to_contain_text("one one one")
    page.get_by_role("button", name="Stop").click()
    broken = card(page, "Recording 1")
    expect(broken.get_by_role("alert")).to_contain_text("status 500")
    expect(broken.locator(".facts")).to_contain_text(
        "incomplete: Words may be missing where the connection broke."
    )
    expect(broken.locator(".transcript")).to_contain_text("one one one")
    expect(broken.get_by_role("slider", name="Position in Recording 1")).to_be_visible()
    page.unroute("**/v1/audio/transcriptions")
    wait_until_kept(page, "Words may be missing where the connection broke.", "partial")
    page.reload()
    broken.locator(".fold").click()
    broken.get_by_role("button", name="Try again").click()
    expect(broken.locator(".facts")).to_contain_text("real time")
    expect(broken.locator(".facts")).not_to_contain_text("incomplete")


def test_a_failed_turn_makes_the_recording_partial(open_page: OpenPage) -> None:
    failed = {f"{TURN}.failed": {"error": {"message": "The engine stumbled."}}}
    page = open_page(
        permissions=["microphone"],
        mock=lambda page: page.route_web_socket("**/v1/realtime*", talking(failed, close=False)),
    )
    speak(page)
    expect(page.locator("#live-text")).to_contain_text("The engine stumbled.")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#live-status")).to_have_text("Waiting for the last words …")
    page.get_by_role("button", name="Stop").click()  # this server never answers to the end
    expect(card(page, "Recording 1").locator(".facts")).to_contain_text("incomplete: The engine stumbled.")


def test_a_browser_that_gives_no_sound_says_so(open_page: OpenPage) -> None:
    page = open_page(permissions=["microphone"])
    page.evaluate(
        "() => { AudioWorkletNode.prototype.connect = null; AudioNode.prototype.connect = () => {}; }"
    )
    speak(page)
    expect(page.locator("#message")).to_have_text("The browser gave no sound of the microphone.")
    expect(page.get_by_role("button", name="Speak")).to_be_visible()


# -- 3, 4: corrections --


def test_the_arrow_keys_pass_a_first_word_at_zero_and_equal_starts(open_page: OpenPage) -> None:
    words = words_at(("a", 0.0), ("b", 1.0), ("c", 1.0), ("d", 1.0), ("e", 2.0))
    page = open_page(mock=answering(**words))
    done = choose(page, payload("call.wav"))
    done.locator(".transcript[tabindex='0']").focus()
    for word in "abcde":
        page.keyboard.press("ArrowRight")
        expect(done.locator(".word.is-reached")).to_have_text(word)
        expect(done.get_by_role("status")).to_have_text(word)
    for word in "dcba":
        page.keyboard.press("ArrowLeft")
        expect(done.locator(".word.is-reached")).to_have_text(word)


def test_a_word_that_was_emptied_can_be_put_back(open_page: OpenPage) -> None:
    page = open_page()
    done = choose(page, payload("call.wav"))
    correct(page, "call.wav", 1, "")
    wait_until_kept(page, SPOKEN.text.replace("one ", "", 1))
    page.reload()
    done.locator(".fold").click()
    done.get_by_role("button", name="Correct words").click()
    done.locator(".word").nth(1).click()
    done.get_by_label("Put a word back").fill("one")
    page.keyboard.press("Enter")
    wait_until_kept(page, SPOKEN.text)


# -- 5, 6: the store --


def test_two_tabs_keep_each_others_corrections_and_deletions(open_page: OpenPage, server: Server) -> None:
    page = open_page()
    choose(page, payload("one.wav"), payload("two.wav"))
    wait_until_kept(page, "two.wav", "name")
    wait_until_kept(page, "one.wav", "name")
    other = second_tab(page, server)
    unfold_alone(page, "one.wav")
    unfold_alone(other, "one.wav")
    correct(page, "one.wav", 0, "Thirty")
    correct(other, "one.wav", 1, "won")
    both = SPOKEN.text.replace("three one", "Thirty won")
    for tab in (page, other):
        expect(card(tab, "one.wav").locator(".transcript")).to_have_text(both)
    wait_until_kept(page, both)
    other.get_by_role("button", name="Delete two.wav").click()
    expect(page.locator("#message")).to_have_text("two.wav was deleted in another tab.")
    expect(card(page, "two.wav")).to_have_count(0)
    other.get_by_role("button", name="Undo").click()
    expect(card(page, "two.wav").locator(".preview")).to_have_text(SPOKEN.text)
    page.reload()
    expect(page.locator("#cards .fold")).to_have_text(["one.wav", "two.wav"])  # in the order of before


def test_delete_all_leaves_what_a_search_hides(open_page: OpenPage) -> None:
    page = open_page()
    page.on("dialog", Dialog.accept)
    choose(page, payload("one.wav"), payload("two.wav"))
    wait_until_kept(page, "two.wav", "name")
    wait_until_kept(page, "one.wav", "name")
    page.get_by_label("Search your transcripts").fill("two.wav")
    expect(card(page, "one.wav")).to_be_hidden()
    page.get_by_role("button", name="Delete all").click()
    expect(card(page, "two.wav")).to_have_count(0)
    page.reload()
    expect(page.locator("#cards .fold")).to_have_text(["one.wav"])


SLOW_STORE = """(() => {
    const { open } = IDBFactory.prototype;
    IDBFactory.prototype.open = function (...all) {
        const request = open.apply(this, all);
        const later = (name, run) => (name === "onsuccess" ? () => setTimeout(run, 3000) : run);
        return new Proxy(request, {
            set: (_, name, run) => ((request[name] = later(name, run)), true),
            get: (_, name) => request[name],
        });
    };
})()"""


def test_a_transcript_that_is_ready_before_the_store_opens_is_kept(open_page: OpenPage) -> None:
    words = words_at(("early", 0.0))
    slow = answering(**words)

    def mock(page: Page) -> None:
        page.add_init_script(SLOW_STORE)
        slow(page)

    page = open_page(mock=mock)
    choose(page, payload("call.wav"))
    expect(card(page, "call.wav").locator(".transcript")).to_have_text("early")
    wait_until_kept(page, "early")


PUT_ODD = """async (version) => {
    const request = indexedDB.open("asr-server", version);
    const database = await new Promise((resolve, reject) => {
        request.onsuccess = () => resolve(request.result);
        request.onblocked = () => reject(new Error("an old tab blocks it"));
    });
    const transaction = database.transaction(["entries"], "readwrite");
    transaction.objectStore("entries").put({ id: 77, odd: true });
    await new Promise((resolve) => (transaction.oncomplete = resolve));
    database.close();
}"""


def test_an_odd_entry_and_a_newer_store_hide_nothing_and_no_tab_blocks_it(open_page: OpenPage) -> None:
    page = open_page()
    choose(page, payload("call.wav"))
    wait_until_kept(page, SPOKEN.text)
    page.evaluate(PUT_ODD, 7)  # while this tab has it open
    page.reload()
    expect(page.locator("#cards .fold")).to_have_text(["call.wav"])
    expect(page.locator("#kept")).to_contain_text("in this browser and nowhere else")


# -- 7: leaving --


def asks_before_leaving(page: Page) -> bool:
    return bool(page.evaluate("() => !dispatchEvent(new Event('beforeunload', { cancelable: true }))"))


def test_leaving_with_work_on_the_page_asks_first(open_page: OpenPage) -> None:
    page = open_page()
    expect(page.locator("#model")).to_contain_text("Served here")
    assert not asks_before_leaving(page)
    page.route("**/v1/audio/transcriptions", lambda route: None)
    choose(page, payload("call.wav"))
    expect(card(page, "call.wav").locator(".facts")).to_contain_text("waiting")
    assert asks_before_leaving(page)
    card(page, "call.wav").get_by_role("button", name="Delete call.wav").click()
    assert not asks_before_leaving(page)
    page.unroute("**/v1/audio/transcriptions")
    choose(page, payload("two.wav")).locator(".word").nth(1).dblclick()
    assert asks_before_leaving(page)
    page.keyboard.press("Escape")
    assert not asks_before_leaving(page)
    assert page.locator("a[href=docs]").get_attribute("target") == "_blank"


# -- 8: the server away --


def test_a_server_that_was_away_holds_the_queue_and_gets_it_when_it_is_back(open_page: OpenPage) -> None:
    page = open_page()
    expect(page.locator("#model")).to_contain_text("Served here")
    for path in ("**/v1/**", "**/ready"):
        page.route(path, lambda route: route.abort("connectionrefused"))
    names = [f"{number}.wav" for number in range(5)]
    choose(page, *(payload(name) for name in names))
    expect(page.locator("#queue-text")).to_have_text("The server is away: 5 files will go on by themselves.")
    expect(page.get_by_role("alert").filter(visible=True)).to_have_count(0)
    for path in ("**/v1/**", "**/ready"):
        page.unroute(path)
    for name in names:
        expect(card(page, name)).to_contain_text(SPOKEN.text)
    expect(page.locator("#queue")).to_be_hidden()


def test_files_that_failed_are_tried_again_by_one_button(open_page: OpenPage) -> None:
    page = open_page()
    page.route("**/v1/audio/transcriptions", lambda route: route.fulfill(status=500))
    names = [f"{number}.wav" for number in range(3)]
    choose(page, *(payload(name) for name in names))
    expect(page.locator("#queue-text")).to_have_text("3 files could not be transcribed.")
    page.unroute("**/v1/audio/transcriptions")
    page.get_by_role("button", name="Try all again").click()
    for name in names:
        expect(card(page, name)).to_contain_text(SPOKEN.text)


def test_no_card_waits_for_ever_where_the_models_cannot_be_asked(open_page: OpenPage) -> None:
    answers = [503, 500]

    def stumbling(route: Route) -> None:
        if answers:
            route.fulfill(status=answers.pop(0), json={"error": {"message": "The engine is starting."}})
        else:
            route.continue_()

    page = open_page(mock=lambda page: page.route("**/v1/models", stumbling))
    choose(page, payload("call.wav"))
    expect(page.locator("#model")).to_contain_text("Served here")
    expect(card(page, "call.wav").locator(".transcript")).to_have_text(SPOKEN.text)


def test_a_server_with_another_model_since_is_asked_for_that(open_page: OpenPage) -> None:
    def old(route: Route) -> None:
        body = route.fetch().json()
        route.fulfill(json={"data": [model | {"id": "yesterday"} for model in body["data"]]})

    page = open_page(mock=lambda page: page.route("**/v1/models", old, times=1))
    expect(page.locator("#model")).to_contain_text("yesterday")
    choose(page, payload("call.wav"))
    expect(card(page, "call.wav").locator(".transcript")).to_have_text(SPOKEN.text)
    expect(page.locator("#model")).to_contain_text("whisper-digits")
