"""A checkpoint of the trainer as a Hugging Face model directory."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import GenerationConfig, WhisperFeatureExtractor

from .losses import GUIDED_HEADS
from .network import MAX_TOKENS, WINDOW_S, make_network
from .vocabulary import Vocabulary, save_tokenizer


def generation_config(words: Vocabulary, alignment_heads: list[list[int]]) -> GenerationConfig:
    """How transformers shall generate: English, transcribe, nothing suppressed, any first timestamp."""
    return GenerationConfig(  # type: ignore[no-untyped-call]
        decoder_start_token_id=words.sot,
        bos_token_id=words.eot,
        eos_token_id=words.eot,
        pad_token_id=words.eot,
        no_timestamps_token_id=words.no_timestamps,
        prev_sot_token_id=words.prev,
        is_multilingual=True,
        lang_to_id={"<|en|>": words.english},
        task_to_id={"transcribe": words.transcribe},
        return_timestamps=False,
        suppress_tokens=[],
        begin_suppress_tokens=[],
        alignment_heads=alignment_heads,
        max_length=MAX_TOKENS,
    )


def export(checkpoint: Path, folder: Path) -> None:
    """Write the averaged weights of a state and every file that goes with them."""
    words = Vocabulary()
    network = make_network(words)
    average, prefix = torch.load(checkpoint)["average"], "network."
    network.load_state_dict({k.removeprefix(prefix): v for k, v in average.items() if k.startswith(prefix)})
    folder.mkdir(parents=True, exist_ok=True)
    last_layer = network.config.decoder_layers - 1
    network.generation_config = generation_config(words, [[last_layer, head] for head in GUIDED_HEADS])
    network.save_pretrained(folder)
    WhisperFeatureExtractor(chunk_length=WINDOW_S).save_pretrained(folder)  # type: ignore[no-untyped-call]
    save_tokenizer(folder)
    for file in folder.iterdir():
        file.chmod(0o644)  # safetensors writes for the owner alone
