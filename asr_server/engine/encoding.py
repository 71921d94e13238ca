"""Encode chunks and write each decoder layer's audio keys and values into slots. Knows no requests."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from functools import partial

import torch
from torch import Tensor

from asr_server.core import Samples
from asr_server.engine.config import EngineConfig
from asr_server.engine.cuda import Pending, Transfers, new_stream, record_graphs, size_for, sizes_up_to
from asr_server.model import DecoderCache, Whisper
from asr_server.model.layers import Silence

FRAMES_PER_POSITION = 2  # the encoder's second convolution halves their number
_CUDA_LENGTHS = (500, 1000)  # positions: few, because the encoder is recorded anew for each
_COPY_THREADS = 4  # that gather a batch's samples: 20 MB, for which a step waits


def make_encoder(
    model: Whisper, cache: DecoderCache, config: EngineConfig, transfers: Transfers
) -> CpuEncoder | CudaEncoder:
    if model.device.type == "cuda":
        return CudaEncoder(model, cache, config, transfers)
    return CpuEncoder(model, cache, config)


@torch.inference_mode()
def _write_silence(model: Whisper, cache: DecoderCache, is_shared: bool) -> Silence:
    """Encode silence into the cache, with which short audio continues."""
    silence = model.encode_silence(cache.kernels)
    cache.write_silence(model.decoder.cross_keys_values(silence.audio), is_shared)
    return silence


class LoneEncode(Pending):
    """One chunk on CPU: encoded by all threads once it is waited for, or by half of them beside decoding."""

    def __init__(self, encode: Callable[[int], None], worker: Executor, num_threads: int) -> None:
        super().__init__(is_on_gpu=False)
        self._encode, self._worker, self._num_threads = encode, worker, num_threads
        self._task: Future[None] | None = None

    def is_ready(self) -> bool:
        if self._num_threads == 1:
            return True
        if self._task is None:
            share = self._num_threads // 2
            self._task = self._worker.submit(self._encode, share)
            torch.set_num_threads(self._num_threads - share)
        return self._task.done()

    def join(self) -> None:
        if self._task is None:
            self._encode(self._num_threads)
            return
        try:
            self._task.result()
        finally:
            torch.set_num_threads(self._num_threads)


class CpuEncoder:
    """Encode several chunks at once, the cores shared between them, or one beside decoding.

    A thread with its own work never waits. Two threads that share each product wait a hundred times a
    chunk, longer when a core is busy.
    """

    shares_silence = True

    def __init__(self, model: Whisper, cache: DecoderCache, config: EngineConfig) -> None:
        self._model, self._cache = model, cache
        self.window = model.sizes.window.for_short_audio(config.short_audio)
        is_shared = self.shares_silence
        self._silence = _write_silence(model, cache, is_shared) if config.short_audio == "tail" else None
        self._num_threads, self._num_workers = torch.get_num_threads(), config.compute_workers
        self._has_ranks = config.num_ranks > 1
        self._workers = ThreadPoolExecutor(config.compute_workers, thread_name_prefix="encode")

    def start(self, slots: Sequence[int], chunks: Sequence[Samples]) -> Pending:
        """Fill these audio slots."""
        encodes = [partial(self._encode, *each) for each in zip(slots, chunks, strict=True)]
        if len(encodes) == 1 and not self._has_ranks:  # whose sums cross one after another
            return LoneEncode(encodes[0], self._workers, self._num_threads)
        share = max(1, self._num_threads // min(len(chunks), self._num_workers))
        tasks = [self._workers.submit(encode, share) for encode in encodes]
        wait(tasks)
        for task in tasks:
            task.result()
        return Pending(is_on_gpu=False)

    def close(self) -> None:
        self._workers.shutdown()

    @torch.inference_mode()
    def _encode(self, slot: int, chunk: Samples, num_threads: int) -> None:
        torch.set_num_threads(num_threads)  # of this thread
        num_frames = FRAMES_PER_POSITION * self.window.positions_for(len(chunk))
        audio = self._model.encoder(
            self._model.log_mel([chunk], num_frames), self._cache.kernels, self._silence
        )
        self._cache.write_audio(slot, self._model.decoder.cross_keys_values(audio))


class CudaEncoder:
    """Encode each batch on the next worker's stream, beside decoding."""

    def __init__(
        self, model: Whisper, cache: DecoderCache, config: EngineConfig, transfers: Transfers
    ) -> None:
        silence = _write_silence(model, cache, is_shared=False) if config.short_audio == "tail" else None
        parts = model, cache, config, transfers, silence
        workers = [_CudaWorker(*parts) for _ in range(config.compute_workers)]
        self.window, self._workers = workers[0].window, itertools.cycle(workers)
        self._copying = ThreadPoolExecutor(_COPY_THREADS, thread_name_prefix="gather")

    @torch.inference_mode()
    def start(self, slots: Sequence[int], chunks: Sequence[Samples]) -> Pending:
        """Launch what fills these audio slots."""
        worker, decoding = next(self._workers), torch.cuda.current_stream()
        worker.stream.wait_stream(decoding)  # which may still read what was in one of them
        batches: dict[int, list[tuple[int, Samples]]] = {}
        for slot, chunk in zip(slots, chunks, strict=True):
            batches.setdefault(self.window.positions_for(len(chunk)), []).append((slot, chunk))
        try:
            with torch.cuda.stream(worker.stream):
                for num_positions, batch in batches.items():
                    worker.encode(num_positions, batch, self._copying)
                return Pending(is_on_gpu=True)
        except BaseException:  # the slots are given to other chunks; what is launched must write first
            decoding.wait_stream(worker.stream)
            raise

    def close(self) -> None:
        self._copying.shutdown()
        torch.cuda.synchronize()


