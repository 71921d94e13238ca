"""The slots of one call of the decoder, and how its layers attend to them.

Torch's products gather slots that are not adjacent; the flash-decode kernel reads them in place. `OwnBlocks`
attends to packed audio, and the silence after it, which slots share.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from asr_server.model.cache import DecoderCache, Slots, slot_ids
from asr_server.model.layers import attend_cached, attend_cached_audio, sums_text_rows
from asr_server.model.products import sum_weighted_packed_rows

# So many rows read shared silence like audio of their own, in half the bytes, and so does any number of rows
# with more audio than silence. Others share one product.
_FEW_ROWS = 8
# Beyond that many queries a sequence, the kernel or the lookup would read the same keys too often.
MAX_QUERIES = 8


class TorchRows:
    def __init__(self, cache: DecoderCache, slots: Slots, positions: Tensor, context: int) -> None:
        self.kernels = cache.kernels
        self._cache = cache
        self._slots = slots
        self._positions = positions
        self._index = slot_ids(slots, positions.device)[:, None]  # [B, 1], the same slots
        unseen = torch.arange(context, device=positions.device) > positions[:, :, None]  # [B, T, context]
        mask = torch.zeros_like(unseen, dtype=cache.keys.dtype).masked_fill_(unseen, float("-inf"))
        self._mask = mask[:, None]  # [B, 1, T, context], zero or minus infinity
        self._context = context
        self._value_rows = self._rows_of_values() if positions.shape[1] == 1 else None
        audio_slots = cache.audio_slots(slots)
        self._own_blocks = own_blocks(cache, audio_slots, positions.shape[1])
        self._audio = _read_together(cache, audio_slots) if self._own_blocks is None else []

    def _rows_of_values(self) -> Tensor | None:
        _, _, num_heads, num_positions, _ = self._cache.values.shape
        if not isinstance(self._slots, slice) or not sums_text_rows(self._cache.values):
            return None
        slot_heads = torch.arange(self._slots.start * num_heads, self._slots.stop * num_heads)
        return (slot_heads[:, None] * num_positions + torch.arange(self._context)).int()

    def attend_text(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Append keys and values, then attend to the text: [B, T, H, d] each (query scaled) to [B, T, D]."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys[self._index, :, self._positions] = key
        values[self._index, :, self._positions] = value
        seen = (self._slots, slice(None), slice(self._context))
        seen_values = values[seen] if self._value_rows is None else values.view(-1, values.shape[-1])
        return attend_cached(query, keys[seen], seen_values, self._mask, self._value_rows)

    def attend_audio(self, layer: int, query: Tensor) -> Tensor:
        """Attend to the audio: [B, T, H, d], scaled, to [B, T, D]."""
        cache = self._cache
        if self._own_blocks is None:
            queries = query.chunk(len(self._audio))
            each = [
                attend_cached_audio(own, cache.audio(layer, slots, length), cache.cross_rows)
                for own, (slots, length) in zip(queries, self._audio, strict=True)
            ]
            return torch.cat(each)
        silence = (cache.silent_keys[layer], cache.silent_values[layer]) if cache.shares_silence else None
        return self._own_blocks.attend(query, cache.cross_keys[layer], cache.cross_values[layer], silence)


def _read_together(cache: DecoderCache, audio_slots: Slots | list[int]) -> list[tuple[Slots, int]]:
    """Return slots and the positions of their own audio: whole windows together, unless in a list.

    The lengths are looked up once a call: a chunk that is encoded beside it changes its slot's.
    """
    if not isinstance(audio_slots, list) and not cache.has_short_audio(audio_slots):
        return [(audio_slots, cache.num_audio_positions)]
    each = slot_ids(audio_slots, cache.audio_lengths.device).tolist()
    return [(slice(slot, slot + 1), cache.own_length(slot)) for slot in each]


class FlashRows:
    """Do as `TorchRows`: read slots in place, each to its own length."""

    def __init__(
        self,
        cache: DecoderCache,
        slots: Slots,
        positions: Tensor,
        context: int,
        active: Tensor | None,
        flash_decode: Callable[..., Tensor],
    ) -> None:
        self.kernels, self._flash_decode = cache.kernels, flash_decode
        self._cache, self._positions, self._context = cache, positions, context
        is_step = isinstance(slots, slice) and active is not None and positions.shape[1] == 1
        look_up = (self.kernels.row_lengths if is_step else None) or row_lengths
        found = look_up(slots, positions, active, cache.audio_of, cache.cross_values.shape[3])
        self._row_slots, self._row_audio_slots, self._text_lengths, self._audio_lengths = found

    def attend_text(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        lengths, rows = self._text_lengths, self._row_slots
        new: dict[str, Tensor] = {}
        if query.shape[1] == 1:  # the kernel stores them: each row is the only one of its slot
            new = {"new_keys": key[:, 0], "new_values": value[:, 0]}
        else:
            slots = rows.view_as(self._positions)
            keys[slots, :, self._positions] = key
            values[slots, :, self._positions] = value
        attended = self._flash_decode(query.flatten(0, 1), keys, values, rows, lengths, self._context, **new)
        return attended.view(*query.shape[:2], -1)

    def attend_audio(self, layer: int, query: Tensor) -> Tensor:
        cache, lengths, rows = self._cache, self._audio_lengths, self._row_audio_slots
        keys, values = cache.cross_keys[layer].transpose(2, 3), cache.cross_values[layer]
        attended = self._flash_decode(query.flatten(0, 1), keys, values, rows, lengths, keys.shape[2])
        return attended.view(*query.shape[:2], -1)


CacheRows = TorchRows | FlashRows


def row_lengths(
    slots: Slots, positions: Tensor, active: Tensor | None, audio_of: Tensor, num_audio: int
) -> tuple[Tensor, ...]:
    """Return each row's slot, audio slot, and how far it reads text and audio, [B T] each."""
    own = slot_ids(slots, positions.device)[:, None].expand_as(positions)
    text, audio = positions + 1, torch.full_like(positions, num_audio)
    if active is not None:
        text, audio = text * active[:, None], audio * active[:, None]
    own = own.flatten().contiguous()  # of an expanded one, flatten gives a view
    return own, audio_of[own], text.flatten(), audio.flatten()


