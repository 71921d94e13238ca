"""The page in headless Chromium, on a real server with the embedded model."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import soundfile
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import (
    Browser,
    FilePayload,
    Locator,
    Page,
    Route,
    WebSocketRoute,
    expect,
    sync_playwright,
)
from playwright.sync_api import TimeoutError as PlaywrightTimeout

from asr_server.core import SAMPLE_RATE
from tests.api.sample_files import sound_file
from tests.conftest import Server
from tests.speech import Spoken, say

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium here: tests/install-browser.sh fetches it"
)

LIMIT_MS = 60_000
SPOKEN = say("314159", gap_s=[0.2, 0.2, 1.2, 0.2, 0.2, 0.5])
TURN = "conversation.item.input_audio_transcription"
OpenPage = Callable[..., Page]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Its microphone plays a file, again and again."""
    speech = tmp_path_factory.mktemp("microphone") / "speech.wav"
    soundfile.write(speech, say("271", gap_s=[0.2, 0.2, 1.5]).samples, SAMPLE_RATE)
    arguments = ["--no-sandbox", "--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]
    arguments.append(f"--use-file-for-fake-audio-capture={speech}")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Browser, server: Server) -> Iterator[OpenPage]:
    """Opens the page in a context of its own; an error in its scripts fails the test."""
    errors: list[str] = []
    contexts = []

    def open_it(path: str = "/", mock: Callable[[Page], None] | None = None, **options: Any) -> Page:
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.set_default_timeout(LIMIT_MS)
        page.on("pageerror", lambda error: errors.append(str(error)))
        if mock:
            mock(page)
        page.goto(server.url + path)
        return page

    expect.set_options(timeout=LIMIT_MS)
    yield open_it
    for context in contexts:
        context.close()
    assert errors == []


def payload(name: str, spoken: Spoken = SPOKEN) -> FilePayload:
    return {"name": name, "mimeType": "audio/wav", "buffer": sound_file(spoken.samples)}


def choose(page: Page, *files: FilePayload) -> None:
    page.set_input_files("#files", list(files))


def choose_by_key(page: Page, *files: FilePayload) -> None:
    """Presses Enter on the file field, once more where the browser's driver was not listening yet."""
    for limit_ms in (5_000, 10_000, LIMIT_MS):
        with contextlib.suppress(PlaywrightTimeout):
            with page.expect_file_chooser(timeout=limit_ms) as chooser:
                page.keyboard.press("Enter")
            chooser.value.set_files(list(files))
            return
    raise AssertionError("Enter opens no choice of files")


def card(page: Page, name: str) -> Locator:
    return page.locator("#cards .card", has=page.get_by_role("heading", name=name, exact=True))


def test_a_file_becomes_text_with_language_times_and_speed(open_page: OpenPage) -> None:
    page = open_page()
    expect(page.locator("#model")).to_contain_text(
        "whisper-digits, a Whisper model that hears English digits only, about 1 in 20 of them wrongly."
    )
    choose(page, payload("call.wav"))
    expect(page.get_by_label("Language")).to_be_hidden()  # there is one alone
    done = card(page, "call.wav")
    expect(done.locator(".transcript")).to_have_text(SPOKEN.text)
    for fact in ("0:05", "English", "× real time"):
        expect(done.locator(".facts")).to_contain_text(fact)
    expect(page.locator("#announce")).to_have_text("call.wav is transcribed.")


