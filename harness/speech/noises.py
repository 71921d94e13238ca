"""Sounds without a word in them, each at a level in dBFS: what a transcript must leave out.

`level_db` is the RMS of the sounding part; peaks beyond full scale are clipped, as a recorder would.
"""

from collections.abc import Callable, Iterator
from functools import cache
from itertools import product

import numpy as np
import numpy.typing as npt
import soxr
from scipy import signal

from asr_server.core import SAMPLE_RATE, Samples
from harness.speech.corpora import RECORDINGS, mono
from harness.speech.digits import VOICES, WORDS, digit

Random = np.random.Generator
NUM_TALKERS = 16  # at once, in babble
# Forty minutes in pieces of every kind, level and length: nobody speaks in them, nor far away.
NOTHING_SAID = ("silence", "hum", "white", "pink", "coughs", "barks", "keyboard", "tones")
LEVELS_DB = (-50, -40, -30, -20, -10)
LENGTHS_S = (0.1, 0.35, 1.0, 3.0, 9.0, 17.0, 30.0)
TALKS = ("jfk.wav", "telephone-30s.wav", "speech-8s.opus", "two-speakers-stereo.wav")


def silence(count: int, rng: Random) -> Samples:
    return np.zeros(count, np.float32)


def hum(count: int, rng: Random) -> Samples:
    """The mains, 50 or 60 Hz, with its harmonics."""
    phases = 2 * np.pi * rng.choice([50.0, 60.0]) * np.arange(count) / SAMPLE_RATE
    harmonics = [np.sin(k * phases + rng.uniform(0, 6)) / k ** rng.uniform(0.7, 2) for k in range(1, 16)]
    return np.asarray(np.sum(harmonics, axis=0), np.float32)


def white(count: int, rng: Random) -> Samples:
    return rng.standard_normal(count, np.float32)


def pink(count: int, rng: Random) -> Samples:
    spectrum = np.fft.rfft(rng.standard_normal(count))
    spectrum /= np.sqrt(np.maximum(np.arange(len(spectrum)), count * 20 / SAMPLE_RATE))
    return np.fft.irfft(spectrum, count).astype(np.float32)


def tones(count: int, rng: Random) -> Samples:
    """Beeps, pairs of keys' tones, glides and chords, one after another with pauses."""
    parts: list[Samples] = []
    while sum(map(len, parts)) < count:
        times = np.arange(int(rng.uniform(0.1, 4.0) * SAMPLE_RATE)) / SAMPLE_RATE
        low, high = np.sort(np.exp(rng.uniform(np.log(80), np.log(6000), 2)))
        glide = np.cumsum(np.linspace(low, high, len(times))) / SAMPLE_RATE
        pitches = [low * times, low * times + 0 * high, glide, low * times][rng.integers(4)]
        sound = np.sin(2 * np.pi * pitches)
        if rng.random() < 0.5:
            sound = sound + np.sin(2 * np.pi * high * times)
        parts += [sound.astype(np.float32), silence(int(rng.uniform(0.0, 1.0) * SAMPLE_RATE), rng)]
    return np.concatenate(parts)[:count]


def music(count: int, rng: Random) -> Samples:
    """Plucked notes with harmonics, several at once."""
    sound = np.zeros(count + 2 * SAMPLE_RATE, np.float32)
    at = 0
    while at < count:
        times = np.arange(int(rng.uniform(0.3, 2.0) * SAMPLE_RATE), dtype=np.float32) / SAMPLE_RATE
        pitch_hz = 110 * 2 ** (rng.integers(0, 36) / 12)
        waves = [np.sin(2 * np.pi * k * pitch_hz * times) / k for k in range(1, 8) if k * pitch_hz < 7500]
        sound[at : at + len(times)] += np.exp(-3 * times) * np.sum(waves, axis=0)
        at += int(rng.uniform(0.1, 0.5) * SAMPLE_RATE)
    return sound[:count]


