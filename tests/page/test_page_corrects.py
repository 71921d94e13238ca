"""To correct, choose and take along: in both browsers, with answers that need no engine."""

import base64
import json
from pathlib import Path
from typing import Any

import av
import numpy as np

from tests.page.both import DROP, AnyTab, OpenAny, answer_with, choose, drop
from tests.page.browsing import words_at
from tests.page.firefox import END, ENTER, ESCAPE, TAB
from tests.page.test_page_reads import WORD, open_text, press_button

TURNS: dict[str, Any] = {
    "text": "one two three four",
    "segments": [
        {"id": i, "seek": 0, "start": i, "end": i + 1.0, "text": f" {text}", "speaker": speaker}
        for i, (text, speaker) in enumerate(zip(["one", "two", "three", "four"], "ABBA", strict=True))
    ],
    "words": [
        {"word": text, "start": i, "end": i + 0.5, "speaker": speaker}
        for i, (text, speaker) in enumerate(zip(["one", "two", "three", "four"], "ABBA", strict=True))
    ],
}
DOUBTFUL = words_at(("one", 0.0), ("two", 1.0))
DOUBTFUL["words"][1]["confidence"] = 0.2
ENTRY = """(async () => {
    const { Store } = await import("/web/store.js");
    const { applyEdits } = await import("/web/edits.js");
    const store = new Store();
    const [entry] = await store.entries();
    const answer = await store.answer(entry.id);
    store.database.close();
    return applyEdits(answer, entry.edits).answer;
})()"""
SPEAKERS = "[...document.querySelectorAll('#cards .transcript .speaker')].map((e) => e.textContent).join()"
TEXT = "document.querySelector('#cards .transcript').textContent"


UNDO = "document.dispatchEvent(new KeyboardEvent('keydown', { key: 'z', ctrlKey: true, bubbles: true }))"
SEGMENTS = f"{ENTRY}.then(({{ segments }}) => segments.map(({{ text, speaker }}) => speaker + text).join())"


def reach(tab: AnyTab, index: int) -> None:
    tab.evaluate(f"document.querySelectorAll('#cards .word')[{index}].click()")
    tab.wait(f"document.querySelectorAll('#cards .word')[{index}].matches('.is-reached')")


def give_to(tab: AnyTab, name: str) -> None:
    choose(tab, "[data-part=giveTo]", name)


def test_a_turn_is_given_to_another_speaker_and_undone(open_any: OpenAny) -> None:
    tab = open_text(open_any, TURNS)
    assert tab.evaluate(SPEAKERS) == "A,B,A"
    reach(tab, 1)
    press_button(tab, "Correct words")
    give_to(tab, "A")
    tab.wait(f"{SPEAKERS} === 'A'")
    tab.wait(f"{ENTRY}.then(({{ segments }}) => segments.every(({{ speaker }}) => speaker === 'A'))")
    tab.wait(f"{ENTRY}.then(({{ words }}) => words.every(({{ speaker }}) => speaker === 'A'))")
    tab.evaluate(UNDO)
    tab.wait(f"{SPEAKERS} === 'A,B,A'")


def test_what_is_selected_is_given_to_somebody_else(open_any: OpenAny) -> None:
    tab = open_text(open_any, TURNS)
    press_button(tab, "Correct words")
    tab.evaluate(
        """(() => {
            const words = document.querySelectorAll("#cards .word");
            getSelection().setBaseAndExtent(words[2].firstChild, 0, words[3].firstChild, 4);
        })()"""
    )
    tab.wait("getSelection().toString().includes('four')")
    give_to(tab, "somebody else")
    tab.wait(f"{SPEAKERS} === 'A,B,Speaker 3'")
    tab.wait(f"{SEGMENTS}.then((text) => text === 'A one,B two,Speaker 3 three,Speaker 3 four')")


