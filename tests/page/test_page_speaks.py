"""What one speaks is kept, whatever becomes of the session, the server and the tab: in both browsers."""

import json
import socket
from collections.abc import Iterator

import pytest

from tests.conftest import Server, run_server
from tests.page.both import (
    SPEECH_FOR_A_MICROPHONE,
    WATCH_DOWNLOADS,
    AnyTab,
    OpenAny,
    choose,
    drop,
    encoded,
    hold_answers,
)
from tests.page.firefox import NEEDS_SOUND
from tests.support.speech import say

pytestmark = NEEDS_SOUND

SPEECH = say("271", gap_s=[0.2, 0.2, 1.5])
SESSION_S = 8
DURATION = """window.downloads[0][1].arrayBuffer().then((data) => {
    const view = new DataView(data);
    return [view.getUint32(40, true) === data.byteLength - 44, view.getUint32(40, true) / 48000];
})"""


@pytest.fixture(scope="module")
def hasty_server() -> Iterator[Server]:
    """Ends each live session after a few seconds."""
    with run_server("--max-realtime-session-s", str(SESSION_S)) as server:
        yield server


def speak(tab: AnyTab) -> None:
    tab.wait_for_text("#model", "whisper-digits")
    tab.evaluate(f"{SPEECH_FOR_A_MICROPHONE}({json.dumps(encoded(SPEECH))})")
    tab.click("#record")
    tab.wait_for_text("#live-text", "two seven one")


KEPT_BYTES = """(async () => {
    const folder = await (await navigator.storage.getDirectory()).getDirectoryHandle("spoken");
    for await (const file of folder.values()) return (await file.getFile()).size;
})()"""


def speak_until(tab: AnyTab, seconds: int) -> None:
    tab.wait(f"document.querySelector('#live-time').textContent >= '0:{seconds:02d}'")


def downloaded_seconds(tab: AnyTab) -> float:
    """The length of what "Download" has as the sound."""
    tab.evaluate(WATCH_DOWNLOADS)
    tab.evaluate(
        "[...document.querySelectorAll('.menu-choices button')]"
        ".find(({ textContent }) => textContent.startsWith('Sound')).click()"
    )
    tab.wait("window.downloads.length === 1")
    assert tab.evaluate("window.downloads[0][0]") == "Recording 1.wav"
    is_whole, seconds = tab.evaluate(DURATION)
    assert is_whole
    return float(seconds)


def test_sessions_are_joined_and_what_lies_between_is_read_as_a_file(
    open_any: OpenAny, hasty_server: Server
) -> None:
    tab = open_any(hasty_server.url)
    speak(tab)
    speak_until(tab, 2 * SESSION_S + 4)
    tab.click("#stop")
    tab.wait_for_text("#cards .facts", "real time")
    assert "incomplete" not in tab.evaluate("document.querySelector('#cards .facts').textContent")
    assert tab.evaluate("document.querySelector('#cards .transcript').textContent.split(' ').length") >= 15
    assert downloaded_seconds(tab) >= 2 * SESSION_S + 4


def test_a_server_that_is_started_anew_costs_no_sound(open_any: OpenAny) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    with run_server("--port", port) as server:
        tab = open_any(server.url)
        speak(tab)
    tab.wait_for_text("#live-status", "Recording. Text comes later")
    with run_server("--port", port):
        tab.wait_for_text("#live-status", "Listening")
        tab.click("#stop")
        tab.wait_for_text("#cards .facts", "real time")
        length = tab.evaluate("document.querySelector('#cards .clock').textContent.split('/ 0:')[1]")
        assert downloaded_seconds(tab) >= float(length)
        assert tab.evaluate("document.querySelector('#cards .transcript').textContent").startswith(
            "two seven one"
        )


@pytest.mark.parametrize("seconds", [5, pytest.param(150, marks=pytest.mark.trial)])
def test_a_tab_that_is_killed_leaves_sound_and_text(open_any: OpenAny, seconds: int) -> None:
    tab = open_any()
    speak(tab)
    for until in range(5, seconds + 1, 5):
        tab.wait(f"{KEPT_BYTES}.then((size) => size >= {until} * 48000)")
    other = open_any()
    other.wait_for_text("#model", "whisper-digits")
    assert other.evaluate("document.querySelectorAll('#cards > li').length") == 0  # it is still being spoken
    tab.close()
    other.reload()
    other.wait_for_text("#cards .facts", "real time")
    other.wait_for_text("#cards .card", "two seven one")
    assert downloaded_seconds(other) >= seconds
    other.reload()
    other.wait("document.querySelector('.fold:enabled')")
    other.click(".fold")
    other.wait("document.querySelector('.word') && document.querySelector('.player')?.checkVisibility()")
    assert downloaded_seconds(other) >= seconds


