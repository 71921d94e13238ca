"""Recordings of people whose words are known, from packages that anybody can install.

`harness/speech/install.sh` fetches what can be had; a corpus that is not there has no clips.
"""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import soundfile
import soxr

from asr_server.core import SAMPLE_RATE, Samples

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache/speech"
RECORDINGS = ROOT / "../shared/data/audio"  # beside the repository, not part of it
POCKETSPHINX = Path("/usr/share/pocketsphinx/test/data")
FILLETS = Path("/usr/share/games/fillets-ng")
ASTERISK = Path("/usr/share/asterisk/sounds")
AUDIOEVAL = CACHE / "pytest-audioeval/pytest_audioeval/samples/audio"

_RECORDED = {
    **dict.fromkeys(
        ("jfk.wav", "jfk.mp3", "jfk.flac"),
        (
            "And so my fellow Americans, ask not what your country can do for you, "
            "ask what you can do for your country.",
            "MIT",
        ),
    ),
    "two-speakers-stereo.wav": (None, "MIT"),  # another sentence in each channel, at the same time
    "telephone-30s.wav": (None, "MIT"),
    "speech-8s.opus": (None, "MIT"),
    "wav-named.mp3": (None, "MIT"),
    "silence-1s.wav": ("", "MIT"),
    "cough.wav": ("", "Apache-2.0"),
}
_DIALOGUE = re.compile(
    r'dialogId\("(?P<id>[^"]+)",\s*"(?P<font>\w+)",\s*"(?P<english>(?:[^"\\]|\\.)*)"\)\s*'
    r'dialogStr\("(?P<acted>(?:[^"\\]|\\.)*)"\)'
)
_PROMPTS = {
    "en_US_f_Allison": "Allison",
    "fr_CA_f_June": "June",
    "it_IT_m_Carlo": "Carlo",
    "ru_RU_f_IvrvoiceRU": "Ivrvoice",
}
_G722_BYTES_PER_S = 8000
_SPEAKERS = {"font_small": "small fish", "font_big": "big fish"}


@dataclass(frozen=True)
class Clip:
    """One recording in a file of its own.

    `text` is what is said in it, in `language` (a code such as `nl`): empty where nothing is said, None where
    it is not known. `translation` is the text in English, where the corpus has it.
    """

    name: str
    corpus: str
    path: Path
    text: str | None
    language: str
    licence: str
    translation: str | None = None
    speaker: str | None = None

    def samples(self) -> Samples:
        return mono(self.path)

    @property
    def duration_s(self) -> float:
        return float(soundfile.info(self.path).duration)


def mono(file: Path | BinaryIO) -> Samples:
    """[num_samples] of float32 at 16 kHz, all channels mixed into one, as the server decodes them."""
    samples, rate = soundfile.read(file, dtype="float32", always_2d=True)
    mixed = samples.mean(axis=1)
    return np.asarray(mixed if rate == SAMPLE_RATE else soxr.resample(mixed, rate, SAMPLE_RATE), np.float32)


def recordings() -> list[Clip]:
    """The recordings beside the repository: people, telephones, formats, and nothing said."""
    counts = {path.name: ("one two three", "BSD-3-Clause") for path in RECORDINGS.glob("one-two-three*")}
    return [
        Clip(f"recordings/{name}", "recordings", RECORDINGS / name, text, "en", licence)
        for name, (text, licence) in sorted((_RECORDED | counts).items())
        if (RECORDINGS / name).exists()
    ]


def librivox() -> list[Clip]:
    """Five sentences of Jane Austen's Sense and Sensibility, read by a volunteer of LibriVox."""
    return _transcribed("librivox", POCKETSPHINX / "librivox/transcription")


def cards() -> list[Clip]:
    """Names of playing cards, said into an ordinary microphone."""
    return _transcribed("cards", POCKETSPHINX / "cards/cards.transcription")


def _transcribed(corpus: str, transcription: Path) -> list[Clip]:
    """The clips of a transcription in the format of CMU Sphinx: `<s> words </s> (file)`."""
    if not transcription.exists():
        return []
    found = re.findall(r"<s>(.*?)</s>\s*\((.*?)\)", transcription.read_text())
    folder, licence = transcription.parent, "BSD-2-Clause"
    return [
        Clip(f"{corpus}/{file}", corpus, folder / f"{file}.wav", text.strip(), "en", licence)
        for text, file in found
    ]


def commands() -> list[Clip]:
    """Headerless samples of pocketsphinx, copied into a WAV file."""
    raw = POCKETSPHINX / "goforward.raw"
    if not raw.exists():
        return []
    path = kept(CACHE / f"pocketsphinx/{raw.stem}.wav", lambda: np.fromfile(raw, "<i2"))
    return [Clip(f"commands/{raw.name}", "commands", path, "go forward ten meters", "en", "BSD-2-Clause")]