def test_turns_are_split_and_joined_also_where_nobody_had_a_name(open_any: OpenAny) -> None:
    tab = open_text(open_any, words_at(("one", 0.0), ("two", 1.0), ("three", 2.0), ("four", 3.0)))
    press_button(tab, "Correct words")
    tab.click(word_at(tab, 2))
    tab.wait("document.activeElement.matches('.word input')")
    enter = "new KeyboardEvent('keydown', { key: 'Enter', ctrlKey: true, bubbles: true })"
    tab.evaluate(f"document.activeElement.dispatchEvent({enter})")
    tab.wait(f"{SPEAKERS} === 'Speaker 1,Speaker 2'")
    tab.wait(f"{SEGMENTS}.then((text) => text === 'Speaker 1 one two,Speaker 2 three four')")
    times = f"{ENTRY}.then(({{ segments }}) => segments.map(({{ start, end }}) => [start, end]))"
    assert tab.evaluate(times) == [[0, 1.1], [2, 5]]
    press_button(tab, "Join with the turn before")
    tab.wait(f"{SPEAKERS} === 'Speaker 1'")
    tab.evaluate(UNDO)
    tab.wait(f"{SPEAKERS} === 'Speaker 1,Speaker 2'")
    reach(tab, 3)
    tab.type(ESCAPE)
    press_button(tab, "New turn here")
    tab.wait(f"{SPEAKERS} === 'Speaker 1,Speaker 2,Speaker 1'")


def word_at(tab: AnyTab, index: int) -> str:
    tab.evaluate(f"document.querySelectorAll('#cards .word')[{index}].setAttribute('data-at', {index})")
    return f".word[data-at='{index}']"


def test_tab_goes_on_to_the_next_word(open_any: OpenAny) -> None:
    tab = open_text(open_any, words_at(("one", 0.0), ("two", 1.0), ("three", 2.0)))
    tab.click(WORD.format(1), times=2)
    tab.wait("document.activeElement.matches('.word input')")
    tab.type("won" + TAB)
    tab.wait("document.querySelector('.word input')?.value === 'two'")
    tab.type("too" + TAB + TAB)  # behind the last one there is none
    tab.wait(f"{TEXT} === 'won too three'")
    tab.wait("document.activeElement.matches('.transcript')")


CORRECTED_ELSEWHERE = """import("/web/store.js").then(async ({ Store }) => {
    const store = new Store();
    const [{ id }] = await store.entries();
    await store.change(id, (entry) => ({ ...entry, edits: [{ id: "elsewhere", word: 0, text: "won" }] }));
    store.database.close();
})"""
SENTENCES = words_at(("I", 0.0), ("met", 0.5), ("her.", 1.0), ("We", 2.0), ("saw", 2.5), ("York.", 3.0))
FIELD = "document.querySelector('#cards .transcript textarea')"
TIMED = f"{ENTRY}.then(({{ words }}) => words.map(({{ word, start, end }}) => [word, start, end]))"


def open_sentence(tab: AnyTab, index: int) -> None:
    """As somebody does who has no mouse."""
    reach(tab, index)
    tab.evaluate("(document.querySelector('#cards .transcript').focus(), 0)")
    enter = "new KeyboardEvent('keydown', { key: 'Enter', shiftKey: true, bubbles: true })"
    tab.evaluate(f"document.activeElement.dispatchEvent({enter})")
    tab.wait(f"document.activeElement === {FIELD}")


def test_a_sentence_is_corrected_at_once_and_its_other_words_keep_their_times(open_any: OpenAny) -> None:
    tab = open_text(open_any, SENTENCES)
    open_sentence(tab, 4)
    assert tab.evaluate(f"{FIELD}.value") == "We saw York."
    tab.type("We all visited New York." + ENTER)
    tab.wait(f"{TEXT} === 'I met her. We all visited New York.'")
    tab.wait(f"{ENTRY}.then(({{ text }}) => text === 'I met her. We all visited New York.')")
    times = tab.evaluate(TIMED)
    assert [times[i] for i in (0, 1, 2, 3, -1)] == [
        ["I", 0, 0.1],
        ["met", 0.5, 0.6],
        ["her.", 1, 1.1],
        ["We", 2, 2.1],
        ["York.", 3, 3.1],
    ]
    assert [word for word, *_ in times[4:7]] == ["all", "visited", "New"]
    starts = [start for _, start, _ in times]
    assert starts == sorted(starts)
    assert all(2.5 <= start <= end <= 2.6 for _, start, end in times[4:7])  # of the word before
    tab.evaluate(UNDO)
    tab.wait(f"{TEXT} === 'I met her. We saw York.'")
    tab.wait(f"{TIMED}.then((words) => words.length === 6)")


