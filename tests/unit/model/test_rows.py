"""Attention to the slots of a call, against plain sums over what was written into them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from asr_server.model.cache import DecoderCache, Slots
from asr_server.model.rows import rows_of
from tests.unit.model.test_cache import CPU, DEPTH, HEADS, LAYERS, SIZES, WINDOW, by_head, keys_values

SLOTS = [slice(1, 3), torch.tensor([2, 0])]
PLACES = ["side by side", "scattered"]


def attended(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """[T, H, d], [H, d, N] and [H, N, d] to [T, D]."""
    weights = (query.transpose(0, 1) @ keys).softmax(-1)
    return (weights @ values).transpose(0, 1).flatten(1)


@pytest.mark.parametrize("slots", SLOTS, ids=PLACES)
def test_each_query_reads_the_text_up_to_its_own_position(slots: Slots) -> None:
    cache = DecoderCache(SIZES, 3, CPU, torch.float32)
    query, key, value = torch.randn(3, 2, 4, HEADS, DEPTH, generator=torch.Generator().manual_seed(1))
    found = []
    for span in (slice(0, 3), slice(3, 4)):
        positions = torch.arange(span.start, span.stop).expand(2, -1)
        rows = rows_of(cache, slots, positions, context=span.stop)
        found.append(rows.attend_text(1, query[:, span], key[:, span], value[:, span]))
    for row, context in enumerate(torch.cat(found, 1)):
        for at in range(4):
            seen_keys, seen_values = key[row, : at + 1], value[row, : at + 1]
            expected = attended(
                query[row, at : at + 1], seen_keys.permute(1, 2, 0), seen_values.transpose(0, 1)
            )
            torch.testing.assert_close(context[at : at + 1], expected)


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("num_queries", [1, 2, 9])
@pytest.mark.parametrize("audio_slots", [[1, 2], [2, 0], [0, 0]])
@pytest.mark.parametrize("slots", SLOTS, ids=PLACES)
def test_queries_read_the_whole_window_of_their_audio(
    slots: Slots, audio_slots: list[int], num_queries: int, is_shared: bool
) -> None:
    cache = DecoderCache(SIZES, 3, CPU, torch.float32)
    silence, audio = keys_values(1, WINDOW, seed=1), keys_values(3, 600, seed=2)
    cache.write_silence(silence, is_shared)
    cache.store_audio(torch.tensor([0, 1, 2]), audio)
    numbers = [1, 2] if isinstance(slots, slice) else slots.tolist()
    cache.attend_to(torch.tensor([numbers, audio_slots]))
    query = torch.randn(2, num_queries, HEADS, DEPTH, generator=torch.Generator().manual_seed(3))
    rows = rows_of(cache, slots, torch.zeros(2, num_queries, dtype=torch.long), context=1)
    for layer in range(LAYERS):
        keys, values = by_head(*audio[layer])
        silent_keys, silent_values = by_head(*silence[layer])
        found = rows.attend_audio(layer, query)
        for row, slot in enumerate(audio_slots):
            all_keys = torch.cat([keys[slot], silent_keys[0, ..., 600:]], -1)
            all_values = torch.cat([values[slot], silent_values[0, :, 600:]], 1)
            expected = attended(query[row], all_keys, all_values)
            torch.testing.assert_close(found[row], expected, atol=1e-5, rtol=1e-5)
