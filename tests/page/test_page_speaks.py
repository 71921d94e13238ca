"""What one speaks is kept, whatever becomes of the session, the server and the tab: in both browsers."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest

from tests.conftest import Server, run_server
from tests.page.both import SPEECH_FOR_A_MICROPHONE, WATCH_DOWNLOADS, AnyTab, OpenAny, encoded
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
    tab.click("#record")
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
        tab.click("#record")
        tab.wait_for_text("#cards .facts", "real time")
        length = tab.evaluate("document.querySelector('#cards .clock').textContent.split('/ 0:')[1]")
        assert downloaded_seconds(tab) >= float(length)
        assert tab.evaluate("document.querySelector('#cards .transcript').textContent").startswith(
            "two seven one"
        )


def test_a_tab_that_is_killed_leaves_sound_and_text(open_any: OpenAny) -> None:
    tab = open_any()
    speak(tab)
    tab.wait(f"{KEPT_BYTES}.then((size) => size >= 5 * 48000)")
    other = open_any()
    other.wait_for_text("#model", "whisper-digits")
    assert other.evaluate("document.querySelectorAll('#cards > li').length") == 0  # it is still being spoken
    tab.close()
    other.reload()
    other.wait_for_text("#cards .facts", "real time")
    other.wait_for_text("#cards .card", "two seven one")
    assert downloaded_seconds(other) >= 5
    other.reload()
    other.wait("document.querySelector('.fold:enabled')")
    other.click(".fold")
    other.wait("document.querySelector('.word') && document.querySelector('.player')?.checkVisibility()")
    assert downloaded_seconds(other) >= 5


def test_the_text_of_one_who_speaks_is_large_followed_and_alone_on_the_page(open_any: OpenAny) -> None:
    tab = open_any()
    speak(tab)
    for selector in (".lead", "#options", "label.button"):
        assert not tab.evaluate(f"document.querySelector({json.dumps(selector)}).checkVisibility()")
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
    tab.click("#record")
    tab.wait("document.querySelector('.fold:enabled')")