def rows_of(
    cache: DecoderCache,
    slots: Slots,
    positions: Tensor,  # [B, T]
    context: int,  # text positions to read; more than any of `positions`
    active: Tensor | None = None,  # [B], 0 for rows that nobody reads, else 1; None: all are active
) -> CacheRows:
    kernels = cache.kernels
    if kernels.flash_decode is None or positions.shape[1] > MAX_QUERIES:
        return TorchRows(cache, slots, positions, context)
    return FlashRows(cache, slots, positions, context, active, kernels.flash_decode)


class OwnBlocks(NamedTuple):
    """Block indices of each slot's own audio, for one step's queries.

    Values are read in place as H R sums of weighted rows: for each head, R queries.
    """

    owners: Tensor  # [N], each block's sum
    places: Tensor  # [N], each block's index, if every sum had a whole window's blocks
    num_blocks: int  # of a whole window
    keys: Tensor  # int32 [N d], rows of the keys, each a block long
    key_starts: Tensor  # int32 [N]
    values: Tensor  # int32 [N block], rows of the values
    value_starts: Tensor  # int32 [H R], where the values of each sum begin in `values`

    def attend(
        self,
        query: Tensor,  # [B, T, H, d], scaled; R = B T
        keys: Tensor,  # packed, [slots, H, blocks, d, bytes]
        values: Tensor,  # packed, [slots, H, F, bytes]
        silence: tuple[Tensor, Tensor] | None,  # keys [H, d, F] and values [H, F, d]; None: whole windows
    ) -> Tensor:
        """Attend to each slot's audio and the silence after it, to [B, T, D]."""
        queries = query.flatten(0, 1).transpose(0, 1)  # [H, R, d]
        num_heads, num_rows, _ = queries.shape
        block = len(self.values) // len(self.owners)
        # [H R, d]. Their sums take float32, and each query has many blocks: here it is converted once.
        each_query = queries.flatten(0, 1).float()
        of_values = values.flatten(0, 2), self.values, self.value_starts
        own = sum_weighted_packed_rows(
            each_query[self.owners].flatten(), keys.flatten(0, 3), self.keys, self.key_starts
        )
        if silence is None or len(own) == num_heads * num_rows * self.num_blocks:
            weights = own.view(num_heads, num_rows, -1).softmax(-1)
            context = sum_weighted_packed_rows(weights.flatten(), *of_values)
        else:
            silent_keys, silent_values = silence
            scores = torch.bmm(queries, silent_keys).to(own.dtype)  # [H, R, F]
            scores.view(-1, block).index_copy_(0, self.places, own)
            weights = scores.softmax(-1)
            by_block = weights.view(-1, block)
            context = sum_weighted_packed_rows(by_block[self.places].flatten(), *of_values)
            by_block.index_fill_(0, self.places, 0)
            context = context + torch.bmm(weights.to(query.dtype), silent_values).view_as(context)
        by_row = context.view(num_heads, num_rows, -1).transpose(0, 1)
        return by_row.reshape(*query.shape[:2], -1).to(query.dtype)


