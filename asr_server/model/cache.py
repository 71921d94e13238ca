"""The keys and values of every slot, contiguous because Whisper's lengths are bounded.

A slot holds one sequence: the keys and values of its audio (written once, after encoding) and of its tokens.
Sequences being decoded lie side by side from slot 0 on, so that a decode step reads one contiguous block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from asr_server.model.attention import split_heads
from asr_server.model.sizes import WhisperSizes

# Which slots a call is about: a slice where they lie side by side, else their indices [B].
Slots = slice | Tensor


class DecoderCache:
    """Keys and values of every layer and slot, [layers, slots, H, positions, d] each.

    The keys of the audio are the other way round, [layers, slots, H, d, positions]: the form in which both
    products of a decode step read their matrix row by row.
    """

    def __init__(
        self,
        sizes: WhisperSizes,
        num_slots: int,
        device: torch.device,
        dtype: torch.dtype,
        short_audio: bool = False,
        num_ranks: int = 1,
    ) -> None:
        """
        Args:
            short_audio: the audio of a sequence may have fewer positions than the window.
            num_ranks: ranks that share out the heads.
        """
        heads, depth = sizes.decoder_heads // num_ranks, sizes.width // sizes.decoder_heads
        text = (sizes.decoder_layers, num_slots, heads, sizes.text_positions, depth)
        audio_keys = (sizes.decoder_layers, num_slots, heads, depth, sizes.audio_positions)
        audio_values = (sizes.decoder_layers, num_slots, heads, sizes.audio_positions, depth)
        # Zeros, not empty: masked positions are multiplied by zero, and zero times a stray NaN is NaN.
        self.keys = torch.zeros(text, device=device, dtype=dtype)
        self.values = torch.zeros(text, device=device, dtype=dtype)
        self.cross_keys = torch.zeros(audio_keys, device=device, dtype=dtype)
        self.cross_values = torch.zeros(audio_values, device=device, dtype=dtype)
        # Minus infinity at positions that a slot's audio does not have.
        self.cross_mask = (
            torch.zeros(num_slots, 1, 1, sizes.audio_positions, device=device, dtype=dtype)
            if short_audio
            else None
        )
        self.cross_rows = torch.arange(
            num_slots * heads * sizes.audio_positions, device=device, dtype=torch.int32
        )

    @staticmethod
    def bytes_per_slot(sizes: WhisperSizes, dtype: torch.dtype) -> int:
        """On all ranks together."""
        positions = sizes.text_positions + sizes.audio_positions
        return 2 * sizes.decoder_layers * positions * sizes.width * dtype.itemsize

    def write_audio(self, slots: Slots, keys_values: list[tuple[Tensor, Tensor]]) -> None:
        """Puts each layer's keys [B, D, F] and values [B, F, D] into B slots."""
        heads, length = self.cross_keys.shape[2], keys_values[0][0].shape[-1]
        for layer, (keys, values) in enumerate(keys_values):
            self.cross_keys[layer, slots, ..., :length] = keys.view(len(keys), heads, -1, length)
            self.cross_values[layer, slots, :, :length] = split_heads(values, heads).transpose(1, 2)
        if self.cross_mask is not None:
            positions = torch.arange(self.cross_mask.shape[-1], device=self.cross_mask.device)
            mask = torch.zeros_like(positions, dtype=self.cross_mask.dtype)
            self.cross_mask[slots] = mask.masked_fill_(positions >= length, float("-inf"))

    def move(self, source: int, target: int) -> None:
        """Copies one slot's sequence into another slot."""
        for tensor in (self.keys, self.values, self.cross_keys, self.cross_values):
            tensor[:, target] = tensor[:, source]
        if self.cross_mask is not None:
            self.cross_mask[target] = self.cross_mask[source]

    def rows(self, slots: Slots, positions: Tensor, context: int) -> CacheRows:
        """Slots whose sequences stand at `positions` [B, T].

        Args:
            context: text positions that are looked at; more than any of `positions`.
        """
        return CacheRows(self, slots, positions, context)


class CacheRows:
    """Some slots for one call of the decoder. Slots side by side are read in place, others are copied."""

    def __init__(self, cache: DecoderCache, slots: Slots, positions: Tensor, context: int) -> None:
        self._cache = cache
        self._slots = slots
        self._positions = positions
        if isinstance(slots, slice):
            slots = torch.arange(slots.start, slots.stop, device=positions.device)
        self._index = slots[:, None]
        unseen = torch.arange(context, device=positions.device) > positions[:, :, None]  # [B, T, context]
        mask = torch.zeros_like(unseen, dtype=cache.keys.dtype).masked_fill_(unseen, float("-inf"))
        self._mask = mask[:, None]
        self._context = context

    def layer(self, index: int) -> LayerView:
        cache = self._cache
        return LayerView(
            cache.keys[index],
            cache.values[index],
            cache.cross_keys[index, self._slots],
            cache.cross_values[index, self._slots],
            cache.cross_rows,
            None if cache.cross_mask is None else cache.cross_mask[self._slots],
            self._slots,
            self._index,
            self._positions,
            self._context,
            self._mask,
        )


class LayerView(NamedTuple):
    """One layer's keys and values of some slots."""

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

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Writes [B, T, H, d] at the sequences' positions; all they may look at, [B, H, context, d]."""
        self.keys[self.slot_ids, :, self.positions] = keys
        self.values[self.slot_ids, :, self.positions] = values
        return self.keys[self.slots, :, : self.context], self.values[self.slots, :, : self.context]
