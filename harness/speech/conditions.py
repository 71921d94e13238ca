"""Conditions under which a recording of known sentences keeps its words.

Used by `benchmarks/lost_words.py`. Each condition makes one recording of another, the same for the same seed.
"""

from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt
from scipy.linalg import solve_toeplitz
from scipy.signal import lfilter

from asr_server.core import SAMPLE_RATE, Samples
from harness.speech.corpora import corpus
from harness.speech.digits import silence
from harness.speech.noises import make_noise, thump, with_sound_at
from harness.speech.synthesis import Speech, joined, say, sentences

Random = np.random.Generator
Sound = npt.NDArray[np.float32]  # [num_samples] or [num_samples, channels]
Condition = Callable[[Speech, Random], Sound]

LEVEL_DB: Final = -25.0  # of a recording to which something is added
PAUSE_S: Final = 0.8  # on both sides of another language
EVERY_S: Final = 3.0  # a click or a thump
WHISPER_ORDER: Final = 18
WHISPER_FRAME: Final = 480  # samples, every second of which begins another


def known_recordings(num_readings: int, seed: int) -> dict[str, Speech]:
    """Return people and a synthetic voice, about a minute each, with pauses of 0.3 to 2 s."""
    rng = np.random.default_rng(seed)
    clips = [*corpus("librivox"), *(clip for clip in corpus("recordings") if clip.name.endswith("jfk.flac"))]
    recordings = {"people": _joined([(clip.text or "", clip.samples()) for clip in clips], rng)}
    texts = rng.permutation(np.array(sentences(), object)).tolist()
    for number in range(num_readings):
        said, num_samples = list[tuple[str, Samples]](), 0
        while num_samples < 60 * SAMPLE_RATE:
            text = texts.pop()
            said.append((text, say(text)))
            num_samples += len(said[-1][1]) + SAMPLE_RATE
        recordings[f"reading {number + 1}"] = _joined(said, rng)
    return {name: speech for name, speech in recordings.items() if speech.sentences}


def _joined(said: list[tuple[str, Samples]], rng: Random) -> Speech:
    return joined(said, np.exp(rng.uniform(np.log(0.3), np.log(2.0), len(said))).tolist())


def unchanged(speech: Speech, rng: Random) -> Sound:
    return speech.samples


def later(speech: Speech, rng: Random) -> Sound:
    return np.concatenate([silence(0.37), speech.samples])


