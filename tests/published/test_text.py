"""What whisper-base makes of real speech, of what stands around it, and of no speech at all."""

import asyncio
import json
import re
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
import pytest_asyncio
import soundfile

from asr_server.annexes.offline.local import LocalTranscriber, TranscribeJob
from asr_server.audio.voice import frames_of, possible_and_certain_s
from asr_server.config import Settings
from asr_server.core import SAMPLE_RATE, TEMPERATURE_LADDER, DecodingOptions, Samples, Transcript
from asr_server.errors import AudioTooShort
from asr_server.transcription.judge import LEAD_S
from asr_server.transcription.transcriber import boosted_keywords, prompt_tokens
from harness.engine_helpers import Checkpoint
from harness.engine_helpers import transcribe as transcribe_chunks
from harness.openai_whisper import transcribed_features
from harness.speech import corpora, corpus
from harness.speech.synthesis import is_installed, read_for, say
from tests.support.memory_file import MemoryFile
from tests.support.noises import forty_minutes, make_noise
from tests.support.real_weights import (
    hugging_face_checkpoint,
    loaded_base,
    openai_whisper_base,
    real_checkpoint,
)
from tests.support.speech import RECORDINGS
from tests.unit.transcription.pipeline import wav

JFK = (
    "and so my fellow americans ask not what your country can do for you ask what you can do for your country"
)
TERMS = [
    *("AntiBERTa", "ABlooper", "Kubernetes", "Grafana", "PostgreSQL", "IgFold", "ESMFold", "Nextflow"),
    *("Snakemake", "Terraform", "Prometheus", "RFdiffusion", "ProteinMPNN", "AlphaFold", "OmegaFold"),
    *("Rosetta", "TensorRT", "PyTorch", "NumPy", "CUDA"),
]
NOISES = ("silence", "hum", "white", "coughs", "barks", "keyboard")


class Base(msgspec.Struct):
    """The pipeline on whisper-base in float32, with the default voice check and cut windows."""

    transcriber: LocalTranscriber

    async def hear(self, sound: Samples, prompt: str = "", keywords: Sequence[str] = ()) -> Transcript:
        options = self.transcriber.options_for("en", prompt)
        if keywords:
            options = msgspec.structs.replace(options, keywords=boosted_keywords(keywords))
        with tempfile.TemporaryFile() as file:
            file.write(wav(sound))
            return await self.transcriber.transcribe(file, lambda *_: None, options)

    async def texts(self, sounds: list[Samples]) -> list[str]:
        heard = await asyncio.gather(*(self.hear(sound) for sound in sounds))
        return [transcript.text for transcript in heard]


IN_MODULE = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def base() -> AsyncIterator[Base]:
    async with running_base() as base:
        yield base


@asynccontextmanager
async def running_base(short_audio: Literal["tail", "exact"] = "tail") -> AsyncIterator[Base]:
    model = str(real_checkpoint("base"))
    settings = Settings(model=model, executor="inline", dtype="float32", short_audio=short_audio)
    transcriber = LocalTranscriber(settings, TranscribeJob((), formats=("verbose_json",)))
    async with transcriber.running():
        yield Base(transcriber)


@cache
def recording(name: str) -> Samples:
    """[num_samples] at 16 kHz; skips where it is not at hand."""
    if not (RECORDINGS / name).exists():
        pytest.skip(f"{name} is not here")
    samples, rate_hz = soundfile.read(RECORDINGS / name, dtype="float32")
    assert rate_hz == SAMPLE_RATE
    return np.asarray(samples, np.float32)


def words(text: str) -> str:
    return " ".join(re.findall(r"[a-z']+", text.lower()))


def long_talk() -> tuple[Samples, str]:
    """Over half a minute of different sentences that whisper-base hears without an error: sound and words."""
    clips = corpus("librivox")
    if not clips:
        pytest.skip("the recordings of pocketsphinx-testdata are not here")
    parts = [part for clip in clips for part in (clip.samples(), pause(0.7))]
    said = " ".join(clip.text or "" for clip in clips).replace("mister", "mr").replace("more a", "more")
    return np.concatenate([*parts, recording("jfk.wav")]), f"{said} {JFK}"


def pause(duration_s: float) -> Samples:
    return np.zeros(round(duration_s * SAMPLE_RATE), np.float32)


