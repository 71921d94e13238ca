"""Drives Debian's Firefox over WebDriver BiDi: no driver but its own WebSocket."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from websockets.sync.client import connect
from websockets.sync.connection import Connection

from tests.page.browsing import LIMIT_MS

FIREFOX = next(filter(None, map(shutil.which, ("firefox-esr", "firefox"))), None)
NEEDS_FIREFOX = pytest.mark.skipif(
    FIREFOX is None, reason="no Firefox here: tests/install-browser.sh fetches it"
)
PULSEAUDIO = shutil.which("pulseaudio")
NEEDS_SOUND = pytest.mark.skipif(
    PULSEAUDIO is None, reason="no PulseAudio here: tests/install-browser.sh fetches it"
)
PREFERENCES = {
    "media.navigator.streams.fake": True,  # a microphone that plays a tone
    "media.navigator.permission.disabled": True,
    "media.autoplay.default": 0,
    "dom.disable_beforeunload": True,
    "datareporting.policy.dataSubmissionEnabled": False,
    "app.update.enabled": False,
    "browser.shell.checkDefaultBrowser": False,
}
ENTER, ESCAPE, TAB, END = "\ue007", "\ue00c", "\ue004", "\ue010"
POLL_S = 0.05
# Not of the scripts: the server is away
UNREACHABLE = re.compile("Firefox can’t establish a connection|The connection to .* was interrupted")
# Whether the next click hits it: a page that is still being laid out may move it from under the mouse,
# also between the press, which hits it then, and the release, which does not.
WATCH_CLICK = """((selector) => {
    const note = ({ target }) => (window.hasHit = Boolean(target.closest(selector)));
    window.hasHit = null;
    addEventListener("click", note, { capture: true, once: true });
})"""
# A busy page takes a click after the driver has said that it was made; another one would undo it.
HAS_HIT = """(async () => {
    const pause = () => new Promise((resolve) => setTimeout(resolve, 50));
    for (let n = 0; window.hasHit === null && n < 200; n++) await pause();
    return window.hasHit;
})()"""
# To their end at once: that of an element that is not drawn, as far down a list, would never come
END_TRANSITIONS = """document.getAnimations()
    .forEach((each) => each instanceof CSSTransition && each.finish())"""
# Its middle, once two frames show it at the same place
PLACE_OF = """(async (element) => {
    const frame = () => new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve, 50)));
    const middle = () => {
        const { x, y, width, height } = element.getBoundingClientRect();
        return [Math.round(x + width / 2), Math.round(y + height / 2)];
    };
    for (let before = null; ; await frame()) {
        element.scrollIntoView({ block: "center", behavior: "instant" }); // what is above is drawn late
        const place = middle();
        if (`${place}` === `${before}`) return place;
        before = place;
    }
})"""


class Firefox:
    """One browser. `errors` are those of the scripts of all pages."""

    def __init__(self, socket: Connection) -> None:
        self._socket = socket
        self._last_id = 0
        self.errors: list[str] = []
        self.call("session.new", capabilities={})
        self.call("session.subscribe", events=["log.entryAdded"])

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._last_id += 1
        self._socket.send(json.dumps({"id": self._last_id, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(timeout=LIMIT_MS / 1000))
            if message["type"] == "event":
                self._on_event(message["params"])
            elif message["id"] == self._last_id:
                assert message["type"] == "success", message
                result: dict[str, Any] = message["result"]
                return result

    def _on_event(self, entry: dict[str, Any]) -> None:
        if entry.get("level") == "error" and not UNREACHABLE.match(str(entry.get("text"))):
            self.errors.append(str(entry.get("text")))

    def new_user(self) -> str:
        """Storage of its own, as a private window has it."""
        user: str = self.call("browser.createUserContext")["userContext"]
        return user

    def open(self, url: str, user: str) -> Tab:
        opened = self.call("browsingContext.create", type="tab", userContext=user)
        tab = Tab(self, opened["context"])
        tab.go(url)
        return tab


class Tab:
    """One page, addressed by CSS selectors."""

    COLOURS = ("light", "dark")  # its driver forces none

    def __init__(self, firefox: Firefox, context: str) -> None:
        self._firefox = firefox
        self._context = context

    def go(self, url: str) -> None:
        self._call("browsingContext.navigate", url=url, wait="complete")

    def reload(self) -> None:
        self._call("browsingContext.reload", wait="complete")

    def close(self) -> None:
        self._call("browsingContext.close")

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._firefox.call(method, context=self._context, **parameters)

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression or a promise, by way of JSON."""
        reply = self._firefox.call(
            "script.evaluate",
            expression=f"(async () => JSON.stringify(await ({expression})) ?? 'null')()",
            target={"context": self._context},
            awaitPromise=True,
            userActivation=False,
        )
        assert reply["type"] == "success", reply
        return json.loads(reply["result"]["value"])

    def wait(self, condition: str) -> None:
        until = time.monotonic() + LIMIT_MS / 1000
        while not self.evaluate(f"Boolean(await ({condition}))"):
            assert time.monotonic() < until, f"{condition}\n{self.evaluate('document.body.innerText')}"
            time.sleep(POLL_S)

    def wait_for_text(self, selector: str, text: str) -> None:
        self.wait(f"document.querySelector({json.dumps(selector)})?.textContent.includes({json.dumps(text)})")

    def show_as(self, width: int, colours: str) -> None:
        self._call("browsingContext.setViewport", viewport={"width": width, "height": 800})
        self.evaluate(f"(document.documentElement.style.colorScheme = '{colours}')")
        self._call("browsingContext.activate")
        self.evaluate(END_TRANSITIONS)

    def click(self, selector: str, times: int = 1) -> None:
        """By the mouse, where a user would click; again if the page moved from under it."""
        query = json.dumps(selector)
        until = time.monotonic() + LIMIT_MS / 1000
        while not self._has_hit(query, times):
            assert time.monotonic() < until, f"{selector} never stands still"

    def _has_hit(self, query: str, times: int) -> bool:
        self.wait(f"document.querySelector({query})?.checkVisibility()")
        self._call("browsingContext.activate")
        self.evaluate(f"{WATCH_CLICK}({query})")
        x, y = self.evaluate(f"{PLACE_OF}(document.querySelector({query}))")
        press = [{"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}]
        move = {"type": "pointerMove", "x": x, "y": y}
        self._perform({"type": "pointer", "id": "mouse", "actions": [move, *press * times]})
        return bool(self.evaluate(HAS_HIT))

    def type(self, text: str) -> None:
        keys = [{"type": kind, "value": key} for key in text for kind in ("keyDown", "keyUp")]
        self._perform({"type": "key", "id": "keyboard", "actions": keys})

    def _perform(self, source: dict[str, Any]) -> None:
        self._call("input.performActions", actions=[source])
        self._call("input.releaseActions")


OpenTab = Callable[..., Tab]


@contextmanager
def run_firefox(folder: Path) -> Iterator[Firefox]:
    profile = folder / "profile"
    profile.mkdir()
    lines = [f"user_pref({json.dumps(name)}, {json.dumps(value)});" for name, value in PREFERENCES.items()]
    (profile / "user.js").write_text("\n".join(lines))
    command = [str(FIREFOX), "--headless", "--no-remote", "--remote-debugging-port", "0", "--profile"]
    with run_sound(folder) as sound, ending([*command, str(profile)], sound, subprocess.PIPE) as process:
        assert process.stderr
        listening = next(line for line in process.stderr if "BiDi listening on" in line)
        Thread(target=process.stderr.read, daemon=True).start()  # a full pipe would stop it
        with connect(f"{listening.split()[-1]}/session", max_size=None) as socket:
            yield Firefox(socket)


@contextmanager
def run_sound(folder: Path) -> Iterator[dict[str, str]]:
    """Firefox runs no AudioContext where there is no sound device: this one is silent."""
    if PULSEAUDIO is None:
        yield {}
        return
    socket = folder / "sound.socket"
    modules = ["module-null-sink", f"module-native-protocol-unix socket={socket} auth-anonymous=1"]
    command = [PULSEAUDIO, "-n", "--daemonize=no", "--exit-idle-time=-1", "--use-pid-file=no"]
    command += [f"--load={module}" for module in modules]
    with ending(command, {"HOME": str(folder), "XDG_RUNTIME_DIR": str(folder)}):
        yield {"PULSE_SERVER": f"unix:{socket}"}


@contextmanager
def ending(
    command: list[str], environment: dict[str, str], stderr: int = subprocess.DEVNULL
) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command, env=os.environ | environment, stderr=stderr, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()