def languages(speech: Speech, rng: Random) -> Sound:
    """Put people of another language behind every second sentence."""
    parts, done = list[Samples](), 0
    for number, said in enumerate(speech.sentences, start=1):
        if number % 2:
            continue
        end = round(said.end_s * SAMPLE_RATE)
        parts += [speech.samples[done:end], silence(PAUSE_S), _other_language(number // 2, rng)]
        parts.append(silence(PAUSE_S))
        done = end
    return np.concatenate([*parts, speech.samples[done:]])


def _other_language(number: int, rng: Random) -> Samples:
    language = ("es", "fr", "it", "zh")[number % 4]
    clips = [clip for clip in corpus("audioeval") if clip.language == language]
    chosen = rng.choice(len(clips), rng.integers(1, len(clips) + 1), replace=False)
    return np.concatenate([part for n in chosen for part in (clips[n].samples(), silence(0.3))])


def louder(speech: Speech, rng: Random, *, level_db: float, offset: float = 0.0) -> Sound:
    return with_sound_at(speech.samples, level_db) + np.float32(offset)


def under(speech: Speech, rng: Random, *, kind: str, relative_db: float) -> Sound:
    """Add a noise of a level relative to the speech."""
    duration_s = len(speech.samples) / SAMPLE_RATE
    noise = make_noise(kind, LEVEL_DB + relative_db, duration_s, int(rng.integers(1 << 30)))
    return with_sound_at(speech.samples, LEVEL_DB) + noise[: len(speech.samples)]


def clicks(speech: Speech, rng: Random) -> Sound:
    sound = with_sound_at(speech.samples, -57.0)
    for at in _moments(sound, rng):
        sound[at : at + 4] += np.array([1, -1, 0.5, -0.5], np.float32)[: len(sound) - at]
    return sound


def thumps(speech: Speech, rng: Random) -> Sound:
    sound = with_sound_at(speech.samples, -50.0)
    one = thump()
    for at in _moments(sound, rng):
        sound[at : at + len(one)] += one[: len(sound) - at]
    return sound


def _moments(sound: Samples, rng: Random) -> list[int]:
    starts = np.arange(0, len(sound) - SAMPLE_RATE, EVERY_S * SAMPLE_RATE)
    return [int(start + rng.integers(SAMPLE_RATE)) for start in starts]


def whispered(speech: Speech, rng: Random) -> Sound:
    """Replace the voice by noise of the same spectrum (linear prediction), as whispering does."""
    samples, step = speech.samples, WHISPER_FRAME // 2
    sound, window = np.zeros(len(samples) + WHISPER_FRAME, np.float32), np.hanning(WHISPER_FRAME)
    for at in range(0, len(samples) - WHISPER_FRAME, step):
        frame = samples[at : at + WHISPER_FRAME] * window
        powers = np.correlate(frame, frame, "full")[WHISPER_FRAME - 1 :][: WHISPER_ORDER + 1]
        if powers[0] < 1e-6:
            continue
        powers[0] *= 1.0001
        weights = solve_toeplitz(powers[:-1], powers[1:])
        left = max(0.0, float(powers[0] - weights @ powers[1:])) / WHISPER_FRAME
        noise = rng.standard_normal(WHISPER_FRAME) * np.sqrt(left)
        sound[at : at + WHISPER_FRAME] += lfilter([1], [1, *-weights], noise) * window
    return with_sound_at(sound[: len(samples)], LEVEL_DB)


def surround(speech: Speech, rng: Random) -> Sound:
    """Put the speech in the centre of 5.1, music as loud in front, noises behind, a rumble below."""
    duration_s, count = len(speech.samples) / SAMPLE_RATE, len(speech.samples)
    kinds = ("music", "music", "pink", "music")
    left, right, behind, beside = (
        make_noise(kind, LEVEL_DB, duration_s, int(rng.integers(1 << 30)))[:count] for kind in kinds
    )
    rumble = np.asarray(0.5 * np.sin(2 * np.pi * 40 * np.arange(count) / SAMPLE_RATE), np.float32)
    centre = with_sound_at(speech.samples, LEVEL_DB)
    return np.stack([left, right, centre, rumble, behind, beside], axis=1)


def inverted(speech: Speech, rng: Random) -> Sound:
    """Invert one side of stereo, with a little noise of its own on each."""
    sides = np.stack([speech.samples, -speech.samples], axis=1)
    return np.asarray(sides + 1e-3 * rng.standard_normal(sides.shape), np.float32)


GIVEN: Final = frozenset({"languages, English given"})  # conditions under which the language is given
CONDITIONS: Final[dict[str, Condition]] = {
    "later": later,
    "languages": languages,
    "languages, English given": languages,
    "offset": partial(louder, level_db=LEVEL_DB, offset=0.5),
    "faint": partial(louder, level_db=-50.0),
    "faint, offset": partial(louder, level_db=-50.0, offset=0.5),
    "clicks": clicks,
    "thumps": thumps,
    "music -5 dB": partial(under, kind="music", relative_db=-5.0),
    "music 0 dB": partial(under, kind="music", relative_db=0.0),
    "music +5 dB": partial(under, kind="music", relative_db=5.0),
    "noise -10 dB": partial(under, kind="pink", relative_db=-10.0),
    "hum 0 dB": partial(under, kind="hum", relative_db=0.0),
    "babble -10 dB": partial(under, kind="babble", relative_db=-10.0),
    "whispered": whispered,
    "surround": surround,
    "inverted": inverted,
}
