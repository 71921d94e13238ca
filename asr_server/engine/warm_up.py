"""Try a GPU before its engine is ready.

A step on random numbers, by which Triton's kernels are compared with torch; then one second of silence, as
each kernel's first call compiles it, 1 to 2 s.
"""

import logging
import math
import os
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from asr_server.checkpoint.files import writable
from asr_server.checkpoint.tokenizer import Tokenizer
from asr_server.config import naming
from asr_server.core import SAMPLE_RATE, ChunkId, ChunkResult, DecodingOptions
from asr_server.engine.active_chunk import ActiveChunk
from asr_server.engine.runner import Runner, StepPlan
from asr_server.engine.slots import Choice, SlotStart, SlotState
from asr_server.engine.tokens import TokenRules, choose_likeliest
from asr_server.model import DecoderCache, Whisper
from asr_server.model.kernels import TORCH, Kernels, triton_kernels
from asr_server.model.layers import split_heads
from asr_server.model.rows import rows_of

_NUM_ROWS, _NUM_CANDIDATES = 8, 6  # that are compared
_NUM_STEPS = 2
_NUM_PROMPTS = 5  # of two tokens: more than eight rows
_TEXT = (0, 1)  # tokens that any vocabulary has as text

logger = logging.getLogger(__name__)


def warm_up(runner: Runner, tokenizer: Tokenizer, num_slots: int) -> None:
    """Encode, detect the language, prefill, decode and align in slot 0. Raises ValueError on NaN."""
    silence, options = np.zeros(SAMPLE_RATE, np.float32), DecodingOptions(word_timestamps=True)
    language = next(iter(tokenizer.specials.languages), None)
    chunk = ActiveChunk(ChunkId("", 0), silence, options, language, [0], 0)
    chunk.set_prompt(tokenizer.specials, runner.model.sizes.text_positions)
    with runner.launching():
        runner.encode([0], [0], [chunk.samples]).join()
        if tokenizer.specials.languages:
            runner.language_probabilities([0]).array()
        for count in (min(_NUM_PROMPTS, num_slots), 1):  # many rows and few have kernels of their own
            prompts = [chunk.prompt[: chunk.sot_index + 2]] * count
            runner.prefill(list(range(count)), prompts, chunk.sot_index)
        runner.branch([0], [SlotStart(0, chunk.prompt, chunk.options)])
        contexts = [len(chunk.prompt) + step for step in range(_NUM_STEPS)]
        logprobs = [runner.decode(StepPlan(1, context)).array()[1, 0] for context in contexts]
        if any(map(math.isnan, logprobs)):
            remedy = f"check the weights or try another {naming('dtype')}"
            raise ValueError(f"the model produced NaN on one second of silence; {remedy}")
        result = ChunkResult(_TEXT, (), 0.0, 0.0, 0.0, 0.0, None, "stop")
        for pending in runner.align([(chunk, result)]):
            pending.aligned_result()


def choose(setting: str, model: Whisper, rules: TokenRules) -> tuple[Kernels, str]:
    """Return the kernels, and on a GPU a line that names them.

    Raises ValueError: a kernel has left the GPU unusable.
    """
    if setting == "torch" or model.device.type != "cuda" or model.shard.count > 1:
        return TORCH, ""
    os.environ.setdefault("TRITON_CACHE_DIR", str(writable("triton")))  # survives a container
    choice = checked(triton_kernels, model, rules)
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        reason = "a kernel of Triton has left the GPU unusable: --kernels torch does without them"
        raise ValueError(reason) from error
    return choice