@IN_MODULE
async def test_where_nobody_speaks_not_one_word_is_heard(base: Base) -> None:
    """Alone, and between two sentences, where coughs are words to the model, each as likely as the others."""
    jfk = recording("jfk.wav")
    alone = [make_noise(kind, -20, 1.0, 3) for kind in NOISES] + [jfk[8000:9600], jfk[:1600]]
    middle = round(7.9 * SAMPLE_RATE)  # between "do for you" and "ask what"
    between = [
        np.concatenate([jfk[:middle], make_noise(kind, level_db, 4.0, 5), jfk[middle:]])
        for kind, level_db in (("coughs", -15), ("barks", -30))
    ]
    assert await base.texts(alone) == [""] * len(alone)
    assert [words(text) for text in await base.texts(between)] == [JFK] * 2


@IN_MODULE
@pytest.mark.parametrize("short_audio", ["tail", pytest.param("exact", marks=pytest.mark.trial)])
async def test_speech_that_the_model_times_too_early_is_not_taken_for_an_invention(
    short_audio: Literal["tail", "exact"],
) -> None:
    """Nobody speaks before 6.7 s, where the model sees five sentences; in a cut window, one in silence."""
    async with running_base(short_audio) as base:
        transcript = await base.hear(recording("telephone-30s.wav"))
    assert "i didn't know you were there" in words(transcript.text)
    assert 6.7 - LEAD_S <= transcript.segments[0].start_s <= 6.8


@IN_MODULE
async def test_room_tone_behind_a_clip_adds_no_word_and_odd_lengths_are_right_or_refused(base: Base) -> None:
    jfk, rng = recording("jfk.wav"), np.random.default_rng(1)
    room = rng.normal(0, 10 ** (-55 / 20), 2 * SAMPLE_RATE).astype(np.float32)
    quiet = rng.normal(0, 10 ** (-55 / 20), 20 * SAMPLE_RATE).astype(np.float32)
    window = np.concatenate([quiet[: 20 * SAMPLE_RATE - 8000], jfk[: 10 * SAMPLE_RATE + 16_000]])
    sounds = [np.concatenate([jfk, room])] + [window[:count] for count in (479_999, 480_001)]
    for count in (159, 161):
        with pytest.raises(AudioTooShort):
            await base.hear(jfk[:count])
    assert [words(text) for text in await base.texts(sounds)] == [JFK] * 3, "the next ones work"


@pytest.mark.parametrize("num_terms", [5, pytest.param(0, marks=pytest.mark.trial)])
def test_text_and_no_speech_probability_are_openai_whispers_where_padding_is_too(
    num_terms: int, tmp_path: Path
) -> None:
    import torch
    import whisper

    for file in hugging_face_checkpoint("base").iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "preprocessor_config.json").unlink(missing_ok=True)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"padding": "zeros"}))
    base, theirs = Checkpoint.load(tmp_path), openai_whisper_base()
    jfk = recording("jfk.wav")
    features = transcribed_features(jfk, 80, 3000)
    prompt = prompt_tokens(base.tokenizer, ", ".join(TERMS[:num_terms]))
    options = DecodingOptions(language="en", prompt_tokens=prompt)
    (ours,) = transcribe_chunks(base.engine(), [jfk], options)
    asked = whisper.DecodingOptions(language="en", prompt=list(prompt) or None, fp16=False)
    with torch.inference_mode():
        expected = whisper.decode(theirs, features, asked)
    assert list(ours.tokens) == expected.tokens
    assert ours.no_speech_prob == pytest.approx(expected.no_speech_prob, rel=1e-3)
    assert ours.avg_logprob == pytest.approx(expected.avg_logprob, abs=1e-3)


def test_doubtful_dutch_does_not_become_gibberish_at_a_high_temperature() -> None:
    clips = [clip for clip in corpora() if clip.name == "fillets/magnet/pap-v-pole"]
    if not clips:
        pytest.skip("the Dutch dialogues are not installed")
    base = loaded_base()
    options = DecodingOptions(language="nl", temperatures=TEMPERATURE_LADDER)
    (found,) = transcribe_chunks(base.engine(), [clips[0].samples()], options)
    text = base.tokenizer.decode([token for token in found.tokens if base.tokenizer.is_text(token)])
    assert found.temperature <= 0.4
    assert re.fullmatch(r"[\x00-\u024f]+", text), text


