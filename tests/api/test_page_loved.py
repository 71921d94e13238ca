"""What people know from other transcription pages: in headless Chromium, on a real server."""

from __future__ import annotations

import io
import re
from pathlib import Path
from xml.etree import ElementTree
from zipfile import ZipFile

from playwright.sync_api import expect

from tests.api.browsing import NEEDS_CHROMIUM, OpenPage, answering, card, choose, payload, words_at
from tests.speech import say

pytestmark = NEEDS_CHROMIUM

WORD = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"


# -- How far it is, how fast it was, and what is missing --

WATCH_FACTS = """() => {
    window.seen = new Set();
    new MutationObserver(() => {
        const work = document.querySelector(".is-working");
        const text = (name) => work.querySelector(name).textContent;
        if (work) window.seen.add(`${text(".facts")} ${work.querySelector("progress").value > 0}`);
    }).observe(document.body, { subtree: true, childList: true, characterData: true, attributes: true });
}"""


def test_a_card_says_how_much_is_transcribed_and_how_long_the_rest_takes(open_page: OpenPage) -> None:
    page = open_page()
    page.evaluate(WATCH_FACTS)
    choose(page, payload("call.wav", say("314159265358979323" * 2, gap_s=0.6)))
    expect(card(page, "call.wav").locator(".facts")).to_contain_text("× real time")
    seen = page.evaluate("[...window.seen]")
    assert any(re.fullmatch(r"listening, [1-9]\d? %0:\d\dabout 0:\d\d left true", facts) for facts in seen), (
        seen
    )


def test_a_speed_below_real_time_is_a_fraction(open_page: OpenPage) -> None:
    page = open_page()
    facts = page.evaluate(
        """async () => {
            const { factsOf } = await import("/web/entry.js");
            return [150, 1500, 6].map((took) => factsOf({ duration: 60, took, createdAt: 0 })[2]);
        }"""
    )
    assert facts == ["0.4 × real time", "0.04 × real time", "10 × real time"]


def test_a_card_says_which_text_was_left_out(open_page: OpenPage) -> None:
    lost = [{"start": 2.0, "end": 4.0, "text": " Thank you.", "reason": "no_voice"}]
    page = open_page(mock=answering(**words_at(("one", 0.0)), dropped=lost))
    choose(page, payload("call.wav"))
    expect(card(page, "call.wav").locator(".facts")).to_contain_text(
        "left out, since nobody seems to speak there: “Thank you.” at 0:02"
    )


# -- As a document --


def test_a_transcript_is_downloaded_as_a_word_document(open_page: OpenPage) -> None:
    text = "Tom & Jerry <3 yes."
    segments = [
        {"id": 0, "seek": 0, "start": 0.0, "end": 2.0, "text": " Tom & Jerry", "speaker": "Ann"},
        {"id": 1, "seek": 0, "start": 2.0, "end": 3.0, "text": " <3", "speaker": "Ann"},
        {"id": 2, "seek": 0, "start": 3.0, "end": 4.0, "text": " yes.", "speaker": "Bob"},
    ]
    page = open_page(mock=answering(text=text, segments=segments, words=[]), accept_downloads=True)
    choose(page, payload("call.wav"))
    card(page, "call.wav").locator("summary", has_text="Download").click()
    with page.expect_download() as download:
        card(page, "call.wav").get_by_role("button", name=".docx").click()
    assert download.value.suggested_filename == "call.docx"
    assert paragraphs_of(Path(download.value.path()).read_bytes()) == ["Ann: Tom & Jerry <3", "Bob: yes."]
    with page.expect_download() as download:
        page.get_by_role("button", name="Download all").click()
    with ZipFile(download.value.path()) as archive:
        assert archive.testzip() is None
        assert paragraphs_of(archive.read("call.docx"))[1] == "Bob: yes."


def paragraphs_of(document: bytes) -> list[str]:
    with ZipFile(io.BytesIO(document)) as archive:
        assert archive.namelist()[0] == "[Content_Types].xml"
        assert archive.testzip() is None
        for name in archive.namelist():
            ElementTree.fromstring(archive.read(name))
        body = ElementTree.fromstring(archive.read("word/document.xml"))
    return ["".join(text.text or "" for text in p.iter(f"{WORD}t")) for p in body.iter(f"{WORD}p")]