def test_the_text_of_one_who_speaks_is_large_followed_and_alone_on_the_page(open_any: OpenAny) -> None:
    tab = open_any()
    speak(tab)
    for selector in (".lead", "#options", "label.button"):
        assert not tab.evaluate(f"document.querySelector({json.dumps(selector)}).checkVisibility()")
    for selector in ("#stop", "#live-level", "#live-time"):
        assert tab.evaluate(f"document.querySelector({json.dumps(selector)}).checkVisibility()")
    size = "parseFloat(getComputedStyle(document.querySelector('#live-text')).fontSize)"
    before = tab.evaluate(size)
    tab.click("#larger")
    assert tab.evaluate(size) > before
    tab.evaluate("(document.querySelector('#live-text').style.maxHeight = '3rem', 0)")
    box = "document.querySelector('#live-text')"
    tab.wait(f"{box}.scrollHeight > 2 * {box}.clientHeight && {box}.scrollTop > 0")
    tab.evaluate(f"{box}.dispatchEvent(new WheelEvent('wheel', {{ bubbles: true }}))")
    tab.evaluate(f"{box}.scrollTop = 0")
    tab.wait("document.querySelector('#live .back').checkVisibility()")
    tab.evaluate("document.querySelector('#live .back').click()")
    tab.wait(f"{box}.scrollTop > 0")
    tab.click("#stop")
    tab.wait("document.querySelector('.fold:enabled')")


def test_all_else_folds_away_while_one_speaks_and_comes_back_as_it_was(open_any: OpenAny) -> None:
    tab = open_any()
    drop(tab, "call.wav")
    tab.wait("document.querySelector('.fold:enabled')")
    tab.evaluate("document.querySelector('.play').click()")
    tab.wait("!document.querySelector('#cards audio').paused")
    tab.click("#cards .word", times=2)
    tab.wait("document.activeElement.matches('.word input')")
    tab.type("kept")
    speak(tab)
    assert not tab.evaluate("document.querySelector('#cards').checkVisibility()")
    audio = "document.querySelector('#cards audio')"
    assert tab.evaluate(f"{audio}.paused")  # it would be heard, too
    tab.evaluate("document.body.dispatchEvent(new KeyboardEvent('keydown', { key: ' ', bubbles: true }))")
    assert tab.evaluate(f"{audio}.paused")
    tab.click("#stop")
    tab.wait("document.querySelectorAll('.fold:enabled').length === 2")
    assert tab.evaluate("document.querySelector('#cards').checkVisibility()")
    words = tab.evaluate("document.querySelector('#cards .card:last-child').textContent")
    assert "kept" in words
    tab.wait("document.querySelector('#cards .card:last-child .fold').ariaExpanded === 'true'")


# -- What is heard --

SOURCES = """(() => {
    const described = [
        { kind: "audioinput", deviceId: "a", label: "Desk" },
        { kind: "audioinput", deviceId: "b", label: "Headset" },
        { kind: "videoinput", deviceId: "c", label: "Camera" },
    ];
    navigator.mediaDevices.enumerateDevices = async () => described;
    window.asked = [];
    const { getUserMedia } = navigator.mediaDevices;
    navigator.mediaDevices.getUserMedia = (wanted) => (window.asked.push(wanted), getUserMedia(wanted));
    navigator.mediaDevices.getDisplayMedia = (wanted) => (window.asked.push(wanted), getUserMedia(wanted));
    navigator.mediaDevices.dispatchEvent(new Event("devicechange"));
})()"""


def test_a_microphone_or_the_sound_of_a_tab_is_chosen(open_any: OpenAny) -> None:
    tab = open_any()
    tab.wait_for_text("#source", "a tab or the computer")
    tab.evaluate(f"{SPEECH_FOR_A_MICROPHONE}({json.dumps(encoded(SPEECH))})")
    tab.evaluate(SOURCES)
    tab.wait_for_text("#source", "Headset")
    offered = "[...document.querySelectorAll('#source option')].map(({ textContent }) => textContent).join()"
    assert tab.evaluate(offered) == "microphone,Desk,Headset,a tab or the computer"
    for source, asked in (
        ("b", {"audio": {"channelCount": 1, "deviceId": "b"}}),
        ("screen", {"video": True, "audio": True}),
    ):
        choose(tab, "#source", source)
        tab.click("#record")
        tab.wait_for_text("#live-text", "two seven one")
        assert tab.evaluate("window.asked.at(-1)") == asked
        tab.click("#stop")
        tab.wait("document.querySelector('#live').hidden")
    tab.evaluate("(navigator.mediaDevices.getDisplayMedia = async () => new MediaStream(), 0)")
    tab.click("#record")
    tab.wait_for_text("#message", "What you share has no sound")


