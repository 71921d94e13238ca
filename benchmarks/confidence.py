"""Fit and check the confidence of words.

    python -m benchmarks.confidence          read the recordings, and say how right the confidence is
    python -m benchmarks.confidence --fit    fit it first, and write the weights into the package
    python -m benchmarks.confidence --evidence FILE    keep there what was read, or take it from there
    python -m benchmarks.confidence --quick  a few recordings, to see that it works

Recordings: the corpora `fillets` (Dutch, acted), `librivox`, `recordings`, `cards`, `commands`, `audioeval`
(ten languages), and the synthetic voice `joe`; whisper-base at the server's defaults. Clips of a corpus are
joined to sounds of up to 26 s with pauses between them. Each is read as it is, beside pink noise or babble
10 dB beneath it, and under music 10 to 0 dB beneath it. The model is fitted on the sounds of even number, and
reported on the others.

A word counts as said if it is in the text at its place. Expected calibration error: words are put in ten
groups by their confidence; the difference between a group's mean confidence and its share of words that were
said, by the groups' sizes. AUROC: how often a word that was said has more confidence than one that was not.
"""

import argparse
import asyncio
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from rapidfuzz.distance import Levenshtein
from rich.console import Console
from rich.table import Table

from asr_server.config import Settings
from asr_server.core import SAMPLE_RATE, Samples
from asr_server.transcription import confidence
from asr_server.transcription.confidence import WEIGHTS, Evidence, Model
from benchmarks.batch_reader import Reading, Sound, read_all
from benchmarks.reporting import benchmark_parser, command, machine, write_json
from harness.real_weights import hugging_face_checkpoint
from harness.speech.corpora import corpus, known_clips
from harness.speech.digits import silence
from harness.speech.error_rates import normalise
from harness.speech.noises import make_noise, with_sound_at
from harness.speech.synthesis import is_installed, say, sentences

CONDITIONS: Final = ("clean", "noise", "music")
MOST_DUTCH, MOST_ENGLISH, MOST_READ = 130, 40, 40  # clips
QUICK: Final = 4  # clips of each kind
MOST_S: Final = 26.0
LEVEL_DB: Final = -25.0
NOISE_DB: Final = -10.0  # relative to the speech
MUSIC_DB: Final = (-10.0, -5.0, 0.0)
NUM_GROUPS: Final = 10
RIDGE: Final = 1.0  # of the standardised weights, in words
NUM_STEPS: Final = 30  # of Newton's method

Said = tuple[str, Samples]  # a text, and its sound


class Known(NamedTuple):
    """A sound whose words are known."""

    number: int  # of the sound without what was added
    condition: str
    language: str
    text: str
    samples: Samples


class Words(NamedTuple):
    """What is known about the words that were read."""

    evidence: Evidence  # [num_words, features]
    was_said: npt.NDArray[np.bool_]
    probability: npt.NDArray[np.float64]  # the mean of its tokens'
    number: npt.NDArray[np.intp]  # of the sound
    condition: npt.NDArray[np.intp]  # among CONDITIONS


class Recorder:
    """In the place of the fitted model: it keeps the evidence, and gives each word its row's number."""

    def __init__(self) -> None:
        self.rows: list[npt.NDArray[np.float64]] = []

    def probabilities(self, evidence: Evidence) -> list[float]:
        first = len(self.rows)
        self.rows += list(evidence)
        return [float(row) for row in range(first, len(self.rows))]


# -- Recordings ----------------------------------------------------------------------------------------------


def known_sounds(most: int | None) -> Iterator[Known]:
    """Yield sounds of at most so many clips of each kind."""
    for number, (language, text, samples) in enumerate(list(_plain(np.random.default_rng(5), most))):
        for condition in CONDITIONS:
            yield Known(number, condition, language, text, _under(samples, condition, number))


