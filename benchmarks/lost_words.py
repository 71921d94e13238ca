"""Count the words that a condition takes from recordings whose words are known, or adds.

    python -m benchmarks.lost_words               whisper-base at the server's defaults
    python -m benchmarks.lost_words --conditions languages --systems ours unchecked
    python -m benchmarks.lost_words --quick             two minutes of speech, three conditions
    python -m benchmarks.lost_words --scenes 2 --seed 2    scenes, two of each kind

People and a synthetic voice, about a minute each, are read as they are and under each condition:

- later: 0.37 s of silence before, a condition that changes nothing: what remains is coincidence;
- languages: behind every second sentence a pause of 0.8 s, people of another language, and a pause; also with
  English given, as one language is found for a file;
- offset, faint: 0.5 added to all samples; -50 dBFS, also under the offset;
- clicks, thumps: of full scale every 3 s, with speech at -57 and -50 dBFS;
- music, noise, hum, babble: so much louder than the speech;
- whispered: noise in place of the voice;
- surround, inverted: the centre of 5.1 between loud effects; one side of stereo inverted.

Scenes are sentences behind, under and between the music and effects of games (`harness/speech/scenes.py`);
their words are counted against the truth. No rule was chosen on those of even seeds.

A word is lost if the system reads it in the plain recording but not under the condition. `unchecked` is ours
without its detector of voices. No language is given where that is not said.
"""

import argparse
import asyncio
from collections.abc import Collection, Sequence
from functools import partial
from itertools import groupby
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from rapidfuzz.distance import Levenshtein
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from asr_server.config import Settings
from benchmarks.batch_reader import Reading, Sound, read_all
from benchmarks.reporting import benchmark_parser, command, machine, write_json
from harness.real_weights import hugging_face_checkpoint
from harness.speech.conditions import CONDITIONS, GIVEN, known_recordings, unchanged
from harness.speech.error_rates import normalise, word_errors
from harness.speech.scenes import fetch, scenes
from harness.speech.synthesis import Speech

SYSTEMS: Final = ("ours", "unchecked")
QUICK: Final = ("later", "faint", "inverted")
MIN_RUN: Final = 3  # words lost in a row
PLAIN: Final = "plain"


class Change(NamedTuple):
    """A transcript under a condition, beside the plain one."""

    num_right: int  # words of the plain transcript
    lost: tuple[str, ...]  # runs of words
    num_invented: int
    dropped: tuple[str, ...]

    @property
    def num_lost(self) -> int:
        return sum(len(run.split()) for run in self.lost)


def change(truth: str, plain: str, answer: Reading) -> Change:
    words = normalise(truth)
    before, after = _right(words, plain), _right(words, answer.text)
    is_lost = [number in before and number not in after for number in range(len(words))]
    groups = groupby(range(len(words)), is_lost.__getitem__)
    lost = tuple(" ".join(words[n] for n in run) for is_run, run in groups if is_run)
    invented = [each for each in Levenshtein.editops(words, normalise(answer.text)) if each.tag == "insert"]
    return Change(len(before), lost, len(invented), answer.dropped)


def _right(words: Sequence[str], text: str) -> set[int]:
    operations = Levenshtein.opcodes(words, normalise(text))
    return {n for each in operations if each.tag == "equal" for n in range(each.src_start, each.src_end)}


Sounds = dict[tuple[str, str], npt.NDArray[np.float32]]  # by condition and recording
Answers = dict[tuple[str, str], Reading]


def answers_of(
    system: str, options: argparse.Namespace, sounds: Sounds, given: Collection[str] = GIVEN
) -> Answers:
    listed = [Sound(each, "en" if condition in given else None) for (condition, _), each in sounds.items()]
    checkpoint, is_checked = hugging_face_checkpoint(options.model), system != "unchecked"
    settings = Settings(model=str(checkpoint), executor="inline", dtype=options.dtype, check_voice=is_checked)
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task(system, total=len(sounds))
        answers = asyncio.run(read_all(settings, listed, advance=partial(progress.advance, bar)))
    return dict(zip(sounds, answers, strict=True))