def coughs(count: int, rng: Random) -> Samples:
    """Bursts of noise through the mouth's resonances, with pauses; among them a recorded one where it is."""
    parts: list[Samples] = []
    while sum(map(len, parts)) < count:
        recorded = recorded_cough()
        cough = recorded if len(recorded) and rng.random() < 0.3 else _cough(rng)
        parts += [cough / np.abs(cough).max(), silence(int(rng.uniform(0.1, 1.5) * SAMPLE_RATE), rng)]
    return np.concatenate(parts)[:count]


def _cough(rng: Random) -> Samples:
    """One to three bursts; the spectrum is shaped by three resonances between 300 and 4000 Hz."""
    bursts = []
    for _ in range(rng.integers(1, 4)):
        count = int(rng.uniform(0.1, 0.4) * SAMPLE_RATE)
        times = np.arange(count) / SAMPLE_RATE
        spectrum = np.fft.rfft(rng.standard_normal(count))
        frequencies = np.fft.rfftfreq(count, 1 / SAMPLE_RATE)
        shape = np.full(len(frequencies), 0.05)
        for centre_hz in rng.uniform(300, 4000, 3):
            shape += 1 / (1 + ((frequencies - centre_hz) / rng.uniform(80, 400)) ** 2)
        envelope = np.minimum(times / 0.01, 1) * np.exp(-times * rng.uniform(5, 20))
        bursts += [np.fft.irfft(spectrum * shape, count) * envelope, np.zeros(rng.integers(500, 4000))]
    return np.concatenate(bursts).astype(np.float32)


def barks(count: int, rng: Random) -> Samples:
    """Dogs, cats and crows, with pauses."""
    parts: list[Samples] = []
    while sum(map(len, parts)) < count:
        parts += [_call(2 * SAMPLE_RATE, rng), silence(int(rng.uniform(0.1, 1.5) * SAMPLE_RATE), rng)]
    return np.concatenate(parts)[:count]


def _call(count: int, rng: Random) -> Samples:
    """Barks, yelps, mews or crows: buzzing that glides in pitch through resonances, once or a few times."""
    sound = np.zeros(count, np.float32)
    low_hz, high_hz = np.sort(np.exp(rng.uniform(np.log(120), np.log(1200), 2)))
    centres_hz, widths_hz = rng.uniform(300, 4000, 3), rng.uniform(60, 500, 3)
    length = min(count, int(rng.uniform(0.08, 0.7) * SAMPLE_RATE))
    for _ in range(rng.integers(1, 5)):
        at = int(rng.integers(0, count - length + 1))
        arch = np.sin(np.linspace(rng.uniform(0, 1), rng.uniform(1.5, 3.1), length))
        pitch_hz = low_hz + (high_hz - low_hz) * arch
        source = signal.sawtooth(2 * np.pi * np.cumsum(pitch_hz) / SAMPLE_RATE)
        source = source + rng.uniform(0, 0.6) * rng.standard_normal(length)
        for centre_hz, width_hz in zip(centres_hz, widths_hz, strict=True):
            source = source + _resonate(source, centre_hz, width_hz)
        once = source * np.sin(np.linspace(0.05, np.pi, length)) ** rng.uniform(0.3, 2)
        sound[at : at + length] += once / (np.abs(once).max() + 1e-6) * rng.uniform(0.3, 1)
    return sound


def _resonate(source: npt.NDArray[np.float64], centre_hz: float, width_hz: float) -> npt.NDArray[np.float64]:
    radius = np.exp(-np.pi * width_hz / SAMPLE_RATE)
    angle = 2 * np.pi * centre_hz / SAMPLE_RATE
    filtered: npt.NDArray[np.float64] = signal.lfilter(
        [1 - radius], [1, -2 * radius * np.cos(angle), radius**2], source
    )
    return np.asarray(filtered * (source.std() / (filtered.std() + 1e-9)))


