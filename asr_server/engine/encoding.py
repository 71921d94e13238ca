"""Encode chunks and write each decoder layer's audio keys and values into slots.

Knows slots, not requests.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Protocol

import torch
from torch import Tensor

from asr_server.checkpoint.files import AudioWindow
from asr_server.core import Samples
from asr_server.engine.config import EngineConfig
from asr_server.engine.cuda import Transfers, batch_buckets, new_stream, record_graphs
from asr_server.model import DecoderCache, Whisper
from asr_server.model.kernels import Kernels
from asr_server.model.silence import Silence

FRAMES_PER_POSITION = 2  # the encoder's second convolution halves their number
# Positions. Few, because the encoder is recorded anew for each.
_CUDA_LENGTHS = (500, 1000)
_COPY_THREADS = 4  # that gather a batch's samples: 20 MB, for which a step waits


class PendingEncode:
    """Chunks being encoded into slots; on CPU, already encoded."""

    def __init__(self, encoded: torch.cuda.Event | None = None) -> None:
        self._encoded = encoded

    def is_done(self) -> bool:
        return self._encoded is None or bool(self._encoded.query())  # type: ignore[no-untyped-call]

    def join(self) -> None:
        if self._encoded is not None:
            torch.cuda.current_stream().wait_event(self._encoded)


class Encoder(Protocol):
    window: AudioWindow  # with the lengths in which chunks are encoded

    def start(self, slots: Sequence[int], chunks: Sequence[Samples]) -> PendingEncode:
        """Fill the audio part of these slots; CUDA may finish later."""
        ...

    def close(self) -> None: ...


def make_encoder(
    model: Whisper, cache: DecoderCache, config: EngineConfig, transfers: Transfers, kernels: Kernels
) -> Encoder:
    kind = CudaEncoder if model.device.type == "cuda" else CpuEncoder
    return kind(model, cache, config, transfers, kernels)


@torch.inference_mode()
def write_silence(model: Whisper, cache: DecoderCache, kernels: Kernels, is_shared: bool) -> Silence:
    """Encode silence into the cache: short audio continues with it."""
    silence = model.encode_silence(kernels)
    cache.write_silence(model.decoder.cross_keys_values(silence.audio), is_shared)
    return silence


class CpuEncoder:
    """Encode several chunks at once, the cores shared between them.

    A thread with its own chunk never waits. Two threads that share each product wait a hundred times a
    chunk, longer when a core is busy.
    """

    shares_silence = True

    def __init__(
        self,
        model: Whisper,
        cache: DecoderCache,
        config: EngineConfig,
        transfers: Transfers,
        kernels: Kernels,
    ) -> None:
        self._model, self._cache, self._kernels = model, cache, kernels
        self.window = model.sizes.window.for_short_audio(config.short_audio)
        self._silence: Silence | None = None
        if config.short_audio == "tail":
            self._silence = write_silence(model, cache, kernels, self.shares_silence)
        self._num_threads, self._num_workers = torch.get_num_threads(), config.compute_workers
        self._workers = ThreadPoolExecutor(config.compute_workers, thread_name_prefix="encode")

    def start(self, slots: Sequence[int], chunks: Sequence[Samples]) -> PendingEncode:
        num_at_once = min(len(chunks), self._num_workers)
        share = max(1, self._num_threads // num_at_once)
        by_slot = zip(slots, chunks, strict=True)
        if num_at_once == 1:
            for slot, chunk in by_slot:
                self._encode(slot, chunk)
        else:
            tasks = [self._workers.submit(self._encode, slot, chunk, share) for slot, chunk in by_slot]
            wait(tasks)
            for task in tasks:
                task.result()
        return PendingEncode()

    def close(self) -> None:
        self._workers.shutdown()

    @torch.inference_mode()
    def _encode(self, slot: int, chunk: Samples, num_threads: int | None = None) -> None:
        if num_threads is not None:
            torch.set_num_threads(num_threads)  # of this thread
        num_frames = FRAMES_PER_POSITION * self.window.positions_for(len(chunk))
        mel = self._model.log_mel([chunk], num_frames)
        audio = self._model.encoder(mel, self._kernels, self._silence)
        self._cache.write_audio(slot, self._model.decoder.cross_keys_values(audio))


class CudaEncoder:
    """Encode each batch on the next worker's stream, beside decoding."""

    def __init__(
        self,
        model: Whisper,
        cache: DecoderCache,
        config: EngineConfig,
        transfers: Transfers,
        kernels: Kernels,
    ) -> None:
        self.window = model.sizes.window.for_short_audio(config.short_audio, _CUDA_LENGTHS)
        silence: Silence | None = None
        if config.short_audio == "tail":
            silence = write_silence(model, cache, kernels, is_shared=False)
        parts = model, cache, config, transfers, kernels, self.window, silence
        self._workers = itertools.cycle([_CudaWorker(*parts) for _ in range(config.compute_workers)])
        self._copying = ThreadPoolExecutor(_COPY_THREADS, thread_name_prefix="gather")

    @torch.inference_mode()
    def start(self, slots: Sequence[int], chunks: Sequence[Samples]) -> PendingEncode:
        worker = next(self._workers)
        decoding = torch.cuda.current_stream()
        worker.stream.wait_stream(decoding)  # which may still move a chunk out of one of the slots
        try:
            with torch.cuda.stream(worker.stream):
                for num_positions, alike in self._by_length(slots, chunks).items():
                    worker.encode(num_positions, alike, self._copying)
                encoded = torch.cuda.Event()  # type: ignore[no-untyped-call]
                encoded.record()
                return PendingEncode(encoded)
        except BaseException:  # the slots are given to other chunks; what is launched must write first
            decoding.wait_stream(worker.stream)
            raise

    def close(self) -> None:
        self._copying.shutdown()
        torch.cuda.synchronize()

    def _by_length(
        self, slots: Sequence[int], chunks: Sequence[Samples]
    ) -> dict[int, list[tuple[int, Samples]]]:
        groups: dict[int, list[tuple[int, Samples]]] = {}
        for slot, chunk in zip(slots, chunks, strict=True):
            groups.setdefault(self.window.positions_for(len(chunk)), []).append((slot, chunk))
        return groups


