"""Recordings read on this machine, in front of a replica that says what the test wants."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from asr_server.annexes.offline import local
from asr_server.annexes.offline.local import LocalTranscriber, TranscribeJob
from asr_server.channel.messages import Submit
from asr_server.checkpoint.tokenizer import Tokenizer
from asr_server.config import Settings
from asr_server.core import SAMPLE_RATE, ChunkResult, Clip, Samples, Transcript
from asr_server.dispatch.dispatcher import Dispatcher
from asr_server.dispatch.supervisor import ReplicaLimits, StartImpossible
from asr_server.errors import ChunkFailed, EngineUnavailable
from tests.support.checkpoints import kept_tokenizer
from tests.support.embedded import embedded
from tests.support.fake_replica import FakeReplica, noise, say

Make = Callable[..., LocalTranscriber]


def digits_of_the_model(submit: Submit) -> ChunkResult:
    tokenizer = kept_tokenizer(Path(embedded().model))
    return say(*tokenizer.encode(" one" if submit.id.chunk else " zero"))


@pytest.fixture
def replica() -> FakeReplica:
    return FakeReplica(digits_of_the_model)


@pytest.fixture
def make(replica: FakeReplica, monkeypatch: pytest.MonkeyPatch) -> Make:
    monkeypatch.setattr(Tokenizer, "from_directory", kept_tokenizer)

    def dispatcher(settings: Settings, window: Any) -> Dispatcher:
        return Dispatcher(settings, replica, window, limits=ReplicaLimits(pause_s=0.01))

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


async def test_progress_goes_from_chunk_to_chunk_up_to_the_whole(
    make: Make, replica: FakeReplica, tmp_path: Path
) -> None:
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


async def test_the_jobs_clips_and_channels_are_what_is_read(
    make: Make, replica: FakeReplica, tmp_path: Path
) -> None:
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
    replica._answer = lambda _: say()
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
