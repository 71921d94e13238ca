"""The page in headless Chromium, on a real server with the embedded model."""

import json
import math
import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import soundfile
from playwright.sync_api import (
    Browser,
    Dialog,
    FileChooser,
    FilePayload,
    Page,
    Route,
    WebSocketRoute,
    expect,
)
from scipy.signal import resample_poly

from asr_server import __version__
from asr_server.api.schemas import TranslationFields
from asr_server.core import SAMPLE_RATE
from asr_server.formats.render import VerboseJson
from tests.conftest import Server, run_server
from tests.page.both import ChromiumTab, faults
from tests.page.browsing import (
    LIMIT_MS,
    NEEDS_CHROMIUM,
    SPOKEN,
    OpenPage,
    answering,
    card,
    choose,
    correct,
    downloaded,
    end_of_stream,
    payload,
    wait_until_deleted,
    wait_until_kept,
)
from tests.page.held_app import HeldApp
from tests.support.speech import Spoken, say
from tests.unit.api.running_app import THREE_CHUNKS
from tests.unit.speakers.people import TALK, join

pytestmark = NEEDS_CHROMIUM

PHONE: dict[str, Any] = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}
TALKING = SPOKEN._replace(samples=join([said for _, said in TALK])[0])  # of two people
TURN = "conversation.item.input_audio_transcription"


