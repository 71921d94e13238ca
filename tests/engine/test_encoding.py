"""Audio on its way into slots: on a CPU by threads, on a GPU (its streams and graphs imitated) by batches."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from asr_server.checkpoint.files import AudioWindow
from asr_server.core import SAMPLE_RATE
from asr_server.engine import encoding
from asr_server.engine.config import EngineConfig
from asr_server.engine.cuda import Transfers
from asr_server.engine.encoding import CpuEncoder, CudaEncoder, make_encoder
from asr_server.model import DecoderCache
from asr_server.model.kernels import TORCH
from asr_server.model.whisper import Encoder
from tests.engine.device_stand_ins import StandInGraphs
from tests.engine.small import LAYERS, SIZES, clip, small
from tests.engine.stream_stand_ins import StandInStream, imitate_streams

CPU = torch.device("cpu")
CONFIG = EngineConfig(device="cpu", num_slots=4, encode_batch=2, compute_workers=2)
CLIPS = [clip(seed, duration_s) for seed, duration_s in enumerate((0.3, 3.0, 0.9, 0.2))]
WHOLE = SIZES.audio_positions


def made(kind: Any, **config: Any) -> tuple[Any, DecoderCache]:
    model = small().model
    cache = model.new_cache(4)
    return kind(model, cache, replace(CONFIG, **config), Transfers(CPU, overlap=False), TORCH), cache


@torch.inference_mode()
def expected(number: int, length: int = WHOLE) -> list[tuple[Tensor, Tensor]]:
    """Return each layer's keys [H, d, F] and values [H, F, d] of a clip in `length` positions."""
    model = small().model
    silence = None if length == WHOLE else model.encode_silence()
    audio = model.encoder(model.log_mel([CLIPS[number]], 2 * length), silence=silence)
    cache = model.new_cache(1)
    cache.write_silence(model.decoder.cross_keys_values(model.encode_silence().audio))
    cache.write_audio([0], model.decoder.cross_keys_values(audio))
    return [tuple(each[0] for each in cache.audio(layer, [0])) for layer in range(LAYERS)]  # type: ignore[misc]


