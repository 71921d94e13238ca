"""The device's side of a step: encode, prefill, decode.

Nothing waits for a GPU: the host reads each `HostCopy` later. Knows slots, not requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import wraps
from typing import TypeVar, TypeVarTuple

import torch
from torch import Tensor

from asr_server.checkpoint.tokenizer import Tokenizer
from asr_server.core import ChunkResult, Samples
from asr_server.engine.active_chunk import ActiveChunk
from asr_server.engine.alignment import AlignedText, Aligner, Attended, PendingAlignment
from asr_server.engine.beam import num_candidates, num_named
from asr_server.engine.boost import Row
from asr_server.engine.config import EngineConfig
from asr_server.engine.cuda import (
    DECODE_PRIORITY,
    Graphs,
    HostCopy,
    Pending,
    Transfers,
    decode_stream,
    record_graphs,
    size_for,
    sizes_up_to,
)
from asr_server.engine.encoding import make_encoder
from asr_server.engine.slots import Choice, SlotStart, SlotState
from asr_server.engine.tokens import (
    GenerationRules,
    Named,
    TokenRules,
    choose_boosted,
    choose_likeliest,
    draw,
    likeliest_named,
    log_probabilities,
    padded_rows,
    penalise,
    rows_at_once,
)
from asr_server.model import Whisper
from asr_server.model.cache import Slots
from asr_server.model.kernels import TORCH, Kernels
from asr_server.model.rows import rows_of


@dataclass(frozen=True)
class StepPlan:
    num_rows: int  # slots 0 to num_rows - 1 are decoded
    context: int  # text positions that are looked at
    sampled: tuple[int, ...] = ()  # rows that draw at a temperature
    restricted: bool = False  # some of these within a top-k, top-p or min-p
    penalised: tuple[int, ...] = ()  # rows with penalties that do not draw
    boosted: tuple[tuple[int, Row], ...] = ()  # rows with keywords, and what these add to their scores
    named: tuple[tuple[int, Row], ...] = ()  # likewise, of beam searches: the host adds it


class RanksFailed(Exception):
    """One rank failed, so all must be replaced."""


Broadcast = Callable[[object], None]
Arguments = TypeVarTuple("Arguments")
T = TypeVar("T")


def on_all_ranks(method: Callable[[Runner, *Arguments], T]) -> Callable[[Runner, *Arguments], T]:
    """Tell the other ranks first, where there are any. Then an error ends all: they may not share it.

    The method runs in torch's inference mode.
    """

    @wraps(method)
    @torch.inference_mode()
    def call(self: Runner, /, *arguments: *Arguments) -> T:
        if self.broadcast is None:
            return method(self, *arguments)
        self.broadcast((method.__name__, arguments))
        try:
            return method(self, *arguments)
        except (torch.OutOfMemoryError, MemoryError, ValueError) as error:
            raise RanksFailed(f"{method.__name__} failed on rank 0: {error}") from error

    return call


class Runner:
    def __init__(
        self,
        model: Whisper,
        rules: GenerationRules,
        tokenizer: Tokenizer,
        config: EngineConfig,
        kernels: Kernels = TORCH,
        broadcast: Broadcast | None = None,
    ) -> None:
        """`broadcast` sends what this rank does to the others; None: it is alone, or follows."""
        self.broadcast, self._kernels = broadcast, kernels
        num_text_slots, device, specials = config.num_text_slots, model.device, tokenizer.specials
        self.model = model
        self._rules = TokenRules(rules, specials, model.sizes.vocabulary, device)
        self.cache = model.new_cache(config.num_slots, kernels, bool(config.int8_audio), num_text_slots)
        self.state = SlotState.empty(num_text_slots, model.sizes.text_positions, device)
        self._specials = specials
        self._language_tokens = torch.tensor(
            list(specials.languages.values()), dtype=torch.long, device=device
        )
        # What the current step has chosen for each slot: written by its first half, read by its second.
        self._tokens = torch.zeros(num_text_slots, dtype=torch.long, device=device)
        self._logprobs = torch.zeros(num_text_slots, device=device)
        # Of beam searches: of each slot its likeliest next tokens, and their log-probabilities; then the
        # likeliest that keywords name.
        self._num_candidates, self._num_named = num_candidates(config.beam_size), num_named(config.beam_size)
        num_lines = 2 * (self._num_candidates + self._num_named)
        self._candidates = torch.zeros(num_lines, num_text_slots, device=device)
        # One for all graphs: an output that each of them kept would take 8 GB with the defaults.
        self._scores = model.decoder.new_scores(num_text_slots)
        self._decode_stream = decode_stream(device)
        self._transfers = Transfers(device, config.copy_overlap)
        self._encoder = make_encoder(model, self.cache, config, self._transfers)
        self.window = self._encoder.window
        self._aligner = Aligner(model, self.cache, tokenizer, self._transfers)
        self._graphs: tuple[Graphs, Graphs] | None = None  # of a step's halves
        self.row_sizes: list[int] = []  # in which steps are computed; empty: in any
        if config.cuda_graphs:
            self._record(num_text_slots)
        if self._decode_stream is not None:  # what fills weights and caches comes first
            self._decode_stream.wait_stream(torch.cuda.current_stream())

    def _record(self, num_text_slots: int) -> None:
        sizes, device = sizes_up_to(num_text_slots, 16), self.model.device
        context = self.model.sizes.text_positions
        scores = record_graphs(self._score, [(rows, context) for rows in sizes], device, DECODE_PRIORITY)
        if scores is None:
            return
        states = record_graphs(self._advance, [(rows,) for rows in sizes], device, DECODE_PRIORITY)
        if states is not None:
            self._graphs, self.row_sizes = (scores, states), sizes

    def launching(self) -> AbstractContextManager[object]:
        """Return the context in which every other method is called, to keep launches in order."""
        return nullcontext() if self._decode_stream is None else torch.cuda.stream(self._decode_stream)

    def close(self) -> None:
        self._encoder.close()

    # -- Encode -------------------------------------------------------------------------------------------

    @on_all_ranks
    def encode(self, slots: Sequence[int], audio_slots: Sequence[int], chunks: Sequence[Samples]) -> Pending:
        """Fill these audio slots, or begin to; the slots attend to them."""
        on_device = self._transfers.to_device(torch.tensor([slots, audio_slots]))
        self.cache.attend_to(on_device)
        return self._encoder.start(audio_slots, chunks)

    # -- Prefill ------------------------------------------------------------------------------------------

    @on_all_ranks
    def prefill(self, slots: Sequence[int], prompts: list[list[int]], sot_index: int) -> None:
        """Feed prompts of equal length; scores at <|startoftranscript|> give the probability of silence."""
        block = self._block(slots)
        self.cache.begin_text(slots, block, len(prompts[0]))
        hidden = self._feed(block, prompts)
        if self._specials.no_speech is not None:
            probabilities = self._probabilities(hidden[:, sot_index])
            self.state.no_speech[block] = probabilities[:, self._specials.no_speech]

    @on_all_ranks
    def language_probabilities(self, slots: Sequence[int]) -> HostCopy:
        """Return each slot's language probabilities, in the order of the special tokens."""
        start = [[self._specials.start_of_transcript]] * len(slots)
        hidden = self._feed(self._block(slots), start)[:, 0]
        return self._transfers.to_host(self._probabilities(hidden)[:, self._language_tokens])

    def _feed(self, slots: Slots, texts: list[list[int]], first: int = 0) -> Tensor:
        tokens = self._transfers.to_device(torch.tensor(texts))
        end = first + tokens.shape[1]
        positions = torch.arange(first, end, device=self.model.device).expand_as(tokens)
        rows = rows_of(self.cache, slots, positions, context=end)
        hidden: Tensor = self.model.decoder(tokens, positions, rows)
        return hidden

    def _probabilities(self, hidden: Tensor) -> Tensor:
        return self.model.decoder.logits(hidden).softmax(-1)

    def _block(self, slots: Sequence[int]) -> Slots:
        if list(slots) == list(range(slots[0], slots[0] + len(slots))):
            return slice(slots[0], slots[0] + len(slots))
        return self._transfers.to_device(torch.tensor(slots))

    # -- Decode -------------------------------------------------------------------------------------------

    @on_all_ranks
    def decode(self, plan: StepPlan) -> HostCopy:
        """Decode one token for every row.

        Two graphs on CUDA: the likeliest tokens, then the change of state. Between them, rows that draw
        or have penalties choose. `branch` corrects a beam search.

        Returns:
            [3 + 2 * (candidates + named), rows]: tokens, log-probabilities, no-speech; then for beam
            searches the likeliest tokens and their log-probabilities, and those that keywords name.
        """
        num_rows = size_for(plan.num_rows, self.row_sizes)
        context = self.model.sizes.text_positions if self.row_sizes else plan.context
        self.cache.text_ends.on_step(num_rows)
        score, advance = (
            [each.replay for each in self._graphs] if self._graphs else (self._score, self._advance)
        )
        self._choose_by_options(score(num_rows, context), plan)
        chosen = advance(num_rows)
        return self._transfers.to_host(chosen)

    def _score(self, num_rows: int, context: int) -> Tensor:
        state = self.state[:num_rows]
        positions = state.position[:, None]
        rows = rows_of(self.cache, slice(0, num_rows), positions, context, state.active)
        hidden = self.model.decoder(state.token[:, None], positions, rows)[:, 0]  # [B, D]
        out = None if self._scores is None else self._scores[:num_rows]
        scores: Tensor = self.model.decoder.logits(hidden, out)
        self._choose(scores, state, self._choice(num_rows))
        return scores

    def _choose(self, scores: Tensor, state: SlotState, choice: Choice) -> None:
        likeliest = choice._replace(candidates=choice.candidates[: 2 * self._num_candidates])
        choose_likeliest(self._kernels, self._rules, scores, state, likeliest)

    def _choice(self, num_rows: int) -> Choice:
        return Choice(self._tokens[:num_rows], self._logprobs[:num_rows], self._candidates[:, :num_rows])

    @on_all_ranks
    def check_draft(self, start: SlotStart, draft: Sequence[int]) -> HostCopy:
        """Feed a draft behind the slot's text; return `decode`'s report of each place, [lines, 1 + draft].

        Until the slot is set again, steps for others write what nobody reads behind its text.
        """
        text = [*start.prompt, *start.tokens]
        fed, first = [text[-1], *draft], len(text) - 1
        last_position = self.model.sizes.text_positions - 1
        self.state.position[start.slot].fill_(last_position)
        self.state.active[start.slot].fill_(0)
        self.cache.text_ends.extend([start.slot], last_position + 1)
        hidden = self._feed(slice(start.slot, start.slot + 1), [fed], first)[0]
        scores: Tensor = self.model.decoder.logits(hidden)
        state = SlotState.empty(len(fed), self.model.sizes.text_positions, self.model.device)
        places = [
            replace(start, slot=place, tokens=(*start.tokens, *draft[:place])) for place in range(len(fed))
        ]
        state.begin(places, self._specials.timestamp_begin - 1, self._transfers)
        state.no_speech.copy_(self.state.no_speech[start.slot].expand(len(fed)))
        choice = Choice(
            torch.empty_like(state.token),
            torch.empty_like(state.no_speech),
            self._candidates.new_zeros(len(self._candidates), len(fed)),
        )
        self._choose(scores, state, choice)
        return self._transfers.to_host(self._end_step(state, choice))

    def _choose_by_options(self, scores: Tensor, plan: StepPlan) -> None:
        for choosing, is_drawn in ((plan.sampled, True), (plan.penalised, False)):
            for rows in rows_at_once(len(choosing), scores.device):
                index, state, allowed = self._allowed(scores, choosing[rows])
                own = penalise(allowed, state, self._specials.end_of_text)
                tokens = draw(own, state, plan.restricted) if is_drawn else own.argmax(-1)
                self._tokens.index_copy_(0, index, tokens)
                self._logprobs.index_copy_(0, index, log_probabilities(allowed, tokens))
        for rows in rows_at_once(len(plan.boosted), scores.device):
            index, named = self._named(scores, plan.boosted[rows], 1)
            tokens, logprobs = choose_boosted(self._tokens[index], self._logprobs[index], named)
            self._tokens.index_copy_(0, index, tokens)
            self._logprobs.index_copy_(0, index, logprobs)
        for rows in rows_at_once(len(plan.named), scores.device):
            index, named = self._named(scores, plan.named[rows], self._num_named)
            likeliest = self._candidates[: self._num_candidates, index].t()
            lines = likeliest_named(named, likeliest, self._num_named)
            self._candidates[2 * self._num_candidates :].index_copy_(1, index, lines)

    def _named(self, scores: Tensor, rows: Sequence[tuple[int, Row]], width: int) -> tuple[Tensor, Named]:
        """Return the slots, and what keywords name in each."""
        slots = [slot for slot, _ in rows]
        index = self._transfers.to_device(torch.tensor(slots))
        tokens, bonuses = map(self._transfers.to_device, padded_rows([row for _, row in rows], width))
        looked_up = torch.cat([self._tokens[index][:, None], tokens], 1)
        if self._kernels.choose_token is None:  # the rules have been applied
            found = scores[index[:, None], looked_up].float()  # [B, tokens]
        else:
            found = self._allowed(scores, slots)[2].gather(1, looked_up).float()
        total = found[:, :1] - self._logprobs[index][:, None]  # logsumexp
        return index, Named(tokens, found[:, 1:] - total, bonuses)

    def _allowed(self, scores: Tensor, rows: Sequence[int]) -> tuple[Tensor, SlotState, Tensor]:
        index = self._transfers.to_device(torch.tensor(rows))
        state, allowed = self.state[index], scores[index]
        if self._kernels.choose_token is not None:  # which leaves the scores as they are
            self._rules.apply(allowed, state)
        return index, state, allowed

    def _advance(self, num_rows: int) -> Tensor:
        return self._end_step(self.state[:num_rows], self._choice(num_rows))

    def _end_step(self, state: SlotState, choice: Choice) -> Tensor:
        limits = self._specials.timestamp_begin, self._specials.end_of_text
        return state.end_step(choice, *limits, self._kernels)

    @on_all_ranks
    def branch(self, sources: Sequence[int], starts: Sequence[SlotStart]) -> None:
        """Set slots to begin or to go on, with the texts of their sources."""
        pairs = zip(sources, starts, strict=True)
        moves = [(source, start) for source, start in pairs if source != start.slot]
        if moves:
            length = max(len(start.prompt) + len(start.tokens) for _, start in moves) - 1
            slots = [(source, start.slot) for source, start in moves]
            self.cache.copy_text(slots, self._transfers.to_device(torch.tensor(slots)), length)
        self.state.begin(starts, self._specials.timestamp_begin - 1, self._transfers)

    # -- Align --------------------------------------------------------------------------------------------

    def align(self, finished: Sequence[tuple[ActiveChunk, ChunkResult]]) -> list[PendingAlignment]:
        """Find when the tokens were said; on CUDA, launch the work."""
        texts = [self._aligner.text_of(chunk, result) for chunk, result in finished]
        return [
            PendingAlignment(chunk, result, text.num_text, *attended)
            for (chunk, result), text, attended in zip(finished, texts, self.attend(texts), strict=True)
        ]

    @on_all_ranks
    def attend(self, texts: Sequence[AlignedText]) -> list[Attended]:
        return self._aligner.start(texts, self._block([text.slot for text in texts]))

    # -- Slots --------------------------------------------------------------------------------------------

    @on_all_ranks
    def move(self, moves: Sequence[tuple[int, int]], length: int) -> None:
        on_device = self._transfers.to_device(torch.tensor(moves))
        self.cache.copy_text(moves, on_device, length)
        self.state.move(*on_device.unbind(1))
