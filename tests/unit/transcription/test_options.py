"""Every way in reads by the same rule: options are built in one place."""

import pytest

from asr_server.annexes.offline.local import LocalTranscriber, TranscribeJob
from asr_server.annexes.realtime.config import decoding_options, default_config
from asr_server.api.models import Models
from asr_server.api.request import parse_transcription_request
from asr_server.core import DecodingOptions
from asr_server.errors import InvalidValue
from tests.support.embedded import embedded
from tests.unit.api.running_app import served

MODELS = Models([served(embedded())])
TRANSCRIBER = MODELS.default.transcriber


def test_a_form_a_live_session_and_the_command_line_read_alike() -> None:
    expected = TRANSCRIBER.options(text_only=True)
    assert expected.early_results, "closed segments stand, in a stream or not"
    assert parse_transcription_request([], MODELS).options == expected
    assert decoding_options(default_config("whisper-1"), MODELS) == expected
    assert LocalTranscriber(embedded(), TranscribeJob(())).options == expected


@pytest.mark.parametrize("response_format", ["json", "text", "verbose_json", "srt", "vtt"])
def test_the_format_of_the_answer_changes_nothing_but_the_times_shown(response_format: str) -> None:
    options = parse_transcription_request([("response_format", response_format)], MODELS).options
    has_words, has_times = response_format in ("srt", "vtt"), response_format not in ("json", "text")
    assert options == TRANSCRIBER.options(word_timestamps=has_words, text_only=not has_times)


def test_channels_that_are_kept_apart_are_timed_in_every_format_as_times_order_them() -> None:
    options = parse_transcription_request([("channels", "split")], MODELS).options
    assert not options.text_only


def test_a_client_names_languages_a_prompt_keywords_and_a_temperature() -> None:
    options = TRANSCRIBER.options(
        languages=["english"], prompt="hi", keywords=[" one ", ""], temperature=0.4, seed=7
    )
    assert options == DecodingOptions(
        language="en",
        prompt_tokens=tuple(TRANSCRIBER.tokenizer.encode(" hi")),
        keywords=("one",),
        temperatures=(0.4,),
        early_results=True,
        seed=7,
    )
    with pytest.raises(InvalidValue, match="klingon"):
        TRANSCRIBER.options(language="klingon")
