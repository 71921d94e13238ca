"""Two ranks with half of the heads and inner columns each compute what one model computes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from asr_server.model import Whisper
from asr_server.model.rows import rows_of
from asr_server.model.sizes import WHOLE, Shard
from tests.unit.engine.small import HEADS, LAYERS, PROMPT, SIZES, clip, random_weights

CPU = torch.device("cpu")
COUNT = 2


class Sum:
    """Ranks in threads of this process."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(COUNT)
        self._parts: dict[int, Tensor] = {}

    def of_rank(self, rank: int) -> Callable[[Tensor], None]:
        def add_up(part: Tensor) -> None:
            self._parts[rank] = part.clone()
            self._barrier.wait(60)
            total = self._parts[0] + self._parts[1]
            self._barrier.wait(60)
            part.copy_(total)

        return add_up


@torch.inference_mode()
def computed(shard: Shard) -> tuple[list[int], Tensor, Tensor, Tensor]:
    """Return the heads that a silent layer has, audio in a whole and a short window, and scores."""
    model = Whisper(SIZES, CPU, torch.float32, shard)
    model.load_hugging_face(random_weights())
    silence = model.encode_silence()
    samples = clip(1, 1.5)
    audio = model.encoder(model.log_mel([samples]))
    short = model.encoder(model.log_mel([samples], 200), silence=silence)
    cache = model.new_cache(1)
    cache.write_silence(model.decoder.cross_keys_values(silence.audio))
    cache.write_audio(0, model.decoder.cross_keys_values(short))
    tokens, positions = torch.tensor([PROMPT]), torch.arange(len(PROMPT))[None]
    hidden = model.decoder(tokens, positions, rows_of(cache, slice(0, 1), positions, len(PROMPT)))
    return [len(layer.biases) for layer in silence.layers], audio, short, model.decoder.logits(hidden)


def test_ranks_that_add_up_their_parts_compute_what_one_model_does() -> None:
    heads, *expected = computed(WHOLE)
    assert heads == [HEADS] * LAYERS
    sums = Sum()
    with ThreadPoolExecutor(COUNT) as pool:
        ranks = list(pool.map(lambda rank: computed(Shard(rank, COUNT, sums.of_rank(rank))), range(COUNT)))
    for heads, *found in ranks:
        assert heads == [HEADS // COUNT] * LAYERS
        for own, whole in zip(found, expected, strict=True):
            torch.testing.assert_close(own, whole, atol=1e-3, rtol=1e-3)
    assert torch.equal(ranks[0][3], ranks[1][3]), "to the last bit: they choose the same token"
