"""Subtitles laid out word by word, as whisper's command writes them."""

import io
import re
from random import Random
from typing import Any

import msgspec
import pytest
from whisper.utils import WriteSRT, WriteTSV

from asr_server.core import Segment, Word
from asr_server.formats.render import RenderOptions, render, verbose_body
from asr_server.formats.subtitles import SubtitleLayout, srt, tsv, vtt
from tests.unit.formats.samples import segment, transcript

LAYOUTS = [
    SubtitleLayout(max_line_width=20),
    SubtitleLayout(max_line_width=8),
    SubtitleLayout(max_words_per_line=3),
    SubtitleLayout(max_words_per_line=1),
    SubtitleLayout(max_line_width=24, max_line_count=2),
    SubtitleLayout(max_line_width=10, max_line_count=1),
    SubtitleLayout(max_line_width=15, max_words_per_line=4),
    SubtitleLayout(raw=True, highlight_words=True),
    SubtitleLayout(max_line_width=16, max_line_count=2, highlight_words=True),
]


def with_words(id: int, *words: Word) -> Segment:
    plain = segment(id, words[0].start_s, words[-1].end_s, "".join(word.text for word in words))
    return Segment(
        **{name: getattr(plain, name) for name in plain.__struct_fields__ if name != "words"}, words=words
    )


def random_segments(seed: int) -> list[Segment]:
    random, at_ms, made = Random(seed), 0, []
    for id in range(6):
        words = []
        for _ in range(random.randint(1, 9)):
            start_ms = at_ms + random.choice([0, 0, 0, 120, 800, 3600])
            at_ms = start_ms + random.randint(1, 60) * 10
            words.append(Word(" " + "x" * random.randint(1, 12), start_ms / 1000, at_ms / 1000))
        made.append(with_words(id, *words))
    return made


def by_whisper(segments: list[Segment], layout: SubtitleLayout) -> str:
    result: dict[str, Any] = {
        "segments": [
            {
                "start": each.start_s,
                "end": each.end_s,
                "text": each.text,
                "words": [{"word": w.text, "start": w.start_s, "end": w.end_s} for w in each.words],
            }
            for each in segments
        ]
    }
    file = io.StringIO()
    WriteSRT("").write_result(
        result,
        file,
        max_line_width=layout.max_line_width,
        max_line_count=layout.max_line_count,
        max_words_per_line=layout.max_words_per_line,
        highlight_words=layout.highlight_words,
    )
    return file.getvalue()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_srt_is_laid_out_as_by_whispers_command(layout: SubtitleLayout) -> None:
    for seed in range(10):
        segments = random_segments(seed)
        assert srt(segments, layout) == by_whisper(segments, layout)


SAID = with_words(0, Word(" a", 0.5, 1.0), Word(" <b>", 1.0, 1.5), Word(" -->", 2.0, 2.5))


def test_marks_within_words_are_escaped_and_the_underline_is_not() -> None:
    highlighted = vtt([SAID], SubtitleLayout(highlight_words=True))
    assert "00:00:01.000 --> 00:00:01.500\na <u>&lt;b&gt;</u> -&gt;\n" in highlighted
    assert "a <b> <u>-></u>\n" in srt([SAID], SubtitleLayout(highlight_words=True))


def test_quotes_stay_and_a_clock_counts_minutes_and_hours() -> None:
    said = segment(0, 60.0, 3600.0, """ "It's" """)
    assert vtt([said]) == """WEBVTT\n\n00:01:00.000 --> 01:00:00.000\n"It's"\n\n"""
    assert srt([said]) == """1\n00:01:00,000 --> 01:00:00,000\n"It's"\n\n"""


def test_segments_without_words_are_subtitles_as_they_are() -> None:
    plain = segment(0, 0, 1, " one two three")
    for layout in (SubtitleLayout(), SubtitleLayout(raw=True), SubtitleLayout(max_words_per_line=1)):
        assert srt([plain], layout) == "1\n00:00:00,000 --> 00:00:01,000\none two three\n\n"
    timed = msgspec.structs.replace(plain, words=(Word(" one two three", 0.2, 0.8),))
    assert srt([timed], SubtitleLayout(raw=True)) == srt([plain]), "not when its words begin and end"


def test_verbose_json_has_the_granularities_asked_for() -> None:
    said = transcript(SAID, text="a <b> -->")
    only_words = verbose_body(said, RenderOptions(with_segments=False, with_words=True))
    assert only_words.segments is None
    assert only_words.words is not None
    assert only_words.words[0].model_dump(exclude_none=True) == {"word": "a", "start": 0.5, "end": 1.0}
    rendered = render(said, "verbose_json", RenderOptions(with_segments=False, with_words=True))
    assert '"segments"' not in rendered
    assert "null" not in rendered
    both = verbose_body(said, RenderOptions(with_words=True))
    assert both.segments
    assert both.words
    assert verbose_body(said).words is None


