"""Slots that a kernel reads in place, next to those that torch's products gather: with a plain kernel."""

import pytest
import torch
from torch import Tensor

from asr_server.model.cache import DecoderCache, Slots
from asr_server.model.kernels import TORCH, Kernels
from asr_server.model.rows import MAX_QUERIES, FlashRows, TorchRows, row_lengths, rows_of
from tests.unit.model.test_cache import CPU, DEPTH, HEADS, LAYERS, SIZES, WINDOW, keys_values

PLACES = [slice(1, 3), torch.tensor([2, 0])]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def plain_flash_decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    lengths: Tensor,
    most: int,
    new_keys: Tensor | None = None,
    new_values: Tensor | None = None,
) -> Tensor:
    """The kernel's contract, row by row."""
    result = torch.zeros_like(query)
    assert int(lengths.max()) <= most <= keys.shape[2] == values.shape[2]
    for row, (slot, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
        if length == 0:
            continue
        if new_keys is not None and new_values is not None:
            keys[slot, :, length - 1], values[slot, :, length - 1] = new_keys[row], new_values[row]
        own_keys, own_values = keys[slot, :, :length].float(), values[slot, :, :length].float()
        scores = torch.einsum("hd,hnd->hn", query[row].float(), own_keys)
        result[row] = torch.einsum("hn,hnd->hd", scores.softmax(-1), own_values)
    return result


IN_PLACE = Kernels(flash_decode=plain_flash_decode)


def caches() -> tuple[DecoderCache, DecoderCache]:
    """Two with the same text and audio: one for torch, one for the kernel."""
    made = tuple(DecoderCache(SIZES, 3, CPU, torch.float32, kernels=kernels) for kernels in (TORCH, IN_PLACE))
    for cache in made:
        cache.keys.copy_(random(*cache.keys.shape, seed=1))
        cache.values.copy_(random(*cache.values.shape, seed=2))
        cache.write_silence(keys_values(1, WINDOW, seed=3))
        cache.store_audio(torch.tensor([0, 1, 2]), keys_values(3, 600, seed=4))
        cache.attend_to(torch.tensor([[1, 2, 0], [2, 2, 1]]))
    return made[0], made[1]


@pytest.mark.parametrize("num_queries", [1, 2, MAX_QUERIES])
@pytest.mark.parametrize("slots", PLACES, ids=["side by side", "scattered"])
def test_text_is_appended_and_read_as_torch_does_it(slots: Slots, num_queries: int) -> None:
    positions = torch.tensor([[4], [1]]) + torch.arange(num_queries)
    query, key, value = random(3, 2, num_queries, HEADS, DEPTH, seed=5)
    both = caches()
    readers = [rows_of(cache, slots, positions, context=20) for cache in both]
    assert [type(reader) for reader in readers] == [TorchRows, FlashRows]
    expected, found = (reader.attend_text(1, query, key, value) for reader in readers)
    assert found.shape == (2, num_queries, HEADS * DEPTH)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(both[0].keys, both[1].keys)
    assert torch.equal(both[0].values, both[1].values)


@pytest.mark.parametrize("num_queries", [1, 3])
@pytest.mark.parametrize("slots", PLACES, ids=["side by side", "scattered"])
def test_audio_is_read_as_torch_does_it(slots: Slots, num_queries: int) -> None:
    positions = torch.zeros(2, num_queries, dtype=torch.long)
    query = random(2, num_queries, HEADS, DEPTH, seed=5)
    readers = [rows_of(cache, slots, positions, context=1) for cache in caches()]
    for layer in range(LAYERS):
        expected, found = (reader.attend_audio(layer, query) for reader in readers)
        assert found.shape == (2, num_queries, HEADS * DEPTH)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_rows_that_nobody_reads_look_at_nothing() -> None:
    _, cache = caches()
    active, positions = torch.tensor([False, True]), torch.tensor([[4], [6]])
    query, key, value = random(3, 2, 1, HEADS, DEPTH, seed=5)
    reader = rows_of(cache, slice(0, 2), positions, context=7, active=active)
    for attended in (reader.attend_text(0, query, key, value), reader.attend_audio(0, query)):
        assert not attended[0].any()
        assert attended[1].all()


@pytest.mark.parametrize("active", [None, torch.tensor([1, 0])])
def test_each_row_reads_up_to_its_position_and_to_the_end_of_its_audio(active: Tensor | None) -> None:
    positions, audio_of = torch.tensor([[3, 4], [7, 8]]), torch.tensor([2, 0, 1])
    found = row_lengths(slice(1, 3), positions, active, audio_of, 60)
    expected = [[1, 1, 2, 2], [0, 0, 1, 1], [4, 5, 8, 9], [60, 60, 60, 60]]
    if active is not None:
        expected[2:] = [[4, 5, 0, 0], [60, 60, 0, 0]]
    assert [each.tolist() for each in found] == expected
    assert all(each.is_contiguous() for each in found)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("slots", [slice(0, 2), torch.tensor([2, 0])], ids=["side by side", "scattered"])
def test_many_queries_of_several_short_chunks_hear_what_each_hears_alone(
    slots: Slots, is_packed: bool
) -> None:
    cache = DecoderCache(SIZES, 3, CPU, torch.float32, int8_audio=is_packed)
    cache.write_silence(keys_values(1, WINDOW, seed=3), is_shared=True)
    for seed, length in enumerate((WINDOW, 500)):  # the second chunk of each slot is the shorter one
        for slot in range(3):
            cache.write_audio(slot, keys_values(1, length, seed=10 * seed + slot))
    positions = torch.arange(MAX_QUERIES + 2).expand(2, -1)
    query = random(2, MAX_QUERIES + 2, HEADS, DEPTH, seed=5)
    found = rows_of(cache, slots, positions, context=20).attend_audio(1, query)
    for row, slot in enumerate((0, 1) if isinstance(slots, slice) else (2, 0)):
        one, own = slice(slot, slot + 1), slice(row, row + 1)
        alone = rows_of(cache, one, positions[own], context=20).attend_audio(1, query[own])
        torch.testing.assert_close(found[own], alone, atol=1e-5, rtol=1e-5)
        few = rows_of(cache, one, positions[own, :2], context=20).attend_audio(1, query[own, :2])
        torch.testing.assert_close(found[own, :2], few, atol=1e-4, rtol=1e-4)