def changes(recordings: dict[str, Speech], answers: Answers) -> dict[str, dict[str, Change]]:
    """Return the changes by condition and recording, those of the plain recordings first."""
    found: dict[str, dict[str, Change]] = {}
    for (condition, name), answer in answers.items():
        plain = answers[PLAIN, name].text
        found.setdefault(condition, {})[name] = change(recordings[name].text, plain, answer)
    return found


def show(system: str, found: dict[str, dict[str, Change]], table: Table, console: Console) -> None:
    for condition, by_recording in found.items():
        own = by_recording.values()
        num_right, num_lost = (sum(getattr(each, name) for each in own) for name in ("num_right", "num_lost"))
        runs = [run for each in own for run in each.lost if len(run.split()) >= MIN_RUN]
        num_dropped = sum(len(text.split()) for each in own for text in each.dropped)
        for run in runs:
            console.print(f"{condition}, {system}: lost: {run}", highlight=False)
        invented = "" if condition.startswith("languages") else str(sum(each.num_invented for each in own))
        share = f"{num_lost / max(1, num_right):.1%}"
        columns = (num_right, num_lost, share, len(runs), invented, num_dropped)
        table.add_row(condition, system, *map(str, columns))


def show_scenes(options: argparse.Namespace, console: Console) -> None:
    fetch()
    listed = list(scenes(options.scenes, options.seed))
    sounds = {(kind, str(number)): truth.samples for number, (kind, truth) in enumerate(listed)}
    table = Table("scenes", "system", "words", "lost", "replaced", "invented", "right ones dropped")
    for system in options.systems:
        answers = answers_of(system, options, sounds, given={kind for kind, _ in listed})
        counts = dict[str, npt.NDArray[np.int_]]()
        for (kind, truth), answer in zip(listed, answers.values(), strict=True):
            score, dropped = word_errors(truth.text, answer.text), num_rightly_read(truth.text, answer)
            own = [score.num_words, score.deletions, score.substitutions, score.insertions, dropped]
            for name in (kind, "all"):
                counts[name] = counts.get(name, np.zeros(len(own), int)) + own
        for name, (num_words, *wrong, dropped) in counts.items():
            shares = [f"{count / num_words:.1%}" for count in wrong]
            table.add_row(name, system, str(num_words), *shares, str(dropped))
    console.print(table)


def num_rightly_read(truth: str, answer: Reading) -> int:
    """Return how many words of the dropped text are in the truth, and nowhere in the answer."""
    lost = " ".join(change(truth, truth, answer).lost).split()
    found = [len(_right(lost, text)) for text in answer.dropped]
    return sum(count for count in found if count >= MIN_RUN)


def parse() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--conditions", nargs="+", choices=CONDITIONS, default=list(CONDITIONS))
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=["ours"])
    parser.add_argument("--readings", type=int, default=4, help="minutes of the synthetic voice")
    parser.add_argument("--scenes", type=int, default=0, help="of each kind, in the place of conditions")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", default="base")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quick", action="store_true", help="two minutes of speech, three conditions")
    options = parser.parse_args()
    if options.quick:
        options.readings, options.conditions = 1, list(QUICK)
    return options


def main() -> None:
    options, console = parse(), Console(width=130)
    console.print(command(), machine())
    if options.scenes:
        show_scenes(options, console)
        return
    recordings = known_recordings(options.readings, options.seed)
    makers = {PLAIN: unchanged} | {name: CONDITIONS[name] for name in options.conditions}
    sounds = {
        (condition, name): make(
            speech, np.random.default_rng([options.seed, *condition.split(",")[0].encode()])
        )
        for condition, make in makers.items()
        for name, speech in recordings.items()
    }
    figures = dict[str, Any]()
    table = Table("condition", "system", "words", "lost", "of 100", "runs of three", "invented", "dropped")
    for system in options.systems:
        answers = answers_of(system, options, sounds)
        found = changes(recordings, answers)
        show(system, found, table, console)
        figures[system] = {
            condition: {
                name: each._asdict() | {"text": answers[condition, name].text} for name, each in own.items()
            }
            for condition, own in found.items()
        }
    console.print(table)
    write_json(options.json, figures)


if __name__ == "__main__":
    main()
