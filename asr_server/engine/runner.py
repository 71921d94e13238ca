"""The device's side of a step: encode, prefill, decode. Knows slots, not requests."""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from asr_server.core import Samples
from asr_server.engine.config import EngineConfig
from asr_server.engine.encoding import PendingEncode, make_encoder
from asr_server.engine.graphs import Graphs, context_buckets, row_buckets
from asr_server.engine.rules import GenerationRules, TokenRules
from asr_server.engine.sampling import draw, log_probabilities, penalise
from asr_server.engine.slots import SlotState
from asr_server.engine.transfers import HostCopy, Transfers
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


class Runner:
    def __init__(
        self, model: Whisper, rules: GenerationRules, specials: SpecialTokens, config: EngineConfig
    ) -> None:
        num_slots = config.num_slots
        self.model = model
        self.cache = model.new_cache(num_slots)
        self.state = SlotState.empty(num_slots, model.sizes.text_positions, model.device)
        self._rules = TokenRules(rules, specials, model.sizes.vocabulary, model.device)
        self._specials = specials
        self._language_tokens = torch.tensor(
            list(specials.languages.values()), dtype=torch.long, device=model.device
        )
        self._transfers = Transfers(model.device, config.copy_overlap)
        self._encoder = make_encoder(model, self.cache, config, self._transfers)
        self._graphs: Graphs | None = None
        if model.device.type == "cuda" and config.cuda_graphs:
            with torch.inference_mode():
                contexts = context_buckets(model.sizes.text_positions)
                self._graphs = Graphs(self._step_in_general, list(product(row_buckets(num_slots), contexts)))

    def close(self) -> None:
        self._encoder.close()

    # -- Encode -------------------------------------------------------------------------------------------

    def encode(self, first_slot: int, chunks: Several[Samples]) -> PendingEncode:
        """Fills the audio part of the slots from `first_slot` on, or on CUDA begins to."""
        return self._encoder.start(first_slot, chunks)

    # -- Prefill ------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def prefill(self, first_slot: int, prompts: list[list[int]], sot_index: int) -> None:
        """Feeds prompts of equal length to the slots from `first_slot` on.

        Args:
            sot_index: of <|startoftranscript|>, whose successor says how likely each chunk is silence.
        """
        hidden = self._feed(first_slot, prompts)
        if self._specials.no_speech is not None:
            probabilities = self._probabilities(hidden[:, sot_index])
            slots = slice(first_slot, first_slot + len(prompts))
            self.state.no_speech[slots] = probabilities[:, self._specials.no_speech]

    @torch.inference_mode()
    def language_probabilities(self, first_slot: int, count: int) -> HostCopy:
        """Of every language, in the order of the special tokens: a line for each slot from `first_slot` on.

        From one decoder step on the same encoder output.
        """
        hidden = self._feed(first_slot, [[self._specials.start_of_transcript]] * count)[:, 0]
        return self._transfers.to_host(self._probabilities(hidden)[:, self._language_tokens])

    def _feed(self, first_slot: int, prompts: list[list[int]]) -> Tensor:
        """The prompts' hidden states, [B, T, D]."""
        tokens = self._transfers.to_device(torch.tensor(prompts))
        positions = torch.arange(tokens.shape[1], device=self.model.device).expand_as(tokens)
        rows = self.cache.rows(first_slot, positions, context=tokens.shape[1])
        hidden: Tensor = self.model.decoder(tokens, positions, rows)
        return hidden

    def _probabilities(self, hidden: Tensor) -> Tensor:
        return self.model.decoder.logits(hidden).float().softmax(-1)

    # -- Decode -------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def decode(self, plan: StepPlan) -> HostCopy:
        """One token for every row: three lines of [rows] to read, tokens, log-probabilities, no-speech."""
        if self._graphs is not None and not plan.sampled and not plan.penalised:
            return self._transfers.to_host(self._graphs.replay(plan.num_rows, plan.context))
        return self._transfers.to_host(self._step(plan))

    def _step_in_general(self, num_rows: int, context: int) -> Tensor:
        """The step that graphs record: timestamps or not, whatever the positions below `context`."""
        return self._step(StepPlan(num_rows, context, timestamps=True))

    def _step(self, plan: StepPlan) -> Tensor:
        state = self.state[: plan.num_rows]
        positions = state.position[:, None]
        rows = self.cache.rows(0, positions, plan.context)
        hidden = self.model.decoder(state.token[:, None], positions, rows)[:, 0]  # [B, D]
        scores = self.model.decoder.logits(hidden).float()
        self._rules.apply(scores, state, plan.timestamps)
        tokens = self._choose(scores, state, plan)
        logprobs = log_probabilities(scores, tokens)
        state.advance(tokens, self._specials.timestamp_begin)
        return torch.stack([tokens.double(), logprobs.double(), state.no_speech.double()])

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

    # -- Slots --------------------------------------------------------------------------------------------

    def move(self, source: int, target: int) -> None:
        self.cache.move(source, target)
        self.state.move(source, target)
