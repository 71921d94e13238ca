"""What heartbeats count: layers computed, and how long steps took."""

from __future__ import annotations

import gc

import pytest
import torch

from asr_server.channel.messages import STEP_TIME_BOUNDS_S
from asr_server.engine.progress import LayerCount, StepTimer
from tests.engine.small import LAYERS, clip, small


@torch.inference_mode()
def encode() -> None:
    model = small().model
    model.encoder(model.log_mel([clip(0)]))


def test_each_layer_counts_once_a_call_and_only_as_long_as_the_engine_lives() -> None:
    layers = [*small().model.encoder.layers, *small().model.decoder.layers]
    hooks_before = [len(layer.qkv._forward_hooks) for layer in layers]
    before, counter = LayerCount(small().model), LayerCount(small().model)
    assert counter.count == 0
    encode()
    assert before.count == counter.count == LAYERS
    del before
    gc.collect()
    encode()
    assert counter.count == 2 * LAYERS
    del counter
    gc.collect()
    hooks = [len(layer.qkv._forward_hooks) for layer in layers]
    assert hooks == hooks_before


def test_a_step_counts_at_the_first_bound_that_it_does_not_exceed() -> None:
    timer = StepTimer()
    assert timer.times.counts == (0,) * (len(STEP_TIME_BOUNDS_S) + 1)
    assert timer.times.sum_s == 0.0
    first, second, last = STEP_TIME_BOUNDS_S[0], STEP_TIME_BOUNDS_S[1], STEP_TIME_BOUNDS_S[-1]
    steps = [first / 2, first, (first + second) / 2, last, 2 * last, 3 * last]
    for step_s in steps:
        timer.add(step_s)
    expected = [2, 1, *[0] * (len(STEP_TIME_BOUNDS_S) - 3), 1, 2]
    assert list(timer.times.counts) == expected
    assert timer.times.sum_s == pytest.approx(sum(steps))