def test_words_are_there_even_where_nothing_was_said() -> None:
    silent = render(transcript(), "verbose_json", RenderOptions(with_words=True))
    assert '"words":[]' in silent


def test_a_subtitle_is_of_one_speaker_and_in_the_order_of_time() -> None:
    ann = msgspec.structs.replace(SAID, speaker="ann")
    bob = msgspec.structs.replace(with_words(1, Word(" yes", 1.2, 1.4)), speaker="<bob>")
    one_word = vtt([ann, bob], SubtitleLayout(max_words_per_line=1))
    assert re.findall(r"<v (.*)>(.*)</v>", one_word) == [
        ("ann", "a"),
        ("ann", "&lt;b&gt;"),
        ("&lt;bob&gt;", "yes"),
        ("ann", "-&gt;"),
    ]
    filled = srt([ann, bob], SubtitleLayout(max_line_width=80, max_line_count=2))
    assert [line for line in filled.splitlines() if ": " in line] == ["ann: a <b> ->", "<bob>: yes"]


def said_by(speaker: str | None, *words: Word) -> Segment:
    return msgspec.structs.replace(with_words(0, *words), speaker=speaker)


def test_a_first_line_has_room_for_the_speakers_label() -> None:
    words = [Word(f" {'x' * 9}", 0.5 * n, 0.5 * n + 0.5) for n in range(4)]  # 39 letters
    for speaker, lines in (("A", 1), ("AB", 2), (None, 1)):
        said = said_by(speaker, *words)
        assert len(srt([said]).split("\n\n")[0].splitlines()) == 2 + lines
        assert len(vtt([said]).split("\n\n")[1].splitlines()) == 2, "a voice tag takes no room"
    assert srt([said_by("AB", *words)]).splitlines()[2] == "AB: xxxxxxxxx xxxxxxxxx"
    words[3] = Word(f" {'x' * 12}", 1.5, 2.0)
    for speaker, lines in (("A", 2), (None, 1)):  # 42 letters
        assert len(srt([said_by(speaker, *words)]).split("\n\n")[0].splitlines()) == 2 + lines


def test_readable_cues_are_highlighted_word_by_word_with_the_pauses_between() -> None:
    said = with_words(0, Word(" one", 0.0, 0.5), Word(" two", 0.5, 1.0), Word(" three", 1.5, 2.0))
    assert srt([said], SubtitleLayout(highlight_words=True)).split("\n\n")[:-1] == [
        "1\n00:00:00,000 --> 00:00:00,500\n<u>one</u> two three",
        "2\n00:00:00,500 --> 00:00:01,000\none <u>two</u> three",
        "3\n00:00:01,000 --> 00:00:01,500\none two three",
        "4\n00:00:01,500 --> 00:00:02,000\none two <u>three</u>",
    ]


def test_words_that_the_model_wrote_without_a_space_are_joined() -> None:
    said = with_words(0, Word("今", 0.0, 0.5), Word("天", 0.5, 1.0), Word(" ok", 1.0, 1.5))
    assert srt([said]).splitlines()[2] == "今天 ok"


def test_only_raw_segments_need_no_words_and_only_they_are_left_as_they_are() -> None:
    long = with_words(0, *(Word(f" {'x' * 20}", 2.0 * n, 2.0 * n + 2) for n in range(6)))
    raw = srt([long], SubtitleLayout(raw=True))
    assert raw == f"1\n00:00:00,000 --> 00:00:12,000\n{' '.join(['x' * 20] * 6)}\n\n"
    assert srt([long]).count("-->") > 1
    for layout in (SubtitleLayout(), SubtitleLayout(raw=True, highlight_words=True)):
        assert RenderOptions(layout=layout).needs_words(["text", "srt"])
        assert RenderOptions(layout=layout).needs_words(["vtt"])
        assert not RenderOptions(layout=layout).needs_words(["json", "tsv"])
    assert not RenderOptions(layout=SubtitleLayout(raw=True)).needs_words(["srt", "vtt"])
    assert RenderOptions(with_words=True, layout=SubtitleLayout(raw=True)).needs_words(["json"])


def test_a_table_has_whispers_columns_in_milliseconds() -> None:
    segments = [segment(0, 83.25, 3661.5, " One\ttwo."), segment(1, 3661.5, 3662.0, " Three.")]
    as_dicts = [{"start": each.start_s, "end": each.end_s, "text": each.text} for each in segments]
    whispers = io.StringIO()
    WriteTSV("").write_result({"segments": as_dicts}, whispers)
    assert tsv(segments) == whispers.getvalue()
