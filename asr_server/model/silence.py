"""Attention over a short chunk's audio and the silence after it, which is encoded once for all chunks.

The chunk's effect on that silence is ignored. On the CPU, the encoder reads silence beyond half a second
in means (`SilentLayer`). engine/README.md has costs and savings. `OwnBlocks` is the decoder's part.
"""

from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from asr_server.model.layers import Behind
from asr_server.model.products import sum_weighted_packed_rows

_MEAN_POSITIONS = 25  # half a second, which divides all lengths in which chunks are encoded
_EACH_QUERY = 5  # of so many, for the weights: neighbours hardly differ


class SilentLayer(NamedTuple):
    """One encoder layer's keys and values for a silent window."""

    keys_values: Tensor  # [F, 2 D / ranks]
    means: Tensor  # [G, 2 D / ranks], of 25 positions each; empty: all positions are read
    biases: Tensor  # [H, G]

    @classmethod
    def of(cls, qkv: Tensor, num_heads: int) -> Self:
        """Split queries (scaled), keys and values, [F, 3 D / ranks].

        25 positions act like one: mean key and value, weighted by the silence's own attention, with a
        score raised by what the 25 have together. Plain means plus log 25 are twice as far off.
        """
        keys_values = qkv[:, qkv.shape[-1] // 3 :].clone()
        if qkv.is_cuda:  # where biases would keep attention from its fastest kernel
            return cls(keys_values, keys_values[:0], keys_values.new_empty(num_heads, 0))
        heads = qkv.float().view(len(qkv), 3 * num_heads, -1).transpose(0, 1)  # [3 H, F, d]
        query = heads[:num_heads, ::_EACH_QUERY]
        means, biases = [], []
        groups = heads[num_heads:].split(_MEAN_POSITIONS, 1)  # type: ignore[no-untyped-call]
        for keys, values in (group.chunk(2) for group in groups):
            scores = query @ keys.transpose(1, 2)  # [H, queries, 25]
            weights = scores.softmax(-1).mean(1, keepdim=True)  # [H, 1, 25]
            mean_key = weights @ keys
            means.append(torch.cat([mean_key, weights @ values]).flatten())
            biases.append((scores.logsumexp(-1) - (query @ mean_key.transpose(1, 2))[..., 0]).mean(1))
        return cls(keys_values, torch.stack(means).to(qkv.dtype), torch.stack(biases, 1).to(qkv.dtype))

    def behind(self, length: int) -> Behind:
        """Return what follows `length` positions: 25 as they are, then means."""
        first_mean = -(-length // _MEAN_POSITIONS) + 1
        near = self.keys_values[length : first_mean * _MEAN_POSITIONS]
        means = self.means[first_mean:]
        if not len(means):
            return Behind(self.keys_values[length:], None)
        biases = F.pad(self.biases[:, first_mean:], (len(near), 0))
        return Behind(torch.cat([near, means]), biases)


class Silence(NamedTuple):
    layers: tuple[SilentLayer, ...]
    audio: Tensor  # [1, F, D]


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

    @classmethod
    def of(
        cls,
        slots: Tensor,  # [R], of each query
        lengths: Tensor,  # [R], audio positions, multiples of `block`
        num_heads: int,
        depth: int,
        num_positions: int,  # of the window
        block: int,
        is_packed: bool,  # a block's keys are contiguous
        silent_slot: int | None,  # with the blocks that follow each slot's own
    ) -> Self:
        num_blocks = num_positions // block
        heads = torch.arange(num_heads)[:, None]
        slot_heads = (slots * num_heads + heads).flatten()  # [H R]
        own_counts = (lengths.long() // block).repeat(num_heads)
        counts = own_counts if silent_slot is None else torch.full_like(own_counts, num_blocks)
        starts = counts.cumsum(0) - counts
        owners = torch.repeat_interleave(torch.arange(len(counts)), counts)
        numbers = torch.arange(len(owners)) - starts[owners]  # of each block in its slot
        sources = slot_heads[owners]
        if silent_slot is not None:
            of_silence = (silent_slot * num_heads + heads).expand(-1, len(slots)).flatten()[owners]
            sources = torch.where(numbers < own_counts[owners], sources, of_silence)
        if is_packed:
            of_keys = (sources * num_blocks + numbers)[:, None] * depth + torch.arange(depth)
        else:
            of_keys = (sources[:, None] * depth + torch.arange(depth)) * num_blocks + numbers[:, None]
        of_values = (sources * num_blocks + numbers)[:, None] * block + torch.arange(block)
        return cls(
            owners,
            owners * num_blocks + numbers,
            num_blocks,
            of_keys.flatten().int(),
            torch.arange(len(owners), dtype=torch.int32) * depth,
            of_values.flatten().int(),
            (starts * block).int(),
        )

    def attend(
        self,
        query: Tensor,  # [B, T, H, d], scaled; R = B T
        keys: Tensor,  # [slots, H, d, F], or packed [slots, H, blocks, d, bytes]
        values: Tensor,  # [slots, H, F, d], or [slots, H, F, bytes]
        silence: tuple[Tensor, Tensor] | None,  # keys [H, d, F] and values [H, F, d]; None: whole windows
    ) -> Tensor:
        """Attend to each slot's audio and the silence after it, to [B, T, D]."""
        queries = query.flatten(0, 1).transpose(0, 1)  # [H, R, d]
        num_heads, num_rows, _ = queries.shape
        block = len(self.values) // len(self.owners)
        is_packed = keys.dtype == torch.uint8
        of_keys = keys.flatten(0, 3) if is_packed else keys.view(-1, block)
        each_query = queries.flatten(0, 1)  # [H R, d]
        if is_packed:  # their sums take float32, and each query has many blocks: here it is converted once
            each_query = each_query.float()
        own = _sums(each_query[self.owners].flatten(), of_keys, self.keys, self.key_starts)
        if silence is None or len(own) == num_heads * num_rows * self.num_blocks:
            weights = own.view(num_heads, num_rows, -1).softmax(-1)
            context = _sums(weights.flatten(), values.flatten(0, 2), self.values, self.value_starts)
        else:
            silent_keys, silent_values = silence
            scores = torch.bmm(queries, silent_keys).to(own.dtype)  # [H, R, F]
            scores.view(-1, block).index_copy_(0, self.places, own)
            weights = scores.softmax(-1)
            by_block = weights.view(-1, block)
            own_weights = by_block[self.places].flatten()
            context = _sums(own_weights, values.flatten(0, 2), self.values, self.value_starts)
            by_block.index_fill_(0, self.places, 0)
            context = context + torch.bmm(weights.to(query.dtype), silent_values).view_as(context)
        return (
            context.view(num_heads, num_rows, -1)
            .transpose(0, 1)
            .reshape(*query.shape[:2], -1)
            .to(query.dtype)
        )


def _sums(weights: Tensor, matrix: Tensor, rows: Tensor, starts: Tensor) -> Tensor:
    """Sum weighted rows: weights [N], matrix [any, m], rows [N], starts [G] to [G, m]."""
    if matrix.dtype == torch.uint8:
        return sum_weighted_packed_rows(weights, matrix, rows, starts)
    return F.embedding_bag(rows, matrix, starts, mode="sum", per_sample_weights=weights)
