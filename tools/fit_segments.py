"""Fit what a segment's evidence says of whether it was said, and write the weights into the package.

    python -m tools.fit_segments              five minutes on two cores, whisper-base at the server's defaults
    python -m tools.fit_segments --dtype float32 --report    judge the present weights

Said: people and a synthetic voice under the conditions of `benchmarks/lost_words.py`, under louder music
and noise, in scenes of games; clips, and letters and words alone, in noise, under music and faint behind
it. Not said: a tenth of a second of words, forty minutes of noises, and music and effects of games. Chunks
are read whole, those too in which the detector hears nobody, and all text is kept. A segment counts as said
where half of its words are in the truth; one with fewer is left out, unless nobody speaks in its time. The
model is fitted on one half of the sounds and reported on the other; that of the text alone without letters
and words alone, of which a text says nothing.
"""

import argparse
import asyncio
import string
from collections.abc import Iterator
from contextvars import ContextVar
from functools import partial
from itertools import product
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from rapidfuzz.distance import Levenshtein
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from asr_server.config import Settings
from asr_server.core import SAMPLE_RATE, Chunk, Samples
from asr_server.levels import Interval
from asr_server.transcription import heard, judge, reading
from asr_server.transcription.heard import (
    SEGMENT_WEIGHTS,
    Heard,
    SegmentModel,
    segment_model,
)
from asr_server.transcription.judge import Known
from asr_server.transcription.segments import DecodedPart
from benchmarks.batch_reader import Sound, read_all
from benchmarks.confidence import auroc, fit_logistic
from harness.real_weights import hugging_face_checkpoint
from harness.speech.conditions import CONDITIONS, known_recordings, under
from harness.speech.conversations import flite
from harness.speech.corpora import known_clips
from harness.speech.digits import silence
from harness.speech.error_rates import normalise
from harness.speech.noises import forty_minutes, make_noise, with_sound_at
from harness.speech.scenes import fetch, game_sound, scenes
from harness.speech.synthesis import say

LOUDER: Final = {
    f"{kind} {relative_db:+} dB": partial(under, kind=kind, relative_db=float(relative_db))
    for kind, relative_db in (("music", 8), ("babble", 0), ("pink", 3), ("pink", -5))
}
LEFT_OUT: Final = ("later", "surround", "inverted", "languages", "languages, English given")
CLIPS: Final = {"fillets": 150, "fillets-cs": 100, "audioeval": 40, "cards": 40, "commands": 4, "librivox": 9}
SHORT: Final = "short"
WORDS: Final = (
    "yes no stop go left right hello thanks okay please one two three four five six seven eight nine ten "
    "maybe never water music garden"
)
NOISES: Final = ("coughs", "barks", "tones", "music", "keyboard", "pink", "hum")
SHORT_S: Final = (0.3, 1.0, 3.0)
ALONE: Final = (*string.ascii_uppercase, *WORDS.split())
LEVEL_DB: Final = -25.0
NUM_GAME_SOUNDS: Final = 90
IN_TRUTH: Final = 0.5  # of a segment's words, if it was said


class KnownSound(NamedTuple):
    is_fitted: bool  # else reported
    kind: str
    text: str
    said_s: tuple[Interval, ...] | None  # None: not known
    samples: Samples
    language: str = "en"


class Evidence(NamedTuple):
    sound: int
    interval_s: Interval
    text: str
    values: list[float]  # of SEGMENT_FEATURES


