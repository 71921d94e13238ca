"""From what the user wrote to decoding options, on a checkpoint with many languages; and files in order."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from asr_server.annexes.offline.local import LocalTranscriber, TranscribeJob
from asr_server.checkpoint.tokenizer import Tokenizer
from asr_server.config import Settings
from asr_server.core import SAMPLE_RATE, DecodingOptions
from asr_server.errors import InvalidValue
from asr_server.formats.subtitles import SubtitleLayout
from tests.support.checkpoints import english_only_directory, kept_tokenizer, pocket_directory
from tests.support.embedded import embedded
from tests.support.speech import say


@pytest.fixture(autouse=True)
def tokenizers_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tokenizer, "from_directory", kept_tokenizer)


def options(**job: Any) -> DecodingOptions:
    settings = Settings(model=str(pocket_directory()), max_fallbacks=2)
    return LocalTranscriber(settings, TranscribeJob(("a.wav",), **job)).options


def test_without_a_word_the_language_is_detected_and_the_ladder_is_as_long_as_set() -> None:
    ladder = (0.0, 0.2, 0.4)
    assert options() == DecodingOptions(early_results=True, text_only=True, temperatures=ladder)


def test_a_temperature_is_the_only_one_tried() -> None:
    assert options(temperature=0.7).temperatures == (0.7,)


def test_languages_and_tasks_are_those_of_the_model() -> None:
    given = options(language="German", task="translate")
    assert (given.language, given.task) == ("de", "translate")
    with pytest.raises(InvalidValue, match=r"'klingon' is not known to this model. Known: .*de \(german\)"):
        options(language="klingon")


@pytest.mark.parametrize(("given", "code"), [("auto", None), ("", None), (None, "de"), ("English", "en")])
def test_a_recordings_own_language_comes_before_the_jobs(given: str | None, code: str | None) -> None:
    settings = Settings(model=str(pocket_directory()))
    transcriber = LocalTranscriber(settings, TranscribeJob(("a.wav",), language="de"))
    assert transcriber.options_for(given, None).language == code


def test_words_are_timed_where_a_result_needs_them() -> None:
    assert options(word_timestamps=True).word_timestamps
    assert options(formats=("json", "srt")).word_timestamps
    assert not options(formats=("vtt",), layout=SubtitleLayout(raw=True)).word_timestamps
    assert options(formats=("vtt",), layout=SubtitleLayout(max_words_per_line=3)).word_timestamps
    assert options(formats=("json", "text")).text_only
    assert not options(formats=("json", "verbose_json")).text_only
    assert not options(word_timestamps=True).text_only
    assert options(condition_on_previous_text=True).condition_on_previous_text


def test_a_model_of_one_language_does_not_translate() -> None:
    settings = Settings(model=str(english_only_directory()), served_model_name="tiny.en")
    with pytest.raises(InvalidValue, match=r"The model tiny\.en cannot translate"):
        LocalTranscriber(settings, TranscribeJob(("a.wav",), task="translate"))


@pytest.mark.slow
async def test_files_are_finished_in_order_with_most_of_the_machine_for_the_oldest(tmp_path: Path) -> None:
    """Side by side, all of them would be nearly done when the first one is."""
    files = [tmp_path / f"{index}.wav" for index in range(4)]
    for path in files:
        soundfile.write(path, np.tile(say("31415", gap_s=0.3).samples, 12), SAMPLE_RATE)
    done_s = dict.fromkeys(files, 0.0)
    finished: list[Path] = []
    most_of_others_s: list[float] = []  # when each one finished

    async def one(transcriber: LocalTranscriber, path: Path) -> None:
        def on_progress(until_s: float, total_s: float | None) -> None:
            done_s[path] = until_s

        await transcriber.transcribe(path, on_progress)
        del done_s[path]
        finished.append(path)
        most_of_others_s.append(max(done_s.values(), default=0.0))

    transcriber = LocalTranscriber(embedded(executor="inline", max_slots=2), TranscribeJob(("folder",)))
    async with transcriber.running(), asyncio.TaskGroup() as group:
        for path in files:
            group.create_task(one(transcriber, path))
    assert finished == files
    assert max(most_of_others_s) <= soundfile.info(files[0]).duration / 2
