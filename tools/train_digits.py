"""Make the embedded model ``whisper-digits``: voices, training, examination, export.

all            everything, in order; goes on where it was stopped
voices         the synthesised voices (tools/digits/install-voices.sh) and the recorded ones
train PLAN     train, or go on training (plans: tools/digits/plans.py)
evaluate       error rates of a model folder, through HTTP
export PLAN    write a model folder
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

# Before torch is loaded: threads that spin while they wait make a step many times as long on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

REPOSITORY = Path(__file__).parent.parent
sys.path.insert(0, str(REPOSITORY))

MODEL_FOLDER = REPOSITORY / "asr_server/models/whisper-digits"
RECORDINGS = REPOSITORY / "../shared/data/spoken-digits/spoken-digits.tar.xz"
PROMPTS = Path("/usr/share/asterisk/sounds")
AUDIO = REPOSITORY / "../shared/data/audio"
CACHE = REPOSITORY / ".cache/digits"
LAST_PLAN = "settled"


def voices(options: argparse.Namespace) -> None:
    """Fill the cache with synthesised and recorded voices, and with variations of them."""
    from tools.digits.corpus import FULL_AMOUNTS, QUICK_AMOUNTS, synthesise_all
    from tools.digits.people import save_people
    from tools.digits.variations import vary_all

    amounts = QUICK_AMOUNTS if options.quick else FULL_AMOUNTS
    synthesise_all(options.cache, amounts, options.processes)
    save_people(options.recordings, options.prompts, options.cache)
    vary_all(options.cache, amounts, options.processes)


def train(options: argparse.Namespace) -> None:
    """Train, or go on training."""
    from tools.digits.judging import judged_sets
    from tools.digits.plans import PLANS
    from tools.digits.training import train as run
    from tools.digits.voice_pool import load_voice_pool
    from tools.digits.voices import is_held_out

    plan = PLANS[options.plan]
    pool = load_voice_pool(options.cache, plan.weights, plan.left_out_speaker, is_held_out)
    run(plan, pool, judged_sets(options.cache), options.cache, options.threads)


def export(options: argparse.Namespace) -> None:
    """Write the model folder of a plan's state, with the heads that the plan guided."""
    from tools.digits.export import export as write
    from tools.digits.plans import PLANS

    write(PLANS[options.plan], options.cache, options.model or options.cache / "model")


def evaluate(options: argparse.Namespace) -> None:
    """Print error rates, times and what comes out empty, line by line."""
    if not options.cache.is_dir():
        raise SystemExit(
            f"There are no voices in {options.cache} to examine a model with. To make them: "
            "tools/digits/install-voices.sh, then python tools/train_digits.py voices"
        )
    from benchmarks.running_server import running_server
    from tools.digits import report
    from tools.digits.examination import Listener

    cases = report.cases(options.cache, options.count, options.examined)
    sounds = report.wordless(options.cache, options.audio, max(1, options.count // 3))
    with running_server("--model", str(options.model or MODEL_FOLDER), "--dtype", "float32") as url:
        for line in report.lines(Listener(url), cases, sounds):
            print(line, flush=True)


def everything(options: argparse.Namespace) -> None:
    """All of it, in order. The result lies in the cache: to ship it is a decision of its own."""
    from tools.digits.plans import FULL_RECIPE, QUICK_RECIPE

    voices(options)
    for plan in QUICK_RECIPE if options.quick else FULL_RECIPE:
        options.plan = plan.name
        train(options)
    options.model = options.model or options.cache / "model"
    options.count = 3 if options.quick else options.count
    export(options)
    options.examined = True
    evaluate(options)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--cache", type=Path, help="of sound and states (default: .cache/digits)")
    result.add_argument("--recordings", type=Path, default=RECORDINGS, help="spoken-digits.tar.xz")
    result.add_argument("--prompts", type=Path, default=PROMPTS, help="Asterisk's sounds")
    result.add_argument("--audio", type=Path, default=AUDIO, help="recordings without digits, jfk.wav ...")
    result.add_argument("--model", type=Path, help="folder to write (CACHE/model) or examine (the shipped)")
    result.add_argument("--processes", type=int, default=2, help="for making sound")
    result.add_argument("--threads", type=int, default=2, help="for training")
    result.add_argument("--quick", action="store_true", help="a toy: little sound, a few steps")
    commands = result.add_subparsers(required=True)

    def command(name: str, function: object) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=str(getattr(function, "__doc__", "")))
        sub.set_defaults(function=function)
        return sub

    result.set_defaults(count=60)
    command("all", everything)
    command("voices", voices)
    for name, function in (("train", train), ("export", export)):
        command(name, function).add_argument("plan", nargs="?", default=LAST_PLAN)
    evaluating = command("evaluate", evaluate)
    evaluating.add_argument("--count", type=int, default=60, help="sequences for each line")
    evaluating.add_argument("--examined", action="store_true", help="it never heard the speaker left out")
    return result


def main() -> None:
    """Run what the command line asks for."""
    options = parser().parse_args()
    if options.cache is None:
        options.cache = CACHE.with_name("digits-quick") if options.quick else CACHE
    options.function(options)


if __name__ == "__main__":
    main()