def check(cache: DecoderCache, slots: Sequence[int], lengths: Sequence[int] = (WHOLE,) * 4) -> None:
    for number, (slot, length) in enumerate(zip(slots, lengths, strict=False)):
        for layer, (keys, values) in enumerate(expected(number, length)):
            found = cache.audio(layer, [slot])
            torch.testing.assert_close(found[0][0], keys, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(found[1][0], values, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_each_chunk_is_written_into_its_slot(workers: int) -> None:
    encoder, cache = made(CpuEncoder, compute_workers=workers)
    assert encoder.window.short_lengths == ()
    for slots, chunks in (([2], CLIPS[:1]), ([0, 3], CLIPS[1:3])):
        pending = encoder.start(slots, chunks)
        assert pending.is_done()
        pending.join()
    check(cache, [2, 0, 3])
    encoder.close()
    if workers > 1:
        with pytest.raises(RuntimeError, match="after shutdown"):
            encoder.start([0, 1], CLIPS[:2])


def test_short_chunks_are_encoded_at_their_length_and_silence_follows() -> None:
    encoder, cache = made(CpuEncoder, short_audio="tail")
    lengths = [encoder.window.positions_for(len(each)) for each in CLIPS]
    assert lengths == [100, WHOLE, 125, 100]
    encoder.start([3, 1, 0, 2], CLIPS).join()
    assert cache.shares_silence
    assert cache.audio_lengths.tolist() == [WHOLE, WHOLE, WHOLE, WHOLE]
    check(cache, [3, 1, 0, 2], lengths)
    encoder.close()


@pytest.mark.parametrize(("threads", "workers", "num_chunks"), [(6, 2, 2), (6, 4, 3), (1, 2, 2), (6, 1, 3)])
def test_chunks_encoded_at_once_share_the_threads_out(
    threads: int, workers: int, num_chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    names: set[str] = set()
    forward = Encoder.forward

    def noted(*arguments: Any) -> Tensor:
        names.add(threading.current_thread().name.partition("_")[0])
        return forward(*arguments)

    monkeypatch.setattr(Encoder, "forward", noted)
    encoder, _ = made(CpuEncoder, compute_workers=workers)
    encoder.start(range(num_chunks), CLIPS[:num_chunks])
    at_once = min(workers, num_chunks)
    assert names == {"encode" if at_once > 1 else "MainThread"}
    assert asked == ([max(1, threads // at_once)] * num_chunks if at_once > 1 else [])
    encoder.close()


def test_an_error_of_one_chunk_is_raised_when_all_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, cache = made(CpuEncoder)
    write = cache.write_audio

    def fail_in_slot_0(slots: Sequence[int], keys_values: Any) -> None:
        if slots == [0]:
            raise ValueError("no room")
        write(slots, keys_values)

    monkeypatch.setattr(cache, "write_audio", fail_in_slot_0)
    with pytest.raises(ValueError, match="no room"):
        encoder.start([0, 2], [CLIPS[1], CLIPS[0]])
    monkeypatch.undo()
    check(cache, [2])
    encoder.close()


def test_a_gpus_encoder_is_made_for_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = small().model, small().model.new_cache(4), CONFIG, Transfers(CPU, overlap=False), TORCH
    assert isinstance(make_encoder(*parts), CpuEncoder)
    imitate_streams(monkeypatch, copy_overlap=False)
    monkeypatch.setattr(small().model, "device", torch.device("cuda"))
    monkeypatch.setattr(encoding, "_CudaWorker", lambda *_: None)
    assert isinstance(make_encoder(*parts), CudaEncoder)


# -- As on a GPU ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_graphs", [False, True])
@pytest.mark.parametrize("short_audio", ["exact", "tail"])
def test_a_batch_is_encoded_by_its_lengths(
    short_audio: str, has_graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    imitate_streams(monkeypatch, copy_overlap=False)
    monkeypatch.setattr(encoding, "_CUDA_LENGTHS", (100, 125))
    monkeypatch.setattr(StandInGraphs, "num_replays", 0)
    encoder, cache = made(CudaEncoder, short_audio=short_audio, cuda_graphs=has_graphs, encode_batch=3)
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


def test_batches_take_turns_on_the_workers_streams_and_wait_for_decoding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    imitate_streams(monkeypatch, copy_overlap=False)
    decoding = StandInStream.current
    encoder, _ = made(CudaEncoder, compute_workers=2, cuda_graphs=False)
    first, second = StandInStream.made[-2:]
    decoding.clock[decoding.number] = 17
    used: list[StandInStream] = []
    forward = Encoder.forward

    def noted(*arguments: Any) -> Tensor:
        used.append(StandInStream.current)
        return forward(*arguments)

    monkeypatch.setattr(Encoder, "forward", noted)
    pending = [encoder.start([slot], CLIPS[:1]) for slot in range(3)]
    assert used == [first, second, first]
    assert first.clock[decoding.number] == second.clock[decoding.number] == 17
    assert StandInStream.current is decoding
    first.clock[first.number] = 5
    last = encoder.start([0], CLIPS[:1])
    assert used[-1] is second
    second.clock[second.number] = 23
    later = encoder.start([1], CLIPS[:1])
    assert decoding.clock.get(first.number, 0) == 0
    later.join()
    assert decoding.clock[first.number] == 5, "decoding waits for the encode that it reads"
    while not last.is_done():
        pass
    assert all(each is not None for each in pending)
    encoder.close()
    with pytest.raises(RuntimeError, match="after shutdown"):
        encoder.start([0], CLIPS[:1])


def test_decoding_waits_for_an_encode_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was launched before may still write into slots that others get."""
    imitate_streams(monkeypatch, copy_overlap=False)
    decoding = StandInStream.current
    encoder, _ = made(CudaEncoder, compute_workers=1, cuda_graphs=False)
    (stream,) = StandInStream.made[-1:]

    def fail(*_: Any) -> Tensor:
        stream.clock[stream.number] = 9
        raise MemoryError

    monkeypatch.setattr(Encoder, "forward", fail)
    with pytest.raises(MemoryError):
        encoder.start([0], CLIPS[:1])
    assert decoding.clock[stream.number] == 9


def test_a_window_is_shared_by_as_many_short_chunks_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[tuple[int, int]] = []
    imitate_streams(monkeypatch, copy_overlap=False)
    monkeypatch.setattr(encoding, "_CUDA_LENGTHS", (50, 100))
    monkeypatch.setattr(encoding, "record_graphs", lambda _, shapes, *__: recorded.extend(shapes))
    made(CudaEncoder, device="cuda", short_audio="tail", encode_batch=2, compute_workers=1)
    most = {length: max(rows for rows, each in recorded if each == length) for _, length in recorded}
    assert most == {50: 6, 100: 3, WHOLE: 2}, "of two windows, and at most three chunks in the place of one"


def test_a_gpu_encodes_short_audio_in_multiples_of_5_s() -> None:
    """In few lengths: the encoder is recorded anew for each."""
    window = AudioWindow().for_short_audio("tail", encoding._CUDA_LENGTHS)
    assert window.short_lengths == tuple(range(250, 1500, 250))
    assert window.positions_for(0) == 250
    assert window.positions_for(30 * SAMPLE_RATE) == 1500
