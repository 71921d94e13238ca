"""The decoder's keys and values, allocated once for all slots.

A slot holds one text; an audio slot holds one chunk's audio. `audio_of` maps slots to audio slots, so the
hypotheses of a beam share one. Active slots lie side by side from 0, so a step reads one block.
`rows.py` attends to them.
"""

import math
import mmap
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from asr_server.checkpoint.sizes import WhisperSizes
from asr_server.model.kernels import TORCH, Kernels
from asr_server.model.layers import split_heads
from asr_server.model.products import pack_rows, packed_row_bytes, unpack_rows

# Which slots a call is about: a slice where they lie side by side, else their indices [B].
Slots = slice | Tensor


def slot_ids(slots: Slots | list[int], device: torch.device) -> Tensor:
    if isinstance(slots, slice):
        return torch.arange(slots.start, slots.stop, device=device)
    return torch.as_tensor(slots, device=device)


_MAX_KEY_BLOCK = 100


def key_block(num_positions: int) -> int:
    """Return the largest block of positions, at most 2 s, that divides the window."""
    return next(size for size in range(_MAX_KEY_BLOCK, 0, -1) if num_positions % size == 0)


# Positions at whose multiples key rows start: for the kernel, and on a GPU for torch's products as well,
# which are slow where rows do not begin at multiples of 16 bytes.
_ROW_ALIGNMENT = 16