def test_a_pause_stops_the_time_until_one_goes_on(open_any: OpenAny) -> None:
    tab = open_any()
    speak(tab)
    tab.click("#pause")
    tab.wait_for_text("#live-status", "Paused")
    tab.wait("document.querySelector('#live-said').textContent.includes('two seven one')")
    time = tab.evaluate("document.querySelector('#live-time').textContent")
    text = tab.evaluate("document.querySelector('#live-text').textContent")
    size = tab.evaluate(KEPT_BYTES)
    tab.evaluate("new Promise((resolve) => setTimeout(resolve, 2500))")
    assert tab.evaluate("document.querySelector('#live-time').textContent") == time
    assert tab.evaluate(KEPT_BYTES) - size < 48000  # what was on its way, not the 2.5 s
    tab.click("#pause")
    tab.wait(f"document.querySelector('#live-text').textContent.trim().length > {len(text.strip())}")
    tab.wait_for_text("#live-status", "Listening")
    tab.click("#stop")
    tab.wait("document.querySelector('.fold:enabled')")


# A server's session, whose events the test sends by `window.emit(type, fields)`
SESSION = """(() => {
    window.sent = [];
    window.WebSocket = class extends EventTarget {
        static OPEN = 1;
        readyState = 1;
        constructor() {
            super();
            const message = (event) => new MessageEvent("message", { data: JSON.stringify(event) });
            const emit = (type, fields) => this.dispatchEvent(message({ type, ...fields }));
            window.emit = (type, fields) => emit(type, { item_id: "a", ...fields });
            setTimeout(() => emit("session.created"));
        }
        send(data) {
            const event = JSON.parse(data);
            if (event.type === "session.update") window.sent.push(event.session);
        }
        close() {}
    };
})()"""
READING = "conversation.item.input_audio_transcription"
LIVE = "document.querySelector('#live-text').textContent.trim()"
MAY_CHANGE = "document.querySelector('#live-text i').textContent"


def emit(tab: AnyTab, type: str, **fields: object) -> None:
    tab.evaluate(f"(window.emit({json.dumps(type)}, {json.dumps(fields)}), 0)")


def test_text_that_may_change_is_shown_as_such_and_stays_where_it_is(open_any: OpenAny) -> None:
    tab = open_any()
    tab.wait_for_text("#model", "whisper-digits")
    tab.evaluate(SESSION)
    choose(tab, "#speakers", "auto")
    tab.click("#record")
    tab.wait("window.sent.length === 2")
    tab.wait(
        "document.querySelector('#live-time').textContent"
    )  # sound has come, which the text is kept with
    include, diarized = tab.evaluate("window.sent")
    assert include["include"] == ["item.input_audio_transcription.interim"]
    assert diarized["audio"]["input"]["transcription"] == {"model": "gpt-4o-transcribe-diarize"}
    emit(tab, "input_audio_buffer.speech_started", audio_start_ms=0)
    emit(tab, f"{READING}.delta", delta="one")
    emit(tab, f"{READING}.interim", text="one two", tail=" two", words=[], is_final=False)
    colour = "getComputedStyle(document.querySelector('#live-text {}')).color"
    assert tab.evaluate(f"{colour.format('i')} !== {colour.format('span')}")
    assert (tab.evaluate(LIVE), tab.evaluate(MAY_CHANGE)) == ("one two", " two")
    place = "document.querySelector('#live-text i').getBoundingClientRect().right"
    before = tab.evaluate(place)
    emit(tab, f"{READING}.delta", delta=" two")
    assert (tab.evaluate(LIVE), tab.evaluate(MAY_CHANGE)) == ("one two", "")
    emit(tab, f"{READING}.interim", text="one two three", tail=" three", words=[], is_final=False)
    assert tab.evaluate(f"{place} > {before}")
    words = [
        {"word": word, "start": i, "end": i + 0.5, "confidence": 0.9 - 0.4 * i}
        for i, word in enumerate(("one", "two", "three"))
    ]
    emit(tab, f"{READING}.interim", text="one two three", tail="", words=words, is_final=True)
    for speaker, text, start in (("A", "one", 0), ("B", " two three", 1)):
        emit(tab, f"{READING}.segment", speaker=speaker, text=text, start=start, end=start + 1.5)
    emit(tab, f"{READING}.completed", transcript="one two three")
    assert tab.evaluate(LIVE) == "A: one\nB: two three"
    hold_answers(tab)  # the whole is read again
    tab.click("#stop")
    tab.click("#stop")
    tab.wait(
        """import("/web/store.js").then(async ({ Store }) => {
            const store = new Store();
            const [entry] = await store.entries();
            const { words, segments } = (entry && (await store.answer(entry.id))) || {};
            store.database.close();
            const spoken = segments?.map(({ speaker, text }) => speaker + text).join();
            return spoken === "Aone,B two three" && words.at(-1).start === 2;
        })"""
    )
