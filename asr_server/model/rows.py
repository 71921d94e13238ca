"""The slots of one call of the decoder, and how its layers attend to them.

Torch's products gather slots that are not adjacent; the flash-decode kernel reads them in place.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from asr_server.model.cache import MAX_QUERIES, DecoderCache, Slots, slot_ids
from asr_server.model.layers import attend_cached, attend_cached_audio, sums_text_rows


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
        self._audio_slots = cache.audio_slots(slots)
        self._own_blocks = cache.own_blocks(self._audio_slots, positions.shape[1])

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
            if not isinstance(self._audio_slots, list):
                return attend_cached_audio(query, *cache.audio(layer, self._audio_slots), cache.cross_rows)
            each = [
                attend_cached_audio(one, *cache.audio(layer, slice(slot, slot + 1)), cache.cross_rows)
                for one, slot in zip(query[:, None], self._audio_slots, strict=True)
            ]
            return torch.cat(each)
        silence = (cache.silent_keys[layer], cache.silent_values[layer]) if cache.shares_silence else None
        return self._own_blocks.attend(query, cache.cross_keys[layer], cache.cross_values[layer], silence)


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
