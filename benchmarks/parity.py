"""Whether a device computes what it should; ends with status 1 where it does not.

    python -m benchmarks.parity --device cuda --shape large-v3-turbo
    python -m benchmarks.parity --quick         on CPU, whisper-tiny's shape
    python -m benchmarks.parity --real ARCHIVE  recordings of people in place of random weights

Tokens: transformers in float32 on CPU against the engine in float32 on the device, on a small random model
and on the embedded one. bfloat16 against float32: the relative error of the encoder's output and of the first
scores, on random weights of the shape asked for. Graphs, streams and lookahead: tokens against the plain loop
without graphs, on clips that none of them has seen. There only float32 must agree in all: kernels for another
number of rows or keys may round otherwise in bfloat16.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from asr_server.checkpoint.sizes import read_window
from asr_server.config import EMBEDDED_MODEL
from asr_server.core import DecodingOptions, Samples
from asr_server.model import Whisper, load_whisper
from asr_server.model.rows import rows_of
from benchmarks import real_parity
from benchmarks.reporting import Budget, Finding, benchmark_parser, command, machine, write_json
from harness.checkpoints import SHAPES, add_checkpoints_option, fixed_checkpoint, make_checkpoint
from harness.clips import make_clip
from harness.engine_helpers import Checkpoint, Reference, transcribe
from harness.speech.digits import say

LANGUAGE = "en"
MAX_TOKENS = 40
MAX_RELATIVE_ERROR = 0.05  # of a whole bfloat16 model; single products are near 0.005


# -- Tokens -----------------------------------------------------------------------------------------------


def spoken_clips() -> list[Samples]:
    return [
        say(digits, voice).samples for digits in ("1", "427", "90817263", "55") for voice in ("f3", "rms")
    ]


def odd_clips(count: int, first_seed: int = 0) -> list[Samples]:
    """They last 1 to 30 s."""
    return [make_clip(first_seed + i, 1 + (7 * i) % 30) for i in range(count)]


def _fitting(clips: list[Samples]) -> list[Samples]:
    """Clips no longer than the embedded model's window."""
    num_samples = read_window(EMBEDDED_MODEL).num_samples
    return [clip[:num_samples] for clip in clips]


def against_transformers(name: str, directory: Path, clips: Sequence[Samples], device: str) -> Finding:
    reference, ours = Reference(directory), Checkpoint.load(directory, device=device)
    expected = reference.transcribe(clips, LANGUAGE, MAX_TOKENS)
    options = DecodingOptions(language=LANGUAGE, max_new_tokens=MAX_TOKENS)
    found = _tokens(ours, clips, options, lookahead=device == "cuda")
    return _agreement(f"{name}, float32: transformers' tokens", found, expected)


def fast_against_plain(directory: Path, dtype: torch.dtype, device: str, count: int) -> Finding:
    checkpoint = Checkpoint.load(directory, dtype, device)
    options = DecodingOptions(language=LANGUAGE, max_new_tokens=MAX_TOKENS)
    fast = {"lookahead": True, "copy_overlap": True, "compute_workers": 2}
    clips = odd_clips(count, first_seed=1000)
    found = _tokens(checkpoint, clips, options, **fast)
    expected = _tokens(checkpoint, clips, options, cuda_graphs=False)
    what = f"{directory.name}, {dtype}: graphs, streams and lookahead against the plain loop"
    return _agreement(what, found, expected, must_hold=dtype == torch.float32)


def _tokens(
    checkpoint: Checkpoint, clips: Sequence[Samples], options: DecodingOptions, **config: Any
) -> list[tuple[int, ...]]:
    engine = checkpoint.engine(num_slots=len(clips), **config)
    try:
        return [result.tokens for result in transcribe(engine, clips, options)]
    finally:
        engine.close()


def _agreement(
    what: str, found: Sequence[object], expected: Sequence[object], must_hold: bool = True
) -> Finding:
    same = sum(map(lambda a, b: a == b, found, expected))
    varied = len(set(expected))
    shown = f"{same} of {len(expected)} clips alike ({varied} different transcripts)"
    return Finding(what, shown, (same == len(expected) or not must_hold) and varied > 1)


