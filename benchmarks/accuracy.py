"""Error rates on real speech: ours and the systems that people use, on the same recordings and weights.

    python -m benchmarks.accuracy                            whisper-base, every corpus that is installed
    python -m benchmarks.accuracy --corpora librivox fillets --most 100 --systems ours "faster-whisper int8"
    python -m benchmarks.accuracy --manifest talks.jsonl --url http://gpu-host:8000     your own recordings
    python -m benchmarks.accuracy --corpora noises --most 400         forty minutes without a word
    python -m benchmarks.accuracy --quick                    a few recordings and two peers

Words are counted (characters in Chinese and Japanese) as `harness.speech.error_rates` says: substituted,
inserted, deleted. What a system answered is kept in `.cache/accuracy` by system, weights and recording, so
that a run that was cut off goes on; `--again` asks anew, and ours is always asked anew. Of a corpus with more
recordings than `--most`, a sample is taken, the same each time. `--readings` are English sentences of
licences read by a synthetic voice, if it is installed, with pauses of 0.3 to 2 s.

A manifest has a JSON line for each recording: `audio` (a path from its folder), `text`, and if known
`language` (else en) and `times` (`[[start, end], ...]` in seconds, for each word of the text).
"""

import argparse
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.reporting import benchmark_parser, command, machine, quantile, write_json
from benchmarks.transcribers import SYSTEMS, Heard, Task, package_of
from harness.real_weights import hugging_face_checkpoint
from harness.speech import Clip, synthesis, word_errors
from harness.speech.corpora import CORPORA, SPEECH, known_clips
from harness.speech.error_rates import Score, TimedWord, time_errors_s, total

CACHE = Path(".cache/accuracy")
NEAR_S = 0.1
QUICK = ("ours", "openai-whisper greedy", "faster-whisper int8")
Times = Mapping[str, Sequence[tuple[float, float]]]  # by the clip's name; of each word of its text
Answers = dict[str, dict[str, Heard]]  # by system and the clip's name


def read_manifest(path: Path) -> tuple[list[Clip], dict[str, list[tuple[float, float]]]]:
    """The recordings, and the times of the words of those that have them.

    Raises SystemExit for a line that cannot be used.
    """
    clips: list[Clip] = []
    times: dict[str, list[tuple[float, float]]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            entry = json.loads(line)
            audio = path.parent / entry["audio"]
            clip = Clip(str(audio), path.stem, audio, entry["text"], entry.get("language", "en"), "")
            clips.append(clip)
            if entry.get("times"):
                times[clip.name] = [(start, end) for start, end in entry["times"]]
                if len(times[clip.name]) != len(entry["text"].split()):
                    raise SystemExit(f"{path}:{number}: there must be as many times as words in the text")
    return clips, times


def answers_of(
    name: str, task: Task, clips: Sequence[Clip], fresh: bool, progress: Progress
) -> dict[str, Heard]:
    """What the system hears in each clip: from the cache, or asked now and kept."""
    kept = _Kept(name, task)
    if fresh:
        kept.forget(clips)
    missing = [clip for clip in clips if clip.name not in kept.answers]
    bar = progress.add_task(name, total=len(clips), completed=len(clips) - len(missing))

    def report(clip: Clip, heard: Heard) -> None:
        kept.add(clip, heard)
        progress.advance(bar)

    if missing:
        with SYSTEMS[name](task) as transcribe:
            transcribe(missing, report)
    return {clip.name: kept.answers[clip.name] for clip in clips}


class _Kept:
    """A system's answers in a file of JSON lines, one added for each recording that is done."""

    def __init__(self, system: str, task: Task) -> None:
        weights = task.checkpoint / "model.safetensors"
        stamp = f"{system} {task.url} {task.checkpoint.resolve()} {weights.stat().st_size} {task.with_times}"
        digest = hashlib.sha256(stamp.encode()).hexdigest()[:8]
        self._path = CACHE / f"{system.replace(' ', '-')}-{digest}.jsonl"
        self.answers: dict[str, Heard] = {}
        if self._path.exists():
            for line in self._path.read_text(encoding="utf-8").splitlines():
                entry = json.loads(line)
                words = [TimedWord(*word) for word in entry["words"]]
                self.answers[entry["clip"]] = Heard(entry["text"], words)

    def forget(self, clips: Sequence[Clip]) -> None:
        for clip in clips:
            self.answers.pop(clip.name, None)

    def add(self, clip: Clip, heard: Heard) -> None:
        self.answers[clip.name] = heard
        CACHE.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"clip": clip.name, "text": heard.text, "words": heard.words}, ensure_ascii=False)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def score(clip: Clip, heard: Heard, times: Times) -> Score:
    text = clip.text or ""
    result = word_errors(text, heard.text, clip.language)
    said = zip(text.split(), times.get(clip.name, ()), strict=False)
    result.time_errors_s = time_errors_s([TimedWord(word, *at) for word, at in said], heard.words)
    return result


