"""A checkpoint of the trainer as a Hugging Face model directory."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import GenerationConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

from .losses import GUIDED_HEADS
from .network import MAX_TOKENS, WINDOW_S, make_network
from .plans import Plan
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


SERVER_KEYS = {"max_chunk_s": 6, "short_audio": "fast"}
"""What asr-server shall do: cut chunks shorter than the window, for fuller ones lose digits, and encode no
more of the window than a chunk fills, as it is trained."""


def exported_network(plan: Plan, folder: Path) -> WhisperForConditionalGeneration:
    """The averaged weights of a run."""
    network, prefix = make_network(Vocabulary()), "network."
    state = torch.load(folder / f"{plan.name}.pt")["average"]
    network.load_state_dict({k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)})
    return network


def export(plan: Plan, folder: Path, model_folder: Path) -> None:
    """Write the model folder of a run that lies in ``folder``."""
    words, network = Vocabulary(), exported_network(plan, folder)
    last_layer = network.config.decoder_layers - 1
    network.generation_config = generation_config(words, [[last_layer, head] for head in GUIDED_HEADS])
    model_folder.mkdir(parents=True, exist_ok=True)
    network.save_pretrained(model_folder)
    extractor = WhisperFeatureExtractor(chunk_length=WINDOW_S, **SERVER_KEYS)  # type: ignore[no-untyped-call]
    extractor.save_pretrained(model_folder)
    save_tokenizer(model_folder)
    for file in model_folder.iterdir():
        file.chmod(0o644)  # safetensors writes for the owner alone
