"""The device's side of a step: encode, prefill, decode. Knows slots, not requests."""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from asr_server.core import Samples
from asr_server.engine.rules import GenerationRules, TokenRules
from asr_server.engine.sampling import draw, log_probabilities, penalise
from asr_server.engine.slots import SlotState
from asr_server.model import Whisper
from asr_server.tokenizer import SpecialTokens


@dataclass(frozen=True)
class StepPlan:
    """What the next decode step has to look after, known on the host without asking the device."""

    num_rows: int  # slots 0 to num_rows - 1 are decoded
    context: int  # text positions that are looked at
    timestamps: bool  # some row is decoded with timestamps
    sampled: tuple[int, ...] = ()  # rows that draw at a temperature
    penalised: tuple[int, ...] = ()  # rows with penalties


class StepTokens(NamedTuple):
    """One new token a row, on the host."""

    tokens: list[int]
    logprobs: list[float]


class Runner:
    def __init__(
        self, model: Whisper, rules: GenerationRules, specials: SpecialTokens, num_slots: int
    ) -> None:
        self.model = model
        self.cache = model.new_cache(num_slots)
        self.state = SlotState.empty(num_slots, model.sizes.text_positions, model.device)
        self._rules = TokenRules(rules, specials, model.sizes.vocabulary, model.device)
        self._specials = specials

    @torch.inference_mode()
    def encode(self, first_slot: int, chunks: Several[Samples]) -> None:
        """Fills the audio part of the slots from `first_slot` on."""
        if self.model.device.type == "cuda":
            self._encode_together(first_slot, chunks)
            return
        # One at a time: the products are large enough as they are, and one chunk's activations stay in cache.
        for slot, chunk in enumerate(chunks, first_slot):
            self._encode_together(slot, [chunk])

    def _encode_together(self, first_slot: int, chunks: Several[Samples]) -> None:
        audio = self.model.encoder(self.model.log_mel(chunks))
        self.cache.write_audio(first_slot, self.model.decoder.cross_keys_values(audio))

    @torch.inference_mode()
    def prefill(self, first_slot: int, prompts: list[list[int]]) -> Tensor:
        """Feeds prompts of equal length to the slots from `first_slot` on; the hidden states, [B, T, D]."""
        tokens = torch.tensor(prompts, device=self.model.device)
        positions = torch.arange(tokens.shape[1], device=self.model.device).expand_as(tokens)
        rows = self.cache.rows(first_slot, positions, context=tokens.shape[1])
        hidden: Tensor = self.model.decoder(tokens, positions, rows)
        return hidden

    @torch.inference_mode()
    def probabilities(self, hidden: Tensor, tokens: list[int]) -> list[list[float]]:
        """Of some tokens, after hidden states [B, D], over the whole vocabulary."""
        scores = self.model.decoder.logits(hidden).float()
        return scores.softmax(-1)[:, tokens].tolist()

    @torch.inference_mode()
    def decode(self, plan: StepPlan) -> StepTokens:
        """One token for every row."""
        state = self.state[: plan.num_rows]
        positions = state.position[:, None]
        rows = self.cache.rows(0, positions, plan.context)
        hidden = self.model.decoder(state.token[:, None], positions, rows)[:, 0]  # [B, D]
        scores = self.model.decoder.logits(hidden).float()
        self._rules.apply(scores, state, plan.timestamps)
        tokens = self._choose(scores, state, plan)
        logprobs = log_probabilities(scores, tokens)
        state.advance(tokens, self._specials.timestamp_begin)
        return StepTokens(tokens.tolist(), logprobs.tolist())

    def _choose(self, scores: Tensor, state: SlotState, plan: StepPlan) -> Tensor:
        """The likeliest token of each row, unless its options say otherwise."""
        tokens = scores.argmax(-1)
        special = sorted({*plan.sampled, *plan.penalised})
        if not special:
            return tokens
        rows = torch.tensor(special, device=scores.device)
        own = penalise(scores[rows], state[rows], self._specials.end_of_text)
        tokens[rows] = own.argmax(-1)
        sampled = torch.tensor([row in plan.sampled for row in special], device=scores.device)
        tokens[rows[sampled]] = draw(own[sampled], state[rows[sampled]])
        return tokens

    def move(self, source: int, target: int) -> None:
        self.cache.move(source, target)
        self.state.move(source, target)
