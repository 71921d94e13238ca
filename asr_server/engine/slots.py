"""The device's state of each slot, as columns, and the host's record of who holds which slot.

Computes no token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from asr_server.core import DecodingOptions
from asr_server.engine.active_chunk import ActiveChunk
from asr_server.engine.cuda import Transfers
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


@dataclass
class SlotState:
    """Columns over slots; a slice shares its memory."""

    token: Tensor  # the last token, whose successor the next step computes
    position: Tensor  # of that token
    previous: Tensor  # the token before it
    num_generated: Tensor  # tokens after the prompt
    last_time: Tensor  # the last timestamp token; one before the first, where there is none yet
    no_speech: Tensor  # how likely the chunk is silence
    active: Tensor  # bool: begun, and not yet at the end of the text; kernels pass over the others
    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    min_p: Tensor
    repetition_penalty: Tensor
    frequency_penalty: Tensor
    presence_penalty: Tensor
    noise_seed: Tensor  # what the random numbers of each draw follow from
    generated: Tensor  # [slots, positions]: the tokens after the prompt

    @classmethod
    def empty(cls, num_slots: int, num_positions: int, device: torch.device) -> SlotState:
        def column(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(num_slots, *shape, dtype=dtype, device=device)

        kinds = dict.fromkeys(_FRACTIONS, torch.float) | {"active": torch.bool}
        names = [field.name for field in fields(cls) if field.name != "generated"]
        columns = {name: column(kinds.get(name, torch.long)) for name in names}
        return cls(**columns, generated=column(torch.long, num_positions))

    def __getitem__(self, slots: slice | Tensor) -> SlotState:
        return SlotState(**{field.name: getattr(self, field.name)[slots] for field in fields(self)})

    def move(self, sources: Tensor, targets: Tensor) -> None:
        for field in fields(self):
            column = getattr(self, field.name)
            column[targets] = column[sources]
        self.active.index_fill_(0, sources, False)

    def begin(self, starts: Sequence[SlotStart], before_first_time: int, transfers: Transfers) -> None:
        """Set slots to the ends of their prompts.

        All values cross in one copy: each number stored by itself would make the host wait for CUDA.
        `generated` is not set: a beam search has no penalties.
        """
        rows = [_start_row(start, before_first_time) for start in starts]
        table = torch.tensor(rows, dtype=torch.double)
        slots, *columns = transfers.to_device(table.t().contiguous()).unbind()
        slots = slots.long()
        for name, values in zip(_START_COLUMNS, columns, strict=True):
            column = getattr(self, name)
            column.index_copy_(0, slots, values.to(column.dtype))
        self.active.index_fill_(0, slots, True)

    def end_step(
        self,
        tokens: Tensor,
        logprobs: Tensor,
        candidates: Tensor,
        first_time: int,
        end_of_text: int,
        kernels: Kernels,
    ) -> Tensor:
        """Append one token [B] to every row; return the host's report, [3 + lines, B]."""
        if kernels.advance is None:
            self.advance(tokens, first_time, end_of_text)
            return torch.cat([torch.stack([tokens, logprobs, self.no_speech]), candidates]).double()
        report = torch.empty(3 + len(candidates), len(tokens), dtype=torch.double, device=tokens.device)
        history = (self.token, self.previous, self.position, self.num_generated, self.last_time)
        columns = (tokens, logprobs, self.no_speech, self.active, *history, self.generated, candidates)
        kernels.advance(*columns, first_time, end_of_text, report)
        return report

    def advance(self, tokens: Tensor, first_time: int, end_of_text: int) -> None:
        self.active.logical_and_(tokens != end_of_text)
        last_position = self.generated.shape[1] - 1
        self.generated.scatter_(1, self.num_generated.clamp(max=last_position)[:, None], tokens[:, None])
        self.previous.copy_(self.token)
        self.token.copy_(tokens)
        self.last_time.copy_(torch.where(tokens >= first_time, tokens, self.last_time))
        self.num_generated += 1
        # A slot that is held may run on; it must not run over.
        self.position.add_(1).clamp_(max=last_position)


