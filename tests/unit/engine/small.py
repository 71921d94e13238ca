"""A Whisper of which a step takes a millisecond: random weights, the digits' vocabulary, a window of 3 s."""

from functools import cache
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from asr_server.core import SAMPLE_RATE, AudioWindow, Samples
from asr_server.engine.tokens import GenerationRules
from asr_server.model import Whisper, WhisperSizes
from harness.engine_helpers import Checkpoint
from tests.support.tokens import make_tokenizer

TOKENIZER: Final = make_tokenizer()
SPECIALS: Final = TOKENIZER.specials
assert SPECIALS.transcribe is not None
PROMPT: Final = [SPECIALS.start_of_transcript, SPECIALS.languages["de"], SPECIALS.transcribe]
VOCABULARY: Final = SPECIALS.timestamp_begin + 151
WIDTH, LAYERS, HEADS, HIDDEN, MELS = 32, 2, 2, 64, 80
SIZES: Final = WhisperSizes(
    *(VOCABULARY, MELS, WIDTH, LAYERS, HEADS, HIDDEN, LAYERS, HEADS, HIDDEN), AudioWindow(150), 60
)
_END, _FIRST_TIME = SPECIALS.end_of_text, SPECIALS.timestamp_begin
RULES: Final = GenerationRules((1, 2, 3, *range(_END + 1, _FIRST_TIME)), suppress_at_begin=(_END, 40))


def random_weights() -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    weights: dict[str, Tensor] = {}

    def add_linear(name: str, outputs: int, *inputs: int) -> None:
        weights[f"{name}.weight"] = draw(outputs, *inputs) * 2 * float(np.prod(inputs)) ** -0.5
        weights[f"{name}.bias"] = draw(outputs) / 4

    def add_norm(name: str) -> None:
        weights[f"{name}.weight"], weights[f"{name}.bias"] = draw(WIDTH) / 8 + 1, draw(WIDTH) / 8

    def add_layer(name: str, *attentions: str) -> None:
        for attention in attentions:
            for part in "qkv":
                add_linear(f"{name}.{attention}.{part}_proj", WIDTH, WIDTH)
            add_linear(f"{name}.{attention}.out_proj", WIDTH, WIDTH)
            del weights[f"{name}.{attention}.k_proj.bias"]
            add_norm(f"{name}.{attention}_layer_norm")
        add_linear(f"{name}.fc1", HIDDEN, WIDTH)
        add_linear(f"{name}.fc2", WIDTH, HIDDEN)
        add_norm(f"{name}.final_layer_norm")

    add_linear("encoder.conv1", WIDTH, MELS, 3)
    add_linear("encoder.conv2", WIDTH, WIDTH, 3)
    for side, positions in (("encoder", SIZES.audio_positions), ("decoder", SIZES.text_positions)):
        weights[f"{side}.embed_positions.weight"] = draw(positions, WIDTH)
        add_norm(f"{side}.layer_norm")
    for layer in range(LAYERS):
        add_layer(f"encoder.layers.{layer}", "self_attn")
        add_layer(f"decoder.layers.{layer}", "self_attn", "encoder_attn")
    weights["decoder.embed_tokens.weight"] = draw(VOCABULARY, WIDTH) / 2
    return weights


@cache
def small(dtype: torch.dtype = torch.float32) -> Checkpoint:
    model = Whisper(SIZES, torch.device("cpu"), dtype)
    model.load_hugging_face(random_weights())
    return Checkpoint(Path(), model.eval().requires_grad_(False), TOKENIZER, RULES)


def clip(seed: int, duration_s: float = 1.0) -> Samples:
    """Noise that swells and fades."""
    length = round(duration_s * SAMPLE_RATE)
    noise = np.random.default_rng(seed).normal(size=length)
    swell = np.sin(np.arange(length) / SAMPLE_RATE * (3 + seed)) ** 2
    samples: Samples = (noise * swell / 8).astype(np.float32)
    return samples