# -- Numbers ----------------------------------------------------------------------------------------------


def rounding(directory: Path, device: str, count: int) -> list[Finding]:
    """bfloat16's relative error, of what float32 computes from the same weights."""
    clips = odd_clips(count)
    exact = _audio_and_scores(load_whisper(directory, device, torch.float32), clips)
    rounded = _audio_and_scores(load_whisper(directory, device, torch.bfloat16), clips)
    errors = [float((b.float() - a).norm() / a.norm()) for a, b in zip(exact, rounded, strict=True)]
    return [
        Finding(f"{directory.name}: bfloat16's error, {what}", f"{error:.2e}", error < MAX_RELATIVE_ERROR)
        for what, error in zip(("encoder", "first scores"), errors, strict=True)
    ]


@torch.inference_mode()
def _audio_and_scores(model: Whisper, clips: Sequence[Samples]) -> tuple[Tensor, Tensor]:
    """The encoder's output [B, F, D] and the scores [B, V] after one token."""
    audio = model.encoder(model.log_mel(clips))
    cache = model.new_cache(len(clips))
    cache.store_audio(torch.arange(len(clips), device=model.device), model.decoder.cross_keys_values(audio))
    tokens = torch.full((len(clips), 1), 100, device=model.device)
    positions = torch.zeros_like(tokens)
    hidden = model.decoder(tokens, positions, rows_of(cache, slice(0, len(clips)), positions, context=1))
    return audio, model.decoder.logits(hidden[:, 0])


def main() -> None:
    options = arguments()
    device, count = options.device, 2 if options.quick else 16
    console = Console(stderr=True, width=140)
    console.print(command(), machine())
    torch.backends.cuda.matmul.allow_tf32 = False  # float32 is to mean float32
    budget, findings = Budget(options.budget_s, console), list[Finding]()

    def lively(shape: str) -> Path:
        directory = options.checkpoints / f"{shape}-lively"
        return make_checkpoint(directory, SHAPES[shape], lively=True, device=device)

    steps: dict[str, Callable[[], Iterable[Finding]]] = {
        "small random model": lambda: [
            against_transformers("small random model", lively("pocket"), odd_clips(count), device)
        ],
        "embedded model": lambda: [
            against_transformers(
                "embedded model", EMBEDDED_MODEL, spoken_clips()[:count] + _fitting(odd_clips(count)), device
            )
        ],
        "rounding": lambda: rounding(
            fixed_checkpoint(options.shape, options.checkpoints, device), device, count
        ),
        "fast against plain": lambda: [
            fast_against_plain(lively(options.shape), dtype, device, count)
            for dtype in (torch.float32, torch.bfloat16)
        ],
    }
    if options.real:
        steps = {"recordings": lambda: real_parity.compare(*recordings_of(options), device)}
    for name in filter(budget.allows, steps):
        console.print("checking:", name)
        for finding in steps[name]():
            findings.append(finding)
            write_json(options.json, [each._asdict() for each in findings])
    table = Table("on " + device, "found", "holds")
    for finding in findings:
        table.add_row(finding.what, finding.found, "yes" if finding.holds else "NO")
    console.print(table)
    sys.exit(0 if all(finding.holds for finding in findings) else 1)


def recordings_of(options: argparse.Namespace) -> tuple[Path, list[real_parity.Recording]]:
    directory, recordings = real_parity.unpack(options.real, options.checkpoints / "real")
    return directory, recordings[:: 8 if options.quick else 1]


def arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__, has_budget=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", choices=list(SHAPES), default="tiny")
    parser.add_argument("--real", type=Path, help="what `benchmarks.real_parity` packed")
    add_checkpoints_option(parser)
    parser.add_argument("--quick", action="store_true", help="an eighth of the clips")
    return parser.parse_args()


if __name__ == "__main__":
    main()