def _plain(rng: np.random.Generator, most: int | None) -> Iterator[tuple[str, str, Samples]]:
    english = known_clips(["librivox", "recordings", "cards", "commands"], MOST_ENGLISH)
    several = corpus("audioeval")
    kinds = [("nl", known_clips(["fillets"], MOST_DUTCH)), ("en", [clip for clip in english if clip.text])]
    for language in sorted({clip.language for clip in several}):
        kinds += [(language, [clip for clip in several if clip.language == language])]
    for language, clips in kinds:
        said = [(clip.text or "", clip.samples()) for clip in clips[:most]]
        yield from ((language, *sound) for sound in _joined(said, rng))
    if is_installed():
        texts = rng.permutation(np.array(sentences(), object)).tolist()[:MOST_READ][:most]
        yield from (("en", *sound) for sound in _joined([(text, say(text)) for text in texts], rng))


def _joined(said: Iterable[Said], rng: np.random.Generator) -> Iterator[Said]:
    texts, parts = list[str](), [silence(0.3)]
    for text, samples in said:
        if texts and sum(map(len, parts)) + len(samples) > MOST_S * SAMPLE_RATE:
            yield " ".join(texts), np.concatenate(parts)
            texts, parts = [], [silence(0.3)]
        evened = samples * np.float32(0.5 / max(1e-3, float(np.abs(samples).max())))
        texts.append(text)
        parts += [evened, silence(float(rng.uniform(0.3, 1.2)))]
    if texts:
        yield " ".join(texts), np.concatenate(parts)


def _under(samples: Samples, condition: str, number: int) -> Samples:
    if condition == "clean":
        return samples
    kind = "music" if condition == "music" else ("pink", "babble")[number % 2]
    relative_db = MUSIC_DB[number % len(MUSIC_DB)] if condition == "music" else NOISE_DB
    noise = make_noise(kind, LEVEL_DB + relative_db, len(samples) / SAMPLE_RATE, number)
    return with_sound_at(samples, LEVEL_DB) + noise[: len(samples)]


# -- Evidence ------------------------------------------------------------------------------------------------


def read(sounds: Sequence[Known], checkpoint: Path) -> Words:
    recorder = Recorder()
    confidence.model = lambda: recorder  # type: ignore[assignment]
    settings = Settings(model=str(checkpoint), executor="inline")
    listed = [Sound(sound.samples, sound.language) for sound in sounds]
    readings = asyncio.run(read_all(settings, listed, with_words=True))
    found = [
        (int(row), was_said, probability, sound.number, CONDITIONS.index(sound.condition))
        for sound, reading in zip(sounds, readings, strict=True)
        for row, was_said, probability in _judged(sound, reading)
    ]
    rows, was_said, probability, number, condition = (np.array(column) for column in zip(*found, strict=True))
    return Words(np.array(recorder.rows)[rows], was_said, probability, number, condition)


def _judged(sound: Known, reading: Reading) -> Iterator[tuple[float, bool, float]]:
    """Yield row, truth and probability of each word; one that holds no letter is left out."""
    words = [word for segment in reading.segments for word in segment.words]
    words = [word for word in words if word.confidence is not None]
    spelt = [normalise(word.text, sound.language) for word in words]
    owner = [number for number, own in enumerate(spelt) for _ in own]
    found = [text for own in spelt for text in own]
    operations = Levenshtein.opcodes(normalise(sound.text, sound.language), found)
    right = [n for each in operations if each.tag == "equal" for n in range(each.dest_start, each.dest_end)]
    wrong = {owner[n] for n in set(range(len(found))) - set(right)}
    for number, word in enumerate(words):
        if spelt[number]:
            yield word.confidence or 0.0, number not in wrong, word.probability or 0.0


# -- Model ---------------------------------------------------------------------------------------------------