def _zeros(shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Allocate lazily on the CPU: most slots stay partly empty."""
    if device.type != "cpu":
        return torch.zeros(shape, device=device, dtype=dtype)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    buffer = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, private)
    return torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).view(*shape)


class DecoderCache:
    """Keys and values of every layer and slot, [layers, slots, H, positions, d].

    Audio keys are transposed, [layers, audio slots, H, d, positions], so that both products read rows.
    8-bit integers are packed rows; a row of keys is one block of positions. `write_silence` fills the window
    after a short chunk.
    """

    def __init__(
        self,
        sizes: WhisperSizes,
        num_slots: int,  # of audio
        device: torch.device,
        dtype: torch.dtype,
        num_ranks: int = 1,  # that share the heads
        kernels: Kernels = TORCH,
        int8_audio: bool = False,  # in packed rows
        num_text_slots: int | None = None,  # None: `num_slots`
    ) -> None:
        self.kernels = kernels
        num_text_slots = num_text_slots or num_slots
        heads, depth = sizes.decoder_heads // num_ranks, sizes.width // sizes.decoder_heads
        text = (sizes.decoder_layers, num_text_slots, heads, sizes.text_positions, depth)
        alignment = _ROW_ALIGNMENT if device.type == "cuda" or kernels.flash_decode is not None else 1
        row = -(-sizes.audio_positions // alignment) * alignment
        audio_keys = (sizes.decoder_layers, num_slots, heads, depth, row)
        audio_values = (sizes.decoder_layers, num_slots, heads, sizes.audio_positions, depth)
        # Zeros, not empty: masked positions are multiplied by zero, and zero times a stray NaN is NaN.
        self._texts = _zeros((2, *text), device, dtype)
        self.keys, self.values = self._texts.unbind()
        self.text_ends = TextEnds(num_text_slots, sizes.text_positions)
        self.is_packed = int8_audio
        self.block = key_block(sizes.audio_positions)
        if self.is_packed:
            in_blocks = (*audio_keys[:3], sizes.audio_positions // self.block, depth, self.block)
            self.cross_keys, self.cross_values = (
                _zeros((layers, slots + 1, *shape, packed_row_bytes(length)), device, torch.uint8)
                for layers, slots, *shape, length in (in_blocks, audio_values)
            )
        else:
            self.cross_keys = _zeros(audio_keys, device, dtype)[..., : sizes.audio_positions]
            self.cross_values = _zeros(audio_values, device, dtype)
        # The audio slot of each slot: one of the same number, until `attend_to` gives another.
        self.audio_of = torch.arange(num_text_slots, device=device) % num_slots
        # On the CPU, positions stored in each audio slot; silence follows them. A slot that was never written
        # may be read between others: it has a whole window of zeros.
        self.audio_lengths = torch.full((num_slots,), sizes.audio_positions, dtype=torch.int32)
        self.shares_silence = False
        self.silent_keys = self.silent_values = torch.empty(0)  # [layers, H, d, F], [layers, H, F, d]
        num_rows = num_slots * heads * sizes.audio_positions if device.type == "cpu" else 0
        self.cross_rows = torch.arange(num_rows, dtype=torch.int32)

    @staticmethod
    def bytes_per_chunk(
        sizes: WhisperSizes, dtype: torch.dtype, int8_audio: bool = False, num_text_slots: int = 1
    ) -> int:
        text_bytes = num_text_slots * sizes.text_positions * dtype.itemsize
        audio_bytes = sizes.audio_positions * (1 if int8_audio else dtype.itemsize)
        whole = 2 * sizes.decoder_layers * sizes.width * (text_bytes + audio_bytes)
        if int8_audio:
            num_blocks = sizes.audio_positions // key_block(sizes.audio_positions)
            num_rows = sizes.width * num_blocks + sizes.decoder_heads * sizes.audio_positions
            whole += sizes.decoder_layers * num_rows * packed_row_bytes(0)
        return whole

    def write_silence(self, keys_values: Iterable[tuple[Tensor, Tensor]], is_shared: bool = False) -> None:
        """Store each layer's silent keys [1, D, F] and values [1, F, D].

        With `is_shared`, slots share one copy where the host knows how long their audio is.
        """
        self.shares_silence = is_shared and not self.kernels.flash_decode
        keys, values = zip(*keys_values, strict=True)
        heads = self.cross_keys.shape[2]
        self.silent_keys = torch.stack([each.view(heads, -1, each.shape[-1]) for each in keys])
        self.silent_values = split_heads(torch.cat(values), heads).transpose(1, 2).contiguous()
        if self.shares_silence and self.is_packed:
            silent_slot = slice(self.silent_slot, None)
            for layer, each in enumerate(zip(self.silent_keys, self.silent_values, strict=True)):
                self._write_packed(layer, silent_slot, *(matrix[None] for matrix in each))
                rounded_keys, rounded_values = self._read_packed(layer, silent_slot, self.num_audio_positions)
                self.silent_keys[layer], self.silent_values[layer] = rounded_keys[0], rounded_values[0]

    def write_audio(self, slot: int, keys_values: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Write each layer's keys [1, D, N] and values [1, N, D] into an audio slot; silence follows."""
        heads, block, length = self.cross_keys.shape[2], slice(slot, slot + 1), 0
        for layer, (keys, values) in enumerate(keys_values):
            length = keys.shape[-1]
            keys, values = keys.view(1, heads, -1, length), split_heads(values, heads).transpose(1, 2)
            unit = self.block if self.shares_silence else self.num_audio_positions
            end = -(-length // unit) * unit
            if length < end:
                keys = torch.cat([keys, self.silent_keys[layer, None, ..., length:end]], -1)
                values = torch.cat([values, self.silent_values[layer, None, :, length:end]], -2)
                length = end
            if self.is_packed:
                self._write_packed(layer, block, keys, values)
            else:
                self.cross_keys[layer, block, ..., :length] = keys
                self.cross_values[layer, block, :, :length] = values
        self.audio_lengths.numpy()[slot] = length

    def store_audio(self, slots: Tensor, keys_values: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Do as `write_audio` for slots [B], whole windows; one that comes again gets the same audio.

        A graph may record it.
        """
        store, heads = self.kernels.store_audio or _store, self.cross_keys.shape[2]
        for layer, (keys, values) in enumerate(keys_values):
            length = keys.shape[-1]
            all_keys, all_values = self.cross_keys[layer], self.cross_values[layer]
            store(keys.view(len(keys), heads, -1, length), slots, all_keys)
            store(split_heads(values, heads).transpose(1, 2), slots, all_values)
            if length < self.num_audio_positions:
                count = len(slots)
                silent_keys = self.silent_keys[layer, None, ..., length:].expand(count, -1, -1, -1)
                silent_values = self.silent_values[layer, None, :, length:].expand(count, -1, -1, -1)
                store(silent_keys, slots, all_keys[..., length:])
                store(silent_values, slots, all_values[:, :, length:])

    def _write_packed(self, layer: int, slots: Slots, keys: Tensor, values: Tensor) -> None:
        in_blocks = keys.reshape(*keys.shape[:-1], -1, self.block).transpose(2, 3)
        self.cross_keys[layer, slots, :, : in_blocks.shape[2]] = pack_rows(in_blocks)
        self.cross_values[layer, slots, :, : values.shape[2]] = pack_rows(values)

    def _read_packed(self, layer: int, slots: Slots, length: int) -> tuple[Tensor, Tensor]:
        packed = (
            self.cross_keys[layer, slots][:, :, : length // self.block],
            self.cross_values[layer, slots][:, :, :length],
        )
        keys, values = (unpack_rows(each, self.keys.dtype) for each in packed)
        return keys.transpose(-3, -2).flatten(-2), values

    def attend_to(self, slots_and_audio: Tensor) -> None:
        """Map slots to audio slots, [2, B]."""
        self.audio_of.index_copy_(0, *slots_and_audio)

    def copy_text(self, moves: Sequence[tuple[int, int]], on_device: Tensor, length: int) -> None:
        """Copy the first `length` positions and the audio slot from sources to targets, [B, 2] on the device.

        Slots may overlap.
        """
        sources, targets = on_device.unbind(1)
        texts = self._texts[..., :length, :]
        texts.index_copy_(2, targets, texts.index_select(2, sources))
        self.audio_of.index_copy_(0, targets, self.audio_of.index_select(0, sources))
        self.begin_text([target for _, target in moves], targets, length)

    def begin_text(self, slots: Sequence[int], on_device: Slots, length: int) -> None:
        """Clear what earlier texts left behind the first `length` positions. The kernel never reads it."""
        if self.kernels.flash_decode is not None:
            return
        end = self.text_ends.restart(slots, length)
        if end > length:
            ids = slot_ids(on_device, self.keys.device)
            self._texts[..., length:end, :].index_fill_(2, ids, 0)

    def audio_slots(self, slots: Slots) -> Slots | list[int]:
        """Return the audio slots: a slice if the host knows that they lie in order, else a list."""
        found = self.audio_of[slots]
        if isinstance(slots, Tensor) or found.is_cuda:
            return found
        audio_slots: list[int] = found.tolist()
        block = slice(audio_slots[0], audio_slots[0] + len(audio_slots))
        return block if audio_slots == list(range(block.start, block.stop)) else audio_slots

    def audio(self, layer: int, slots: Slots, length: int) -> list[tuple[Tensor, Tensor]]:
        """Return keys [B, H, d, N] and values [B, H, N, d]: of `length` positions, then of shared silence."""
        if self.is_packed:
            audio = [self._read_packed(layer, slots, length)]
        else:
            keys, values = self.cross_keys[layer, slots], self.cross_values[layer, slots]
            audio = [(keys[..., :length], values[:, :, :length])]
        if length < self.num_audio_positions:
            silent_keys, silent_values = self.silent_keys[layer, None], self.silent_values[layer, None]
            audio.append((silent_keys[..., length:], silent_values[:, :, length:]))
        return audio

    def own_length(self, slot: int) -> int:
        """Return the positions behind which shared silence follows."""
        return int(self.audio_lengths[slot]) if self.shares_silence else self.num_audio_positions

    def has_short_audio(self, slots: Slots | list[int]) -> bool:
        return self.shares_silence and bool((self.audio_lengths[slots] < self.num_audio_positions).any())

    @property
    def silent_slot(self) -> int:
        return len(self.audio_lengths)

    @property
    def num_audio_positions(self) -> int:
        return self.cross_values.shape[3]

    def audio_keys(self, layer: int, slot: int, num_positions: int) -> Tensor:
        """Return one audio slot's first keys, [H, d, num_positions]."""
        if self.is_packed:
            keys = unpack_rows(self.cross_keys[layer, slot], self.keys.dtype)
            return keys.transpose(-3, -2).flatten(-2)[..., :num_positions]
        return self.cross_keys[layer, slot, ..., :num_positions]


def _store(source: Tensor, slots: Tensor, target: Tensor) -> None:
    target[:, :, : source.shape[2], : source.shape[3]].index_copy_(0, slots, source)


class TextEnds:
    """For each slot, an upper bound of the positions ever written, so that a new text clears the rest.

    A step reads all slots to the longest text. A shorter one is masked, but NaN would spoil it.
    """

    def __init__(self, num_slots: int, num_positions: int) -> None:
        self._ends = np.zeros(num_slots, np.int64)
        self._num_positions = num_positions

    def on_step(self, num_rows: int) -> None:
        self._ends[:num_rows] += 1

    def extend(self, slots: Sequence[int], end: int) -> None:
        rows = list(slots)  # a tuple would be one index of numpy's
        self._ends[rows] = np.maximum(self._ends[rows], end)

    def restart(self, slots: Sequence[int], end: int) -> int:
        """Set the ends of new texts; return how far the old ones reach."""
        rows = list(slots)
        farthest = min(int(self._ends[rows].max()), self._num_positions)
        self._ends[rows] = end
        return farthest
