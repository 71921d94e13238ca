"""Known sentences behind, under and between the music and the effects of games, the same for the same seed.

Scenes of odd seeds, for fitting, and of even ones, for reports, have other games, voices and sentences.
"""

import subprocess
import tempfile
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Final

import numpy as np
import soundfile

from asr_server.core import SAMPLE_RATE, Samples
from harness.speech.conversations import flite
from harness.speech.corpora import CACHE, known_clips, mono
from harness.speech.digits import silence
from harness.speech.noises import with_sound_at
from harness.speech.synthesis import SaidSentence, Speech, say, sentences

GAMES: Final = CACHE / "games"
PACKAGES: Final = (
    ("powermanga-data", "torus-trooper-data", "chromium-bsu-data", "funnyboat", "bomberclone-data"),
    ("frozen-bubble-data", "noiz2sa-data", "freedroid-data", "solarwolf", "minetest-data"),
)
VOICES: Final = (("joe", "rms", "awb", "people"), ("joe", "slt", "people"))
SPOKEN: Final = ("noh", "ThouArtDefeated", "Cry")  # effects with voices
MUSIC_S: Final = 20.0  # a file that lasts as long is music
LEVEL_DB: Final = -25.0  # of speech
RELATIVE_DB: Final = {"behind": (-5.0, 15.0), "under": (-6.0, 6.0), "between": (-5.0, 15.0)}
KINDS: Final = (*product(RELATIVE_DB, ("music", "effects", "both")), ("between", "silence"))
NUM_SENTENCES: Final = 4

Random = np.random.Generator
_read = cache(mono)


def fetch() -> None:
    """Unpack the games from Debian's packages, which takes no rights."""
    GAMES.mkdir(parents=True, exist_ok=True)
    for name in (name for names in PACKAGES for name in names if not (GAMES / name).exists()):
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(["apt-get", "download", name], cwd=folder, check=True)
            (package,) = Path(folder).glob("*.deb")
            subprocess.run(["dpkg-deb", "-x", package, GAMES / name], check=True)


def scenes(number: int, seed: int) -> Iterator[tuple[str, Speech]]:
    """Yield so many scenes of each kind."""
    for (place, sound), n in product(KINDS, range(number)):
        kind = f"{place} {sound}"
        yield kind, _scene(place, sound, np.random.default_rng([seed, n, *kind.encode()]), seed % 2)


def _scene(place: str, sound: str, rng: Random, half: int) -> Speech:
    level_db = LEVEL_DB + rng.uniform(*RELATIVE_DB[place])
    parts, said = [silence(rng.uniform(0.1, 1.0))], list[SaidSentence]()
    for number, (text, spoken) in enumerate(_said(rng, half)):
        if place == "between" or (place == "behind" and number % 2 == 0):
            parts.append(game_sound(sound, round(rng.uniform(3, 20) * SAMPLE_RATE), level_db, rng, half))
        parts.append(silence(float(np.exp(rng.uniform(np.log(0.05), np.log(1.5))))))
        at_s = sum(map(len, parts)) / SAMPLE_RATE
        said.append(SaidSentence(text, at_s, at_s + len(spoken) / SAMPLE_RATE))
        parts.append(with_sound_at(spoken, LEVEL_DB))
    samples = np.concatenate([*parts, silence(rng.uniform(0.3, 3.0))])
    if place == "under":
        samples = samples + game_sound(sound, len(samples), level_db, rng, half)
    return Speech(np.clip(samples, -1, 1), tuple(said))


def _said(rng: Random, half: int) -> Iterator[tuple[str, Samples]]:
    clips, texts = known_clips(["librivox", "recordings"], 30), sentences()[half::2]
    clips = [clip for clip in clips if len(clip.text or "") > len("one two three")][half::2]
    for voice in rng.choice(VOICES[half], NUM_SENTENCES):
        clip, text = clips[rng.integers(len(clips))], texts[rng.integers(len(texts))]
        if voice == "people":
            yield clip.text or "", clip.samples()
        else:
            yield text, say(text) if voice == "joe" else flite(str(voice), text)


@cache
def _files(is_music: bool, half: int) -> list[Path]:
    paths = [path for name in PACKAGES[half] for path in sorted((GAMES / name).rglob("*.*"))]
    paths = [path for path in paths if path.suffix in (".ogg", ".wav") and not path.stem.startswith(SPOKEN)]
    return [path for path in paths if (soundfile.info(path).duration >= MUSIC_S) == is_music]


def game_sound(kind: str, count: int, level_db: float, rng: Random, half: int) -> Samples:
    """Return so many samples."""
    sound = np.zeros(count, np.float32)
    if kind in ("music", "both"):
        music = _read(_files(True, half)[rng.integers(len(_files(True, half)))])
        first = int(rng.integers(max(1, len(music) - count)))
        sound += np.resize(with_sound_at(music[first : first + count], level_db), count)
    at = 0 if kind in ("effects", "both") else count
    while at < count:
        effect = _read(_files(False, half)[rng.integers(len(_files(False, half)))])[: count - at]
        sound[at : at + len(effect)] += with_sound_at(effect, level_db + rng.uniform(-6, 6))
        at += len(effect) + round(rng.uniform(0.0, 2.0) * SAMPLE_RATE)
    return sound