Scores = dict[str, dict[str, Score]]  # by system and the clip's name


def show(scores: Scores, groups: Mapping[str, Sequence[Clip]], console: Console) -> None:
    """Error rates by group, each with the words substituted, inserted and deleted."""
    table = Table("recordings", "system", "errors", "sub / ins / del", "of words", "clips wrong")
    if any(score.time_errors_s for each in scores.values() for score in each.values()):
        for title in ("times: median", "99 %", f"within {NEAR_S:g} s"):
            table.add_column(title)
    for group, clips in groups.items():
        for system, by_clip in scores.items():
            own = [by_clip[clip.name] for clip in clips]
            summed = total(own)
            table.add_row(
                f"{group} ({len(clips)})",
                system,
                f"{summed.error_rate:.1%}" if summed.num_words else "",
                f"{summed.substitutions} / {summed.insertions} / {summed.deletions}",
                str(summed.num_words),
                str(sum(each.errors > 0 for each in own)),
                *_times(summed.time_errors_s),
            )
        table.add_section()
    console.print(table)


def _times(errors_s: list[float]) -> list[str]:
    if not errors_s:
        return []
    near = float(np.mean(np.array(errors_s) <= NEAR_S))
    return [f"{quantile(errors_s, 0.5):.3f} s", f"{quantile(errors_s, 0.99):.3f} s", f"{near:.1%}"]


def groups_of(clips: Sequence[Clip]) -> dict[str, list[Clip]]:
    """By corpus, and English, Dutch and the rest."""
    by_corpus = {
        name: [c for c in clips if c.corpus == name] for name in dict.fromkeys(c.corpus for c in clips)
    }
    by_language = {
        "all English": [clip for clip in clips if clip.language == "en"],
        "all Dutch": [clip for clip in clips if clip.language == "nl"],
        "all other languages": [clip for clip in clips if clip.language not in ("en", "nl")],
    }
    return {name: own for name, own in (by_corpus | by_language).items() if own}


def figures(
    scores: Scores, answers: Answers, groups: Mapping[str, Sequence[Clip]], clips: Sequence[Clip]
) -> dict[str, Any]:
    return {
        "groups": {
            group: {
                system: asdict(total(by_clip[clip.name] for clip in own))
                for system, by_clip in scores.items()
            }
            for group, own in groups.items()
        },
        "clips": {
            clip.name: {"said": clip.text}
            | {system: {"heard": answers[system][clip.name].text, **asdict(scores[system][clip.name])}
               for system in scores}
            for clip in clips
        },
    }  # fmt: skip


def parse() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--model", default="base", help="a published model's name, or a directory")
    parser.add_argument("--corpora", nargs="+", choices=CORPORA, default=list(SPEECH))
    parser.add_argument("--most", type=int, default=60, help="recordings of each corpus")
    parser.add_argument(
        "--readings", type=int, default=4, help="recordings of 100 s of English read by a synthetic voice"
    )
    parser.add_argument(
        "--reading-speeds",
        nargs="+",
        type=float,
        default=[1.0],
        help="how fast that voice reads, 1.2: in 1/1.2 of the time",
    )
    parser.add_argument("--manifest", type=Path, help="these recordings instead")
    parser.add_argument("--url", default="", help="of a server that runs, which is `ours` then")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, help="[default: all that are installed]")
    parser.add_argument("--again", action="store_true", help="ask the peers again, too")
    parser.add_argument("--quick", action="store_true", help="four recordings of each corpus, two peers")
    options = parser.parse_args()
    if options.quick:
        options.most, options.readings, options.systems = 4, 0, options.systems or list(QUICK)
    return options


def main() -> None:
    options = parse()
    console = Console(width=130)
    console.print(command(), machine())
    if options.manifest:
        clips, times = read_manifest(options.manifest)
    else:
        clips, times = known_clips(options.corpora, options.most), {}
        if synthesis.is_installed():
            for speed in options.reading_speeds:
                clips += synthesis.readings(options.readings, speed=speed)
    if not clips:
        raise SystemExit("no recordings are installed: harness/speech/install.sh fetches what can be had")
    names = options.systems or (["ours"] if options.url else list(SYSTEMS))
    names = [name for name in names if name.startswith("ours") or find_spec(package_of(name))]
    task = Task(hugging_face_checkpoint(options.model), options.url, bool(times))
    with Progress(console=Console(stderr=True)) as progress:
        answers = {
            name: answers_of(name, task, clips, options.again or name.startswith("ours"), progress)
            for name in names
        }
    scores = {
        name: {clip.name: score(clip, heard[clip.name], times) for clip in clips}
        for name, heard in answers.items()
    }
    groups = groups_of(clips)
    show(scores, groups, console)
    write_json(options.json, figures(scores, answers, groups, clips))


if __name__ == "__main__":
    main()
