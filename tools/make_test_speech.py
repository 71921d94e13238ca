"""Synthesise the speech that tests and the README use: tests/data/ and examples/.

    python tools/make_test_speech.py        (needs tools/digits/install-voices.sh)

Only voices that never train the embedded model speak here. Each file of tests/data holds one voice's ten
digits one after another with half a second of silence between; digits.json says where each one lies.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import soundfile

sys.path.insert(0, str(Path(__file__).parent.parent))

from tools.digits.clips import SAMPLE_RATE, Clip, Samples, make_clip
from tools.digits.espeak import Espeak, EspeakVoice
from tools.digits.texts import WORDS
from tools.digits.voices import is_held_out, read_16k

REPOSITORY = Path(__file__).parent.parent
PAUSE = np.zeros(SAMPLE_RATE // 2, np.int16)
ESPEAK_VOICES = {
    "f3": EspeakVoice("en-us", "f3", rate_wpm=150, pitch=55, pitch_range=50),
    "m5": EspeakVoice("en-gb", "m5", rate_wpm=165, pitch=40, pitch_range=50),
    "linda": EspeakVoice("en-us", "linda", rate_wpm=140, pitch=50, pitch_range=60),
}


def flite(text: str, voice: str) -> Samples:
    """The text by a flite voice as 16 kHz mono."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "out.wav"
        subprocess.run(["flite", "-voice", voice, "-t", text, "-o", str(path)], check=True)
        return read_16k(path)


def clip(samples: Samples, digits: str, voice: str) -> Clip:
    made = make_clip(samples, digits, voice)
    if made is None or not is_held_out(voice):
        raise RuntimeError(f"{voice} did not say {digits}, or trains the model")
    return made


def ten_digits(name: str, engine: Espeak) -> list[Clip]:
    if name == "rms":
        return [clip(flite(word, "rms"), str(digit), "flite/rms/") for digit, word in enumerate(WORDS)]
    voice = ESPEAK_VOICES[name]
    return [clip(engine.say(word, voice), str(digit), str(voice)) for digit, word in enumerate(WORDS)]


def main() -> None:
    places: dict[str, list[tuple[float, float]]] = {}
    engine = Espeak()
    for name in (*ESPEAK_VOICES, "rms"):
        parts, at = [PAUSE], len(PAUSE)
        places[name] = []
        for spoken in ten_digits(name, engine):
            places[name].append(((at + spoken.start) / SAMPLE_RATE, (at + spoken.end) / SAMPLE_RATE))
            parts += [spoken.samples, PAUSE]
            at += len(spoken.samples) + len(PAUSE)
        soundfile.write(REPOSITORY / f"tests/data/digits-{name}.flac", np.concatenate(parts), SAMPLE_RATE)
    (REPOSITORY / "tests/data/digits.json").write_text(json.dumps(places, indent=1) + "\n")
    example = flite("one nine four five, three zero seven", "rms")
    soundfile.write(REPOSITORY / "examples/digits.wav", example, SAMPLE_RATE)


if __name__ == "__main__":
    main()
