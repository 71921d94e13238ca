"""The likeliest token of every row by Whisper's rules, by torch or by one kernel. Used by `runner.py`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from asr_server.engine.rules import TokenRules
from asr_server.engine.sampling import log_probabilities
from asr_server.engine.slots import SlotState
from asr_server.model.kernels import TORCH, Kernels
from asr_server.model.kernels.table import Candidate
from asr_server.model.whisper import padded_vocabulary

_TOLERANCE = 1e-3  # of log-probabilities; a token must be the very same
_TRIED_ROWS = 32


def choose_likeliest(
    kernels: Kernels,
    rules: TokenRules,
    scores: Tensor,
    state: SlotState,
    timestamps: bool,
    tokens: Tensor,
    logprobs: Tensor,
) -> None:
    """Writes the rows' tokens and their log-probabilities to `tokens` and `logprobs` [B].

    Torch applies the rules to `scores` [B, vocabulary] in place. The kernel leaves them as they are, and rows
    that are not active without a choice.
    """
    if kernels.choose_token is None:
        rules.apply(scores, state, timestamps)
        tokens.copy_(scores.argmax(-1))
        logprobs.copy_(log_probabilities(scores, tokens))
        return
    columns = (state.active, state.timestamps, state.num_generated)
    history = (state.token, state.previous, state.last_time)
    kernels.choose_token(scores, rules.suppressed, *columns, *history, *rules.limits, tokens, logprobs)


def candidates(kernels: Kernels, rules: TokenRules, device: torch.device) -> Iterator[Candidate]:
    """The kernel and torch on random scores and states of rows, for `choose_kernels`."""
    _, first_time, _ = rules.limits
    generator = torch.Generator(device).manual_seed(0)
    shape = (_TRIED_ROWS, padded_vocabulary(rules.vocabulary, device))
    scores = torch.randn(shape, generator=generator, device=device) * 4
    state = SlotState.empty(_TRIED_ROWS, 8, device)
    rows = torch.arange(_TRIED_ROWS, device=device)
    state.active.fill_(True)
    state.timestamps.copy_(rows % 4 > 0)
    state.num_generated.copy_(rows % 3)
    state.token.copy_(torch.where(rows % 5 > 2, first_time + rows % 7, rows))
    state.previous.copy_(torch.where(rows % 2 > 0, first_time, rows))
    last_time = torch.where(state.token >= first_time, state.token, first_time)
    state.last_time.copy_(torch.where(state.num_generated > 0, last_time, first_time - 1))

    def compute(chosen: Kernels) -> Tensor:
        tokens, logprobs = torch.zeros_like(rows), torch.zeros(_TRIED_ROWS, device=device)
        own = scores.clone()[:, : rules.vocabulary]
        choose_likeliest(chosen, rules, own, state, True, tokens, logprobs)
        return torch.stack([tokens.double(), logprobs.double()])

    yield Candidate("choose_token", lambda: compute(kernels), lambda: compute(TORCH), _TOLERANCE)
