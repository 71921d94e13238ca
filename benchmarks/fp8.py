"""What 8-bit floats change (--cache-dtype fp8, --encoder-dtype fp8), on a CPU that imitates the GPU.

    python -m benchmarks.fp8 --quick --json fp8.json

Spoken digits by the embedded model, in float32 and in each form: clips whose tokens are others, digit errors,
and how far the tokens' log-probabilities are off. Then random weights of large-v3's layout with few layers:
the relative error of the encoder's output, and of the scores of every position of a text. bfloat16 beside it
(all of the model, weights too) shows what is lost there already. It says nothing of speed.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from scipy.signal import butter, sosfilt
from torch import Tensor

from asr_server.checkpoint import AudioWindow
from asr_server.config import EMBEDDED_MODEL
from asr_server.core import SAMPLE_RATE, ChunkResult, DecodingOptions, Samples
from asr_server.engine import Engine, EngineConfig
from asr_server.model import Whisper, load_whisper
from asr_server.model.float8 import FP8
from benchmarks.checkpoints import Shape, add_checkpoints_option, make_checkpoint
from benchmarks.clips import make_clip
from benchmarks.engine_helpers import transcribe
from benchmarks.reporting import benchmark_parser, command, machine, write_json
from benchmarks.speech.digits import VOICES, Spoken, digits_of, errors_in, say

MAX_TOKENS = 60
Random = np.random.Generator


class Form(NamedTuple):
    """Which parts are in 8 bits, and the precision of the others."""

    fp8_cache: bool = False
    fp8_encoder: bool = False
    dtype: torch.dtype = torch.float32


EXACT = "float32"
FORMS = {
    EXACT: Form(),
    "fp8 cache": Form(fp8_cache=True),
    "fp8 encoder": Form(fp8_encoder=True),
    "both": Form(fp8_cache=True, fp8_encoder=True),
    "bfloat16": Form(dtype=torch.bfloat16),
}


# -- Speech --------------------------------------------------------------------------------------------------


class Clip(NamedTuple):
    samples: Samples
    digits: str


def spoken_clips(count: int) -> list[Clip]:
    """Clips that the model never heard, of 3 to 12 digits: each as it is, over the telephone and in noise."""
    rng = np.random.default_rng(7)
    spoken = [_fitting_sequence(VOICES[i % len(VOICES)], rng) for i in range(count)]
    return [Clip(change(each.samples, rng), each.digits) for change in CONDITIONS for each in spoken]


def _clean(samples: Samples, rng: Random) -> Samples:
    return samples


def _telephone(samples: Samples, rng: Random) -> Samples:
    """300 to 3400 Hz."""
    band = butter(4, (300, 3400), "bandpass", fs=SAMPLE_RATE, output="sos")
    filtered: npt.NDArray[np.float64] = sosfilt(band, samples)
    return filtered.astype(np.float32)


def _noise_20_db(samples: Samples, rng: Random) -> Samples:
    """White noise 20 dB below the speech."""
    spoken = samples[np.abs(samples) > 1e-4]
    level = float(np.sqrt(np.mean(spoken**2))) / 10
    return samples + rng.normal(0, level, len(samples)).astype(np.float32)


CONDITIONS: tuple[Callable[[Samples, Random], Samples], ...] = (_clean, _telephone, _noise_20_db)


def _fitting_sequence(voice: str, rng: Random) -> Spoken:
    """A sequence of 3 to 12 random digits, with pauses of 0.05 to 1 s, no longer than the model's window."""
    while True:
        digits = "".join(rng.choice(list("0123456789"), rng.integers(3, 13)))
        lead_s = rng.uniform(0.1, 0.5)
        gaps_s = [rng.uniform(0.05, 0.5) if rng.random() < 0.8 else rng.uniform(0.7, 1.0) for _ in digits]
        spoken = say(digits, voice, gaps_s, lead_s)
        if len(spoken.samples) <= AudioWindow.from_directory(EMBEDDED_MODEL).num_samples:
            return spoken


def hear(form: Form, clips: Sequence[Clip]) -> tuple[list[ChunkResult], list[str]]:
    engine = Engine.load(
        EngineConfig(
            str(EMBEDDED_MODEL),
            device="cpu",
            dtype=str(form.dtype).removeprefix("torch."),
            num_slots=8,
            cpu_threads=torch.get_num_threads(),
            compute_workers=1,
            short_audio="auto",
            cache_dtype="fp8" if form.fp8_cache else "auto",
            encoder_dtype="fp8" if form.fp8_encoder else "auto",
        )
    )
    try:
        results = transcribe(
            engine, [clip.samples for clip in clips], DecodingOptions(max_new_tokens=MAX_TOKENS)
        )
        return results, [engine.tokenizer.decode(result.tokens) for result in results]
    finally:
        engine.close()