@torch.inference_mode()
def checked(load: Callable[[], Kernels], model: Whisper, rules: TokenRules) -> tuple[Kernels, str]:
    """Return the kernels if they run and agree with torch in a step, else torch's, after a warning."""
    try:
        kernels = load()
        computed = compute_step(kernels, model, rules), compute_step(TORCH, model, rules)
        error = max(map(_relative_error, *computed))
        most = 1e-4 if model.dtype == torch.float32 else 2e-2  # that roundings explain
        if error <= most:
            return kernels, "triton"
        reason = f"they differ from torch by {error:.2g}, more than {most:g}"
    except torch.OutOfMemoryError:
        raise
    except Exception as failure:  # whatever goes wrong in a compiler or a driver, torch can do the same
        reason = f"{type(failure).__name__}: {' '.join(str(failure).split())[:120]}"
    logger.warning("decoding takes two to three times as long, as Triton's kernels are not used: %s", reason)
    return TORCH, f"torch: {reason}"


def _relative_error(found: Tensor, expected: Tensor) -> float:
    if not expected.is_floating_point():
        return 0.0 if torch.equal(found, expected) else math.inf
    difference = (found.float() - expected.float()).norm() / expected.float().norm()
    return float(difference.nan_to_num(torch.inf))


def compute_step(kernels: Kernels, model: Whisper, rules: TokenRules) -> list[Tensor]:
    """Return what one row and several compute in a decoder layer and at the end of a step."""
    layers = [each for rows in (1, _NUM_ROWS) for each in _decode_layer(kernels, model, rows)]
    return [*layers, *_end_step(kernels, model, rules)]


def _decode_layer(kernels: Kernels, model: Whisper, num_rows: int) -> list[Tensor]:
    sizes = replace(model.sizes, decoder_layers=1)
    generator = torch.Generator(model.device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=model.device, dtype=model.dtype)

    cache = DecoderCache(sizes, num_rows, model.device, model.dtype, kernels=kernels)
    for stored in (cache.keys, cache.values, cache.cross_keys, cache.cross_values):
        stored.copy_(draw(*stored.shape))
    active = torch.ones(num_rows, dtype=torch.long, device=model.device)
    positions = (active.cumsum(0) * (sizes.text_positions - 1) // num_rows)[:, None]
    rows = rows_of(cache, slice(0, num_rows), positions, sizes.text_positions, active)
    x, change = draw(2, num_rows, 1, sizes.width)
    query, key, value = split_heads(draw(3, num_rows, 1, sizes.width), sizes.decoder_heads)
    query = query * query.shape[-1] ** -0.5
    # Attention by itself: beside what a layer adds it to, a fault would not show.
    attended = [rows.attend_text(0, query, key, value), rows.attend_audio(0, query)]
    return [*attended, *model.decoder.layers[0](x, change, rows), cache.keys, cache.values]


def _end_step(kernels: Kernels, model: Whisper, rules: TokenRules) -> list[Tensor]:
    end_of_text, first_time, _ = rules.limits
    rows, state = torch.arange(_NUM_ROWS), SlotState.empty(_NUM_ROWS, 8, model.device)
    state.active.fill_(1)
    state.num_generated.copy_(rows % 3)
    state.token.copy_(torch.where(rows % 5 > 2, first_time + rows % 7, rows))
    state.previous.copy_(torch.where(rows % 2 > 0, first_time, rows))
    state.last_time.copy_(state.token.clamp(min=first_time - 1))
    scores = 4 * torch.randn(_NUM_ROWS, rules.vocabulary, generator=torch.Generator().manual_seed(0))
    padded = torch.zeros(_NUM_ROWS, len(rules.suppressed), device=model.device)[:, : rules.vocabulary]
    padded.copy_(scores)
    choice = Choice(
        torch.zeros(_NUM_ROWS, dtype=torch.long, device=model.device),
        torch.zeros(_NUM_ROWS, device=model.device),
        torch.zeros(2 * _NUM_CANDIDATES, _NUM_ROWS, device=model.device),
    )
    choose_likeliest(kernels, rules, padded, state, choice)
    report = state.end_step(choice, first_time, end_of_text, kernels)
    likeliest, of_likeliest = report[3:].chunk(2)
    return [state.integers, report[0].long(), likeliest.long(), of_likeliest]
