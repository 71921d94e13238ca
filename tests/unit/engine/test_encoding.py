"""Audio on its way into slots in batches, as on a GPU, whose streams and graphs are imitated."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from asr_server.engine import encoding
from asr_server.engine.config import EngineConfig
from asr_server.engine.cuda import Transfers
from asr_server.engine.encoding import CudaEncoder
from asr_server.model import DecoderCache
from asr_server.model.whisper import Encoder
from tests.support.audio_cache import whole_audio
from tests.unit.engine.device_stand_ins import StandInGraphs
from tests.unit.engine.small import LAYERS, SIZES, clip, small
from tests.unit.engine.stream_stand_ins import imitate_streams

CPU = torch.device("cpu")
CONFIG = EngineConfig(device="cpu", num_slots=4, encode_batch=2, compute_workers=2)
CLIPS = [clip(seed, duration_s) for seed, duration_s in enumerate((0.3, 3.0, 0.9, 0.2))]
WHOLE = SIZES.audio_positions


def made(**config: Any) -> tuple[CudaEncoder, DecoderCache]:
    model = small().model
    cache = model.new_cache(4)
    return CudaEncoder(model, cache, replace(CONFIG, **config), Transfers(CPU, overlap=False)), cache


@torch.inference_mode()
def expected(number: int, length: int = WHOLE) -> list[tuple[Tensor, Tensor]]:
    """Return each layer's keys [H, d, F] and values [H, F, d] of a clip in `length` positions."""
    model = small().model
    silence = None if length == WHOLE else model.encode_silence()
    audio = model.encoder(model.log_mel([CLIPS[number]], 2 * length), silence=silence)
    cache = model.new_cache(1)
    cache.write_silence(model.decoder.cross_keys_values(model.encode_silence().audio))
    cache.write_audio(0, model.decoder.cross_keys_values(audio))
    return [tuple(each[0] for each in whole_audio(cache, layer, 0)) for layer in range(LAYERS)]  # type: ignore[misc]


def check(cache: DecoderCache, slots: Sequence[int], lengths: Sequence[int]) -> None:
    for number, (slot, length) in enumerate(zip(slots, lengths, strict=False)):
        for layer, (keys, values) in enumerate(expected(number, length)):
            found = whole_audio(cache, layer, slot)
            torch.testing.assert_close(found[0][0], keys, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(found[1][0], values, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("has_graphs", [False, True])
@pytest.mark.parametrize("short_audio", ["exact", "tail"])
def test_a_batch_is_encoded_by_its_lengths(
    short_audio: str, has_graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    imitate_streams(monkeypatch, copy_overlap=False)
    monkeypatch.setattr(encoding, "_CUDA_LENGTHS", (100, 125))
    monkeypatch.setattr(StandInGraphs, "num_replays", 0)
    encoder, cache = made(short_audio=short_audio, cuda_graphs=has_graphs, encode_batch=3)
    batches: list[tuple[int, int]] = []
    forward = Encoder.forward

    def noted(own: Any, mel: Tensor, *others: Any, **named: Any) -> Tensor:
        batches.append((len(mel), mel.shape[-1] // 2))
        return forward(own, mel, *others, **named)

    monkeypatch.setattr(Encoder, "forward", noted)
    encoder.start([3, 1, 0, 2][:3], CLIPS[:3]).join()
    encoder.start([2], CLIPS[3:]).join()
    encoded = list(batches)
    is_short = short_audio == "tail"
    lengths = [100, WHOLE, 125, 100] if is_short else [WHOLE] * 4
    check(cache, [3, 1, 0, 2], lengths)
    assert not cache.shares_silence
    if is_short:
        assert encoded == [(1, 100), (1, WHOLE), (1, 125), (1, 100)]
    elif not has_graphs:
        assert encoded == [(3, WHOLE), (1, WHOLE)]
    assert StandInGraphs.num_replays == has_graphs * (4 if is_short else 2)
    encoder.close()