def test_the_upload_is_shown_as_it_goes_and_text_as_it_is_recognised(open_page: OpenPage) -> None:
    page = open_page()
    page.evaluate(
        """() => {
            window.seen = [];
            new MutationObserver(() => {
                const card = document.querySelector(".card.is-working");
                const text = (name) => card.querySelector(name).textContent;
                if (card) window.seen.push([text(".facts"), text(".transcript")]);
            }).observe(document.body, { subtree: true, childList: true, characterData: true });
        }"""
    )
    slow_upload = {"offline": False, "latency": 0, "downloadThroughput": -1, "uploadThroughput": 1_000_000}
    page.context.new_cdp_session(page).send("Network.emulateNetworkConditions", slow_upload)
    choose(page, payload("call.wav", say("314159265358979323" * 2, gap_s=0.6)))
    expect(card(page, "call.wav").locator(".facts")).to_contain_text("× real time")
    seen = page.evaluate("window.seen")
    assert len({facts for facts, _ in seen if facts.startswith("uploading, ")}) >= 2
    assert len({text for _, text in seen if text}) >= 2  # not all of it at once
    with page.expect_download() as download:
        page.get_by_role("button", name="Download call.wav as json").click()
    segments = json.loads(Path(download.value.path()).read_text())["segments"]
    assert max(segment["seek"] for segment in segments) > 0  # a border of chunks to draw
    borders = page.evaluate(
        """async () => (await import("/web/waveform.js")).chunkBorders(
            [{ seek: 0 }, { seek: 0 }, { seek: 2450 }, { seek: 600 }, { seek: 2450 }, {}])"""
    )
    assert borders == [6, 24.5]


def test_the_languages_to_choose_from_are_those_of_the_model(open_page: OpenPage) -> None:
    def multilingual(page: Page) -> None:
        model = {"id": "turbo", "description": "a Whisper model", "languages": ["yue", "de", "en"]}
        page.route("**/v1/models", lambda route: route.fulfill(json={"data": [model]}))

    page = open_page(mock=multilingual)
    expect(page.locator("#model")).to_have_text("Served here: turbo, a Whisper model.")
    offered = page.get_by_label("Language").locator("option")
    expect(offered).to_have_text(["detected", "Cantonese", "English", "German"])


def test_several_files_wait_their_turn_and_a_bad_one_says_why(open_page: OpenPage) -> None:
    page = open_page()
    names = [f"{number}.wav" for number in range(4)]
    choose(
        page,
        *(payload(name) for name in names),
        {"name": "letter.mp3", "mimeType": "audio/mpeg", "buffer": b"no"},
    )
    for name in names:
        expect(card(page, name).locator(".transcript")).to_have_text(SPOKEN.text)
    bad = card(page, "letter.mp3")
    expect(bad.get_by_role("alert")).to_contain_text("not audio")
    bad.get_by_role("button", name="Try again").click()
    expect(bad.get_by_role("alert")).to_contain_text("not audio")
    bad.get_by_role("button", name="Remove letter.mp3").click()
    expect(page.locator("#cards > li")).to_have_count(4)


@pytest.mark.parametrize(
    ("format", "beginning"),
    [("txt", "three one four"), ("srt", "1\n00:00:00,"), ("vtt", "WEBVTT\n\n00:00:00."), ("json", "{")],
)
def test_the_transcript_is_downloaded_in_each_format(
    open_page: OpenPage, format: str, beginning: str
) -> None:
    page = open_page(accept_downloads=True)
    choose(page, payload("call.wav"))
    with page.expect_download() as download:
        page.get_by_role("button", name=f"Download call.wav as {format}").click()
    assert download.value.suggested_filename == f"call.{format}"
    text = Path(download.value.path()).read_text()
    assert text.startswith(beginning)
    if format == "json":
        assert json.loads(text)["segments"][0]["start"] == pytest.approx(SPOKEN.times[0][0], abs=0.2)


def test_words_light_up_while_it_plays_and_a_click_on_one_goes_there(open_page: OpenPage) -> None:
    page = open_page()
    choose(page, payload("call.wav"))
    done = card(page, "call.wav")
    position = done.get_by_role("slider", name="Position in call.wav")
    done.locator(".word", has_text="five").click()
    expect(done.locator(".word.is-lit")).to_have_text("five")
    assert float(position.get_attribute("aria-valuenow") or 0) == pytest.approx(SPOKEN.times[4][0], abs=0.4)
    position.press("Home")
    done.get_by_role("button", name="Play call.wav").click()
    expect(done.locator(".word.is-lit")).to_have_text("three")
    expect(done.locator(".word.is-lit")).to_have_text("nine")


