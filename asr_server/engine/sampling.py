"""Chooses tokens from scores by each row's options: temperature, top-k, top-p, min-p, penalties."""

from __future__ import annotations

import hashlib
import struct
from typing import Final

import torch
from torch import Tensor

from asr_server.core import ChunkId
from asr_server.engine.slots import SlotState

NOISE_SEED_BITS: Final = 53  # a slot's beginnings cross to the device as doubles
# SplitMix64 (Steele, Lea and Flood 2014), its factors as torch's signed integers; products wrap around.
_INCREMENT: Final = 0x9E3779B97F4A7C15 - (1 << 64)
_FACTORS: Final = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))


def noise_seed_of(seed: int, id: ChunkId, temperature: float) -> int:
    """Settles the random numbers of one try: the same in every process and whoever else is decoded."""
    key = hashlib.blake2b(struct.pack("<qqqd", seed, id.chunk, id.part, temperature), digest_size=8).digest()
    return int.from_bytes(key, "little") >> (64 - NOISE_SEED_BITS)


def log_probabilities(scores: Tensor, tokens: Tensor) -> Tensor:
    """Of the chosen tokens [B] under scores [B, vocabulary]."""
    return scores.log_softmax(-1).gather(1, tokens[:, None])[:, 0]  # half the time of logsumexp


def penalise(scores: Tensor, state: SlotState, end_of_text: int) -> Tensor:
    """Scores of text tokens lowered by how often they were generated; times and end-of-text stay free.

    Repetition as in CTRL (Keskar et al. 2019), frequency and presence as in OpenAI's API.
    """
    counts = torch.zeros_like(scores)
    seen = torch.arange(state.generated.shape[1], device=scores.device) < state.num_generated[:, None]
    counts.scatter_add_(1, state.generated, seen.to(scores.dtype))
    counts[:, end_of_text:] = 0
    present = counts > 0
    factor = state.repetition_penalty[:, None]
    repeated = torch.where(scores > 0, scores / factor, scores * factor)
    scores = torch.where(present, repeated, scores)
    scores = scores - state.frequency_penalty[:, None] * counts
    return scores - state.presence_penalty[:, None] * present


def draw(scores: Tensor, state: SlotState, restricted: bool = True) -> Tensor:
    """One token a row at its temperature, within its top-k, top-p and min-p.

    The token whose score and noise are the largest together, which is drawn as often as its probability says
    (Gumbel 1954). Each token has noise of its own, so that scores which differ in the last digit, as another
    batch or several ranks make them, change the draw only where two sums are that close.

    Args:
        restricted: some row has a top-k, top-p or min-p. Without any, nothing needs to be sorted.
    """
    scores = scores / state.temperature[:, None]
    if restricted:
        scores = _restrict(scores, state)
    return (scores + _gumbel_noise(state, scores.shape[1])).argmax(-1)


def _gumbel_noise(state: SlotState, vocabulary: int) -> Tensor:
    """[B, vocabulary], in double: for each row's next token, from its seed and how many it has already."""
    tokens = torch.arange(1, vocabulary + 1, device=state.noise_seed.device)
    counter = state.num_generated[:, None] * vocabulary + tokens
    bits = state.noise_seed[:, None] + counter * _INCREMENT
    bits = (bits ^ _shifted(bits, 30)) * _FACTORS[0]
    bits = (bits ^ _shifted(bits, 27)) * _FACTORS[1]
    bits = bits ^ _shifted(bits, 31)
    uniform = (_shifted(bits, 11).double() + 0.5) * 2.0**-53
    return -(-uniform.log()).log()


def _shifted(bits: Tensor, count: int) -> Tensor:
    """To the right, with zeros coming in: torch's own shift repeats the sign."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _restrict(scores: Tensor, state: SlotState) -> Tensor:
    """Scores [B, vocabulary] with those outside top-k, top-p and min-p at minus infinity."""
    vocabulary = scores.shape[1]
    probabilities, order = scores.softmax(-1).sort(dim=-1, descending=True)
    rank = torch.arange(vocabulary, device=scores.device)
    top_k = torch.where(state.top_k > 0, state.top_k, vocabulary)[:, None]
    top_p = state.top_p[:, None]
    before = probabilities.cumsum(-1) - probabilities
    kept = (rank < top_k) & ((before < top_p) | (top_p >= 1))
    kept &= probabilities >= state.min_p[:, None] * probabilities[:, :1]
    kept[:, 0] = True
    return scores.masked_fill(~kept.scatter(1, order, kept), float("-inf"))
