"""Subtitles: how fast they are, their times, and a second track in English; in both browsers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.page.both import WATCH_DOWNLOADS, AnyTab, OpenAny, answer_with, choose, drop
from tests.page.browsing import words_at
from tests.page.firefox import ENTER
from tests.page.test_page_corrects import UNDO, drop_video, write_late_video
from tests.page.test_page_reads import WORD, open_text, press_button

# The second subtitle has 45 letters in a second
FAST = words_at(
    ("Slowly.", 0.0), ("Extraordinarily", 2.0), ("complicated", 2.3), ("communication.", 2.6), ("Go.", 3.0)
)
ROWS = "[...document.querySelectorAll('.cues li')]"
TIMES = f"{ROWS}.map((row) => row.querySelector('.muted').textContent)"


def open_subtitles(tab: AnyTab) -> None:
    press_button(tab, "Subtitles")
    tab.wait(f"{ROWS}.length > 0")


def exported(tab: AnyTab, format: str) -> str:
    """The file behind a choice of the menu."""
    tab.evaluate(WATCH_DOWNLOADS)
    tab.evaluate(f"document.querySelector('[data-format=\"{format}\"]').click()")
    tab.wait("window.downloads.length === 1")
    content: str = tab.evaluate("window.downloads[0][1].text()")
    return content


def stamps(text: str) -> list[str]:
    return [line.replace(" --> ", " – ") for line in text.split("\n") if " --> " in line]


def test_each_subtitle_says_how_fast_it_is_and_too_fast_ones_are_marked(open_any: OpenAny) -> None:
    tab = open_text(open_any, FAST)
    open_subtitles(tab)
    speeds = tab.evaluate(f"{ROWS}.map((row) => row.querySelector('.speed').textContent)")
    assert speeds == ["7 letters/s", "42 letters/s", "3 letters/s"]
    fast = f"{ROWS}.map((row) => row.querySelector('.speed').matches('.is-fast'))"
    assert tab.evaluate(fast) == [False, True, False]
    tab.wait_for_text(".cues [role=status]", "1 of 3 subtitles faster than 20 letters a second")
    tab.click(WORD.format(3), times=2)
    tab.wait("document.activeElement.matches('.word input')")
    tab.type("a" + ENTER)
    tab.wait(f"{ROWS}[1].textContent.includes('Extraordinarily a communication.')")


def test_times_of_subtitles_are_moved_exported_so_and_moved_back(open_any: OpenAny) -> None:
    tab = open_text(open_any, FAST)
    open_subtitles(tab)
    before = tab.evaluate(TIMES)
    assert before == [
        "00:00:00.000 – 00:00:01.000",
        "00:00:02.000 – 00:00:03.000",
        "00:00:03.000 – 00:00:04.000",
    ]
    tab.click(".cues li:nth-child(2)")
    tab.wait("document.querySelector('audio').currentTime === 2")
    move(tab, "start", "Earlier", "0.25")
    tab.wait(f"{TIMES}[1] === '00:00:01.750 – 00:00:03.000'")
    move(tab, "end", "Later", "0.5")
    tab.wait(f"{TIMES}[1] === '00:00:01.750 – 00:00:03.500'")
    move(tab, "all", "Later", "60")
    moved = ["00:01:00.000 – 00:01:01.000", "00:01:01.750 – 00:01:03.500", "00:01:03.000 – 00:01:04.000"]
    tab.wait(f"{TIMES}[0] === '{moved[0]}'")
    assert tab.evaluate(TIMES) == moved
    assert stamps(exported(tab, "vtt")) == moved
    assert stamps(exported(tab, "srt").replace(",", ".")) == moved
    tab.evaluate("document.querySelector('[data-format=csv]').click()")
    assert "\r\n0.000,5.000" in tab.evaluate("window.downloads[1][1].text()")  # words stay beside their sound
    for _ in range(3):
        tab.evaluate(UNDO)
    tab.wait(f"{TIMES}[0] === '{before[0]}'")
    assert tab.evaluate(TIMES) == before


def move(tab: AnyTab, side: str, button: str, by: str) -> None:
    choose(tab, ".cues select", side)
    choose(tab, ".cues [type=number]", by)
    press_button(tab, button)


def test_a_subtitle_ends_where_the_next_one_was_moved_to(open_any: OpenAny) -> None:
    tab = open_text(open_any, FAST)
    open_subtitles(tab)
    tab.click(".cues li:nth-child(3)")
    move(tab, "start", "Earlier", "0.6")
    tab.wait(f"{TIMES}[2].startsWith('00:00:02.400')")
    assert tab.evaluate(TIMES)[1] == "00:00:02.000 – 00:00:02.400"
    move(tab, "all", "Earlier", "1.5")
    tab.wait(f"{TIMES}.length === 2")  # the first one is over before the sound begins
    assert stamps(exported(tab, "vtt")) == ["00:00:00.500 – 00:00:00.900", "00:00:00.900 – 00:00:02.500"]


ENGLISH: dict[str, Any] = {
    "text": "Only in English.",
    "segments": [{"id": 0, "seek": 0, "start": 2.0, "end": 4.0, "text": " Only in English."}],
}
CAN_TRANSLATE = "document.querySelector('#task-field').hidden = {}"


def test_a_translation_is_a_second_track_over_the_video_and_a_file_of_its_own(
    open_any: OpenAny, tmp_path: Path
) -> None:
    tab = open_any()
    tab.wait_for_text("#model", "whisper-digits")
    tab.evaluate(CAN_TRANSLATE.format("false"))
    answer_with(tab, language="german", **words_at(("eins", 1.0), ("zwei", 3.0)))
    write_late_video(tmp_path / "talk.webm")
    drop_video(tab, tmp_path / "talk.webm")
    tab.wait(
        "document.querySelector('.fold:enabled') && document.querySelector('video')?.textTracks.length === 1"
    )
    assert tab.evaluate("document.querySelector('[data-format=\"en.srt\"]').hidden")
    open_subtitles(tab)
    answer_with(tab, **ENGLISH)
    tab.evaluate(
        """(() => {
            const { open } = XMLHttpRequest.prototype;
            XMLHttpRequest.prototype.open = function (...to) { window.asked = to[1]; open.apply(this, to); };
        })()"""
    )
    press_button(tab, "Translate into English")
    tab.wait("document.querySelector('video').textTracks.length === 2")
    assert tab.evaluate("window.asked") == "v1/audio/translations"
    english = "document.querySelector('video').textTracks[1]"
    tab.evaluate(f"({english}.mode = 'showing')")  # as in the browser's menu
    tab.wait(f"{english}.cues[0].text === 'Only in English.'")
    tab.wait("document.querySelector('.cues [lang=en]').textContent.startsWith('Only in English.')")
    move(tab, "all", "Later", "1")
    tab.wait(f"{TIMES}[0].startsWith('00:00:02.000')")
    assert tab.evaluate(f"[{english}.mode, {english}.cues.length, {english}.cues[0].startTime]") == [
        "showing",
        1,
        3,
    ]
    assert exported(tab, "en.srt").startswith("1\n00:00:03,000 --> 00:00:05,000\nOnly in English.")
    assert tab.evaluate("window.downloads[0][0]") == "talk.en.srt"
    assert "eins" in exported(tab, "srt")
    tab.reload()
    tab.wait("document.querySelector('.fold:enabled')")
    tab.click(".fold")
    tab.wait("document.querySelector('.word')")
    assert "Only in English." in exported(tab, "en.vtt")


def test_no_translation_is_offered_where_the_model_cannot_or_the_text_is_english(open_any: OpenAny) -> None:
    for is_hidden, language in (("true", "german"), ("false", "english")):
        tab = open_any()
        tab.wait_for_text("#model", "whisper-digits")
        tab.evaluate(CAN_TRANSLATE.format(is_hidden))
        answer_with(tab, **FAST | {"language": language})
        drop(tab, "call.wav")
        tab.wait("document.querySelector('[data-part=subtitling]')?.checkVisibility()")
        open_subtitles(tab)
        assert tab.evaluate("document.querySelector('[data-part=translating]').hidden")


def test_the_subtitles_of_two_recordings_have_names_of_their_own(open_any: OpenAny) -> None:
    """As readers of screens jump from one to the next."""
    tab = open_text(open_any, FAST)
    open_subtitles(tab)
    drop(tab, "second.wav")
    tab.wait("document.querySelectorAll('.fold:enabled').length === 2")
    tab.evaluate("document.querySelector('#cards .card:last-child .fold[aria-expanded=false]')?.click()")
    tab.evaluate("document.querySelector('#cards .card:first-child [data-part=subtitling]').click()")
    names = "[...document.querySelectorAll('.cues')].map((panel) => panel.ariaLabel)"
    tab.wait(f"{names}.length === 2")
    assert tab.evaluate(names) == ["Subtitles of second.wav", "Subtitles of call.wav"]