def keyboard(count: int, rng: Random) -> Samples:
    """Keystrokes, knocks and clicks: short resonances."""
    sound = np.zeros(count, np.float32)
    for _ in range(rng.poisson(3 * count / SAMPLE_RATE) + 1):
        length = int(rng.uniform(0.003, 0.08) * SAMPLE_RATE)
        at = int(rng.integers(0, max(1, count - length)))
        times = np.arange(length, dtype=np.float32) / SAMPLE_RATE
        knock = np.exp(-times * rng.uniform(40, 400)) * np.sin(2 * np.pi * rng.uniform(100, 5000) * times)
        knock += 0.3 * np.exp(-times * 200) * rng.standard_normal(length)
        sound[at : at + length] += (rng.uniform(0.1, 1) * knock)[: count - at]
    return sound


def babble(count: int, rng: Random) -> Samples:
    """Many people at once: the synthesised digits, and where they are at hand, recordings of talk."""
    voices = [_talk(count, rng) for _ in range(NUM_TALKERS)]
    return np.asarray(np.sum(voices, axis=0), np.float32)


def _talk(count: int, rng: Random) -> Samples:
    """One talker at a level like the others'."""
    talks = recorded_talks()
    if talks and rng.random() < 0.5:
        talk = np.resize(talks[rng.integers(len(talks))], count + SAMPLE_RATE)
    else:
        voice = VOICES[rng.integers(len(VOICES))]
        talk = np.concatenate([digit(str(rng.integers(len(WORDS))), voice) for _ in range(count // 8000 + 2)])
    talk = np.roll(np.resize(talk, count), rng.integers(count))
    return np.asarray(talk / (talk.std() + 1e-9), np.float32)


@cache
def recorded_talks() -> tuple[Samples, ...]:
    return tuple(mono(RECORDINGS / name) for name in TALKS if (RECORDINGS / name).exists())


@cache
def recorded_cough() -> Samples:
    path = RECORDINGS / "cough.wav"
    return mono(path) if path.exists() else np.empty(0, np.float32)


def forty_minutes() -> Iterator[tuple[str, Samples]]:
    """Each piece's name and its samples, [num_samples] at 16 kHz."""
    for kind, level_db, duration_s in product(NOTHING_SAID, LEVELS_DB, LENGTHS_S):
        yield f"{kind}/{level_db}dB/{duration_s:g}s", make_noise(kind, level_db, duration_s, seed=7)


Maker = Callable[[int, Random], Samples]
KINDS: dict[str, Maker] = {
    each.__name__: each for each in (silence, hum, white, pink, babble, coughs, barks, keyboard, tones, music)
}


def make_noise(kind: str, level_db: float, duration_s: float, seed: int = 0) -> Samples:
    sound = KINDS[kind](round(duration_s * SAMPLE_RATE), np.random.default_rng([seed, *kind.encode()]))
    return np.clip(with_sound_at(sound, level_db), -1, 1)


def thump() -> Samples:
    """Return a quarter of a second of 70 Hz that dies away, as of a hand on a table."""
    times_s = np.arange(SAMPLE_RATE // 4, dtype=np.float32) / SAMPLE_RATE
    return np.asarray(np.sin(2 * np.pi * 70 * times_s) * np.exp(-20 * times_s), np.float32)


def with_sound_at(samples: Samples, level_db: float) -> Samples:
    """Scale samples so that what sounds of them has this level; silence stays what it is."""
    sounding = samples[np.abs(samples) > 1e-4]
    if not len(sounding):
        return samples
    level = float(np.sqrt(np.mean(np.square(sounding))))
    return np.asarray(samples * (10 ** (level_db / 20) / level), np.float32)


def by_telephone(samples: Samples) -> Samples:
    """As many samples, with what 300 to 3,400 Hz at 8 kHz and eight bits by mu-law (ITU-T G.711) leave."""
    band = signal.butter(4, (300, 3400), "bandpass", fs=SAMPLE_RATE, output="sos")
    narrow = soxr.resample(signal.sosfilt(band, samples), SAMPLE_RATE, 8000)
    loudness = np.round(128 * np.log1p(255 * np.abs(np.clip(narrow, -1, 1))) / np.log(256)) / 128
    heard = soxr.resample(np.sign(narrow) * (256**loudness - 1) / 255, 8000, SAMPLE_RATE).astype(np.float32)
    return np.pad(heard, (0, max(0, len(samples) - len(heard))))[: len(samples)]