def choose_by_key(page: Page, *files: FilePayload) -> None:
    """Presses Enter on the file field. A choice that opens before the driver listens is never closed."""
    choosers: list[FileChooser] = []
    page.on("filechooser", lambda chooser: choosers.append(chooser))
    expect(page.locator("#model")).to_contain_text("whisper-digits")
    tab_to(page, "document.activeElement.id === 'files'")
    page.keyboard.press("Enter")
    for _ in range(LIMIT_MS // 50):
        if choosers:
            break
        page.wait_for_timeout(50)
    choosers[0].set_files(list(files))


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


def test_a_card_says_that_its_file_was_cut_short(open_page: OpenPage) -> None:
    page = open_page()
    file = payload("cut.wav")
    choose(page, {**file, "buffer": file["buffer"][:-2000]})
    expect(card(page, "cut.wav").locator(".facts")).to_contain_text("damaged or cut short")


# What a card says of its upload, which passes by itself
WATCH_UPLOAD = """() => {
    window.seen = [];
    new MutationObserver(() => {
        const facts = document.querySelector(".card.is-working .facts");
        if (facts) window.seen.push(facts.textContent);
    }).observe(document.body, { subtree: true, childList: true, characterData: true });
}"""


def test_the_upload_is_shown_as_it_goes(open_page: OpenPage) -> None:
    page = open_page()
    page.evaluate(WATCH_UPLOAD)
    slow_upload = {"offline": False, "latency": 0, "downloadThroughput": -1, "uploadThroughput": 500_000}
    page.context.new_cdp_session(page).send("Network.emulateNetworkConditions", slow_upload)
    choose(page, payload("call.wav", say("314159265358979323" * 2, gap_s=0.6)))
    expect(card(page, "call.wav").locator(".facts")).to_contain_text("× real time")
    uploading = [facts for facts in page.evaluate("window.seen") if facts.startswith("uploading, ")]
    assert len(set(uploading)) >= 2
    assert any(re.fullmatch(r"uploading, \d+ %\d:\d\d", facts) for facts in uploading)  # and for how long


def test_text_and_what_is_left_are_shown_while_the_engine_works(
    open_page: OpenPage, held_app: HeldApp
) -> None:
    page = open_page(url=held_app.url)
    choose(page, {"name": "talk.wav", "mimeType": "audio/wav", "buffer": THREE_CHUNKS})
    work = card(page, "talk.wav")
    expect(work.locator(".facts")).to_have_text(re.compile(r"^listening …\d:\d\d$"))
    held_app.release_chunk()
    expect(work.locator(".transcript")).to_have_text("zero")
    expect(work.locator(".facts")).to_have_text(
        re.compile(r"^listening, [1-9]\d %\d:\d\dabout \d+:\d\d left$")
    )
    expect(work.locator("progress")).to_have_attribute("value", re.compile(r"0\.[1-9]"))
    for _ in range(2):
        held_app.release_chunk()
    expect(work.locator(".transcript")).to_have_text("zero one two")
    expect(work.locator(".facts")).to_contain_text("× real time")


def test_language_task_and_prompt_are_chosen_from_what_the_model_has_and_sent(open_page: OpenPage) -> None:
    def multilingual(page: Page) -> None:
        languages, tasks = ["yue", "de", "en"], ["transcribe", "translate"]
        model = {"id": "turbo", "description": "a Whisper model", "languages": languages, "tasks": tasks}
        page.route(
            "**/v1/models", lambda route: route.fulfill(json={"data": [model | {"max_upload_bytes": 10**9}]})
        )
        page.route("**/v1/audio/*", receive)

    def receive(route: Route) -> None:
        sent.append((route.request.url.rpartition("/")[2], fields_of(route.request.post_data_buffer or b"")))
        route.fulfill(status=502)

    sent: list[tuple[str, dict[str, str]]] = []

    page = open_page(mock=multilingual)
    expect(page.locator("#model")).to_have_text("Served here: turbo, a Whisper model.")
    offered = page.get_by_label("Language").locator("option")
    expect(offered).to_have_text(["detected", "Cantonese", "English", "German"])
    page.get_by_label("Language").select_option("German")
    page.get_by_label("Speakers").select_option("3 people")
    page.get_by_label("Names and words to expect").fill(" Oberursel ")
    choose(page, payload("a.wav")).get_by_role("button", name="Try again").wait_for()
    page.locator("summary", has_text="Choices").click()
    page.get_by_label("Write it").select_option("in English")
    for name in ("Language", "Speakers"):
        expect(page.get_by_label(name)).to_be_disabled()
    choose(page, payload("b.wav")).get_by_role("button", name="Try again").wait_for()
    (first, fields), (second, others) = sent
    assert (first, second) == ("transcriptions", "translations")
    assert {"language": "de", "num_speakers": "3", "hotwords": "Oberursel"}.items() <= fields.items()
    assert "timestamp_granularities[]" in fields
    assert "language" not in others
    assert others["hotwords"] == "Oberursel"
    TranslationFields.model_validate(others)


def fields_of(form: bytes) -> dict[str, str]:
    found = re.findall(rb'name="([^"]+)"\r\n\r\n(.*?)\r\n', form)
    return {name.decode(): value.decode() for name, value in found}


def test_several_files_wait_their_turn_and_a_bad_one_says_why(open_page: OpenPage) -> None:
    page = open_page()
    names = [f"{number}.wav" for number in range(4)]
    choose(
        page,
        *(payload(name) for name in names),
        {"name": "letter.mp3", "mimeType": "audio/mpeg", "buffer": b"no"},
        {"name": "empty.mp3", "mimeType": "audio/mpeg", "buffer": b""},
    )
    for name in names:
        expect(card(page, name)).to_contain_text(SPOKEN.text)  # its text, or folded the beginning of it
    expect(page.locator(".fold[aria-expanded=true]:enabled")).to_have_count(1)
    for name, reason in (("letter.mp3", "not audio"), ("empty.mp3", "This file is empty.")):
        bad = card(page, name)
        expect(bad.get_by_role("alert")).to_contain_text(reason)
        expect(bad.get_by_role("button", name="Try again")).to_be_hidden()  # nothing would be different
        bad.get_by_role("button", name=f"Delete {name}").click()
    expect(page.locator("#cards > li")).to_have_count(4)


def test_the_transcript_is_downloaded_in_each_format_as_it_was_corrected(open_page: OpenPage) -> None:
    page = open_page(accept_downloads=True)
    done = choose(page, payload("call.wav"))
    done.get_by_role("button", name="Correct words").click()
    done.locator(".word").nth(1).click()
    field = done.get_by_label("Correct “one”")
    field.fill("forty two")
    field.press("Escape")
    expect(done.locator(".transcript")).to_have_text(SPOKEN.text)
    for number, text in ((1, "forty  two"), (3, "")):
        done.locator(".word").nth(number).click()
        done.locator(".word input").fill(text)
        done.locator(".word input").press("Enter")
    corrected = "three forty two four five nine"
    expect(done.locator(".transcript")).to_have_text(corrected)
    assert downloaded(page, "call.wav", ".txt") == f"{corrected}\n"
    assert re.match(
        r"1\n00:00:00,\d+ --> 00:00:0\d,\d+\nthree forty two", downloaded(page, "call.wav", ".srt")
    )
    assert downloaded(page, "call.wav", ".vtt").startswith("WEBVTT\n\n00:00:00.")
    body = VerboseJson.model_validate_json(downloaded(page, "call.wav", ".json"))
    assert (body.task, body.language, body.text) == ("transcribe", "english", corrected)
    assert body.segments
    assert body.words
    assert " ".join(segment.text.strip() for segment in body.segments) == corrected
    assert [word.word for word in body.words] == ["three", "forty", "two", "four", "five", "nine"]
    assert body.words[1].end == body.words[2].start  # they share the time of the one that was said
    assert body.segments[0].start == pytest.approx(SPOKEN.times[0][0], abs=0.2)
    assert body.usage.seconds == math.ceil(body.duration)


def test_transcripts_are_kept_in_this_browser_until_they_are_deleted(open_page: OpenPage) -> None:
    """One context, so that a reload finds what was there before."""
    page = open_page(accept_downloads=True)
    page.on("dialog", lambda dialog: dialog.accept())
    expect(page.locator("#history")).to_be_hidden()
    choose(page, payload("one.wav"), payload("two.wav", say("271828", gap_s=0.2)))
    expect(page.locator("#cards .is-working")).to_have_count(0)
    opened = page.locator(".fold[aria-expanded=true]")
    expect(opened).to_have_count(1)  # the first to finish; the other is folded
    first = card(page, "one.wav")
    if opened.text_content() != "one.wav":
        first.locator(".fold").click()
    correct(page, "one.wav", 0, "Thirty")
    corrected = SPOKEN.text.replace("three", "Thirty")
    wait_until_kept(page, corrected)

    page.reload()
    expect(page.locator("#cards > li")).to_have_count(2)
    expect(page.locator("#kept")).to_contain_text("in this browser and nowhere else")
    expect(page.locator(".transcript .word")).to_have_count(0)  # all are folded
    expect(first.locator(".preview")).to_have_text(corrected)
    page.get_by_label("Search your transcripts").fill("THIRTY one")
    expect(page.locator("#found")).to_have_text("1 of 2 transcripts")
    expect(card(page, "two.wav")).to_be_hidden()
    expect(first.locator("mark")).to_have_text("Thirty one")
    first.locator(".fold").click()
    expect(first.locator(".word.is-found")).to_have_text(["Thirty", "one"])
    assert downloaded(page, "one.wav", ".txt") == f"{corrected}\n"
    page.get_by_label("Search your transcripts").fill("")

    first.get_by_role("button", name="Delete one.wav").click()
    expect(first).to_have_count(0)
    page.get_by_role("button", name="Undo").click()
    expect(first).to_have_count(1)
    card(page, "two.wav").get_by_role("button", name="Delete two.wav").click()
    expect(page.locator("#undo-text")).to_have_text("two.wav is deleted.")
    wait_until_deleted(page, "two.wav")
    page.reload()
    expect(page.locator("#cards .fold")).to_have_text(["one.wav"])
    page.get_by_role("button", name="Delete all").click()
    expect(page.locator("#cards > li")).to_have_count(0)
    wait_until_deleted(page, "one.wav")
    page.reload()
    expect(page.locator("#kept")).to_have_text(re.compile("."))  # it has looked
    expect(page.locator("#cards > li")).to_have_count(0)


def test_speakers_have_colours_and_names_that_can_be_changed(open_page: OpenPage) -> None:
    page = open_page(accept_downloads=True, reduced_motion="reduce")
    page.get_by_label("Speakers").select_option("labelled")
    choose(page, payload("talk.wav", TALKING))
    done, labels = card(page, "talk.wav"), card(page, "talk.wav").locator(".transcript .speaker")
    expect(labels).to_have_text(["A", "B", "A", "B"])
    colours = labels.evaluate_all("labels => labels.map((label) => getComputedStyle(label).color)")
    assert colours[0] == colours[2] != colours[1] == colours[3]
    expect(done.locator(".facts")).to_contain_text("2 speakers")

    done.get_by_role("button", name="Rename A").press("Enter")
    page.get_by_label("Name of speaker A").fill(" Anna  <x> ")
    page.keyboard.press("Enter")
    expect(done.get_by_role("button", name="Rename Anna <x>")).to_be_focused()
    labels.nth(3).click()
    page.get_by_label("Name of speaker B").fill("Ben")
    page.get_by_label("Name of speaker B").blur()
    expect(labels).to_have_text(["Anna <x>", "Ben", "Anna <x>", "Ben"])
    schemes: tuple[Literal["dark", "light"], ...] = ("dark", "light")
    for scheme, width in zip(schemes, (1000, 360), strict=True):
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": 740})
        assert faults(ChromiumTab(page)) == []
    for at_first in (done.get_by_role("button", name="Rename Ben"), labels.nth(1)):
        at_first.click()
        page.get_by_label("Name of speaker Ben").fill("Ben" * 20)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        page.keyboard.press("Escape")

    wait_until_kept(page, ["Anna <x>", "Ben"], "speakers")
    page.reload()
    page.get_by_label("Search your transcripts").fill("anna")
    expect(done.locator(".facts")).to_contain_text("Anna <x> and Ben")
    assert downloaded(page, "talk.wav", ".txt").startswith("Anna <x>: three one")
    assert "\nBen: two seven" in downloaded(page, "talk.wav", ".srt")
    assert "\n<v Anna &lt;x&gt;>three one" in downloaded(page, "talk.wav", ".vtt")
    body = VerboseJson.model_validate_json(downloaded(page, "talk.wav", ".json"))
    assert {each.speaker for each in (*(body.segments or ()), *(body.words or ()))} == {"Anna <x>", "Ben"}
    done.locator(".fold").click()
    for answer, names in ((Dialog.dismiss, ["Anna <x>", "Ben"]), (Dialog.accept, ["Anna <x>"])):
        page.once("dialog", answer)
        done.get_by_role("button", name="Rename Ben").click()
        page.get_by_label("Name of speaker Ben").fill("Anna <x>")
        page.keyboard.press("Enter")
        expect(done.locator(".speakers li")).to_contain_text(names)


def test_what_is_kept_is_bounded_and_a_browser_that_keeps_nothing_says_so(open_page: OpenPage) -> None:
    page = open_page("/version", bypass_csp=True)  # of the same origin, without a list that shows each
    found = page.evaluate(
        """async () => {
            const { Store } = await import("/web/store.js");
            const store = new Store();
            const put = (id, entry) => store.put({ id: `${id}`, name: `${id}`, order: id, ...entry }, {});
            for (let number = 0; number < 503; number++) await put(number, { text: "" });
            const kept = (await store.entries()).map(({ name }) => Number(name));
            const dropped = (await store.answer("1")) ?? null;
            await put(999, { name: "newest", text: "x".repeat(3e7) });
            const few = (await store.entries()).map(({ name }) => name);
            return [kept.length, kept[0], kept.at(-1), dropped, few];
        }"""
    )
    assert found == [500, 502, 3, None, ["newest"]]
    refuse = "IDBFactory.prototype.open = () => { throw new DOMException('no', 'SecurityError'); }"
    page = open_page(mock=lambda page: page.add_init_script(refuse))
    expect(page.locator("#kept")).to_contain_text("keeps nothing")
    choose(page, payload("call.wav"))
    expect(card(page, "call.wav").locator(".transcript")).to_have_text(SPOKEN.text)
    expect(page.locator("#message")).to_be_hidden()


def test_ten_thousand_words_are_shown_in_paragraphs_and_found(open_page: OpenPage) -> None:
    texts = [{0: f"start{i // 12 % 97}", 11: "end."}.get(i % 12, "and") for i in range(10_000)]
    page = open_page(mock=answering(**end_of_stream(texts)))
    done = choose(page, payload("hour.wav"))
    expect(done.locator(".word")).to_have_count(10_000)
    assert done.locator(".transcript p").count() > 50
    assert done.locator(".transcript p").nth(1).get_attribute("data-time") == "0:21"
    for num_words in (0, 10_000):
        done.locator(".fold").click()
        expect(done.locator(".word")).to_have_count(num_words)
    page.get_by_label("Search your transcripts").fill("end. start9")
    box, word = done.locator(".transcript"), done.locator(".word.is-found").first
    num_places = sum(str(number % 97).startswith("9") for number in range(1, 834))
    expect(done.locator(".word.is-found")).to_have_count(2 * num_places)
    seen, place = box.bounding_box(), word.bounding_box()
    assert seen is not None
    assert place is not None
    assert seen["height"] < 1_000
    assert seen["y"] <= place["y"] < seen["y"] + seen["height"]


@pytest.mark.trial
def test_a_recording_of_an_hour_goes_from_drop_to_download(browser: Browser, tmp_path: Path) -> None:
    recording = tmp_path / "hour.mp3"
    spoken = say("31415926535897932384" * 8, gap_s=0.4)
    write_mp3(recording, spoken, HOUR_S)
    assert recording.stat().st_size >= 60e6
    with run_server() as server, closing(browser.new_context(accept_downloads=True)) as context:
        page = context.new_page()
        page.set_default_timeout(600_000)
        page.goto(server.url)
        # A file of the disk reaches a page through a field alone; from there it is dropped.
        page.evaluate(
            """() => {
                const field = document.createElement("input");
                Object.assign(field, { type: "file", id: "dropped" });
                field.onchange = () => {
                    const dataTransfer = new DataTransfer();
                    dataTransfer.items.add(field.files[0]);
                    document.dispatchEvent(new DragEvent("drop", { dataTransfer, cancelable: true }));
                };
                document.body.append(field);
            }"""
        )
        page.set_input_files("#dropped", recording)
        done = card(page, "hour.mp3")
        expect(done.locator(".facts")).to_contain_text("× real time", timeout=600_000)
        print(done.locator(".facts").text_content())
        num_words = done.locator(".word").count()
        assert num_words > 0.8 * HOUR_S / spoken.samples.size * SAMPLE_RATE * len(spoken.text.split())
        last = done.locator(".word").last
        last.click()
        expect(done.locator(".clock")).to_contain_text("1:02:")
        expect(last).to_be_in_viewport()
        heap = page.evaluate("performance.memory.usedJSHeapSize") / 2**20
        print(f"{num_words} words, {heap:.0f} MiB of JavaScript's heap")
        assert heap < 200
        page.reload()
        expect(done.locator(".preview")).to_contain_text("three one four")
        body = VerboseJson.model_validate_json(downloaded(page, "hour.mp3", ".json"))
        assert body.duration == pytest.approx(HOUR_S, abs=1)
        assert len(body.words or ()) == num_words
        assert downloaded(page, "hour.mp3", ".srt").count(" --> ") == len(body.segments or ())


HOUR_S = 3_760.0  # so long are 60 MB at 128 kbit/s


def write_mp3(path: Path, spoken: Spoken, duration_s: float) -> None:
    """At 128 kbit/s, the usual rate, over and over."""
    rate = 44_100
    samples = resample_poly(spoken.samples, rate // 100, SAMPLE_RATE // 100).astype(np.float32)
    with soundfile.SoundFile(
        path, "w", rate, 1, format="MP3", bitrate_mode="CONSTANT", compression_level=2 / 3
    ) as file:
        left = round(duration_s * rate)
        while left:
            file.write(samples[:left])
            left -= len(samples[:left])


def test_words_light_up_while_it_plays_and_a_click_on_one_goes_there(open_page: OpenPage) -> None:
    page = open_page()
    done = choose(page, payload("call.wav"))
    position = done.get_by_role("slider", name="Position in call.wav")
    done.locator(".word", has_text="five").click()
    expect(done.locator(".word.is-lit")).to_have_text("five")
    assert float(position.input_value()) == pytest.approx(SPOKEN.times[4][0], abs=0.4)
    done.get_by_role("button", name="Play call.wav").click()
    expect(done.locator(".word.is-lit")).to_have_text("nine")


def test_the_microphone_is_heard_while_one_speaks(open_page: OpenPage) -> None:
    page = open_page(permissions=["microphone"])
    page.get_by_label("Names and words to expect").fill("one")
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
            event = json.loads(message)
            received.append(event["type"])
            match received[-1]:
                case "session.update" if len(received) == 1:
                    asked_for.append(event["session"])
                    send("session.updated")
                case "input_audio_buffer.append" if len(received) == 2:
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
    asked_for: list[dict[str, Any]] = []
    page = open_page(permissions=["microphone"], mock=lagging)
    page.get_by_label("Names and words to expect").fill("Oberursel")
    page.get_by_role("button", name="Speak").click()
    expect(page.locator("#live-text")).to_contain_text("one")
    page.evaluate(
        """() => {
            for (const end = performance.now() + 600; performance.now() < end; ); // blocks are waiting now
            document.getElementById("stop").click();
        }"""
    )
    expect(card(page, "Recording 1").locator(".transcript")).to_have_text("one two")
    assert asked_for == [
        {
            "type": "transcription",
            "include": ["item.input_audio_transcription.interim"],
            "audio": {"input": {"transcription": {"keywords": ["Oberursel"]}}},
        }
    ]
    _, *appends, commit, update = received  # audio behind the commit would never be committed
    assert set(appends) == {"input_audio_buffer.append"}
    assert (commit, update) == ("input_audio_buffer.commit", "session.update")


def test_everything_works_by_keyboard_alone(open_page: OpenPage) -> None:
    page = open_page()
    choose_by_key(page, payload("call.wav"))
    done = card(page, "call.wav")
    done.get_by_label("Download call.wav").wait_for()
    assert done.locator(".transcript[tabindex='0']").count() == 1
    reached = set()
    for _ in range(20):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.getAttribute('aria-label')"))
    assert {"Play call.wav", "Position in call.wav", "Download call.wav", "Delete call.wav"} <= reached
    tab_to(page, "document.activeElement.matches('.transcript')", "Shift+Tab")
    for word in ("three", "one"):
        page.keyboard.press("ArrowRight")
        expect(done.locator(".word.is-lit")).to_have_text(word)
    page.keyboard.press("Enter")
    page.keyboard.type("won")
    page.keyboard.press("Enter")
    expect(done.locator(".word.is-lit")).to_have_text("won")
    tab_to(page, "document.activeElement.type === 'range'", "Shift+Tab")
    page.keyboard.press("End")
    expect(done.locator(".clock")).to_contain_text("0:05 / 0:05")
    page.keyboard.press("Home")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")  # on "Play": it goes on whenever this looks
    expect(done.locator(".clock")).not_to_contain_text("0:00 /")
    tab_to(page, "document.activeElement.textContent === 'Download'", "Shift+Tab")
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    expect(done.locator(".menu-choices")).to_be_hidden()
    page.keyboard.press("Enter")
    tab_to(page, "document.activeElement.textContent === 'Subtitles .srt'")
    with page.expect_download():
        page.keyboard.press("Enter")
    tab_to(page, "document.activeElement.textContent === 'call.wav'", "Shift+Tab")
    page.keyboard.press("Enter")
    expect(done.locator(".transcript")).to_be_hidden()
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
    pending: list[Callable[[Route], None]] = [*answers.values(), lambda route: route.continue_()]
    page = open_page(
        mock=lambda page: page.route("**/v1/audio/transcriptions", lambda route: pending.pop(0)(route))
    )
    for number, message in enumerate(answers):
        choose(page, payload(f"{number}.wav"))
        expect(card(page, f"{number}.wav").get_by_role("alert")).to_contain_text(message)
        expect(page.locator("#announce")).to_have_text(f"{number}.wav could not be transcribed.")
    card(page, "0.wav").get_by_role("button", name="Try again").click()
    expect(card(page, "0.wav").locator(".transcript")).to_have_text(SPOKEN.text)


def test_a_file_that_the_server_would_refuse_is_not_sent(open_page: OpenPage) -> None:
    sent: list[str] = []

    def small(page: Page) -> None:
        def served(route: Route) -> None:
            body = route.fetch().json()
            route.fulfill(json={"data": [model | {"max_upload_bytes": 100_000} for model in body["data"]]})

        page.route("**/v1/models", served)
        page.on("request", lambda request: sent.append(request.url))

    page = open_page(mock=small)
    told = choose(page, payload("long.wav"))
    expect(told.get_by_role("alert")).to_contain_text("the server takes 0.1 MiB at most. As mp3, m4a or opus")
    expect(told.get_by_role("button", name="Try again")).to_be_hidden()
    assert not [url for url in sent if url.endswith("/v1/audio/transcriptions")]


def test_without_a_microphone_or_a_place_the_page_says_so(open_page: OpenPage) -> None:
    def full(page: Page) -> None:
        page.route_web_socket("**/v1/realtime*", lambda socket: socket.close(code=1006))
        page.route("**/v1/realtime*", refuse)

    def refuse(route: Route) -> None:
        error = {"message": "64 realtime sessions are open: --max-realtime-sessions.", "code": None}
        route.fulfill(status=503, json={"error": error})

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
    page = open_page(**PHONE)
    name = "a name without spaces-that-is-long-as-recorders-write-them-2026-08-14.wav"
    choose(page, payload(name, say("314159" * 4, gap_s=0.1)))
    page.locator(".word").first.wait_for()
    choose(page, payload("call.wav"))
    page.locator(".fold[aria-expanded=false]").wait_for()
    for view in ("transcribe", "server"):
        page.locator(f"nav a[data-view={view}]").click()
        assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_the_second_view_shows_the_server_live(open_page: OpenPage) -> None:
    page = open_page("/#server")
    expect(page.locator("#health")).to_have_text("Ready: an engine takes work.")
    assert page.evaluate("window.scrollY") == 0
    expect(page.locator("#replicas")).to_contain_text("slots in use")
    expect(page.locator("#speed")).not_to_have_text("–")
    other = open_page()
    choose(other, payload("call.wav", say("31415926" * 3, gap_s=0.3)))
    expect(card(other, "call.wav").locator(".facts")).to_contain_text("× real time")
    expect(page.locator("#statuses")).to_contain_text("× 200")
    expect(page.locator("#last li").first).to_contain_text(
        re.compile(r": 200, [\d.]+ s of audio in [\d.]+ s")
    )
    expect(page.locator("#waiting")).to_contain_text(re.compile(r"^\d+ chunks? waiting; wait: [\d.]+ s, "))
    expect(page.locator("#latencies")).to_contain_text(re.compile(r"within [\d.]+ s, [\d.]+ s, [\d.]+ s$"))
    expect(page.locator("#about")).to_contain_text(f"version {__version__}")
    expect(page.locator("#memory")).to_contain_text("GB for FFmpeg")
    page.locator("#speed-chart").wait_for()
    late = open_page("/#server")  # it shows what went before
    expect(late.locator("#last li").first).to_contain_text("s of audio in")
    error = {"message": "The engine is starting."}
    page.route("**/ready", lambda route: route.fulfill(status=503, json={"error": error}))
    expect(page.locator("#health.is-bad")).to_have_text("The engine is starting.")
    page.route("**/v1/activity", lambda route: route.abort())
    expect(page.locator("#health.is-bad")).to_contain_text("cannot be reached")


def test_the_description_of_the_api_works_without_any_other_host(open_page: OpenPage, server: Server) -> None:
    hosts: set[str] = set()
    violations: list[str] = []

    def watch(page: Page) -> None:
        page.on("request", lambda request: hosts.add(request.url.partition("//")[2].partition("/")[0]))
        page.on(
            "console", lambda message: violations.append(message.text) if "Policy" in message.text else None
        )

    page = open_page("/docs", mock=watch)
    expect(page.locator(".swagger-ui")).to_contain_text("/v1/audio/transcriptions")
    page.locator("#operations-operations-health_health_get").click()
    page.get_by_role("button", name="Try it out").click()
    page.get_by_role("button", name="Execute").click()
    expect(page.locator(".live-responses-table tbody .response-col_status")).to_contain_text("200")
    assert violations == []
    assert hosts - {""} == {server.url.partition("//")[2]}


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
            route.fulfill(status=429, json={"error": error}, headers={"retry-after": "5"})
        else:
            route.continue_()

    page = open_page(mock=busy)
    choose(page, payload("call.wav"))
    expect(card(page, "call.wav").locator(".facts")).to_contain_text(
        re.compile("asking again in 5 s0:0[1-5]")  # the seconds go on
    )
    expect(card(page, "call.wav").locator(".transcript")).to_have_text(SPOKEN.text)


COLOURS: tuple[dict[str, Any], ...] = (
    {"forced_colors": "active", "color_scheme": "light"},
    {"forced_colors": "none", "color_scheme": "dark"},
    {"forced_colors": "none", "color_scheme": "light"},
)


@pytest.mark.parametrize(
    ("width", "all_colours"),
    [
        (320, COLOURS[:2]),
        (1280, COLOURS[2:]),
        *(pytest.param(width, COLOURS, marks=pytest.mark.trial) for width in (320, 768, 1280)),
    ],
)
def test_axe_finds_no_fault_in_any_colours_and_nothing_scrolls_sideways(
    open_page: OpenPage, width: int, all_colours: tuple[dict[str, Any], ...]
) -> None:
    viewport = {"width": width, "height": 800}
    page = open_page(reduced_motion="reduce", viewport=viewport, permissions=["microphone"])
    choose(page, payload("call.wav"), {"name": "letter.mp3", "mimeType": "audio/mpeg", "buffer": b"no"})
    page.locator(".word").first.wait_for()
    card(page, "letter.mp3").get_by_role("alert").wait_for()
    card(page, "call.wav").locator(".menu").click()
    card(page, "call.wav").locator(".menu").click()  # on a narrow page the menu lies over the words
    for word in ("Choices", "Storage"):
        page.locator("summary", has_text=word).click()
    card(page, "call.wav").locator("summary", has_text="Details").click()
    card(page, "call.wav").get_by_role("button", name="Find and replace").press("Enter")
    card(page, "call.wav").locator(".word").last.dblclick()
    card(page, "call.wav").locator(".menu").press("Enter")
    page.keyboard.press("Escape")
    card(page, "call.wav").get_by_role("button", name="Correct words").press("Enter")
    card(page, "call.wav").locator(".word").first.dblclick()
    expect(card(page, "call.wav").locator(".word input")).to_be_focused()
    for state in ("transcribe", "speaking", "server"):
        if state == "speaking":
            page.get_by_role("button", name="Speak").click()
            expect(page.locator("#live-text")).to_contain_text("two seven one")
        else:
            page.locator(f"nav a[data-view={state}]").click()
        if state == "server":
            expect(page.locator("#replicas")).to_contain_text("slots in use")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        for colours in all_colours:
            page.emulate_media(**colours)
            assert faults(ChromiumTab(page)) == []
