"""What names an audio track."""

from __future__ import annotations

import pytest

from asr_server.audio.tracks import DEFAULT_TRACK, TrackChoice, parse_choice, require_only_track
from asr_server.errors import InvalidValue, NoSuchTrack
from asr_server.language_codes import whisper_code
from asr_server.transcription.language import NAMES


@pytest.mark.parametrize(
    ("text", "split_channels", "choice"),
    [
        ("", False, DEFAULT_TRACK),
        (" 2 ", False, TrackChoice((2,))),
        ("1, 2", True, TrackChoice((1, 2))),
        ("ger", False, TrackChoice(language="ger")),
    ],
)
def test_a_track_is_a_number_or_a_language_or_two_numbers(
    text: str, split_channels: bool, choice: TrackChoice
) -> None:
    assert parse_choice(text, split_channels) == choice


@pytest.mark.parametrize("text", ["0", "1000", "-1", "1.5", "1,2", "eng,ger", "?", "9" * 60])
def test_anything_else_is_refused_by_the_name_of_the_field(text: str) -> None:
    with pytest.raises(InvalidValue, match="'track'") as refused:
        parse_choice(text, split_channels=False)
    assert refused.value.param == "track"


def test_a_plain_recording_has_one_track() -> None:
    require_only_track(DEFAULT_TRACK)
    require_only_track(TrackChoice((1,)))
    for choice in (TrackChoice((2,)), TrackChoice((1, 2)), TrackChoice(language="eng")):
        with pytest.raises(NoSuchTrack, match="1 audio track "):
            require_only_track(choice)


def test_every_language_of_whisper_has_its_three_letters() -> None:
    from asr_server import language_codes

    assert set(language_codes._WHISPER_CODES.values()) | {"haw", "yue"} == set(NAMES)
    for code in ("eng", "deu", "ger", "spa", "de-AT", "POR", "zh_Hans"):
        assert whisper_code(code) in NAMES
