"""Make the embedded model ``whisper-digits``: synthesise, train, examine, export.

all            everything, in order; goes on where it was stopped
synthesise     the synthesised voices (needs tools/digits/install-voices.sh)
recordings     the recorded voices, and copies of them with other pitches and throats
train NAME     one stage: pretrain, examined (without one speaker), shipped (all five)
evaluate       error rates of the examined model
export         write the model directory
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

REPOSITORY = Path(__file__).parent.parent
MODEL_FOLDER = REPOSITORY / "asr_server/models/whisper-digits"
RECORDINGS = REPOSITORY / "../shared/data/spoken-digits/spoken-digits.tar.xz"
AUDIO = REPOSITORY / "../shared/data/audio"
ANY_HEADS = [[1, 0]]
"""Alignment heads of a model that is not to be shipped."""


def synthesise(options: argparse.Namespace) -> None:
    """Fill the cache with synthesised voices."""
    from digits.corpus import synthesise_all

    synthesise_all(options.cache, options.processes)


def recordings(options: argparse.Namespace) -> None:
    """Fill the cache with the recorded voices and their variations."""
    from digits.corpus import vary_all

    vary_all(options.recordings, options.cache, options.processes)


def train(options: argparse.Namespace) -> None:
    """Train one stage."""
    from digits.plans import plan
    from digits.training import load_choir
    from digits.training import train as run
    from digits.voices import is_held_out

    chosen = plan(options.name, options.cache)
    run(chosen, load_choir(options.cache, chosen, is_held_out), options.cache, options.threads)


def export(options: argparse.Namespace) -> None:
    """Write the model directory from a stage's checkpoint, with the heads that align best."""
    from digits.alignment import best_heads
    from digits.examination import sequences
    from digits.export import export as write
    from digits.report import held_out_clips

    checkpoint = None if options.name == "untrained" else options.cache / f"{options.name}.pt"
    write(checkpoint, options.model, ANY_HEADS)
    if checkpoint is not None:
        heads = best_heads(options.model, sequences(held_out_clips(options.cache), 40, seed=5))
        print("alignment heads:", heads)
        write(checkpoint, options.model, heads)


def evaluate(options: argparse.Namespace) -> None:
    """Print error rates, rejections and times of a stage's model."""
    from digits.examination import Listener
    from digits.export import export as write
    from digits.report import error_rates, rejections

    folder = options.cache / f"model-{options.name}"
    write(options.cache / f"{options.name}.pt", folder, ANY_HEADS)
    listener = Listener(folder)
    for line in (
        *error_rates(listener, options.cache),
        "",
        *rejections(listener, options.cache, options.audio),
    ):
        print(line, flush=True)


def everything(options: argparse.Namespace) -> None:
    """All of it, in order."""
    synthesise(options)
    recordings(options)
    for options.name in ("pretrain", "examined", "shipped"):
        train(options)
    options.name = "examined"
    evaluate(options)
    options.name = "shipped"
    export(options)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument(
        "--cache", type=Path, default=REPOSITORY / ".cache/digits", help="synthesised sound, states"
    )
    result.add_argument("--recordings", type=Path, default=RECORDINGS, help="spoken-digits.tar.xz")
    result.add_argument("--processes", type=int, default=2, help="for making sound")
    result.add_argument("--threads", type=int, default=2, help="for training")
    commands = result.add_subparsers(required=True)

    def command(name: str, function: object) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=str(getattr(function, "__doc__", "")))
        sub.set_defaults(function=function)
        return sub

    result.set_defaults(model=MODEL_FOLDER, audio=AUDIO)
    command("all", everything)
    command("synthesise", synthesise)
    command("recordings", recordings)
    training = command("train", train)
    training.add_argument("name", choices=("pretrain", "examined", "shipped"))
    exporting = command("export", export)
    exporting.add_argument("name", nargs="?", default="shipped")
    exporting.add_argument("--model", type=Path, default=MODEL_FOLDER)
    evaluating = command("evaluate", evaluate)
    evaluating.add_argument(
        "name", nargs="?", default="examined", choices=("pretrain", "examined", "shipped")
    )
    evaluating.add_argument(
        "--audio", type=Path, default=AUDIO, help="recordings without digits, jfk.wav among them"
    )
    return result


if __name__ == "__main__":
    arguments = parser().parse_args()
    arguments.function(arguments)