_FROM_OPTIONS = ("top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
_START_COLUMNS = (
    *("token", "previous", "position", "num_generated", "last_time", "temperature", "noise_seed"),
    *_FROM_OPTIONS,
)
_FRACTIONS = {"no_speech", "temperature", *_FROM_OPTIONS} - {"top_k"}


def _start_row(start: SlotStart, before_first_time: int) -> list[float]:
    fed = [*start.prompt, *start.tokens]
    last, previous = fed[-1], fed[-2] if start.tokens else fed[-1]
    times = [token for token in start.tokens if token > before_first_time]
    history = (last, previous, len(fed) - 1, len(start.tokens), times[-1] if times else before_first_time)
    state = (*history, start.temperature, start.noise_seed)
    return [float(each) for each in (start.slot, *state, *(getattr(start.options, n) for n in _FROM_OPTIONS))]


class SlotTable:
    """Which chunk holds which slots and audio slots."""

    def __init__(self, num_chunks: int, num_searches: int, beam_size: int) -> None:
        self._holders: list[ActiveChunk | None] = [None] * (num_chunks + num_searches * (beam_size - 1))
        self._audio_holders: list[ActiveChunk | None] = [None] * num_chunks
        self._searching: set[int] = set()  # audio slots of the chunks with several slots
        self._num_searches = num_searches

    def __len__(self) -> int:
        return len(self._audio_holders) - self._audio_holders.count(None)

    def place(self, chunk: ActiveChunk) -> None:
        """Give the chunk its first slot and audio slot."""
        chunk.audio_slot = self._audio_holders.index(None)
        self._audio_holders[chunk.audio_slot] = chunk
        self._add_slot(chunk)

    def _add_slot(self, chunk: ActiveChunk) -> None:
        slot = self._holders.index(None)
        self._holders[slot] = chunk
        chunk.slots.append(slot)

    def resize(self, chunk: ActiveChunk, num_slots: int) -> bool:
        """Grow or shrink the chunk's slots. Return False if too many searches are wide already."""
        if num_slots == 1:
            self._searching.discard(chunk.audio_slot)
        elif chunk.audio_slot not in self._searching:
            if len(self._searching) == self._num_searches:
                return False
            self._searching.add(chunk.audio_slot)
        while len(chunk.slots) < num_slots:
            self._add_slot(chunk)
        for slot in chunk.slots[num_slots:]:
            self._holders[slot] = None
        del chunk.slots[num_slots:]
        return True

    def free(self, chunk: ActiveChunk) -> None:
        for slot in chunk.slots:
            self._holders[slot] = None
        self._audio_holders[chunk.audio_slot] = None
        self._searching.discard(chunk.audio_slot)
        chunk.slots.clear()

    def compact(self, movable: Iterable[ActiveChunk]) -> list[tuple[int, int]]:
        """Move chunks from the last slots into free ones; return old and new slots."""
        gaps = [slot for slot, holder in enumerate(self._holders) if holder is None]
        held = [(slot, chunk) for chunk in movable for slot in chunk.slots]
        moves: list[tuple[int, int]] = []
        for (slot, chunk), gap in zip(sorted(held, key=_slot, reverse=True), gaps, strict=False):
            if gap > slot:
                break
            moves.append((slot, gap))
            self._holders[slot], self._holders[gap] = None, chunk
            chunk.slots[chunk.slots.index(slot)] = gap
        return moves


def _slot(held: tuple[int, ActiveChunk]) -> int:
    return held[0]


def grouped(chunks: Iterable[ActiveChunk], key: Callable[[ActiveChunk], object]) -> list[list[ActiveChunk]]:
    groups: dict[object, list[ActiveChunk]] = {}
    for chunk in sorted(chunks, key=lambda chunk: chunk.slot):
        groups.setdefault(key(chunk), []).append(chunk)
    return list(groups.values())