def test_words_that_are_added_lie_between_and_one_for_several_has_their_time(open_any: OpenAny) -> None:
    tab = open_text(open_any, SENTENCES)
    open_sentence(tab, 3)
    tab.type("We never saw York." + TAB)
    tab.wait(f"!{FIELD}")  # it was the last one
    assert tab.evaluate(TIMED)[3:6] == [["We", 2, 2.1], ["never", 2.1, 2.5], ["saw", 2.5, 2.6]]
    open_sentence(tab, 0)
    tab.type("Met." + TAB)
    tab.wait(f"{FIELD}?.value === 'We never saw York.'")
    tab.type(ESCAPE)
    tab.wait(f"{TIMED}.then(([word]) => JSON.stringify(word) === '[\"Met.\",0,1.1]')")
    assert tab.evaluate(TEXT).split() == ["Met.", "We", "never", "saw", "York."]


def test_a_sentence_without_spaces_keeps_the_times_of_its_other_words(open_any: OpenAny) -> None:
    answer = words_at(("今日", 0.0), ("は", 1.0), ("晴れ", 2.0), ("。", 3.0))
    answer["text"], answer["segments"][0]["text"] = "今日は晴れ。", "今日は晴れ。"
    tab = open_text(open_any, answer)
    open_sentence(tab, 1)
    tab.evaluate(f"({FIELD}.value = '今日は雨。')")
    tab.type(ENTER)
    tab.wait(f"{TEXT} === '今日は雨。'")
    tab.wait(f"{TIMED}.then((words) => words.length === 4)")
    assert tab.evaluate(TIMED) == [["今日", 0, 0.1], ["は", 1, 1.1], ["雨", 2, 2.1], ["。", 3, 3.1]]


def test_a_doubtful_sentence_is_confirmed_and_others_corrections_stay(open_any: OpenAny) -> None:
    tab = open_text(open_any, DOUBTFUL)
    tab.wait("document.querySelectorAll('.is-doubtful').length === 1")
    open_sentence(tab, 0)
    tab.evaluate(CORRECTED_ELSEWHERE)
    tab.wait("document.querySelector('#cards .facts') && document.querySelectorAll('.is-found').length === 0")
    tab.type("one two three" + ENTER)
    tab.wait(f"{TEXT} === 'won two three'")
    tab.wait("document.querySelectorAll('.is-doubtful').length === 0")


def test_keys_of_the_player_work_in_a_field(open_any: OpenAny) -> None:
    tab = open_text(open_any, words_at(("one", 0.0), ("two", 3.0)))
    tab.wait("document.querySelector('.wave input').max > 5.5")  # as long as the file
    tab.click(WORD.format(2), times=2)
    tab.wait("document.activeElement.matches('.word input')")
    press = "document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {{ bubbles: true, {} }}))"
    audio = "document.querySelector('audio')"
    for key, time, rate in (("F1", 1, 1), ("F2", 3, 1), ("F3", 3, 0.75), ("F4", 3, 1), ("F4", 3, 1.25)):
        tab.evaluate(press.format(f"key: '{key}'"))
        tab.wait(f"Math.abs({audio}.currentTime - {time}) < 0.1 && {audio}.playbackRate === {rate}")
    tab.evaluate(press.format("key: ' ', ctrlKey: true"))
    tab.wait(f"{audio}.currentTime > 3.2")
    assert tab.evaluate("document.querySelector('.word input').value") == "two"


def test_a_doubtful_word_is_confirmed_by_enter(open_any: OpenAny) -> None:
    tab = open_text(open_any, DOUBTFUL)
    tab.wait("document.querySelectorAll('.is-doubtful').length === 1")
    tab.click(WORD.format(2), times=2)
    tab.wait("document.activeElement.matches('.word input')")
    tab.type(ENTER)
    tab.wait("document.querySelectorAll('.is-doubtful').length === 0")
    assert tab.evaluate(TEXT) == "one two"


