"""Make the embedded model ``whisper-digits``: synthesise, train, examine, export.

    python tools/train_digits.py all            everything, in order; goes on where it was stopped
    python tools/train_digits.py synthesise     the synthesised voices (needs tools/digits/install-voices.sh)
    python tools/train_digits.py recordings     the recorded voices, and copies of them with other pitches and throats
    python tools/train_digits.py train NAME     one stage: pretrain, examined (without one speaker), shipped (all five)
    python tools/train_digits.py evaluate       error rates of the examined model
    python tools/train_digits.py export         write the model directory
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

REPOSITORY = Path(__file__).parent.parent
MODEL_FOLDER = REPOSITORY / "asr_server/models/whisper-digits"
RECORDINGS = REPOSITORY / "../shared/data/spoken-digits/spoken-digits.tar.xz"


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

    chosen = plan(options.name, options.cache, options.steps)
    run(chosen, load_choir(options.cache, chosen, is_held_out), options.cache, options.threads)


def export(options: argparse.Namespace) -> None:
    """Write a model directory from a stage's checkpoint."""
    from digits.export import export as write

    checkpoint = None if options.name == "untrained" else options.cache / f"{options.name}.pt"
    write(checkpoint, options.model, options.alignment_heads)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--cache", type=Path, default=REPOSITORY / ".cache/digits", help="synthesised sound, states")
    result.add_argument("--recordings", type=Path, default=RECORDINGS, help="spoken-digits.tar.xz")
    result.add_argument("--processes", type=int, default=2, help="for making sound")
    result.add_argument("--threads", type=int, default=2, help="for training")
    commands = result.add_subparsers(required=True)

    def command(name: str, function: object) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=str(getattr(function, "__doc__", "")))
        sub.set_defaults(function=function)
        return sub

    command("synthesise", synthesise)
    command("recordings", recordings)
    training = command("train", train)
    training.add_argument("name", choices=("pretrain", "examined", "shipped"))
    training.add_argument("--steps", type=int, help="instead of the plan's number")
    exporting = command("export", export)
    exporting.add_argument("name", nargs="?", default="shipped")
    exporting.add_argument("--model", type=Path, default=MODEL_FOLDER)
    exporting.set_defaults(alignment_heads=[[1, 0]])
    return result


if __name__ == "__main__":
    arguments = parser().parse_args()
    arguments.function(arguments)