def kept(path: Path, make: Callable[[], npt.NDArray[Any]]) -> Path:
    """Return the file, written with the samples [num_samples] at 16 kHz of `make` if it is not there."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".part{os.getpid()}")  # several processes may write it at once
        soundfile.write(part, make(), SAMPLE_RATE, format=path.suffix[1:].upper())
        part.replace(path)
    return path


def audioeval() -> list[Clip]:
    """Three sentences in each of ten languages, of the samples that pytest-audioeval comes with."""
    return [
        Clip(
            f"audioeval/{path.parent.name}/{path.stem}",
            "audioeval",
            path,
            path.with_suffix(".txt").read_text(encoding="utf-8").strip(),
            path.parent.name,
            "MIT",
        )
        for path in sorted(AUDIOEVAL.glob("*/*.wav"))
    ]


def fillets(language: str = "nl") -> list[Clip]:
    """The Dutch dialogues of the game Fish Fillets, or the Czech ones by other actors: acted, short, and also
    in English.
    """
    corpus = "fillets" if language == "nl" else f"fillets-{language}"
    clips = []
    for script in sorted(FILLETS.glob(f"script/*/dialogs_{language}.lua")):
        for line in _DIALOGUE.finditer(script.read_text(encoding="utf-8")):
            level, name = script.parent.name, line["id"]
            path = FILLETS / f"sound/{level}/{language}/{name}.ogg"
            if path.exists():
                clips.append(
                    Clip(
                        f"{corpus}/{level}/{name}",
                        corpus,
                        path,
                        _unescaped(line["acted"]),
                        language,
                        "GPL-2.0",
                        translation=_unescaped(line["english"]),
                        speaker=_SPEAKERS.get(line["font"], line["font"].removeprefix("font_")),
                    )
                )
    return list({clip.path: clip for clip in clips}.values())


def prompts() -> list[Clip]:
    """Prompts of the telephone exchange Asterisk at 16 kHz, of three women and a man, a second and more."""
    return [
        Clip(
            f"prompts/{path.stem}", "prompts", _as_flac(path), None, folder[:2], "CC-BY-SA-3.0", speaker=name
        )
        for folder, name in _PROMPTS.items()
        for path in sorted((ASTERISK / folder).glob("*.g722"))
        if path.stat().st_size >= _G722_BYTES_PER_S
    ]


def _as_flac(g722: Path) -> Path:
    def decoded() -> npt.NDArray[Any]:
        import av  # large, and a machine to which everything must travel does without this format

        with av.open(str(g722), format="g722") as container:
            return np.concatenate([frame.to_ndarray()[0] for frame in container.decode(audio=0)])

    return kept(CACHE / f"prompts/{g722.parent.name}/{g722.stem}.flac", decoded)


def noises() -> list[Clip]:
    """Forty minutes in which nobody speaks, made when they are first asked for."""
    from harness.speech.noises import forty_minutes

    return [
        Clip(f"noises/{name}", "noises", path, "", "en", "made here")
        for name, samples in forty_minutes()
        for path in [kept(CACHE / f"noises/{name}.flac", partial(np.asarray, samples))]
    ]


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", lambda match: " " if match[1] == "n" else match[1], text)


CORPORA: dict[str, Callable[[], list[Clip]]] = {
    "recordings": recordings,
    "librivox": librivox,
    "cards": cards,
    "commands": commands,
    "audioeval": audioeval,
    "fillets": fillets,
}
SPEECH: tuple[str, ...] = tuple(CORPORA)
CORPORA |= {"fillets-cs": partial(fillets, "cs"), "noises": noises, "prompts": prompts}


@cache
def corpus(name: str) -> tuple[Clip, ...]:
    """All clips of one corpus, always in the same order; none where it is not installed."""
    return tuple(CORPORA[name]())


def corpora() -> tuple[Clip, ...]:
    """All clips of people that are installed."""
    return tuple(clip for name in SPEECH for clip in corpus(name))


def sample(clips: tuple[Clip, ...], count: int, seed: int = 0) -> tuple[Clip, ...]:
    """So many of the clips, drawn at random but always the same, in their order."""
    if count >= len(clips):
        return clips
    chosen = np.random.default_rng(seed).choice(len(clips), count, replace=False)
    return tuple(clips[index] for index in sorted(chosen))


def known_clips(corpora: Sequence[str], most: int) -> list[Clip]:
    """Recordings whose words are known, at most so many of each corpus, no recording in two formats, and none
    that holds no sound, as two of the Dutch ones do.
    """
    clips: list[Clip] = []
    for name in corpora:
        known = tuple(clip for clip in corpus(name) if clip.text is not None)
        clips += sample(_once(known), most)
    return [clip for clip in clips if clip.duration_s]


def chosen_clips(count: int) -> list[Clip]:
    """So many recordings whose words are known, half of them Dutch, where the corpora are installed."""
    others = tuple(known_clips(["recordings", "librivox", "cards", "commands", "audioeval"], 1000))
    dutch = sample(corpus("fillets"), count // 2)
    return [*sample(others, count - len(dutch)), *(clip for clip in dutch if clip.duration_s)]


def _once(clips: Sequence[Clip]) -> tuple[Clip, ...]:
    """One of those that differ in their format alone."""
    of_shared_text = {
        clip.text if clip.corpus == "recordings" and clip.text else clip.name: clip for clip in clips
    }
    return tuple(of_shared_text.values())