def test_the_microphone_is_heard_while_one_speaks(open_page: OpenPage) -> None:
    page = open_page(permissions=["microphone"])
    page.get_by_role("button", name="Speak").click()
    expect(page.locator("#live-text")).to_contain_text("two seven one")
    page.get_by_role("button", name="Stop").click()
    done = card(page, "Recording 1")
    expect(done.locator(".transcript")).to_contain_text("two seven one")
    expect(done.get_by_role("slider", name="Position in Recording 1")).to_be_visible()
    expect(page.get_by_role("button", name="Speak")).to_be_visible()


def test_what_the_server_had_not_heard_when_one_stopped_is_waited_for(open_page: OpenPage) -> None:
    """A server that lags behind: the second turn begins, for it, after the button was pressed."""

    def lagging(page: Page) -> None:
        page.route_web_socket("**/v1/realtime*", serve)

    def serve(socket: WebSocketRoute) -> None:
        def send(type: str, **fields: object) -> None:
            socket.send(json.dumps({"type": type, **fields}))

        def on_message(message: str | bytes) -> None:
            received.append(json.loads(message)["type"])
            match received[-1]:
                case "input_audio_buffer.append" if len(received) == 1:
                    send("input_audio_buffer.speech_started", item_id="a", audio_start_ms=0)
                    send(f"{TURN}.delta", item_id="a", delta="one")
                    send("input_audio_buffer.speech_stopped", item_id="a", audio_end_ms=100)
                    send("input_audio_buffer.committed", item_id="a")
                case "input_audio_buffer.commit":
                    send("input_audio_buffer.speech_started", item_id="b", audio_start_ms=200)
                    send("input_audio_buffer.committed", item_id="b")
                    send(f"{TURN}.completed", item_id="a", transcript="one")
                case "session.update":
                    send("session.updated")
                    send(f"{TURN}.completed", item_id="b", transcript="two")

        socket.on_message(on_message)
        send("session.created")

    received: list[str] = []
    page = open_page(permissions=["microphone"], mock=lagging)
    page.get_by_role("button", name="Speak").click()
    expect(page.locator("#live-text")).to_contain_text("one")
    page.evaluate(
        """() => {
            for (const end = performance.now() + 600; performance.now() < end; ); // blocks are waiting now
            document.getElementById("record").click();
        }"""
    )
    expect(card(page, "Recording 1").locator(".transcript")).to_have_text("one two")
    *appends, commit, update = received  # audio behind the commit would never be committed
    assert set(appends) == {"input_audio_buffer.append"}
    assert (commit, update) == ("input_audio_buffer.commit", "session.update")


def test_everything_works_by_keyboard_alone(open_page: OpenPage) -> None:
    page = open_page()
    tab_to(page, "document.activeElement.id === 'files'")
    choose_by_key(page, payload("call.wav"))
    done = card(page, "call.wav")
    words = done.locator(".transcript[tabindex='0']")
    words.wait_for()
    reached = set()
    for _ in range(15):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.getAttribute('aria-label')"))
    assert {"Play call.wav", "Position in call.wav", "Download call.wav as srt", "Remove call.wav"} <= reached
    tab_to(page, "document.activeElement.getAttribute('role') === 'group'", "Shift+Tab")
    for word in ("three", "one"):
        page.keyboard.press("ArrowRight")
        expect(done.locator(".word.is-lit")).to_have_text(word)
    tab_to(page, "document.activeElement.getAttribute('role') === 'slider'", "Shift+Tab")
    page.keyboard.press("End")
    expect(done.locator(".clock")).to_contain_text("0:05 / 0:05")
    page.keyboard.press("Home")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")  # on "Play"
    expect(done.locator(".word.is-lit")).to_have_text("three")
    tab_to(page, "document.activeElement.textContent === 'SRT'")
    with page.expect_download():
        page.keyboard.press("Enter")
    tab_to(page, "document.activeElement.textContent === 'Server'", "Shift+Tab")
    page.keyboard.press("Enter")
    expect(page.locator("#replicas")).to_contain_text("slots in use")