def test_whole_words_are_replaced_one_by_one(open_any: OpenAny) -> None:
    tab = open_text(open_any, words_at(("an", 0.0), ("animal", 1.0), ("an", 2.0), ("an", 3.0)))
    press_button(tab, "Find and replace")
    tab.type("an")
    tab.wait_for_text(".replace [role=status]", "4 found")
    tab.click(".replace [type=checkbox]")
    tab.wait_for_text(".replace [role=status]", "3 found")
    tab.evaluate("document.querySelectorAll('.replace input')[1].focus()")
    tab.type("the")
    for text in ("an animal an an", "the animal an an", "the animal the an"):
        press_button(tab, "Replace")
        assert tab.evaluate(TEXT) == text


def test_a_message_goes_with_the_next_press_and_moves_nothing_under_it(open_any: OpenAny) -> None:
    tab = open_text(open_any, TURNS)
    tab.evaluate(
        "(navigator.mediaDevices.getUserMedia = () => Promise.reject(new Error('No microphone.')), 0)"
    )
    tab.click("#record")
    tab.wait_for_text("#message", "No microphone.")
    tab.click("#cards p:last-of-type .word", times=2)
    tab.wait("document.querySelector('#message').hidden && document.activeElement.matches('.word input')")


def test_choices_are_there_after_a_reload(open_any: OpenAny) -> None:
    tab = open_any()
    tab.wait("!document.querySelector('#options').hidden")
    tab.evaluate(
        """(() => {
            document.querySelector("#speakers").value = "3";
            document.querySelector("#prompt").value = "Oberursel";
            document.querySelector("#prompt").dispatchEvent(new Event("change", { bubbles: true }));
        })()"""
    )
    tab.reload()
    tab.wait("document.querySelector('#prompt').value === 'Oberursel'")
    assert tab.evaluate("document.querySelector('#speakers').value") == "3"


def test_one_of_several_models_is_chosen(open_any: OpenAny) -> None:
    tab = open_any()
    tab.wait_for_text("#model", "whisper-digits")
    assert tab.evaluate(
        "document.querySelector('#model-field').hidden"
    )  # its other names are not other models
    found = tab.evaluate(
        """import("/web/serving.js").then(async ({ Serving }) => {
            const { chosenOptions, offerModels } = await import("/web/options.js");
            const models = ["small", "large"].map((id) => ({ id, max_upload_bytes: 1e9 }));
            const serving = Object.assign(new Serving(), { models });
            offerModels(models);
            document.querySelector("#model-choice").value = "large";
            document.querySelector("#options").onchange();
            offerModels(models); // as after the server was away
            const { model } = chosenOptions();
            return [model, serving.find(model).id, serving.find("gone").id];
        })"""
    )
    assert found == ["large", "large", "small"]


def test_a_table_says_that_it_is_utf_8(open_any: OpenAny) -> None:
    tab = open_any()
    table = tab.evaluate(
        "import('/web/downloads.js').then(({ FORMATS }) => FORMATS.csv.render({ segments: [] }))"
    )
    assert table == "\ufeffstart,end,speaker,text\r\n"


def test_a_file_that_was_changed_says_so(open_any: OpenAny) -> None:
    tab = open_any()
    tab.wait_for_text("#model", "whisper-digits")
    tab.evaluate(
        """(() => {
            XMLHttpRequest.prototype.send = function () { setTimeout(() => this.onerror()); };
            const gone = { arrayBuffer: () => Promise.reject(new DOMException("gone", "NotReadableError")) };
            File.prototype.slice = () => gone;
        })()"""
    )
    drop(tab, "call.wav")
    tab.wait_for_text("#cards .error", "The file was changed or moved after it was chosen.")


def test_the_time_left_is_that_of_the_pace_without_the_wait(open_any: OpenAny) -> None:
    tab = open_any()
    rests = tab.evaluate(
        """import("/web/recording.js").then(({ Recording }) => {
            let now = 0;
            performance.now = () => now;
            const recording = new Recording(null, { name: "a" });
            recording.wait({});
            recording.begin();
            recording.upload(1);
            const rest = (at, until) => {
                now = at * 1000;
                recording.hear("word", until);
                return Math.round(recording.rest(1200)?.seconds);
            };
            return [rest(600, 24), rest(606, 84), rest(612, 144)]; // others came first
        })"""
    )
    assert rests == [0, 112, 106]  # nothing is guessed of the first 2 %


