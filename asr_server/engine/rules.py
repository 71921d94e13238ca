"""Whisper's rules on which token may come next, for a whole batch at once.

The rules are those of openai/whisper (decoding.py: SuppressTokens, SuppressBlank, ApplyTimestampRules); which
tokens they concern is read from the checkpoint's generation_config.json.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from asr_server.checkpoint import read_json
from asr_server.checkpoint.tokenizer import SpecialTokens
from asr_server.engine.slots import SlotState
from asr_server.model.whisper import padded_vocabulary

_NEVER = float("-inf")
ALWAYS, AT_BEGIN, WITH_TIMES = 1, 2, 4  # when a token is suppressed, as bits; the kernel knows them too


@dataclass(frozen=True)
class GenerationRules:
    """What generation_config.json (or, in older checkpoints, config.json) forbids."""

    suppress: tuple[int, ...] = ()  # always
    suppress_at_begin: tuple[int, ...] = ()  # as the first token
    max_initial_timestamp: int | None = None  # in steps of a timestamp token; None: no limit

    @classmethod
    def from_directory(cls, directory: Path) -> GenerationRules:
        path = directory / "generation_config.json"
        path = path if path.exists() else directory / "config.json"
        config = read_json(path)
        return cls(
            suppress=tuple(config.get("suppress_tokens") or ()),
            suppress_at_begin=tuple(config.get("begin_suppress_tokens") or ()),
            max_initial_timestamp=config.get("max_initial_timestamp_index"),
        )


class TokenRules:
    """Sets the scores of forbidden tokens to minus infinity, without a loop over sequences."""

    def __init__(
        self, rules: GenerationRules, specials: SpecialTokens, vocabulary: int, device: torch.device
    ) -> None:
        self.vocabulary = vocabulary
        self._suppress = _ids(rules.suppress, vocabulary, device)
        self._suppress_at_begin = _ids(rules.suppress_at_begin, vocabulary, device)
        self._end_of_text = specials.end_of_text
        self._no_timestamps = specials.no_timestamps
        self._first_time = specials.timestamp_begin
        self._times = torch.arange(specials.timestamp_begin, vocabulary, device=device)
        limit = rules.max_initial_timestamp
        self._last_initial_time = vocabulary if limit is None else specials.timestamp_begin + limit
        # The same for the kernel: in which cases each token is suppressed, and the tokens that are borders.
        cases = torch.zeros(padded_vocabulary(vocabulary, device), dtype=torch.int8)
        cases[self._suppress.cpu()] |= ALWAYS
        cases[self._suppress_at_begin.cpu()] |= AT_BEGIN
        cases[specials.no_timestamps] |= WITH_TIMES
        self.suppressed = cases.to(device)
        self.limits = (self._end_of_text, self._first_time, self._last_initial_time)

    def apply(self, scores: Tensor, state: SlotState, timestamps: bool) -> None:
        """Changes `scores` [B, vocabulary] in place.

        Args:
            timestamps: whether any of the sequences is decoded with timestamps.
        """
        scores.index_fill_(1, self._suppress, _NEVER)
        begin = state.num_generated == 0  # [B]
        at_begin = scores[:, self._suppress_at_begin]
        scores[:, self._suppress_at_begin] = at_begin.masked_fill_(begin[:, None], _NEVER)
        if timestamps:
            self._apply_to_timestamps(scores, state, begin)

    def _apply_to_timestamps(self, scores: Tensor, state: SlotState, begin: Tensor) -> None:
        wanted = state.timestamps
        begin = begin & wanted
        after_time = wanted & ~begin & (state.token >= self._first_time)
        after_two = after_time & ((state.num_generated < 2) | (state.previous >= self._first_time))
        after_one = after_time & ~after_two  # of a pair: text must not follow

        # Times never go back; after a closed pair they must move on.
        earliest = torch.where(after_one, state.last_time, state.last_time + 1)
        times_off = (self._times < earliest[:, None]) | after_two[:, None]
        times_off |= begin[:, None] & (self._times > self._last_initial_time)
        times = scores[:, self._first_time :]
        times.masked_fill_(times_off & wanted[:, None], _NEVER)

        scores[:, self._no_timestamps].masked_fill_(wanted, _NEVER)
        scores[:, : self._end_of_text].masked_fill_(after_one[:, None], _NEVER)

        # Where all times together are likelier than any one other token, a time it is.
        others = scores[:, : self._first_time]
        time_wins = begin | (wanted & (times.logsumexp(-1) > others.amax(-1)))
        others.masked_fill_(time_wins[:, None], _NEVER)


def _ids(tokens: tuple[int, ...], vocabulary: int, device: torch.device) -> Tensor:
    return torch.tensor(
        [token for token in tokens if 0 <= token < vocabulary], dtype=torch.long, device=device
    )
