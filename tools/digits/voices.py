"""The synthesised speakers: which voices there are, which are left out, and what each one says.

espeak-ng: about 90 variants times English accents and 23 other languages' voices that read respelled
digits; flite, festival and SVOX Pico: recorded voices (diphones, units, statistical), again with other
languages' voices for accents. Every engine leaves some voices out of training altogether.
"""

from __future__ import annotations

import random
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import soundfile
import soxr

from .clips import SAMPLE_RATE, ClipStore, Samples, make_clip
from .espeak import Espeak, EspeakVoice
from .texts import RESPELLED, digit_text, other_text, spoken_words, strange_text

HELD_OUT_VOICES = frozenset(
    {f"espeak/{name}" for name in ("f3", "m5", "klatt3", "linda", "john", "Andy", "michel", "grandma")}
    | {"flite/rms", "festival/pc_diphone", "pico/en-US"}
    | {"asterisk/en_US_f_Allison", "asterisk/es_MX_f_Allison"}
)
"""Voices that never train anything."""

_ENGLISH_ACCENTS = (
    *("en-us", "en-us", "en-us-nyc", "en-029"),
    *("en-gb", "en-gb-scotland", "en-gb-x-rp", "en-gb-x-gbclan", "en-gb-x-gbcwmd"),
)
_NOT_SPEAKERS = frozenset({"fast"})

_FLITE = ("kal", "kal16", "awb", "rms", "slt")

# Festival voices and the espeak-ng language whose respelling they read.
_FESTIVAL = {
    "ked_diphone": "en",
    "cmu_us_slt_arctic_hts": "en",
    "lp_diphone": "it",
    "pc_diphone": "it",
    "upc_ca_ona_hts": "plain",
    "czech_dita": "czech",
    "czech_krb": "czech",
    "czech_machac": "czech",
    "czech_ph": "czech",
    "hy_fi_mv_diphone": "fi",
    "suo_fi_lj_diphone": "fi",
    "msu_ru_nsh_clunits": "ru",
}
_ASCII_RESPELLED = {  # for voices that read no accented letters
    "plain": ("siro", "uan", "tu", "tri", "for", "faif", "siks", "seven", "eit", "nain"),
    "czech": ("zirou", "vuan", "tu", "tri", "for", "fajv", "siks", "sevn", "ejt", "najn"),
}
_PICO = {"en-GB": "en", "en-US": "en", "de-DE": "de", "es-ES": "es", "fr-FR": "fr-fr", "it-IT": "it"}


def voice_name(voice: str) -> str:
    """The voice without its style: "engine/name"."""
    return voice.rsplit("/", 1)[0]


def is_held_out(voice: str) -> bool:
    """Whether this voice never trains anything."""
    return voice_name(voice) in HELD_OUT_VOICES


def espeak_variants() -> list[str]:
    """Names of the installed espeak-ng variants that sound like somebody."""
    listing = subprocess.run(
        ["espeak-ng", "--voices=variant"], capture_output=True, text=True, check=True
    ).stdout
    names = [line.split("!v/")[1].split()[0] for line in listing.splitlines() if "!v/" in line]
    # "Mr serious": the blank breaks the name.
    return sorted(name for name in names if name not in _NOT_SPEAKERS and name != "Mr")


def espeak_speakers(count: int, rng: random.Random, english_share: float = 0.67) -> Iterator[EspeakVoice]:
    """Random speakers; ``english_share`` of them have an English accent, the rest another language's."""
    variants = espeak_variants()
    for index in range(count):
        english = rng.random() < english_share
        yield EspeakVoice(
            language=rng.choice(_ENGLISH_ACCENTS if english else tuple(RESPELLED)),
            variant=variants[index % len(variants)],
            rate_wpm=rng.randint(105, 250),
            pitch=rng.randint(15, 85),
            pitch_range=rng.randint(10, 90),
        )


def synthesise_espeak(num_speakers: int, seed: int) -> ClipStore:
    """Every speaker says the ten digits one by one, four runs of two to seven, and some other things."""
    rng, engine, store = random.Random(seed), Espeak(), ClipStore()
    for voice in espeak_speakers(num_speakers, rng):
        texts = list(_script(voice.language, rng, num_runs=4))
        if not voice.language.startswith("en"):
            # English read by rules of another language: babble with its sounds.
            texts.append(("", other_text(rng)))
        for digits, text in texts:
            store.add(make_clip(engine.say(text, voice), digits, str(voice)))
    return store


def synthesise_other_speech(num_speakers: int, seed: int) -> ClipStore:
    """Every speaker, each with an English accent, says six things that hold no digit."""
    rng, engine, store = random.Random(seed), Espeak(), ClipStore()
    for voice in espeak_speakers(num_speakers, rng, english_share=1.0):
        for write in (strange_text, strange_text, strange_text, strange_text, other_text, other_text):
            store.add(make_clip(engine.say(write(rng), voice), "", str(voice)))
    return store


