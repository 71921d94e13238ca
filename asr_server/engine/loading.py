"""Loads what an engine needs from the checkpoint that its configuration names, whole or one rank's part."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from asr_server.checkpoint.tokenizer import Tokenizer
from asr_server.engine.config import EngineConfig, check_fp8, choose_device, choose_dtype
from asr_server.engine.memory import keep_freed_memory
from asr_server.engine.rules import GenerationRules
from asr_server.engine.validation import check_timestamps
from asr_server.machine import available_cores
from asr_server.model import Shard, Whisper, load_whisper


class Loaded(NamedTuple):
    model: Whisper
    tokenizer: Tokenizer
    rules: GenerationRules


def load(config: EngineConfig, rank: int = 0) -> Loaded:
    """
    Raises:
        CheckpointError, ValueError, OSError: the checkpoint is damaged, or the device is not there, or not
            able to do what is asked for.
    """
    device = choose_device(config.device)
    check_fp8(config, device)
    dtype = choose_dtype(config.dtype, device)
    torch.set_num_threads(config.cpu_threads or available_cores())
    directory = Path(config.model)
    shard, fp8_encoder = Shard(rank, config.num_ranks), config.encoder_dtype == "fp8"
    model = load_whisper(directory, device, dtype, shard, fp8_encoder)
    if device.type == "cpu":
        keep_freed_memory()  # from here on: what loading needed is given back
    tokenizer, rules = Tokenizer.from_directory(directory), GenerationRules.from_directory(directory)
    check_timestamps(tokenizer.specials, model.sizes)
    return Loaded(model, tokenizer, rules)
