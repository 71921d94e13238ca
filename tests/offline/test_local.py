"""From what the user wrote to decoding options, on a checkpoint with many languages; nothing is started."""

from __future__ import annotations

from typing import Any

import pytest

from asr_server.config import Settings
from asr_server.core import DecodingOptions
from asr_server.errors import InvalidValue
from asr_server.formats.render import SubtitleLayout
from asr_server.offline.local import LocalTranscriber, TranscribeJob
from tests.checkpoints import english_only_directory, pocket_directory


def options(**job: Any) -> DecodingOptions:
    settings = Settings(model=str(pocket_directory()), max_fallbacks=2)
    return LocalTranscriber(settings, TranscribeJob(("a.wav",), **job)).options


def test_without_a_word_the_language_is_detected_and_the_ladder_is_as_long_as_set() -> None:
    assert options() == DecodingOptions(early_results=True, temperatures=(0.0, 0.2, 0.4))


def test_a_temperature_is_the_only_one_tried() -> None:
    assert options(temperature=0.7).temperatures == (0.7,)


def test_languages_and_tasks_are_those_of_the_model() -> None:
    given = options(language="German", task="translate")
    assert (given.language, given.task) == ("de", "translate")
    with pytest.raises(InvalidValue, match=r"'klingon' is not known to this model. Known: .*de \(german\)"):
        options(language="klingon")


def test_words_are_timed_where_a_result_needs_them() -> None:
    assert options(word_timestamps=True).word_timestamps
    assert options(layout=SubtitleLayout(max_words_per_line=3)).word_timestamps
    assert options(condition_on_previous_text=True).condition_on_previous_text


def test_a_prompt_becomes_tokens() -> None:
    assert len(options(prompt="Kafka, Prag").prompt_tokens) > 2


def test_a_model_of_one_language_does_not_translate() -> None:
    settings = Settings(model=str(english_only_directory()), served_model_name="tiny.en")
    with pytest.raises(InvalidValue, match=r"The model tiny\.en cannot translate"):
        LocalTranscriber(settings, TranscribeJob(("a.wav",), task="translate"))
