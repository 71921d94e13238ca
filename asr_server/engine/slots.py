"""The device's state of each slot, as columns, and the host's record of who holds which slot.

Computes no token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Final, NamedTuple

import torch
from torch import Tensor

from asr_server.core import DecodingOptions
from asr_server.engine.active_chunk import ActiveChunk
from asr_server.engine.cuda import Transfers, size_for
from asr_server.model.kernels import Kernels


@dataclass(frozen=True)
class SlotStart:
    """The point at which decoding begins or continues in one slot."""

    slot: int
    prompt: Sequence[int]
    options: DecodingOptions
    temperature: float = 0.0
    noise_seed: int = 0  # of a try at a temperature above 0
    tokens: Sequence[int] = ()  # generated already: a hypothesis that goes on


class Choice(NamedTuple):
    """The choice of a step for each row."""

    tokens: Tensor  # [B]
    logprobs: Tensor  # [B]
    candidates: Tensor  # [lines, B]: likely tokens, and their log-probabilities


_FROM_OPTIONS: Final = ("top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
_NUM_INTEGERS, _NUM_FRACTIONS = 8, 2 + len(_FROM_OPTIONS)


class SlotState:
    """Columns over slots: rows of int64 [8 + positions, slots] and float32 [7, slots]; slices share them."""

    def __init__(self, integers: Tensor, fractions: Tensor) -> None:
        self.integers, self.fractions = integers, fractions
        (  # the kernels know this order
            self.active,  # 1: begun, and not yet at the end of the text; kernels pass over the others
            self.token,  # the last token, whose successor the next step computes
            self.previous,  # the token before it
            self.position,  # of the last token
            self.num_generated,  # tokens after the prompt
            self.last_time,  # the last timestamp token; one before the first, where there is none yet
            self.noise_seed,  # what the random numbers of each draw follow from
            self.top_k,
        ) = integers[:_NUM_INTEGERS].unbind()
        self.generated = integers[_NUM_INTEGERS:]  # [positions, slots]: the tokens after the prompt
        self.no_speech, self.temperature, *options = fractions.unbind()  # no_speech: chance of silence
        self.top_p, self.min_p, *penalties = options
        self.repetition_penalty, self.frequency_penalty, self.presence_penalty = penalties

    @classmethod
    def empty(cls, num_slots: int, num_positions: int, device: torch.device) -> SlotState:
        integers = torch.zeros(_NUM_INTEGERS + num_positions, num_slots, dtype=torch.long, device=device)
        return cls(integers, torch.zeros(_NUM_FRACTIONS, num_slots, device=device))

    def __getitem__(self, slots: slice | Tensor) -> SlotState:
        return SlotState(self.integers[:, slots], self.fractions[:, slots])

    def move(self, sources: Tensor, targets: Tensor) -> None:
        for matrix in (self.integers, self.fractions):
            matrix.index_copy_(1, targets, matrix.index_select(1, sources))
        self.active.index_fill_(0, sources, 0)

    def begin(self, starts: Sequence[SlotStart], before_first_time: int, transfers: Transfers) -> None:
        """Set slots to the ends of their prompts.

        All values cross in two copies: each number stored by itself would make the host wait for CUDA.
        `generated` is not set: a beam search has no penalties.
        """
        integers = torch.tensor([_integers(start, before_first_time) for start in starts])
        fractions = torch.tensor(
            [[each.temperature, *(getattr(each.options, name) for name in _FROM_OPTIONS)] for each in starts]
        )
        slots, *_ = integers = transfers.to_device(integers.t().contiguous())
        self.integers[:_NUM_INTEGERS].index_copy_(1, slots, integers[1:])
        self.fractions[1:].index_copy_(1, slots, transfers.to_device(fractions.t().contiguous()))

    def end_step(self, choice: Choice, first_time: int, end_of_text: int, kernels: Kernels) -> Tensor:
        """Append one token [B] to every row; return the host's report, [3 + lines, B]."""
        tokens, logprobs, candidates = choice
        if kernels.advance is None:
            self.advance(tokens, first_time, end_of_text)
            return torch.cat([torch.stack([tokens, logprobs, self.no_speech]), candidates]).double()
        report = torch.empty(3 + len(candidates), len(tokens), dtype=torch.double, device=tokens.device)
        chosen = (tokens, logprobs, self.no_speech, self.integers, candidates)
        kernels.advance(*chosen, first_time, end_of_text, report)
        return report

    def advance(self, tokens: Tensor, first_time: int, end_of_text: int) -> None:
        self.active.logical_and_(tokens != end_of_text)
        last_position = len(self.generated) - 1
        self.generated.scatter_(0, self.num_generated.clamp(max=last_position)[None], tokens[None])
        self.previous.copy_(self.token)
        self.token.copy_(tokens)
        self.last_time.copy_(torch.where(tokens >= first_time, tokens, self.last_time))
        self.num_generated += 1
        # A slot that is held may run on; it must not run over.
        self.position.add_(1).clamp_(max=last_position)


