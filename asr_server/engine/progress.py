"""Count the engine's layers and step times, which heartbeats carry to the API process."""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Sequence

from torch.utils.hooks import RemovableHandle

from asr_server.channel.messages import STEP_TIME_BOUNDS_S, StepTimes
from asr_server.model import Whisper


class LayerCount:
    """The layers computed outside of CUDA graphs."""

    def __init__(self, model: Whisper) -> None:
        layers = (*model.encoder.layers, *model.decoder.layers)
        counted = self._counted = [0]

        def add(*_: object) -> None:
            counted[0] += 1

        # Every way through a layer calls this part of it.
        hooks = [layer.qkv.register_forward_hook(add) for layer in layers]
        weakref.finalize(self, _remove, hooks)  # the model may outlive its engine

    @property
    def count(self) -> int:
        return self._counted[0]


def _remove(hooks: Sequence[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


class StepTimer:
    """A histogram of steps. One thread writes, others may read."""

    def __init__(self) -> None:
        self._counts = [0] * (len(STEP_TIME_BOUNDS_S) + 1)  # the last one: longer than every bound
        self._sum_s = 0.0

    def add(self, step_s: float) -> None:
        self._counts[bisect_left(STEP_TIME_BOUNDS_S, step_s)] += 1
        self._sum_s += step_s

    @property
    def times(self) -> StepTimes:
        return StepTimes(tuple(self._counts), self._sum_s)
