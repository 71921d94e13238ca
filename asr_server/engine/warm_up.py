"""Compute one second of silence before a GPU's engine is ready: each kernel's first call compiles it, 1
to 2 s.
"""

from __future__ import annotations

import math

import numpy as np

from asr_server.checkpoint.tokenizer import Tokenizer
from asr_server.config import naming
from asr_server.core import SAMPLE_RATE, ChunkId, ChunkResult, DecodingOptions
from asr_server.engine.active_chunk import ActiveChunk
from asr_server.engine.runner import Runner, StepPlan
from asr_server.engine.slots import SlotStart

_NUM_STEPS = 2
_NUM_PROMPTS = 5  # of two tokens: more than eight rows
_TEXT = (0, 1)  # tokens that any vocabulary has as text


def warm_up(runner: Runner, tokenizer: Tokenizer, num_slots: int) -> None:
    """Encode, detect the language, prefill, decode and align in slot 0. Raises ValueError on NaN."""
    chunk = _chunk(runner, tokenizer)
    with runner.launching():
        runner.encode([0], [0], [chunk.samples]).join()
        if tokenizer.specials.languages:
            runner.language_probabilities([0]).array()
        for count in (min(_NUM_PROMPTS, num_slots), 1):  # many rows and few have kernels of their own
            prompts = [chunk.prompt[: chunk.sot_index + 2]] * count
            runner.prefill(range(count), prompts, chunk.sot_index)
        runner.start([SlotStart(0, chunk.prompt, chunk.options)])
        _check(_decode(runner, chunk))
        result = ChunkResult(_TEXT, (), 0.0, 0.0, 0.0, 0.0, None, "stop")
        for pending in runner.align([(chunk, result)]):
            pending.aligned_result()


def _chunk(runner: Runner, tokenizer: Tokenizer) -> ActiveChunk:
    silence, options = np.zeros(SAMPLE_RATE, np.float32), DecodingOptions(word_timestamps=True)
    language = next(iter(tokenizer.specials.languages), None)
    chunk = ActiveChunk(ChunkId("", 0), silence, options, language, [0], 0)
    chunk.set_prompt(tokenizer.specials, runner.model.sizes.text_positions)
    return chunk


def _decode(runner: Runner, chunk: ActiveChunk) -> list[float]:
    contexts = [len(chunk.prompt) + step for step in range(_NUM_STEPS)]
    return [float(runner.decode(StepPlan(1, context)).array()[1, 0]) for context in contexts]


def _check(logprobs: list[float]) -> None:
    if any(map(math.isnan, logprobs)):
        remedy = f"check the weights or try another {naming('dtype')}"
        raise ValueError(f"the model produced NaN on one second of silence; {remedy}")