def known_sounds() -> Iterator[KnownSound]:
    makers = {name: make for name, make in CONDITIONS.items() if name not in LEFT_OUT} | LOUDER
    for seed in (11, 12):
        for kind, make in makers.items():
            for speech in known_recordings(2, seed).values():
                samples = make(speech, np.random.default_rng([seed, *kind.encode()]))
                yield KnownSound(seed % 2 == 1, kind, speech.text, _times(speech), samples)
    for seed in (1, 2):
        for kind, speech in scenes(2, seed):
            yield KnownSound(seed % 2 == 1, f"scene {kind}", speech.text, _times(speech), speech.samples)
    clips = [clip for corpus, most in CLIPS.items() for clip in known_clips([corpus], most) if clip.text]
    for number, clip in enumerate(clips):
        for kind, samples in _heard_badly(clip.samples(), number):
            yield KnownSound(number % 2 == 1, kind, clip.text or "", None, samples, clip.language)
        yield KnownSound(number % 2 == 1, "fragment", "", (), clip.samples()[8000:9600])
    for number, (text, voice) in enumerate(product(ALONE, ("rms", "slt", "awb", "joe"))):
        spoken = say(f"{text}.") if voice == "joe" else flite(voice, text)
        samples = np.concatenate([silence(1.0), spoken, silence(1.0)])
        even, level_db = with_sound_at(samples, LEVEL_DB), 5 * (number % 3) - 40.0
        for kind in ("silence", "pink", "music"):
            sound = samples if kind == "silence" else even + _sound(kind, level_db, len(even), number)
            yield KnownSound((number + number // 4) % 2 == 1, f"{SHORT}, {kind}", text, None, sound)
    for number, (_, samples) in enumerate(forty_minutes()):
        yield KnownSound(number % 2 == 1, "noise", "", (), np.asarray(samples, np.float32))
    for number, (kind, duration_s, level_db) in enumerate(product(NOISES, SHORT_S, range(-40, -10, 3))):
        yield KnownSound(
            number % 2 == 1, "noise", "", (), make_noise(kind, float(level_db), duration_s, number)
        )
    for seed in (1, 2):
        rng = np.random.default_rng(seed)
        for number in range(NUM_GAME_SOUNDS):
            kind, count = ("music", "effects", "both")[number % 3], round(rng.uniform(3, 25) * SAMPLE_RATE)
            samples = np.clip(game_sound(kind, count, rng.uniform(-40, -15), rng, seed % 2), -1, 1)
            yield KnownSound(seed % 2 == 1, "game", "", (), samples)


def _times(speech: Any) -> tuple[Interval, ...]:
    return tuple((said.start_s, said.end_s) for said in speech.sentences)


def _heard_badly(samples: Samples, number: int) -> Iterator[tuple[str, Samples]]:
    level_db = LEVEL_DB - 10 + 5 * (number % 3)
    yield "clip", samples
    even, pause = with_sound_at(samples, LEVEL_DB), silence(1.0)
    yield "clip in noise", even + _sound("pink", level_db, len(even), number)
    longer = np.concatenate([pause, even, pause])
    yield "clip under music", longer + _sound("music", level_db + 5, len(longer), number)
    if number % 3 == 0:
        music = _sound("music", LEVEL_DB + 10, 4 * SAMPLE_RATE, number)
        yield "clip behind music", np.concatenate([music, pause, with_sound_at(samples, 2 * LEVEL_DB), pause])


def _sound(kind: str, level_db: float, count: int, seed: int) -> Samples:
    return make_noise(kind, level_db, count / SAMPLE_RATE + 1, seed)[:count]


# -- Evidence ------------------------------------------------------------------------------------------------


class Recorder:
    """In the place of `judge`: it keeps the evidence, and all text."""

    def __init__(self) -> None:
        self.found: list[Evidence] = []
        self.sound: ContextVar[int] = ContextVar("sound")

    def judge(self, part: DecodedPart, chunk: Chunk, known: Known) -> DecodedPart:
        for span in part.spans:
            interval_s = part.start_s + span.start_s, part.start_s + span.end_s
            values = judge.evidence_of(span, part, known)
            text = known.tokenizer.decode(span.tokens)
            self.found.append(Evidence(self.sound.get(), interval_s, text, values))
        return part


def read(sounds: list[KnownSound], options: argparse.Namespace) -> list[Evidence]:
    recorder, hear = Recorder(), heard.hear

    def hear_whole(chunk: Chunk) -> Heard:
        return msgspec.structs.replace(hear(chunk), stretches=[chunk], is_loud_between=False)

    reading.hear, judge.judge = hear_whole, recorder.judge  # type: ignore[attr-defined]
    judge.may_leave = lambda *_: False  # what a stream sends early is not judged again
    Heard.may_be_spoken = True  # type: ignore[assignment, method-assign]
    settings = Settings(
        model=str(hugging_face_checkpoint(options.model)), executor="inline", dtype=options.dtype
    )
    # What is reported early is not read again at another temperature: that is no evidence of a whole reading.
    listed = [Sound(sound.samples, sound.language, {"early_results": False}) for sound in sounds]
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("read", total=len(listed))
        asyncio.run(
            read_all(settings, listed, advance=partial(progress.advance, bar), on_begin=recorder.sound.set)
        )
    return recorder.found


def labelled(sounds: list[KnownSound], found: list[Evidence]) -> Iterator[tuple[Evidence, bool]]:
    """Yield the evidence of segments of which it is known whether they were said."""
    by_sound = dict[int, list[Evidence]]()
    for each in sorted(found, key=lambda each: each.interval_s):
        by_sound.setdefault(each.sound, []).append(each)
    for number, own in by_sound.items():
        sound = sounds[number]
        words = [normalise(each.text, sound.language) for each in own]
        owner = [place for place, these in enumerate(words) for _ in these]
        blocks = Levenshtein.opcodes(normalise(sound.text, sound.language), [w for ws in words for w in ws])
        right = [owner[n] for b in blocks if b.tag == "equal" for n in range(b.dest_start, b.dest_end)]
        for place, each in enumerate(own):
            share = right.count(place) / max(1, len(words[place]))
            start_s, end_s = each.interval_s
            is_alone = sound.said_s is not None and all(
                last_s <= start_s or first_s >= end_s for first_s, last_s in sound.said_s
            )
            if share >= IN_TRUTH or (is_alone and share == 0):
                yield each, share >= IN_TRUTH


# -- Model ---------------------------------------------------------------------------------------------------


def fitted(
    values: npt.NDArray[np.float64], was_said: npt.NDArray[np.bool_], is_short: npt.NDArray[np.bool_]
) -> SegmentModel:
    num_text = len(segment_model().unheard.weights)
    unheard = fit_logistic(values[~is_short, :num_text], was_said[~is_short])
    return SegmentModel(fit_logistic(values, was_said), unheard)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="base")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--report", action="store_true", help="judge the present weights, and fit none")
    return parser.parse_args()


def main() -> None:
    options = parse()
    fetch()
    sounds = list(known_sounds())
    known = list(labelled(sounds, read(sounds, options)))
    values, was_said = np.array([each.values for each, _ in known]), np.array([said for _, said in known])
    is_fitted = np.array([sounds[each.sound].is_fitted for each, _ in known])
    is_short = np.array([sounds[each.sound].kind.startswith(SHORT) for each, _ in known])
    columns = (column[is_fitted] for column in (values, was_said, is_short))
    both = segment_model() if options.report else fitted(*columns)
    if not options.report:
        SEGMENT_WEIGHTS.write_bytes(msgspec.json.format(msgspec.json.encode(both), indent=1) + b"\n")
    table = Table("model", "said", "of them dropped", "not said", "of them kept", "AUROC")
    for name, model, chosen in (
        ("text and detector", both.heard, ~is_fitted),
        ("text alone", both.unheard, ~is_fitted & ~is_short),
    ):
        said = was_said[chosen]
        probability = np.array(model.probabilities(values[chosen, : len(model.weights)]))
        stands = probability >= judge.LEAST_SAID
        counts = (said.sum(), (said & ~stands).sum(), (~said).sum(), (~said & stands).sum())
        table.add_row(name, *map(str, counts), f"{auroc(probability, said):.4f}")
    Console().print(table)


if __name__ == "__main__":
    main()