@IN_MODULE
@pytest.mark.parametrize("asked", [{}, {"text_only": True}, {"streams": True}])
async def test_between_languages_a_sentence_is_written_in_its_own(base: Base, asked: dict[str, Any]) -> None:
    """To the detector the Dutch one is likelier English ("I can hear a rustle of rain in the dinging")."""
    name = "fillets/computer/poc-v-nenajde"
    dutch = [clip.samples() for clip in corpora() if clip.name == name]
    if not dutch:
        pytest.skip("the Dutch dialogues are not installed")
    parts = [pause(0.6), dutch[0], pause(0.6), recording("jfk.wav")]
    options = base.transcriber.transcriber.options(multilingual=True, **asked)
    source = base.transcriber.recording(MemoryFile(wav(np.concatenate(parts))), ())
    async with base.transcriber.transcriber.run(source, options) as transcription:
        deltas = "".join([delta.text async for delta in transcription])
        transcript = await transcription.transcript()
    assert deltas == transcript.text
    assert re.fullmatch(f"en ik .* hier vast .* dingen {JFK}", words(deltas))
    assert transcript.languages == ("nl", "en")


@pytest.mark.skipif(not is_installed(), reason="the voice that reads aloud is not installed")
@IN_MODULE
async def test_speech_that_begins_with_a_keyword_keeps_it(base: Base) -> None:
    said = np.concatenate([pause(0.3), say("Kubernetes and Grafana run on our servers."), pause(0.5)])
    heard = await base.hear(said, keywords=["Kubernetes", "Grafana"])
    assert words(heard.text) == "kubernetes and grafana run on our servers"


# -- Minutes of it ----------------------------------------------------------------------------------------


@pytest.mark.trial
@pytest.mark.timeout(3600)
@IN_MODULE
async def test_forty_minutes_of_nothing_in_pieces_of_any_length_give_not_one_word(base: Base) -> None:
    sounds = dict(forty_minutes())
    assert sum(map(len, sounds.values())) / SAMPLE_RATE >= 40 * 60
    heard = dict(zip(sounds, await base.texts(list(sounds.values())), strict=True))
    assert {sound: text for sound, text in heard.items() if text} == {}


@IN_MODULE
@pytest.mark.parametrize("num_terms", [0, pytest.param(8, marks=pytest.mark.trial)])
async def test_a_sentence_said_twice_is_no_loop(base: Base, num_terms: int) -> None:
    """Both together compress like a loop of the model's: what was closed before is not read again for it."""
    jfk = recording("jfk.wav")
    heard = await base.hear(np.concatenate([jfk, pause(0.7), jfk]), ", ".join(TERMS[:num_terms]))
    assert words(heard.text) == f"{JFK} {JFK}"


@pytest.mark.trial
@pytest.mark.timeout(600)
@IN_MODULE
async def test_a_prompt_of_any_number_of_terms_loses_no_segment(base: Base) -> None:
    jfk, (talk, said) = recording("jfk.wav"), long_talk()
    for count in range(0, len(TERMS) + 1, 4):
        prompt = ", ".join(TERMS[:count])
        assert words((await base.hear(jfk, prompt)).text) == JFK, prompt
        assert words((await base.hear(talk, prompt)).text) == said, prompt


@pytest.mark.trial
@pytest.mark.timeout(600)
@IN_MODULE
async def test_silent_and_short_clips_among_31_others_change_no_text(base: Base) -> None:
    jfk = recording("jfk.wav")
    others = [jfk[: len(jfk) - 100 * number] for number in range(29)]
    sounds = [*others, pause(5.0), jfk[:3200], make_noise("hum", -30, 2.0)]
    together = await base.texts(sounds)
    assert together == [(await base.hear(sound)).text for sound in sounds]
    assert {words(text) for text in together[:29]} == {JFK}


@pytest.mark.trial
@pytest.mark.timeout(600)
@IN_MODULE
async def test_half_a_minute_that_fails_the_ladder_does_not_cost_what_follows(base: Base) -> None:
    talk, said = long_talk()
    noise = make_noise("babble", -15, 30.0, 2)
    heard = words((await base.hear(np.concatenate([noise, talk]))).text)
    assert heard.endswith(said)


@pytest.mark.trial
@pytest.mark.timeout(600)
@pytest.mark.skipif(not is_installed(), reason="the voice that reads aloud is not installed")
@IN_MODULE
async def test_nothing_is_said_behind_the_last_segment(base: Base) -> None:
    speech = read_for(29.4, [0.4, 1.0])
    sound = speech.samples[: round(29.4 * SAMPLE_RATE)]
    transcript = await base.hear(sound)
    end_s = transcript.segments[-1].end_s
    behind = sound[round((end_s + 0.2) * SAMPLE_RATE) :]
    assert possible_and_certain_s(frames_of(behind))[1] == []
