"""Chooses tokens from scores by each row's options: temperature, top-k, top-p, min-p, penalties."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import torch
from torch import Tensor

from asr_server.core import ChunkId
from asr_server.engine.slots import SlotState


def uniforms_of(seed: int, id: ChunkId, temperature: float, count: int) -> Tensor:
    """The random numbers in [0, 1) of one try: the same in every process and whoever else is decoded."""
    key = hashlib.blake2b(struct.pack("<qqqd", seed, id.chunk, id.part, temperature), digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=np.frombuffer(key, np.uint64)))
    return torch.from_numpy(generator.random(count, dtype=np.float32))


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


def draw(scores: Tensor, state: SlotState) -> Tensor:
    """One token a row at its temperature, within its top-k, top-p and min-p, by its next random number."""
    rows = torch.arange(len(scores), device=scores.device)
    step = state.num_generated.clamp(max=state.uniforms.shape[1] - 1)
    uniform = state.uniforms[rows, step].double()
    probabilities, order = (scores / state.temperature[:, None]).softmax(-1).sort(dim=-1, descending=True)
    cumulative = _restrict(probabilities, state).double().cumsum(-1)
    picked = torch.searchsorted(cumulative, (uniform * cumulative[:, -1])[:, None], right=True)
    last_possible = (probabilities > 0).sum(-1, keepdim=True) - 1  # rounding must not reach a forbidden token
    return order.gather(1, torch.minimum(picked, last_possible))[:, 0]


def _restrict(probabilities: Tensor, state: SlotState) -> Tensor:
    """Probabilities [B, vocabulary], falling, with those outside top-k, top-p and min-p set to zero."""
    vocabulary = probabilities.shape[1]
    rank = torch.arange(vocabulary, device=probabilities.device)
    top_k = torch.where(state.top_k > 0, state.top_k, vocabulary)[:, None]
    before = probabilities.cumsum(-1) - probabilities
    kept = (rank < top_k) & (before < state.top_p[:, None])
    kept &= probabilities >= state.min_p[:, None] * probabilities[:, :1]
    kept[:, 0] = True
    return probabilities * kept