class _CudaWorker:
    """Turn samples into cached audio, in one graph for each size of batch and length."""

    def __init__(
        self,
        model: Whisper,
        cache: DecoderCache,
        config: EngineConfig,
        transfers: Transfers,
        silence: Silence | None,
    ) -> None:
        self.stream = new_stream()
        self._model, self._cache, self._transfers, self._silence = model, cache, transfers, silence
        self.window = window = model.sizes.window.for_short_audio(config.short_audio, _CUDA_LENGTHS)
        most = config.encode_batch * window.num_positions
        self._sizes = {
            length: sizes_up_to(min(most // length, config.chunks_per_encode), most)
            for length in (*window.short_lengths, window.num_positions)
        }
        shapes = [(rows, length) for length, sizes in self._sizes.items() for rows in sizes]
        num_samples = max(rows * self._num_samples(length) for rows, length in shapes)
        self._samples = torch.zeros(num_samples, device=model.device)
        self._numbers = torch.zeros(2, config.chunks_per_encode, dtype=torch.long, device=model.device)
        self._graphs = record_graphs(self._compute, shapes, model.device) if config.cuda_graphs else None

    def encode(self, length: int, batch: list[tuple[int, Samples]], copying: ThreadPoolExecutor) -> None:
        num_rows, log_mel = size_for(len(batch), self._sizes[length]), self._model.log_mel
        missing = num_rows - len(batch)  # the last chunk is encoded again, into its own slot
        slots, chunks = zip(*batch, *batch[-1:] * missing, strict=True)
        samples, numbers = self._input(num_rows, length), self._numbers[:, :num_rows]
        gathered = log_mel.gather(chunks, samples.shape[1], copying.map)
        samples.copy_(self._transfers.to_device(gathered))
        numbers.copy_(self._transfers.to_device(torch.stack([torch.tensor(slots), log_mel.lengths(chunks)])))
        (self._compute if self._graphs is None else self._graphs.replay)(num_rows, length)

    def _num_samples(self, length: int) -> int:
        return self._model.log_mel.num_gathered(FRAMES_PER_POSITION * length)

    def _input(self, num_rows: int, length: int) -> Tensor:
        return self._samples[: num_rows * self._num_samples(length)].view(num_rows, -1)

    def _compute(self, num_rows: int, length: int) -> Tensor:
        slots, lengths = self._numbers[:, :num_rows].unbind()
        samples, num_frames = self._input(num_rows, length), FRAMES_PER_POSITION * length
        mel = self._model.log_mel.of_samples(samples, lengths, num_frames)
        audio = self._model.encoder(mel, self._cache.kernels, self._silence)
        self._cache.store_audio(slots, self._model.decoder.cross_keys_values(audio))
        return slots