def own_blocks(cache: DecoderCache, slots: Slots | list[int], num_queries: int) -> OwnBlocks | None:
    """Return the blocks for `num_queries` of each audio slot; None where torch's products read them."""
    if not cache.is_packed or num_queries > MAX_QUERIES:
        return None
    rows = slot_ids(slots, cache.audio_lengths.device).repeat_interleave(num_queries)
    lengths = cache.audio_lengths[rows]
    _, _, num_heads, _, depth = cache.values.shape
    num_positions = cache.num_audio_positions
    silent_slot = None
    if cache.shares_silence:
        is_mostly_audio = int(lengths.sum()) >= len(rows) * num_positions // 2
        silent_slot = cache.silent_slot if len(rows) <= _FEW_ROWS or is_mostly_audio else None
    shape = num_heads, depth, num_positions, cache.block
    return find_blocks(tuple(rows.tolist()), tuple(lengths.tolist()), *shape, silent_slot)


@lru_cache(maxsize=1)  # the next step has mostly the same slots
def find_blocks(
    slots: tuple[int, ...],  # [R], of each query
    lengths: tuple[int, ...],  # [R], audio positions, multiples of `block`
    num_heads: int,
    depth: int,
    num_positions: int,  # of the window
    block: int,
    silent_slot: int | None,  # with the blocks that follow each slot's own
) -> OwnBlocks:
    num_blocks = num_positions // block
    heads = torch.arange(num_heads)[:, None]
    slot_heads = (torch.tensor(slots) * num_heads + heads).flatten()  # [H R]
    own_counts = (torch.tensor(lengths) // block).repeat(num_heads)
    counts = own_counts if silent_slot is None else torch.full_like(own_counts, num_blocks)
    starts = counts.cumsum(0) - counts
    owners = torch.repeat_interleave(torch.arange(len(counts)), counts)
    numbers = torch.arange(len(owners)) - starts[owners]  # of each block in its slot
    sources = slot_heads[owners]
    if silent_slot is not None:
        of_silence = (silent_slot * num_heads + heads).expand(-1, len(slots)).flatten()[owners]
        sources = torch.where(numbers < own_counts[owners], sources, of_silence)
    of_keys = (sources * num_blocks + numbers)[:, None] * depth + torch.arange(depth)
    of_values = (sources * num_blocks + numbers)[:, None] * block + torch.arange(block)
    return OwnBlocks(
        owners,
        owners * num_blocks + numbers,
        num_blocks,
        of_keys.flatten().int(),
        torch.arange(len(owners), dtype=torch.int32) * depth,
        of_values.flatten().int(),
        (starts * block).int(),
    )
