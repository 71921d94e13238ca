from hypothesis import given
from hypothesis import strategies as st

from asr_server.realtime.turn_types import Agreement, agree, conclude

WORDS = st.lists(st.sampled_from(["one", "two", "three"]), max_size=6).map(" ".join)


def test_the_first_reading_alone_is_not_stable() -> None:
    _, text = agree(Agreement(), "one two", None)
    assert text == ""


def test_punctuation_and_capitals_are_no_disagreement() -> None:
    agreement, _ = agree(Agreement(), "one two", None)
    assert agree(agreement, "One, two. Three", None)[1] == "One, two."


def test_characters_agree_where_there_are_no_words() -> None:
    agreement, _ = agree(Agreement(), "你好吗", "zh")
    agreement, text = agree(agreement, "你好嘛", "zh")
    assert text == "你好"
    assert conclude(agreement, "你好吗", "zh") == "吗"


@given(st.lists(WORDS, max_size=6), WORDS)
def test_as_many_words_are_sent_as_the_final_text_has_unless_more_had_been_stable(
    readings: list[str], final: str
) -> None:
    agreement, sent = Agreement(), []
    for reading in readings:
        agreement, text = agree(agreement, reading, None)
        sent += text.split()
    assert len(sent) == agreement.num_sent
    rest = conclude(agreement, final, None).split()
    assert len(sent) + len(rest) == max(len(sent), len(final.split()))
    assert rest == final.split()[len(sent) :]
