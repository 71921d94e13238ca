"""Words get speakers by their times, and segments are split between them."""

import msgspec
import pytest

from asr_server.annexes.speakers.labels import SpeakerOfTime, Turn, label_segments
from asr_server.core import Segment, Word

TURNS = [Turn(0.0, 2.0, "A"), Turn(2.2, 4.0, "B"), Turn(3.5, 6.0, "A")]


def bytes_of(token: int) -> bytes:
    return b" one"[:token]


def segment(*words: tuple[str, float, float]) -> Segment:
    made = tuple(Word(f" {text}", start_s, end_s) for text, start_s, end_s in words)
    text = "".join(word.text for word in made)
    return Segment(7, 0, made[0].start_s, made[-1].end_s, text, (1, 2), 0.0, -0.1, 1.0, 0.0, made)


def test_a_segment_is_split_where_another_speaker_goes_on() -> None:
    parts = label_segments(
        [segment(("one", 0.1, 1.0), ("two", 1.2, 1.9), ("three", 2.3, 3.0))], TURNS, bytes_of
    )
    assert [(part.id, part.speaker, part.text) for part in parts] == [
        (0, "A", " one two"),
        (1, "B", " three"),
    ]
    assert [(part.start_s, part.end_s) for part in parts] == [(0.1, 1.9), (2.3, 3.0)]


def test_the_tokens_of_a_split_segment_are_those_of_its_words() -> None:
    texts = {
        1: b"",
        2: b" on",
        3: b"e",
        4: b" two.",
        5: "\u2026".encode()[:2],
        6: "\u2026".encode()[2:],
        7: b" three",
    }
    whole = segment(("one", 0.1, 1.0), ("two.\u2026", 1.2, 1.9), ("three", 2.3, 3.0))
    whole = msgspec.structs.replace(whole, tokens=(1, 2, 3, 4, 5, 6, 7, 1))
    parts = label_segments([whole], TURNS, lambda token: texts[token])
    assert [part.tokens for part in parts] == [(1, 2, 3, 4, 5, 6), (7, 1)]


def test_every_word_has_one_speaker_and_no_text_is_lost() -> None:
    whole = segment(*((f"w{n}", n * 0.1, n * 0.1 + 0.1) for n in range(70)))
    parts = label_segments([whole], TURNS, bytes_of)
    assert "".join(part.text for part in parts) == whole.text
    assert [word for part in parts for word in part.words] == list(whole.words)
    assert {part.speaker for part in parts} == {"A", "B"}


ONE_AND_OTHER = [Turn(0, 2, "A"), Turn(2, 4, "B")]
ABOUT = [Turn(0, 0.4, "A"), Turn(0.4, 1.0, "B"), Turn(1.0, 1.4, "A")]
SHORT_PAUSE = [Turn(0, 2.0, "A"), Turn(2.05, 3, "B")]
WITHIN = [Turn(0, 10, "A"), Turn(2, 3, "B"), Turn(20, 21, "B")]
LATE = [Turn(0, 2, "A"), Turn(0.5, 1, "B"), Turn(9, 10, "B")]


@pytest.mark.parametrize(
    ("turns", "words"),
    [
        # In a pause it is the nearest: who ended last, not who began last.
        (TURNS, [(6.5, 6.6, "A")]),
        ([Turn(0, 1, "A"), Turn(9, 10, "B")], [(8.0, 8.2, "B")]),
        (WITHIN, [(2.1, 2.2, "A"), (20, 21, "B"), (10.5, 10.7, "A")]),
        (LATE[1:], [(3.0, 3.2, "B")]),
        (LATE, [(3.0, 3.2, "A")]),
        ([Turn(0, 1, "A"), Turn(5, 6, "B")], [(2.0, 2.2, "A")]),
        # All turns of a person within a word count together; of 0.6 s each it is the last speaker's.
        (ABOUT, [(0, 2, "A")]),
        ([*ABOUT[1:], Turn(1.4, 1.6, "A")], [(0, 2, "B")]),
        ([Turn(1, 2.5, "A"), Turn(2.6, 3.4, "B")], [(0.5, 3.5, "A")]),
        # The last speaker keeps a word unless another has a twentieth of a second more.
        (ONE_AND_OTHER, [(1, 1.5, "A"), (1.5, 2.54, "A")]),
        (ONE_AND_OTHER, [(1, 1.5, "A"), (1.5, 2.56, "B")]),
        (SHORT_PAUSE, [(2.03, 2.05, "A"), (2.03, 2.04, "A")]),
    ],
)
def test_a_word_belongs_to_who_speaks_most_of_it_or_is_nearest(
    turns: list[Turn], words: list[tuple[float, float, str]]
) -> None:
    speakers = SpeakerOfTime(turns)
    assert [speakers.of(start_s, end_s) for start_s, end_s, _ in words] == [speaker for *_, speaker in words]


def test_where_nobody_was_found_text_has_a_speaker_all_the_same() -> None:
    assert [part.speaker for part in label_segments([segment(("one", 0.1, 1.0))], [], bytes_of)] == ["A"]


def test_a_split_segment_lasts_as_long_as_the_whole_one() -> None:
    whole = msgspec.structs.replace(segment(("one", 0.1, 1.0), ("two", 2.3, 3.0)), start_s=0.0, end_s=3.5)
    parts = label_segments([whole], TURNS, lambda _: b" one two")
    assert [(part.start_s, part.end_s) for part in parts] == [(0.0, 1.0), (2.3, 3.5)]


def test_a_token_of_two_speakers_words_is_the_first_ones() -> None:
    whole = msgspec.structs.replace(segment(("one", 0.1, 1.0), ("two", 2.3, 3.0)), tokens=(1,))
    parts = label_segments([whole], TURNS, lambda _: b" one two")
    assert [part.tokens for part in parts] == [(1,), ()]