def _integers(start: SlotStart, before_first_time: int) -> list[int]:
    fed = [*start.prompt, *start.tokens]
    previous = fed[-2] if start.tokens else fed[-1]
    times = [token for token in start.tokens if token > before_first_time]
    history = fed[-1], previous, len(fed) - 1, len(start.tokens), times[-1] if times else before_first_time
    return [start.slot, 1, *history, start.noise_seed, start.options.top_k]


class SlotTable:
    """Which chunk holds which slots and audio slots."""

    def __init__(self, num_chunks: int, beam_size: int, row_sizes: Sequence[int] = ()) -> None:
        """`row_sizes`: numbers of rows in which steps are computed; none: any."""
        self._holders: list[ActiveChunk | None] = [None] * (num_chunks * beam_size)
        self._audio_holders: list[ActiveChunk | None] = [None] * num_chunks
        self._row_sizes = row_sizes

    def __len__(self) -> int:
        return len(self._audio_holders) - self._audio_holders.count(None)

    def place(self, chunk: ActiveChunk) -> None:
        """Give the chunk its first slot and audio slot."""
        chunk.audio_slot = self._audio_holders.index(None)
        self._audio_holders[chunk.audio_slot] = chunk
        self.resize(chunk, 1)

    def resize(self, chunk: ActiveChunk, num_slots: int) -> None:
        while len(chunk.slots) < num_slots:
            slot = self._holders.index(None)
            self._holders[slot] = chunk
            chunk.slots.append(slot)
        for slot in chunk.slots[num_slots:]:
            self._holders[slot] = None
        del chunk.slots[num_slots:]

    def free(self, chunk: ActiveChunk) -> None:
        self.resize(chunk, 0)
        self._audio_holders[chunk.audio_slot] = None

    def compact(self, movable: Iterable[ActiveChunk]) -> list[tuple[int, int]]:
        """Move chunks from the last slots into free ones if that saves rows; return old and new slots."""
        gaps = deque(slot for slot, holder in enumerate(self._holders) if holder is None)
        held = sorted(((slot, chunk) for chunk in movable for slot in chunk.slots), key=itemgetter(0))
        if not held:
            return []
        num_before, num_after = held[-1][0] + 1, 0
        moving: list[tuple[int, ActiveChunk, int]] = []
        while held and gaps and gaps[0] < held[-1][0]:
            moving.append((*held.pop(), gaps.popleft()))
            num_after = moving[-1][2] + 1
        num_after = max(num_after, held[-1][0] + 1 if held else 0)
        if size_for(num_after, self._row_sizes) == size_for(num_before, self._row_sizes):
            return []
        for slot, chunk, gap in moving:
            self._holders[slot], self._holders[gap] = None, chunk
            chunk.slots[chunk.slots.index(slot)] = gap
        return [(slot, gap) for slot, _, gap in moving]