def tab_to(page: Page, condition: str, key: str = "Tab") -> None:
    for _ in range(40):
        if page.evaluate(condition):
            return
        page.keyboard.press(key)
    raise AssertionError(f"{key} does not lead there: {condition}")


ERROR_STREAM = 'data: {"error": {"message": "The engine stumbled.", "type": "server_error"}}\n\n'


def test_each_error_is_told_in_words(open_page: OpenPage) -> None:
    too_large = {"error": {"message": "The file is larger than 1024 MiB."}}
    answers: dict[str, Callable[[Route], None]] = {
        "The connection broke. Is the server still running?": lambda route: route.abort("connectionreset"),
        "The file is larger than 1024 MiB": lambda route: route.fulfill(status=413, json=too_large),
        "The server answered with status 502.": lambda route: route.fulfill(status=502, body="<html>"),
        "The engine stumbled.": lambda route: route.fulfill(body=ERROR_STREAM),
        "The answer ended early": lambda route: route.fulfill(body=""),
    }
    pending = list(answers.values())
    page = open_page(
        mock=lambda page: page.route("**/v1/audio/transcriptions", lambda route: pending.pop(0)(route))
    )
    for number, message in enumerate(answers):
        choose(page, payload(f"{number}.wav"))
        expect(card(page, f"{number}.wav").get_by_role("alert")).to_contain_text(message)
        expect(page.locator("#announce")).to_have_text(f"{number}.wav could not be transcribed.")


def test_a_file_that_the_server_would_refuse_is_not_sent(open_page: OpenPage) -> None:
    sent: list[str] = []

    def small(page: Page) -> None:
        def served(route: Route) -> None:
            body = route.fetch().json()
            route.fulfill(json={"data": [model | {"max_upload_bytes": 100_000} for model in body["data"]]})

        page.route("**/v1/models", served)
        page.on("request", lambda request: sent.append(request.url))

    page = open_page(mock=small)
    choose(page, payload("long.wav"))
    told = card(page, "long.wav")
    expect(told.get_by_role("alert")).to_contain_text("the server takes 0.1 MiB at most. As mp3, m4a or opus")
    expect(told.get_by_role("button", name="Try again")).to_be_hidden()
    assert not [url for url in sent if url.endswith("/v1/audio/transcriptions")]


def test_without_a_microphone_or_a_place_the_page_says_so(open_page: OpenPage) -> None:
    def full(page: Page) -> None:
        page.route_web_socket("**/v1/realtime*", refuse)

    def refuse(socket: WebSocketRoute) -> None:
        error = {"message": "64 realtime sessions are open: --max-realtime-sessions."}
        socket.send(json.dumps({"type": "error", "error": error}))
        socket.close(code=1013)

    page = open_page(permissions=["microphone"], mock=full)
    page.get_by_role("button", name="Speak").click()
    expect(page.locator("#message")).to_contain_text("64 realtime sessions are open")
    page.evaluate(
        """() => {
            const refusal = new DOMException("no", "NotAllowedError");
            navigator.mediaDevices.getUserMedia = () => Promise.reject(refusal);
        }"""
    )
    page.get_by_role("button", name="Speak").click()
    expect(page.locator("#message")).to_contain_text("The microphone was not allowed.")
    expect(page.get_by_role("button", name="Speak")).to_be_visible()