def fit_logistic(evidence: Evidence, was_said: npt.NDArray[np.bool_]) -> Model:
    """Fit by Newton's method, with a ridge on standardised features."""
    mean, std = evidence.mean(0), np.maximum(evidence.std(0), 1e-6)
    x = np.column_stack([np.ones(len(evidence)), (evidence - mean) / std])
    weights, ridge = np.zeros(x.shape[1]), np.diag([0.0, *[RIDGE] * len(std)])
    for _ in range(NUM_STEPS):
        probability = 1 / (1 + np.exp(-x @ weights))
        slope = x.T @ (was_said - probability) - ridge @ weights
        curvature = (x.T * (probability * (1 - probability))) @ x + ridge
        weights = weights + np.linalg.solve(curvature, slope)
    own = weights[1:] / std
    return Model(float(weights[0] - own @ mean), tuple(own.tolist()))


def calibration_error(probability: npt.NDArray[np.float64], was_said: npt.NDArray[np.bool_]) -> float:
    group = np.minimum((probability * NUM_GROUPS).astype(int), NUM_GROUPS - 1)
    return sum(
        abs(float(probability[group == n].mean() - was_said[group == n].mean())) * float((group == n).mean())
        for n in range(NUM_GROUPS)
        if (group == n).any()
    )


def auroc(probability: npt.NDArray[np.float64], was_said: npt.NDArray[np.bool_]) -> float:
    _, place, count = np.unique(probability, return_inverse=True, return_counts=True)
    rank = (np.cumsum(count) - (count - 1) / 2)[place]  # equal ones share their mean rank
    num_said = int(was_said.sum())
    num_pairs = num_said * (len(was_said) - num_said)
    return float((rank[was_said].sum() - num_said * (num_said + 1) / 2) / max(1, num_pairs))


def select(words: Words, chosen: npt.NDArray[np.bool_]) -> Words:
    return Words(**{name: column[chosen] for name, column in words._asdict().items()})


def parse() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--fit", action="store_true", help="fit, and write the weights")
    parser.add_argument("--evidence", type=Path, help="what was read: kept there, or taken from there")
    parser.add_argument("--model", default="base")
    parser.add_argument("--quick", action="store_true", help="a few recordings, to see that it works")
    return parser.parse_args()


def words_of(options: argparse.Namespace) -> Words:
    if options.evidence is not None and options.evidence.exists():
        kept = np.load(options.evidence)
        return Words(*(kept[name] for name in Words._fields))
    sounds = list(known_sounds(QUICK if options.quick else None))
    words = read(sounds, hugging_face_checkpoint(options.model))
    if options.evidence is not None:
        np.savez(options.evidence, **words._asdict())
    return words


def main() -> None:
    options, console = parse(), Console(width=110)
    console.print(command(), machine())
    fitted = Model(**msgspec.json.decode(WEIGHTS.read_bytes())) if not options.fit else None
    words = words_of(options)
    is_even = words.number % 2 == 0
    if fitted is None:
        own = select(words, is_even)
        fitted = fit_logistic(own.evidence, own.was_said)
        WEIGHTS.parent.mkdir(exist_ok=True)
        WEIGHTS.write_bytes(msgspec.json.format(msgspec.json.encode(fitted), indent=1) + b"\n")
    table = Table("condition", "words", "said", "", "calibration error", "AUROC")
    figures: dict[str, object] = {}
    for number, condition in enumerate(CONDITIONS):
        own = select(words, ~is_even & (words.condition == number))
        measures = {
            "confidence": np.array(fitted.probabilities(own.evidence)),
            "mean probability": own.probability,
        }
        for name, values in measures.items():
            error, area = calibration_error(values, own.was_said), auroc(values, own.was_said)
            table.add_row(
                *(condition, str(len(values)), f"{own.was_said.mean():.3f}", name),
                *(f"{error:.3f}", f"{area:.3f}"),
            )
            figures[f"{condition}, {name}"] = {"calibration error": error, "AUROC": area}
    console.print(table)
    write_json(options.json, figures)


if __name__ == "__main__":
    main()