def _script(language: str, rng: random.Random, num_runs: int) -> Iterator[tuple[str, str]]:
    """What one speaker says: (digits, text)."""
    for digit in range(10):
        yield str(digit), digit_text(str(digit), language, rng)
    for _ in range(num_runs):
        digits = random_digits(rng.randint(2, 7), rng)
        yield digits, digit_text(digits, language, rng)
    if language.startswith("en"):
        for _ in range(2):
            yield "", other_text(rng)


def random_digits(count: int, rng: random.Random) -> str:
    """``count`` random digits."""
    return "".join(rng.choice("0123456789") for _ in range(count))


def read_16k(path: Path) -> Samples:
    """A sound file as 16 kHz mono int16; empty if the synthesiser wrote none."""
    if not path.exists() or path.stat().st_size < 1000:
        return np.zeros(0, np.int16)
    samples, rate_hz = soundfile.read(path, dtype="int16", always_2d=True)
    mono = np.ascontiguousarray(samples[:, 0])
    resampled: Samples = mono if rate_hz == SAMPLE_RATE else soxr.resample(mono, rate_hz, SAMPLE_RATE)
    return resampled


def synthesise_flite(styles: int, seed: int) -> ClipStore:
    """Each flite voice at random tempos and pitches."""
    rng, store = random.Random(seed), ClipStore()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "out.wav"
        for index in range(styles * len(_FLITE)):
            name, stretch = _FLITE[index % len(_FLITE)], rng.uniform(0.75, 1.5)
            pitch_hz = rng.randint(150, 240) if name == "slt" else rng.randint(80, 150)
            for digits, text in _script("en", rng, num_runs=5):
                options = [
                    "--setf",
                    f"duration_stretch={stretch:.2f}",
                    "--setf",
                    f"int_f0_target_mean={pitch_hz}",
                ]
                subprocess.run(["flite", "-voice", name, *options, "-t", text, "-o", str(path)], check=True)
                store.add(make_clip(read_16k(path), digits, f"flite/{name}/{stretch:.2f}-{pitch_hz}"))
    return store


def synthesise_pico(styles: int, seed: int) -> ClipStore:
    """Each SVOX Pico voice at random tempos and pitches; four of them read respelled digits."""
    rng, store, names = random.Random(seed), ClipStore(), list(_PICO)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "out.wav"
        for index in range(styles * len(names)):
            name, speed, pitch = names[index % len(names)], rng.randint(70, 150), rng.randint(75, 130)
            for digits, text in _script(_PICO[name], rng, num_runs=5):
                marked = f'<pitch level="{pitch}"><speed level="{speed}">{text}</speed></pitch>'
                subprocess.run(
                    ["pico2wave", "-l", name, "-w", str(path), marked], check=True, capture_output=True
                )
                store.add(make_clip(read_16k(path), digits, f"pico/{name}/{speed}-{pitch}"))
    return store


def synthesise_festival(styles: int, seed: int) -> ClipStore:
    """Each festival voice at random tempos; all of one voice's utterances in one festival process."""
    rng, store = random.Random(seed), ClipStore()
    for name, language in _FESTIVAL.items():
        lines: list[tuple[str, str, float]] = []
        for _ in range(styles):
            stretch = rng.uniform(0.75, 1.5)
            lines += [(digits, text, stretch) for digits, text in _festival_script(language, rng)]
        with tempfile.TemporaryDirectory() as folder:
            _run_festival(name, lines, Path(folder))
            for number, (digits, _, stretch) in enumerate(lines):
                samples = read_16k(Path(folder) / f"{number}.wav")
                store.add(make_clip(samples, digits, f"festival/{name}/{stretch:.2f}"))
    return store


def _festival_script(language: str, rng: random.Random) -> Iterator[tuple[str, str]]:
    if language in _ASCII_RESPELLED:
        words = _ASCII_RESPELLED[language]
        for count in [1] * 10 + [2, 3, 4, 5]:
            digits = random_digits(count, rng)
            yield digits, " ".join(words[int(d)] for d in digits)
        return
    spoken_words(language)
    for digits, text in _script(language, rng, num_runs=5):
        yield digits, text.rstrip(".,!?") if language != "en" else text


def _run_festival(voice: str, lines: list[tuple[str, str, float]], folder: Path) -> None:
    commands = [f"(voice_{voice})"]
    for number, (_, text, stretch) in enumerate(lines):
        path = folder / f"{number}.wav"
        commands.append(f"(Parameter.set 'Duration_Stretch {stretch:.2f})")
        commands.append(f'(utt.save.wave (utt.synth (Utterance Text "{text}")) "{path}" \'riff)')
    script = folder / "script.scm"
    script.write_text("\n".join(commands), encoding="utf-8")
    subprocess.run(["festival", "-b", str(script)], capture_output=True, check=False, timeout=600)
