"""Which heads of the decoder look where a word is said: the generation config's ``alignment_heads``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import WhisperForConditionalGeneration, WhisperProcessor

from .clips import SAMPLE_RATE
from .examination import Example
from .vocabulary import TIMESTAMP_STEP_S, Vocabulary


def share_on_word(folder: Path, examples: list[Example]) -> npt.NDArray[np.float64]:
    """Mean share of each head's attention on the digit about to be written; shape [layers, heads]."""
    words, processor = Vocabulary(), WhisperProcessor.from_pretrained(folder)
    model = WhisperForConditionalGeneration.from_pretrained(folder, attn_implementation="eager")
    shares: list[npt.NDArray[np.float64]] = []
    for example in examples:
        features = processor(example.wave, sampling_rate=SAMPLE_RATE, return_tensors="pt").input_features
        prompt = [words.sot, words.english, words.transcribe, words.no_timestamps]
        tokens = torch.tensor([prompt + words.encode_digits(example.digits)])
        with torch.inference_mode():
            output = model(features, decoder_input_ids=tokens, output_attentions=True)
        # [layers, heads, tokens, frames]
        attention = torch.stack(output.cross_attentions)[:, 0].double().numpy()
        for number, item in enumerate(example.said):
            first, last = int(item.start_s / TIMESTAMP_STEP_S), int(item.end_s / TIMESTAMP_STEP_S) + 1
            # The digit is written by the position before it.
            shares.append(attention[:, :, len(prompt) - 1 + number, first:last].sum(axis=-1))
    return np.asarray(np.mean(shares, axis=0))


def best_heads(folder: Path, examples: list[Example]) -> list[list[int]]:
    """[layer, head] of every head with at least 0.8 of the best one's share."""
    shares = share_on_word(folder, examples)
    return [[int(layer), int(head)] for layer, head in np.argwhere(shares >= 0.8 * shares.max())]
