"""Recordings read on this machine: their options, on checkpoints with many languages and with one; their
reading, in front of a replica that says what the test wants; and their order, with the real one."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from asr_server.annexes.offline import local
from asr_server.annexes.offline.local import LocalTranscriber, TranscribeJob
from asr_server.checkpoint.tokenizer import Tokenizer
from asr_server.config import Settings
from asr_server.core import SAMPLE_RATE, ChunkResult, Clip, DecodingOptions, Samples, Transcript
from asr_server.dispatch.dispatcher import Dispatcher
from asr_server.dispatch.supervisor import ReplicaLimits, StartImpossible
from asr_server.errors import ChunkFailed, EngineUnavailable, InvalidValue
from asr_server.formats.subtitles import SubtitleLayout
from asr_server.transport.messages import Submit
from tests.support.checkpoints import english_only_directory, kept_tokenizer, pocket_directory
from tests.support.embedded import embedded
from tests.support.fake_replica import FakeReplica, noise
from tests.support.fake_replica import say as answer
from tests.support.speech import say

Make = Callable[..., LocalTranscriber]


@pytest.fixture(autouse=True)
def tokenizers_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tokenizer, "from_directory", kept_tokenizer)


def options(**job: Any) -> DecodingOptions:
    settings = Settings(model=str(pocket_directory()))
    return LocalTranscriber(settings, TranscribeJob(("a.wav",), **job)).options


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


# -- A replica that says what the test wants ---------------------------------------------------------------


def digits_of_the_model(submit: Submit) -> ChunkResult:
    tokenizer = kept_tokenizer(Path(embedded().model))
    return answer(*tokenizer.encode(" one" if submit.id.chunk else " zero"))


@pytest.fixture
def replica() -> FakeReplica:
    return FakeReplica(digits_of_the_model)


@pytest.fixture
def make(replica: FakeReplica, monkeypatch: pytest.MonkeyPatch) -> Make:
    def dispatcher(settings: Settings, window: Any) -> Dispatcher:
        return Dispatcher(settings, lambda _: replica, window, limits=ReplicaLimits(pause_s=0.01))

    monkeypatch.setattr(local, "Dispatcher", dispatcher)

    def made(settings: Settings | None = None, **job: Any) -> LocalTranscriber:
        return LocalTranscriber(settings or embedded(), TranscribeJob(("a.wav",), **job))

    return made


def file_of(folder: Path, samples: Samples) -> Path:
    path = folder / "a.wav"
    soundfile.write(path, samples, SAMPLE_RATE)
    return path


async def transcript_of(
    transcriber: LocalTranscriber, path: Path, on_progress: Callable[..., None] = lambda *_: None
) -> Transcript:
    async with transcriber.running() as running:
        assert running is transcriber
        return await transcriber.transcribe(path, on_progress)


async def test_progress_goes_by_chunks_to_the_end(make: Make, replica: FakeReplica, tmp_path: Path) -> None:
    reached: list[tuple[float, float | None]] = []
    transcriber = make()
    path = file_of(tmp_path, noise(75.0))
    transcript = await transcript_of(transcriber, path, lambda *done: reached.append(done))
    assert transcript.text.split() == ["zero", *["one"] * (len(reached) - 1)]
    ends_s = [end_s for end_s, _ in reached]
    assert ends_s == sorted(ends_s)
    assert (ends_s[-1], {whole_s for _, whole_s in reached}) == (75.0, {75.0})
    assert transcriber.model == "whisper-digits"
    with pytest.raises(RuntimeError, match="shutdown"):
        await transcriber.transcribe(path, lambda *_: None)


async def test_a_jobs_clips_and_channels_are_read(make: Make, replica: FakeReplica, tmp_path: Path) -> None:
    path = file_of(tmp_path, noise(10.0))
    await transcript_of(make(clips=(Clip(2.0, 5.0),)), path)
    assert sum(len(submit.samples) for submit in replica.submits) == pytest.approx(3 * SAMPLE_RATE, rel=0.1)
    replica.submits.clear()
    path = file_of(tmp_path, np.stack([noise(2.0), noise(2.0)[::-1]], 1))
    await transcript_of(make(speakers=("Ann", "Zoe"), formats=("srt",)), path)
    assert {submit.id.chunk for submit in replica.submits} == {0, 1}
    replica.submits.clear()
    await transcript_of(make(), path)
    assert [submit.id.chunk for submit in replica.submits] == [0]


async def test_one_recording_may_have_a_language_and_a_prompt_of_its_own(
    make: Make, replica: FakeReplica, tmp_path: Path
) -> None:
    transcriber, path = make(prompt="one"), file_of(tmp_path, noise(1.0))
    async with transcriber.running():
        await transcriber.transcribe(path, lambda *_: None)
        own = transcriber.options_for(None, "")
        await transcriber.transcribe(path, lambda *_: None, own)
    assert [bool(submit.options.prompt_tokens) for submit in replica.submits] == [True, False]
    assert transcriber.options_for(None, None) == transcriber.options


async def test_a_model_that_nobody_chose_and_that_recognises_nothing_is_a_failure(
    make: Make, tmp_path: Path, replica: FakeReplica
) -> None:
    stands_in, path = embedded(why_embedded="no network"), file_of(tmp_path, noise(1.0))
    assert (await transcript_of(make(stands_in), path)).text == "zero"
    replica._answer = lambda _: answer()
    assert (await transcript_of(make(), path)).text == ""
    with pytest.raises(ChunkFailed, match="whisper-digits, in the place of base, hears English digits only"):
        await transcript_of(make(stands_in), path)


async def test_the_reason_of_an_engine_that_cannot_start_is_told_for_each_recording(
    make: Make, tmp_path: Path, replica: FakeReplica
) -> None:
    async def impossible() -> None:
        raise StartImpossible("no such device")

    replica.before_launch = impossible
    with pytest.raises(EngineUnavailable, match=r"the engine could not be started: .*no such device"):
        await transcript_of(make(), file_of(tmp_path, noise(1.0)))
