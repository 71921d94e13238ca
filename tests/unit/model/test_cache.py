"""The decoder's keys and values: audio and the silence after it, whose audio a text reads, and sizes."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from asr_server.checkpoint.sizes import WhisperSizes
from asr_server.core import AudioWindow
from asr_server.model.cache import DecoderCache
from asr_server.model.kernels import Kernels
from tests.support.audio_cache import whole_audio

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


def write(cache: DecoderCache, slots: list[int], audio: list[tuple[Tensor, Tensor]]) -> None:
    for row, slot in enumerate(slots):
        cache.write_audio(slot, [(keys[row : row + 1], values[row : row + 1]) for keys, values in audio])


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
    write(cache, [2, 0], audio)
    for layer in range(LAYERS):
        silent_keys, silent_values = by_head(*silence[layer])
        for slot, row in ((2, 0), (0, 1)):
            keys, values = by_head(*(each[row : row + 1] for each in audio[layer]))
            found = whole_audio(cache, layer, slot)
            assert torch.equal(found[0], torch.cat([keys, silent_keys[..., length:]], -1))
            assert torch.equal(found[1], torch.cat([values, silent_values[:, :, length:]], 2))
            assert torch.equal(cache.audio_keys(layer, slot, 500), keys[0, ..., :500])
    assert cache.has_short_audio([0]) is (is_shared and length < WINDOW)
    assert not cache.has_short_audio([1])


@pytest.mark.parametrize("length", [550, WINDOW])
def test_a_gpu_stores_a_batch_as_the_cpu_stores_each_chunk(length: int) -> None:
    """A slot that comes twice, as where a batch has fewer chunks than its graph, gets its audio twice."""
    both = DecoderCache(SIZES, 4, CPU, torch.float32), DecoderCache(SIZES, 4, CPU, torch.float32)
    audio = [tuple(each[[0, 1, 1]] for each in layer) for layer in keys_values(2, length, seed=2)]
    for cache in both:
        cache.write_silence(keys_values(1, WINDOW, seed=1))
    both[0].store_audio(torch.tensor([2, 0, 0]), audio)  # type: ignore[arg-type]
    write(both[1], [2, 0], audio)  # type: ignore[arg-type]
    assert torch.equal(both[0].cross_keys, both[1].cross_keys)
    assert torch.equal(both[0].cross_values, both[1].cross_values)


def test_a_text_reads_the_audio_that_it_was_given() -> None:
    cache = DecoderCache(SIZES, 4, CPU, torch.float32, num_text_slots=8)
    assert cache.audio_slots(slice(1, 3)) == slice(1, 3)
    assert cache.audio_slots(slice(3, 5)) == [3, 0]
    cache.attend_to(torch.tensor([[0, 1], [2, 2]]))
    assert cache.audio_slots(slice(0, 2)) == [2, 2]
    found = cache.audio_slots(torch.tensor([0, 5]))
    assert isinstance(found, Tensor)
    assert found.tolist() == [2, 1]


def test_a_copied_text_takes_its_audio_along_where_slots_change_places() -> None:
    cache = DecoderCache(SIZES, 4, CPU, torch.float32)
    for slot in (0, 1):
        cache.keys[:, slot, :, :5] = slot + 1
        cache.values[:, slot, :, :5] = slot + 1
    cache.text_ends.extend([0, 1], 5)
    cache.copy_text([(0, 1), (1, 0)], torch.tensor([(0, 1), (1, 0)]), 3)
    for tensor in (cache.keys, cache.values):
        assert (tensor[:, 0, :, :3] == 2).all()
        assert (tensor[:, 1, :, :3] == 1).all()
        assert not tensor[:, :2, :, 3:5].any(), "of the texts before"
    assert cache.audio_slots(slice(0, 2)) == [1, 0]
    assert cache.audio_of.tolist() == [1, 0, 2, 3]


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("num_layers", [LAYERS, 3])
def test_the_bytes_of_a_chunk_are_those_that_are_allocated(num_layers: int, num_ranks: int) -> None:
    sizes = replace(SIZES, decoder_layers=num_layers)
    cache = DecoderCache(sizes, 4, CPU, torch.float32, num_ranks, num_text_slots=8)
    allocated = sum(each.nbytes for each in (cache.keys, cache.values, cache.cross_keys, cache.cross_values))
    told = DecoderCache.bytes_per_chunk(sizes, torch.float32, num_text_slots=2)
    assert 4 * told == num_ranks * allocated


# -- Audio in 8 bits ------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("length", [600, 750, WINDOW])
def test_audio_in_8_bits_is_read_nearly_as_it_was_written(is_shared: bool, length: int) -> None:
    """Each slot and head in its own steps: here their numbers differ by a hundred times."""
    cache = DecoderCache(SIZES, 4, CPU, torch.float32, int8_audio=True)
    silence, audio = keys_values(1, WINDOW, seed=1), keys_values(2, length, seed=2)
    scales = torch.tensor([1.0, 100.0])[:, None, None]
    audio = [(keys * scales, values * scales) for keys, values in audio]
    cache.write_silence(silence, is_shared)
    write(cache, [3, 1], audio)
    assert cache.shares_silence is is_shared
    for layer in range(LAYERS):
        silent_keys, silent_values = by_head(*silence[layer])
        for slot, row in ((3, 0), (1, 1)):
            keys, values = by_head(*(each[row : row + 1] for each in audio[layer]))
            found = whole_audio(cache, layer, slot)
            expected = torch.cat([keys, silent_keys[..., length:]], -1)
            assert (found[0] - expected).norm() / expected.norm() < 0.04
            expected = torch.cat([values, silent_values[:, :, length:]], 2)
            assert (found[1] - expected).norm() / expected.norm() < 0.04
            torch.testing.assert_close(cache.audio_keys(layer, slot, 500), found[0][0, ..., :500])
            assert cache.audio_keys(layer, slot, 500).shape == (HEADS, DEPTH, 500)
    assert cache.has_short_audio([3]) is (cache.shares_silence and length < WINDOW)


def test_packed_silence_is_rounded_once_for_all_who_read_it() -> None:
    cache = DecoderCache(SIZES, 4, CPU, torch.float32, int8_audio=True)
    silence = keys_values(1, WINDOW, seed=1)
    cache.write_silence(silence, is_shared=True)
    for layer in range(LAYERS):
        keys, values = by_head(*silence[layer])
        assert 0 < (cache.silent_keys[layer] - keys[0]).norm() / keys.norm() < 0.02
        assert 0 < (cache.silent_values[layer] - values[0]).norm() / values.norm() < 0.02


def test_a_kernel_has_rows_that_begin_at_multiples_of_16_and_no_shared_silence() -> None:
    sizes = replace(SIZES, window=AudioWindow(25))
    cache = DecoderCache(sizes, 2, CPU, torch.float32, kernels=Kernels(flash_decode=lambda *_: None))  # type: ignore[arg-type]
    assert cache.cross_keys.shape == (LAYERS, 2, HEADS, DEPTH, 25)
    assert cache.cross_keys.stride(3) == 32
    assert DecoderCache(sizes, 2, CPU, torch.float32).cross_keys.stride(3) == 25
    cache.write_silence(keys_values(1, 25, seed=1), is_shared=True)
    assert not cache.shares_silence


# -- Texts ----------------------------------------------------------------------------------------------


def test_a_new_text_clears_what_steps_have_written_behind_it_and_nothing_else() -> None:
    cache = DecoderCache(SIZES, 4, CPU, torch.float32)
    cache.begin_text([1, 2], slice(1, 3), 3)
    for _ in range(2):
        cache.text_ends.on_step(3)
    cache.keys.fill_(1)
    cache.values.fill_(1)
    cache.begin_text([2, 1], torch.tensor([2, 1]), 3)
    for tensor in (cache.keys, cache.values):
        assert not tensor[:, 1:3, :, 3:5].any()
        assert tensor[:, 1:3, :, 5:].all()
        assert tensor[:, 1:3, :, :3].all()
        assert tensor[:, [0, 3]].all()
    cache.keys.fill_(1)
    cache.begin_text([1], slice(1, 2), 3)
    assert cache.keys.all(), "nothing was written since"
