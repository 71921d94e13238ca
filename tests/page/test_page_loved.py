"""What people know from other transcription pages: in headless Chromium, on a real server."""

import io
import json
from pathlib import Path
from xml.etree import ElementTree
from zipfile import ZipFile

from playwright.sync_api import expect

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
    wait_until_promised,
    words_at,
)
from tests.page.test_page_corrects import write_late_video

pytestmark = NEEDS_CHROMIUM

WORD = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"


# -- How fast it was, and what is missing --


def test_a_speed_below_real_time_is_a_fraction(open_page: OpenPage) -> None:
    page = open_page()
    facts = page.evaluate(
        """async () => {
            const { detailsOf } = await import("/web/entry.js");
            return [150, 1500, 6].map((took) => detailsOf({ duration: 60, took, createdAt: 0 })[1]);
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
    text = "Tom & Jerry <3\uffff yes."
    segments = [
        {"id": 0, "seek": 0, "start": 0.0, "end": 2.0, "text": " Tom & Jerry", "speaker": "Ann"},
        {"id": 1, "seek": 0, "start": 2.0, "end": 3.0, "text": " <3\uffff", "speaker": "Ann"},
        {"id": 2, "seek": 0, "start": 3.0, "end": 4.0, "text": " yes.", "speaker": "Bob"},
    ]
    page = open_page(mock=answering(text=text, segments=segments, words=[]), accept_downloads=True)
    choose(page, payload("call.wav")).get_by_role("button", name="Download").click()
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


# -- Doubtful words --


def test_doubtful_words_are_tinted_underlined_and_reached_by_a_button(open_page: OpenPage) -> None:
    words = words_at(("Grüße", 0.0), ("an", 1.0), ("Oberursel", 2.0), ("heute", 3.0))
    for word, confidence in zip(words["words"], (0.9, 0.1, 0.5, 0.7), strict=True):
        word["confidence"] = confidence
    page = open_page(mock=answering(**words))
    done = choose(page, payload("call.wav"))
    doubtful = done.locator(".word.is-doubtful")
    expect(doubtful).to_have_text(["an", "Oberursel"])
    style = doubtful.first.evaluate(
        "(word) => [getComputedStyle(word).textDecorationStyle, word.style.color]"
    )
    assert style == ["dashed", ""]
    button = done.get_by_role("button", name="2 doubtful words")
    for word in ("an", "Oberursel", "an"):
        button.click()
        expect(done.locator(".word.is-reached")).to_have_text(word)
        expect(done.get_by_role("status")).to_have_text(f"{word}, doubtful")
    page.keyboard.press("Enter")
    done.locator(".word input").fill("in")
    page.keyboard.press("Enter")
    expect(doubtful).to_have_text(["Oberursel"])
    expect(done.get_by_role("button", name="1 doubtful word")).to_be_visible()
    page.keyboard.press("Control+z")
    expect(doubtful).to_have_text(["an", "Oberursel"])


def test_the_words_of_a_real_answer_say_how_sure_they_are(open_page: OpenPage) -> None:
    page = open_page()
    with page.expect_response("**/v1/audio/transcriptions") as reply:
        choose(page, payload("call.wav"))
    card(page, "call.wav").locator(".word").first.wait_for()
    event = next(line for line in reply.value.text().splitlines() if "text.done" in line)
    words = json.loads(event.removeprefix("data: "))["words"]
    assert all(0 < word["confidence"] < 1 for word in words)
    shares = page.evaluate(
        """async (answer) => {
            const { applyEdits } = await import("/web/edits.js");
            const words = (confidence) => answer.words.map((word) => ({ ...word, confidence }));
            const piecesAt = (confidence) => applyEdits({ ...answer, words: words(confidence) }, []).pieces;
            const numDoubtful = (pieces) => pieces.filter(({ isDoubtful }) => isDoubtful).length;
            return [0.9, 0.1].map((confidence) => numDoubtful(piecesAt(confidence)));
        }""",
        json.loads(event.removeprefix("data: ")),
    )
    assert shares == [0, len(SPOKEN.text.split())]


# -- Find and replace --


def test_words_are_found_and_replaced_together_and_undone_together(open_page: OpenPage) -> None:
    words = words_at(("New", 0.0), ("york,", 0.5), ("a", 1.0), ("haha", 1.5), ("new", 2.0), ("York.", 2.5))
    page = open_page(mock=answering(**words))
    done = choose(page, payload("call.wav"))
    done.get_by_role("button", name="Find and replace").click()
    expect(done.get_by_label("Find")).to_be_focused()
    page.set_viewport_size({"width": 320, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 320
    for find, by, count, text in (
        ("new york", "Paris", 2, "Paris, a haha Paris."),
        ("HA", "ho", 2, "Paris, a hoho Paris."),
        ("a h", "", 1, "Paris, oho Paris."),
    ):
        done.get_by_label("Find", exact=True).fill(find)
        expect(done.locator(".replace [role=status]")).to_have_text(f"{count} found")
        expect(done.locator(".word.is-found")).not_to_have_count(0)
        done.get_by_label("Replace by").fill("")
        done.get_by_label("Replace by").press_sequentially(by)
        done.get_by_role("button", name="Replace all").click()
        expect(done.locator(".replace [role=status]")).to_have_text(f"{count} replaced")
        expect(done.locator(".transcript")).to_have_text(text)
    wait_until_kept(page, "Paris, oho Paris.")
    done.get_by_label("Find", exact=True).press("Escape")
    expect(done.get_by_label("Replace by")).to_be_hidden()
    expect(done.locator(".word.is-found")).to_have_count(0)
    for text in ("Paris, a hoho Paris.", "Paris, a haha Paris.", "New york, a haha new York."):
        page.keyboard.press("Control+z")
        expect(done.locator(".transcript")).to_have_text(text)


# -- The first visit, and speaking with speakers --


def test_the_page_says_what_it_is_and_has_a_sample_to_try(open_page: OpenPage) -> None:
    page = open_page()
    expect(page.locator(".lead")).to_contain_text("this server writes down what is said")
    page.get_by_role("button", name="Try a sample").click()
    expect(page.locator("#announce")).to_have_text("Sample.mp3 is transcribed.")
    expect(card(page, "Sample.mp3").locator(".clock")).to_contain_text("/ 0:07")
    expect(page.get_by_role("button", name="Try a sample")).to_be_hidden()


def test_one_who_speaks_is_told_when_the_speakers_come(open_page: OpenPage) -> None:
    page = open_page(permissions=["microphone"])
    page.get_by_label("Speakers").select_option("labelled")
    page.get_by_role("button", name="Speak").click()
    expect(page.locator("#live-status")).to_have_text("Listening … Who speaks is made sure when you stop.")
    expect(page.locator("#live-text")).to_contain_text("two seven one")


def test_browsers_can_install_the_page(open_page: OpenPage) -> None:
    page = open_page()
    session = page.context.new_cdp_session(page)
    errors = session.send("Page.getInstallabilityErrors")["installabilityErrors"]
    assert {error["errorId"] for error in errors} <= {"in-incognito"}  # as each context of a test is


# -- Recordings kept in the browser --


def test_a_recording_that_is_kept_plays_after_a_reload_until_it_is_switched_off(open_page: OpenPage) -> None:
    page = open_page()
    choose(page, payload("call.wav")).locator(".word").first.wait_for()
    page.locator("summary", has_text="Storage").click()
    page.get_by_label("Recordings too").check()
    wait_until_promised(page, NUM_SOUNDS.replace("NUMBER", "1"))
    page.reload()
    page.get_by_role("button", name="call.wav", exact=True).click()
    done = card(page, "call.wav")
    done.get_by_role("button", name="Play call.wav").click()
    expect(done.locator(".word.is-lit")).not_to_have_count(0)
    expect(done.get_by_role("button", name="Transcribe again")).to_be_visible()
    done.get_by_role("button", name="Delete call.wav").click()
    page.get_by_role("button", name="Undo").click()
    page.get_by_role("button", name="call.wav", exact=True).click()
    expect(card(page, "call.wav").get_by_role("button", name="Play call.wav")).to_be_enabled()
    page.locator("summary", has_text="Storage").click()
    page.get_by_label("Recordings too").uncheck()
    wait_until_promised(page, NUM_SOUNDS.replace("NUMBER", "0"))
    page.reload()
    page.get_by_role("button", name="call.wav", exact=True).click()
    expect(card(page, "call.wav").locator(".transcript")).to_have_text(SPOKEN.text)
    expect(card(page, "call.wav").locator(".player")).to_have_count(0)


NUM_SOUNDS = """async () => {
    const files = await navigator.storage.getDirectory();
    const folder = await files.getDirectoryHandle("recordings", { create: true });
    let number = 0;
    for await (const _ of folder.keys()) number++;
    return number === NUMBER;
}"""


def test_kept_recordings_are_bounded_and_swept_with_their_transcripts(open_page: OpenPage) -> None:
    page = open_page()
    kept = page.evaluate(
        """async () => {
            const { Sounds } = await import("/web/sounds.js");
            const sounds = new Sounds(25);
            await sounds.switchTo(true);
            const file = (size) => new File(["x".repeat(size)], "x");
            for (const id of ["a", "b", "c"]) {
                await sounds.keep(id, file(10));
                await new Promise((resolve) => setTimeout(resolve, 20)); // the next is newer
            }
            await sounds.keep("large", file(30));
            const has = async (id) => Boolean(await sounds.file(id, "x"));
            const bounded = [await has("a"), await has("b"), await has("c"), await has("large")];
            await sounds.sweep(new Set(["c"]));
            return [bounded, await has("b"), await has("c")];
        }"""
    )
    assert kept == [[False, True, True, False], False, True]


def test_a_tab_keeps_no_recording_once_another_has_switched_that_off(open_page: OpenPage) -> None:
    page = open_page()
    kept = page.evaluate(
        """async () => {
            const { Sounds } = await import("/web/sounds.js");
            const [one, other] = [new Sounds(), new Sounds()];
            await one.switchTo(true);
            const file = new File(["x"], "x");
            const writing = other.keep("a", file).catch(() => {}); // its file may be deleted under it
            await one.switchTo(false);
            await writing;
            await other.keep("b", file);
            const has = async (id) => Boolean(await one.file(id, "x"));
            return [await has("a"), await has("b"), other.isOn];
        }"""
    )
    assert kept == [False, False, False]


# -- A video --


def test_a_video_is_shown_with_what_was_corrected_as_its_captions(
    open_page: OpenPage, tmp_path: Path
) -> None:
    page = open_page(mock=answering(**words_at(("one", 0.0), ("two", 1.0))))
    path = tmp_path / "talk.webm"
    write_late_video(path)
    done = choose(page, {"name": "talk.webm", "mimeType": "video/webm", "buffer": path.read_bytes()})
    expect(done.locator("video")).to_be_visible()
    page.wait_for_function(HAS_CAPTION, arg="one two")
    assert done.locator("video").evaluate("(video) => video.textTracks[0].mode") == "showing"
    correct(page, "talk.webm", 0, "won")
    page.wait_for_function(HAS_CAPTION, arg="won two")
    done.locator(".fold").click()
    expect(done.locator("video")).to_be_hidden()


HAS_CAPTION = """(text) => {
    const track = document.querySelector("video").textTracks[0];
    return [...(track.cues ?? [])].map((cue) => cue.text).join() === text;
}"""
