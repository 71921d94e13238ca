"""Some slots of the cache for one call of the decoder, and how its layers attend to them.

`DecoderCache.rows` chooses: torch's products, which gather slots that do not lie side by side, or the kernel
that reads slots where they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from asr_server.model.attention import attend_cached, attend_cached_audio
from asr_server.model.kernels import FlashDecode

if TYPE_CHECKING:
    from asr_server.model.cache import DecoderCache

# Which slots a call is about: a slice where they lie side by side, else their indices [B].
Slots = slice | Tensor


class LayerView(Protocol):
    """One layer's keys and values of some slots."""

    def attend_text(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Appends this call's keys and values; attends to all text up to each query.

        Args:
            query, key, value: [B, T, H, d], the query scaled.
        Returns:
            [B, T, D].
        """
        ...

    def attend_audio(self, query: Tensor) -> Tensor:
        """[B, T, H, d], scaled, to [B, T, D]."""
        ...


class CacheRows(Protocol):
    """The slots of one call."""

    def layer(self, index: int) -> LayerView: ...


class TorchRows:
    """Slots side by side are read in place, others are copied."""

    def __init__(self, cache: DecoderCache, slots: Slots, positions: Tensor, context: int) -> None:
        self._cache = cache
        self._slots = slots
        self._positions = positions
        self._index = slot_ids(slots, positions.device)[:, None]
        unseen = torch.arange(context, device=positions.device) > positions[:, :, None]  # [B, T, context]
        mask = torch.zeros_like(unseen, dtype=cache.keys.dtype).masked_fill_(unseen, float("-inf"))
        self._mask = mask[:, None]
        self._context = context

    def layer(self, index: int) -> TorchLayer:
        cache = self._cache
        return TorchLayer(
            cache.keys[index],
            cache.values[index],
            *cache.audio(index, self._slots),
            cache.cross_rows,
            None if cache.cross_mask is None else cache.cross_mask[self._slots],
            self._slots,
            self._index,
            self._positions,
            self._context,
            self._mask,
        )


class TorchLayer(NamedTuple):
    keys: Tensor  # [slots, H, positions, d], all slots
    values: Tensor
    cross_keys: Tensor  # [B, H, d, F]
    cross_values: Tensor  # [B, H, F, d]
    cross_rows: Tensor
    cross_mask: Tensor | None  # [B, 1, 1, F]
    slots: Slots
    slot_ids: Tensor  # [B, 1], the same slots
    positions: Tensor  # [B, T]
    context: int
    mask: Tensor  # [B, 1, T, context], zero or minus infinity

    def attend_text(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.keys[self.slot_ids, :, self.positions] = key
        self.values[self.slot_ids, :, self.positions] = value
        keys, values = (each[self.slots, :, : self.context] for each in (self.keys, self.values))
        return attend_cached(query, keys, values, self.mask)

    def attend_audio(self, query: Tensor) -> Tensor:
        return attend_cached_audio(
            query, self.cross_keys, self.cross_values, self.cross_rows, self.cross_mask
        )


class FlashRows:
    """Slots are read where they are; of each, as many positions as it has."""

    def __init__(
        self,
        cache: DecoderCache,
        slots: Slots,
        positions: Tensor,
        context: int,
        active: Tensor | None,
        flash_decode: FlashDecode,
    ) -> None:
        self._cache, self._positions, self._context = cache, positions, context
        self._flash_decode = flash_decode
        self._slots = slot_ids(slots, positions.device)[:, None].expand_as(positions)  # [B, T]
        text, audio = positions + 1, cache.audio_lengths[self._slots]
        if active is not None:
            text, audio = text * active[:, None], audio * active[:, None]
        self._text_lengths, self._audio_lengths = text.flatten(), audio.flatten()
        self._row_slots = self._slots.flatten().contiguous()  # of an expanded one, flatten gives a view

    def layer(self, index: int) -> FlashLayer:
        return FlashLayer(self, index)

    def attend_text(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys[self._slots, :, self._positions] = key
        values[self._slots, :, self._positions] = value
        lengths, rows = self._text_lengths, self._row_slots
        attended = self._flash_decode(query.flatten(0, 1), keys, values, rows, lengths, self._context)
        return attended.view(*query.shape[:2], -1)

    def attend_audio(self, layer: int, query: Tensor) -> Tensor:
        cache, lengths, rows = self._cache, self._audio_lengths, self._row_slots
        keys, values = cache.cross_keys[layer].transpose(2, 3), cache.cross_values[layer]
        scales = () if cache.audio_scales is None else cache.audio_scales[:, layer].unbind()
        queries, most = query.flatten(0, 1), keys.shape[2]
        attended = self._flash_decode(queries, keys, values, rows, lengths, most, *scales)
        return attended.view(*query.shape[:2], -1)


class FlashLayer(NamedTuple):
    rows: FlashRows
    number: int

    def attend_text(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.rows.attend_text(self.number, query, key, value)

    def attend_audio(self, query: Tensor) -> Tensor:
        return self.rows.attend_audio(self.number, query)


def slot_ids(slots: Slots, device: torch.device) -> Tensor:
    """As indices [B]."""
    return torch.arange(slots.start, slots.stop, device=device) if isinstance(slots, slice) else slots