def compare_speech(clips: Sequence[Clip], progress: Progress) -> dict[str, dict[str, float]]:
    figures: dict[str, dict[str, float]] = {}
    exact: list[ChunkResult] = []
    for name, form in progress.track(FORMS.items(), description=f"{len(clips)} clips of speech"):
        found, texts = hear(form, clips)
        exact = exact or found
        alike = [pair for pair in zip(found, exact, strict=True) if pair[0].tokens == pair[1].tokens]
        off = [
            abs(a - b) for mine, other in alike for a, b in zip(mine.logprobs, other.logprobs, strict=True)
        ]
        errors = [errors_in(digits_of(text), clip.digits) for text, clip in zip(texts, clips, strict=True)]
        figures[name] = {
            "clips": len(clips),
            "clips_with_other_tokens": len(clips) - len(alike),
            "digits": sum(len(clip.digits) for clip in clips),
            "digit_errors": sum(errors),
            "logprob_off_mean": sum(off) / max(1, len(off)),
            "logprob_off_most": max(off, default=0.0),
        }
    return figures


# -- Random weights ------------------------------------------------------------------------------------------


def compare_random(
    directory: Path, clips: Sequence[Samples], tokens: Tensor, progress: Progress
) -> dict[str, dict[str, float]]:
    figures: dict[str, dict[str, float]] = {}
    exact: tuple[Tensor, Tensor] | None = None
    for name, form in progress.track(FORMS.items(), description="random weights"):
        audio, scores = compute(directory, form, clips, tokens)
        exact = exact or (audio, scores)
        centred = [each - each.mean(-1, keepdim=True) for each in (scores, exact[1])]  # what softmax sees
        figures[name] = {
            "encoder_error": relative_error(audio, exact[0]),
            "scores_error": relative_error(*centred),
            "likeliest_differs": float((scores.argmax(-1) != exact[1].argmax(-1)).float().mean()),
        }
    return figures


@torch.inference_mode()
def compute(directory: Path, form: Form, clips: Sequence[Samples], tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The encoder's output [B, F, D] and the scores [B, T, V] of what follows each token of a text."""
    gc.collect()
    model = load_whisper(directory, "cpu", form.dtype, fp8_encoder=form.fp8_encoder)
    audio = model.encoder(model.log_mel(clips))
    return audio.float(), _scores(model, form, audio, tokens)


def _scores(model: Whisper, form: Form, audio: Tensor, tokens: Tensor) -> Tensor:
    slots = slice(0, len(audio))
    cache = model.new_cache(len(audio), audio_dtype=FP8 if form.fp8_cache else None)
    cache.write_audio(slots, model.decoder.cross_keys_values(audio))
    tokens = tokens.expand(len(audio), -1)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    rows = cache.rows(slots, positions, context=tokens.shape[1])
    scores: Tensor = model.decoder.logits(model.decoder(tokens, positions, rows))
    return scores


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


# -- Reporting -----------------------------------------------------------------------------------------------


def tables(figures: dict[str, dict[str, dict[str, float]]]) -> Iterator[Table]:
    for title, forms in figures.items():
        names = list(forms[EXACT])
        table = Table(title, *(name.replace("_", " ") for name in names))
        for form, values in forms.items():
            table.add_row(form, *(f"{values[name]:.3g}" for name in names))
        yield table


def arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--sequences", type=int, default=60, help="of digits, in each of three conditions")
    parser.add_argument("--layers", type=int, default=4, help="of the random encoder; 2 in its decoder")
    parser.add_argument("--quick", action="store_true", help="16 sequences, 2 layers, one clip")
    add_checkpoints_option(parser)
    options = parser.parse_args()
    if options.quick:
        options.sequences, options.layers = 16, 2
    return options


def main() -> None:
    options = arguments()
    console = Console(stderr=True, width=140)
    console.print(command(), machine())
    shape = Shape(1280, 20, options.layers, decoder_layers=2, num_mels=128, num_languages=100)
    clips = [make_clip(i, 30.0) for i in range(1 if options.quick else 2)]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(50_000, (1, 16), generator=generator)
    figures: dict[str, Any] = {}
    with Progress(console=console) as progress:
        figures["embedded model, speech"] = compare_speech(spoken_clips(options.sequences), progress)
        write_json(options.json, figures)
        for lively in (False, True):
            name = f"large-v3's layout, {options.layers} layers, {'large ' if lively else ''}random weights"
            path = options.checkpoints / f"large-v3-{options.layers}-2{'-lively' * lively}"
            directory = make_checkpoint(path, shape, lively)
            figures[name] = compare_random(directory, clips, tokens, progress)
            write_json(options.json, figures)
    for table in tables(figures):
        console.print(table)


if __name__ == "__main__":
    main()
