"""Attention to short audio and the silence behind it, against plain softmaxes over whole windows."""

import math

import pytest
import torch
from torch import Tensor

from asr_server.model.layers import SilentLayer
from asr_server.model.products import pack_rows, unpack_rows
from asr_server.model.rows import OwnBlocks, find_blocks

HEADS, DEPTH, WINDOW, BLOCK = 2, 4, 200, 50
SLOTS = 3


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# -- The encoder's part ---------------------------------------------------------------------------------


def test_a_mean_has_the_weights_and_the_score_that_the_25_have_together() -> None:
    """By definition: of every fifth query of the window."""
    qkv = random(WINDOW, 3 * HEADS * DEPTH)
    layer = SilentLayer.of(qkv, HEADS)
    query, key, value = qkv.view(WINDOW, 3, HEADS, DEPTH).unbind(1)
    for group in (0, 3, WINDOW // 25 - 1):
        own = slice(25 * group, 25 * group + 25)
        for head in range(HEADS):
            scores = query[::5, head] @ key[own, head].t()
            weights = scores.softmax(-1).mean(0)
            mean_key, mean_value = weights @ key[own, head], weights @ value[own, head]
            found = layer.means[group].view(2, HEADS, DEPTH)[:, head]
            torch.testing.assert_close(found, torch.stack([mean_key, mean_value]))
            bias = (scores.exp().sum(-1).log() - query[::5, head] @ mean_key).mean()
            torch.testing.assert_close(layer.biases[head, group], bias)


@pytest.mark.parametrize(("length", "near"), [(50, 25), (60, 40), (75, 25), (101, 49), (149, 26)])
def test_half_to_one_second_behind_the_audio_is_read_as_it_is_then_means(length: int, near: int) -> None:
    layer = SilentLayer.of(random(WINDOW, 3 * HEADS * DEPTH), HEADS)
    behind = layer.behind(length)
    first_mean = (length + near) // 25
    assert torch.equal(behind.keys_values[:near], layer.keys_values[length : length + near])
    assert torch.equal(behind.keys_values[near:], layer.means[first_mean:])
    assert behind.biases is not None
    assert not behind.biases[:, :near].any()
    assert torch.equal(behind.biases[:, near:], layer.biases[:, first_mean:])


# -- The decoder's part ---------------------------------------------------------------------------------


class Stored:
    """Keys [slots, H, d, F] and values [slots, H, F, d] of slots and, behind them, of silence."""

    def __init__(self) -> None:
        keys, values = (
            random(SLOTS + 1, HEADS, DEPTH, WINDOW, seed=1),
            random(SLOTS + 1, HEADS, WINDOW, DEPTH),
        )
        in_blocks = keys.reshape(SLOTS + 1, HEADS, DEPTH, -1, BLOCK).transpose(2, 3)
        self.keys, self.values = pack_rows(in_blocks), pack_rows(values)
        unpacked = unpack_rows(self.keys, torch.float32)
        self.exact_keys = unpacked.transpose(-3, -2).flatten(-2)
        self.exact_values = unpack_rows(self.values, torch.float32)
        self.silence = self.exact_keys[SLOTS], self.exact_values[SLOTS]

    def expected(self, query: Tensor, slot: int, length: int, goes_on: bool) -> Tensor:
        """Attend from [H, d] to [D]."""
        keys, values = self.exact_keys[slot, ..., :length], self.exact_values[slot, :, :length]
        if goes_on:
            keys = torch.cat([keys, self.silence[0][..., length:]], -1)
            values = torch.cat([values, self.silence[1][:, length:]], -2)
        weights = (query[:, None] @ keys).softmax(-1)
        return (weights @ values).flatten()


def blocks(slots: list[int], lengths: list[int], silent_slot: int | None = None) -> OwnBlocks:
    return find_blocks(tuple(slots), tuple(lengths), HEADS, DEPTH, WINDOW, BLOCK, silent_slot)


@pytest.mark.parametrize(
    ("slots", "lengths"),
    [([2, 0], [50, 150]), ([0, 1, 2], [200, 50, 100]), ([1, 1, 2, 2], [100, 100, 150, 150]), ([1], [100])],
)
def test_each_query_attends_to_its_slots_audio_and_then_to_silence(
    slots: list[int], lengths: list[int]
) -> None:
    stored, query = Stored(), random(len(slots), 1, HEADS, DEPTH, seed=3)
    own = blocks(slots, lengths)
    assert len(own.owners) == HEADS * sum(lengths) // BLOCK
    found = own.attend(query, stored.keys, stored.values, stored.silence)
    assert found.shape == (len(slots), 1, HEADS * DEPTH)
    for row, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
        expected = stored.expected(query[row, 0], slot, length, goes_on=True)
        torch.testing.assert_close(found[row, 0], expected, atol=1e-5, rtol=1e-4)


def test_silence_of_a_packed_cache_is_read_from_its_own_slot() -> None:
    stored, query = Stored(), random(2, 1, HEADS, DEPTH, seed=3)
    own = blocks([2, 0], [50, 150], silent_slot=SLOTS)
    assert len(own.owners) == 2 * HEADS * WINDOW // BLOCK, "a whole window each"
    wrong = torch.full_like(stored.silence[0], math.nan), stored.silence[1]
    found = own.attend(query, stored.keys, stored.values, wrong)
    for row, (slot, length) in enumerate(((2, 50), (0, 150))):
        expected = stored.expected(query[row, 0], slot, length, goes_on=True)
        torch.testing.assert_close(found[row, 0], expected, atol=1e-5, rtol=1e-4)


def test_whole_windows_need_no_silence() -> None:
    stored, query = Stored(), random(2, 1, HEADS, DEPTH, seed=3)
    found = blocks([1, 0], [WINDOW] * 2).attend(query, stored.keys, stored.values, None)
    for row, slot in enumerate((1, 0)):
        expected = stored.expected(query[row, 0], slot, WINDOW, goes_on=False)
        torch.testing.assert_close(found[row, 0], expected, atol=1e-5, rtol=1e-4)