class _CudaWorker:
    """Turn samples into cached audio, in one graph for each size of batch and length."""

    def __init__(
        self,
        model: Whisper,
        cache: DecoderCache,
        config: EngineConfig,
        transfers: Transfers,
        kernels: Kernels,
        window: AudioWindow,
        silence: Silence | None,
    ) -> None:
        self.stream = new_stream()
        self._model, self._cache, self._transfers = model, cache, transfers
        self._kernels, self._silence = kernels, silence
        most = config.encode_batch * window.num_positions
        self._rows = {
            length: batch_buckets(min(most // length, config.chunks_per_encode))
            for length in (*window.short_lengths, window.num_positions)
        }
        shapes = [(rows, length) for length, sizes in self._rows.items() for rows in sizes]
        device, num_samples = model.device, max(math.prod(self._shape(*shape)) for shape in shapes)
        self._samples = torch.zeros(num_samples, device=device)
        self._numbers = torch.zeros(2, max(rows for rows, _ in shapes), dtype=torch.long, device=device)
        self._graphs = record_graphs(self._compute, shapes, device) if config.cuda_graphs else None

    def encode(self, length: int, batch: list[tuple[int, Samples]], copying: ThreadPoolExecutor) -> None:
        sizes, log_mel = self._rows[length], self._model.log_mel
        num_rows = sizes[bisect_left(sizes, len(batch))]
        missing = num_rows - len(batch)  # the last chunk is encoded again, into its own slot
        slots, chunks = zip(*batch, *batch[-1:] * missing, strict=True)
        samples = log_mel.gather(chunks, self._shape(num_rows, length)[1], copying.map)
        self._transfers.fill(self._input(num_rows, length), samples)
        numbers = torch.stack([torch.tensor(slots), log_mel.lengths(chunks)])
        self._transfers.fill(self._numbers[:, :num_rows], numbers)
        if self._graphs is None:
            self._compute(num_rows, length)
        else:
            self._graphs.replay(num_rows, length)

    def _shape(self, num_rows: int, length: int) -> tuple[int, int]:
        return num_rows, self._model.log_mel.num_gathered(FRAMES_PER_POSITION * length)

    def _input(self, num_rows: int, length: int) -> Tensor:
        shape = self._shape(num_rows, length)
        return self._samples[: math.prod(shape)].view(shape)

    def _compute(self, num_rows: int, length: int) -> Tensor:
        slots, lengths = self._numbers[:, :num_rows].unbind()
        samples = self._input(num_rows, length)
        mel = self._model.log_mel.of_samples(samples, lengths, FRAMES_PER_POSITION * length)
        audio = self._model.encoder(mel, self._kernels, self._silence)
        self._cache.store_audio(slots, self._model.decoder.cross_keys_values(audio))
        return slots
