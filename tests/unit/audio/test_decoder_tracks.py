"""What names an audio track."""

from __future__ import annotations

import pytest

from asr_server.audio.decoder import DEFAULT_TRACK, TrackChoice, parse_choice, ranked, require_only_track
from asr_server.core import Track
from asr_server.errors import InvalidValue, NoSuchTrack


@pytest.mark.parametrize(
    ("text", "split_channels", "choice"),
    [
        ("", False, DEFAULT_TRACK),
        (" 2 ", False, TrackChoice((2,))),
        ("1, 2", True, TrackChoice((1, 2))),
        ("1", False, TrackChoice((1,))),
        ("999", True, TrackChoice((999,))),
        ("000000001", False, TrackChoice((1,))),
        ("ger", False, TrackChoice(language="ger")),
    ],
)
def test_a_track_is_a_number_or_a_language_or_two_numbers(
    text: str, split_channels: bool, choice: TrackChoice
) -> None:
    assert parse_choice(text, split_channels) == choice


@pytest.mark.parametrize(
    "text", ["0", "1000", "-1", "1.5", "1,2", "eng,ger", "?", "9" * 60, "0000000001", "\u0662"]
)
def test_anything_else_is_refused_by_the_name_of_the_field(text: str) -> None:
    with pytest.raises(InvalidValue, match="'track'") as refused:
        parse_choice(text, split_channels=False)
    assert refused.value.param == "track"


@pytest.mark.parametrize("text", ["1,1", "1,2,3", "0,1", "eng,1"])
def test_split_channels_take_two_different_numbers(text: str) -> None:
    with pytest.raises(InvalidValue, match="'track'"):
        parse_choice(text, split_channels=True)


TRACKS = [
    Track(1, "deu", is_extra=True),
    Track(2, "eng", is_extra=True, is_default=True),
    Track(3, "ger"),
    Track(4),
    Track(5, "de"),
]


@pytest.mark.parametrize(
    ("choice", "numbers"),
    [
        (DEFAULT_TRACK, [2, 3, 4, 5, 1]),
        (TrackChoice((5, 1)), [5, 1]),
        (TrackChoice(language="de"), [3, 5, 1]),
    ],
)
def test_the_best_track_is_the_files_default_and_then_what_is_no_commentary(
    choice: TrackChoice, numbers: list[int]
) -> None:
    assert [track.number for track in ranked(TRACKS, choice)] == numbers


def test_a_track_that_is_not_there_is_refused_with_those_that_are() -> None:
    many = [*TRACKS, *(Track(number, "en") for number in range(6, 25))]
    with pytest.raises(NoSuchTrack) as refused:
        ranked(many, TrackChoice(language="f" * 21))
    assert f"asks for the language '{'f' * 20}'; the file has 24 audio tracks (1: " in str(refused.value)
    assert str(refused.value).endswith(", 19: en, 20: en).")
    with pytest.raises(NoSuchTrack) as refused:
        ranked(TRACKS, TrackChoice((6,)))
    assert str(refused.value).endswith(
        "the file has 5 audio tracks (1: deu, 2: eng, 3: ger, 4: no language, 5: de)."
    )


def test_a_plain_recording_has_one_track() -> None:
    require_only_track(DEFAULT_TRACK)
    require_only_track(TrackChoice((1,)))
    for choice in (TrackChoice((2,)), TrackChoice((1, 2)), TrackChoice(language="eng")):
        with pytest.raises(NoSuchTrack, match="1 audio track "):
            require_only_track(choice)