def test_a_phone_shows_all_of_it_without_scrolling_sideways(open_page: OpenPage) -> None:
    page = open_page(viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
    choose(page, payload("a name without spaces-that-is-long-as-recorders-write-them-2026-08-14.wav"))
    page.locator(".word").first.wait_for()
    for view in ("transcribe", "server"):
        page.locator(f"nav a[data-view={view}]").click()
        assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_the_second_view_shows_the_server_live(open_page: OpenPage) -> None:
    page = open_page("/#server")
    expect(page.locator("#health")).to_have_text("Ready: an engine takes work.")
    assert page.evaluate("window.scrollY") == 0
    expect(page.locator("#replicas")).to_contain_text("slots in use")
    expect(page.locator("#throughput")).not_to_have_text("–")
    other = open_page()
    choose(other, payload("call.wav", say("31415926" * 3, gap_s=0.3)))
    expect(card(other, "call.wav").locator(".facts")).to_contain_text("× real time")
    expect(page.locator("#throughput")).not_to_have_text("0.0")
    expect(page.locator("#preprocess")).to_contain_text("waiting for a slot")
    expect(page.locator("#tries")).to_have_text(re.compile(r"^\d+ fallbacks, \d+ chunks read again so far$"))
    error = {"message": "The engine is starting."}
    page.route("**/ready", lambda route: route.fulfill(status=503, json={"error": error}))
    expect(page.locator("#health.is-bad")).to_have_text("The engine is starting.")
    page.route("**/metrics", lambda route: route.abort())
    expect(page.locator("#health.is-bad")).to_contain_text("cannot be reached")


def test_the_description_of_the_api_works_without_any_other_host(open_page: OpenPage, server: Server) -> None:
    hosts: set[str] = set()

    def watch(page: Page) -> None:
        page.on("request", lambda request: hosts.add(request.url.partition("//")[2].partition("/")[0]))

    page = open_page("/docs", mock=watch)
    expect(page.locator(".swagger-ui")).to_contain_text("/v1/audio/transcriptions")
    assert hosts - {""} == {server.url.partition("//")[2]}


def test_a_server_with_a_key_asks_for_it(open_page: OpenPage) -> None:
    def locked(page: Page) -> None:
        page.route("**/v1/models", unless_key)

    def unless_key(route: Route) -> None:
        if route.request.headers.get("authorization") == "Bearer s3cret":
            route.continue_()
        else:
            error = {
                "message": "Incorrect API key.",
                "type": "invalid_request_error",
                "param": None,
                "code": None,
            }
            route.fulfill(status=401, json={"error": error})

    page = open_page(mock=locked)
    page.get_by_label("This server asks for an API key.").fill("wrong")
    page.get_by_role("button", name="Use this key").click()
    expect(page.locator("#key-error")).to_have_text("The server does not take this key.")
    page.get_by_label("This server asks for an API key.").fill("s3cret")
    page.keyboard.press("Enter")
    expect(page.locator("#model")).to_contain_text("whisper-digits")
    expect(page.locator("#key-form")).to_be_hidden()


def test_a_busy_server_is_asked_again_when_it_says(open_page: OpenPage) -> None:
    answers = iter([429])

    def busy(page: Page) -> None:
        page.route("**/v1/audio/transcriptions", at_first)

    def at_first(route: Route) -> None:
        if next(answers, None):
            error = {
                "message": "Full.",
                "type": "rate_limit_error",
                "param": None,
                "code": "server_overloaded",
            }
            route.fulfill(status=429, json={"error": error}, headers={"retry-after": "1"})
        else:
            route.continue_()

    page = open_page(mock=busy)
    choose(page, payload("call.wav"))
    expect(card(page, "call.wav").locator(".facts")).to_contain_text("asking again in 1 s")
    expect(card(page, "call.wav").locator(".transcript")).to_have_text(SPOKEN.text)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_fault(open_page: OpenPage, scheme: str) -> None:
    page = open_page(color_scheme=scheme, bypass_csp=True, reduced_motion="reduce")
    choose(page, payload("call.wav"), {"name": "letter.mp3", "mimeType": "audio/mpeg", "buffer": b"no"})
    page.locator(".word").first.wait_for()
    card(page, "letter.mp3").get_by_role("alert").wait_for()
    for view in ("transcribe", "server"):
        page.locator(f"nav a[data-view={view}]").click()
        if view == "server":
            expect(page.locator("#replicas")).to_contain_text("slots in use")
        found = Axe().run(page).response["violations"]
        assert [(fault["id"], fault["impact"], fault["nodes"][0]["html"]) for fault in found] == []
