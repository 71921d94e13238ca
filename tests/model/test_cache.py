"""The decoder's keys and values: audio and the silence after it, whose audio a text reads, and sizes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from asr_server.model.cache import DecoderCache
from asr_server.model.sizes import WhisperSizes

LAYERS, HEADS, DEPTH, WINDOW = 2, 3, 4, 1500
SIZES = WhisperSizes(100, 80, HEADS * DEPTH, 1, HEADS, 48, LAYERS, HEADS, 48)
CPU = torch.device("cpu")


def keys_values(num_rows: int, length: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Random [B, D, N] and [B, N, D] of each layer."""
    random = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(num_rows, HEADS * DEPTH, length, generator=random),
            torch.randn(num_rows, length, HEADS * DEPTH, generator=random),
        )
        for _ in range(LAYERS)
    ]


def by_head(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """[B, D, N] and [B, N, D] to [B, H, d, N] and [B, H, N, d]."""
    num_rows, _, length = keys.shape
    return (
        keys.view(num_rows, HEADS, DEPTH, length),
        values.view(num_rows, length, HEADS, DEPTH).transpose(1, 2),
    )


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("length", [550, 600, WINDOW])
def test_silence_follows_each_chunks_audio_to_the_end_of_the_window(is_shared: bool, length: int) -> None:
    cache = DecoderCache(SIZES, 4, CPU, torch.float32)
    silence, audio = keys_values(1, WINDOW, seed=1), keys_values(2, length, seed=2)
    cache.write_silence(silence, is_shared)
    cache.write_audio([2, 0], audio)
    for layer in range(LAYERS):
        silent_keys, silent_values = by_head(*silence[layer])
        for slot, row in ((2, 0), (0, 1)):
            keys, values = by_head(*(each[row : row + 1] for each in audio[layer]))
            found = cache.audio(layer, [slot])
            assert torch.equal(found[0], torch.cat([keys, silent_keys[..., length:]], -1))
            assert torch.equal(found[1], torch.cat([values, silent_values[:, :, length:]], 2))
            assert torch.equal(cache.audio_keys(layer, slot, 500), keys[0, ..., :500])
    assert cache.has_short_audio([0]) is (is_shared and length < WINDOW)
    assert not cache.has_short_audio([1])


def test_a_text_reads_the_audio_that_it_was_given() -> None:
    cache = DecoderCache(SIZES, 4, CPU, torch.float32, num_texts=8)
    assert cache.audio_slots(slice(1, 3)) == slice(1, 3)
    assert cache.audio_slots(slice(3, 5)) == [3, 0]
    cache.attend_to([0, 1], [2, 2], torch.tensor([[0, 1], [2, 2]]))
    assert cache.audio_slots(slice(0, 2)) == [2, 2]
    found = cache.audio_slots(torch.tensor([0, 5]))
    assert isinstance(found, Tensor)
    assert found.tolist() == [2, 1]


def test_a_copied_text_takes_its_audio_along_where_slots_change_places() -> None:
    cache = DecoderCache(SIZES, 4, CPU, torch.float32)
    for slot in (0, 1):
        cache.keys[:, slot, :, :5] = slot + 1
        cache.values[:, slot, :, :5] = slot + 1
    cache.copy_text([(0, 1), (1, 0)], torch.tensor([(0, 1), (1, 0)]), 3)
    for tensor in (cache.keys, cache.values):
        assert (tensor[:, 0, :, :3] == 2).all()
        assert (tensor[:, 1, :, :3] == 1).all()
    assert cache.audio_slots(slice(0, 2)) == [1, 0]
    assert cache.audio_of.tolist() == [1, 0, 2, 3]


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("audio_dtype", [None, torch.bfloat16])
def test_the_bytes_of_a_chunk_are_those_that_are_allocated(
    num_ranks: int, audio_dtype: torch.dtype | None
) -> None:
    cache = DecoderCache(SIZES, 4, CPU, torch.float32, num_ranks, audio_dtype=audio_dtype, num_texts=8)
    allocated = sum(each.nbytes for each in (cache.keys, cache.values, cache.cross_keys, cache.cross_values))
    told = DecoderCache.bytes_per_chunk(SIZES, torch.float32, audio_dtype, num_texts=2)
    assert 4 * told == num_ranks * allocated


def test_packed_rows_have_one_slot_more_for_silence() -> None:
    cache = DecoderCache(SIZES, 4, CPU, torch.float32, audio_dtype=torch.uint8)
    text = cache.keys.nbytes + cache.values.nbytes
    audio = cache.cross_keys.nbytes + cache.cross_values.nbytes
    told = DecoderCache.bytes_per_chunk(SIZES, torch.float32, torch.uint8)
    assert (len(cache.cross_keys[0]), len(cache.cross_values[0])) == (5, 5)
    assert told * 20 == text * 5 + audio * 4