def write_late_video(path: Path) -> None:
    """Pictures for 5 s, sound from the second second on."""
    with av.open(str(path), "w") as container:
        pictures = container.add_stream("vp8", rate=5)
        pictures.width, pictures.height, pictures.pix_fmt = 160, 90, "yuv420p"
        sound = container.add_stream("libopus", rate=48_000)
        for shade in range(25):
            picture = np.full((90, 160, 3), shade * 10, np.uint8)
            container.mux(pictures.encode(av.VideoFrame.from_ndarray(picture)))
        container.mux(pictures.encode())
        for block in range(2, 5):
            samples = np.random.default_rng(block).standard_normal((1, 48_000)).astype(np.float32) / 10
            frame = av.AudioFrame.from_ndarray(samples, format="flt", layout="mono")
            frame.sample_rate, frame.pts = 48_000, block * 48_000
            container.mux(sound.encode(frame))
        container.mux(sound.encode())


def drop_video(tab: AnyTab, path: Path) -> None:
    encoded = base64.b64encode(path.read_bytes()).decode()
    tab.evaluate(f"{DROP.replace('audio/wav', 'video/webm')}({json.dumps(['talk.webm', encoded])})")


def test_a_video_is_as_long_as_its_pictures_and_keeps_its_captions_off(
    open_any: OpenAny, tmp_path: Path
) -> None:
    tab = open_any()
    tab.wait_for_text("#model", "whisper-digits")
    answer_with(tab, **words_at(("one", 2.0), ("two", 4.0)))
    write_late_video(tmp_path / "talk.webm")
    drop_video(tab, tmp_path / "talk.webm")
    tab.wait_for_text("#cards .clock", "/ 0:05")
    tab.wait(
        "document.querySelector('video').checkVisibility() && document.querySelector('video').readyState > 1"
    )
    tab.evaluate("document.querySelector('.wave input').focus()")
    tab.type(END)
    tab.wait("document.querySelector('video').currentTime > 4.8")
    tab.evaluate("(document.querySelector('video').textTracks[0].mode = 'disabled', 0)")
    tab.click(WORD.format(1), times=2)
    tab.type("won" + ENTER)
    tab.wait(f"{TEXT} === 'won two'")
    tab.wait("document.querySelector('video').textTracks.length === 1")
    assert tab.evaluate("document.querySelector('video').textTracks[0].mode") == "disabled"


def test_captions_over_a_video_are_those_that_are_exported(open_any: OpenAny, tmp_path: Path) -> None:
    tab = open_any()
    tab.wait_for_text("#model", "whisper-digits")
    words = [(f"word{i}", 0.2 * i) for i in range(20)]
    answer_with(tab, **words_at(*words))
    write_late_video(tmp_path / "talk.webm")
    drop_video(tab, tmp_path / "talk.webm")
    lines = "Array.from(document.querySelector('video')?.textTracks[0]?.cues ?? [], ({ text }) => text)"
    tab.wait(f"{lines}.length > 0 && {lines}.join(' ').split(/\\s/).length === 20")
    assert max(len(line) for cue in tab.evaluate(lines) for line in cue.split("\n")) > 20
    choose(tab, "#cue-width", "20")
    tab.wait(f"{lines}.every((text) => text.split('\\n').every((line) => line.length <= 20))")
    exported = tab.evaluate(
        """(async () => {
            const { FORMATS } = await import("/web/downloads.js");
            const { cuesOf } = await import("/web/subtitles.js");
            const { subtitleLayout } = await import("/web/options.js");
            const answer = await ENTRY;
            const cues = cuesOf(answer, subtitleLayout()).map(({ lines }) => lines.join("\\n"));
            return [cues, FORMATS.vtt.render(answer).split(" --> ").length - 1];
        })()""".replace("ENTRY", ENTRY)
    )
    assert exported == [tab.evaluate(lines), len(exported[0])]
