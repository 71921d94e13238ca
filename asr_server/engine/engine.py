"""One step: admit, encode, prefill, decode, align, emit.

A step takes waiting chunks into free slots, encodes them and decodes one token of every chunk, so new
ones join running ones. Active chunks fill slots 0 to n - 1: the next chunk or the last takes a freed
place. A beam's hypotheses share an audio slot. Runs on one thread; knows no HTTP, files or text.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice

import msgspec
import torch

from asr_server.checkpoint.tokenizer import Tokenizer
from asr_server.config import naming
from asr_server.core import ChunkResult
from asr_server.engine.active_chunk import ActiveChunk, Stage, Stages, is_broken
from asr_server.engine.alignment import ALIGN_BATCH, NAN, PendingAlignment
from asr_server.engine.config import EngineConfig, engine_info, load
from asr_server.engine.cuda import HostCopy, Pending
from asr_server.engine.loop import DecodeLoop
from asr_server.engine.runner import Broadcast, Runner
from asr_server.engine.slots import SlotTable
from asr_server.engine.tokens import GenerationRules, TokenRules
from asr_server.engine.warm_up import choose, warm_up
from asr_server.model import WHOLE, Shard, Whisper
from asr_server.transport.messages import (
    STEP_TIME_BOUNDS_S,
    Cancel,
    Command,
    Credit,
    Drain,
    EarlyResult,
    Event,
    Failed,
    Heartbeat,
    LanguageDetected,
    Result,
    SetLanguage,
    StepTimes,
    Submit,
)

logger = logging.getLogger(__name__)

_ENCODES_IN_FLIGHT = 2  # batches that a stream of a GPU has under way: one runs, the next one is ready
_ENCODE_BUDGET_S = 1.5  # longest that encoding may hold up chunks that are being decoded
_AT_WORK = (Stage.ENCODING, Stage.ASKED, Stage.ENCODED, Stage.DECODING)
_LONGEST_HELD_S = 1.0  # that an interim reading waits for urgent chunks
_MOST_ALIGNING = 32  # texts without slots whose token times are on the way


class Engine:
    """One replica's engine. Not thread-safe."""

    def __init__(
        self,
        model: Whisper,
        tokenizer: Tokenizer,
        rules: GenerationRules,
        config: EngineConfig | None = None,
        broadcast: Broadcast | None = None,
    ) -> None:
        config = (config or EngineConfig()).resolved(model.sizes, model.device, model.dtype, model.int8)
        self.model = model
        self.tokenizer = tokenizer
        self.config = config
        self.num_slots = config.num_slots
        self.num_steps = 0
        self.draining = False
        self._step_counts = [0] * (len(STEP_TIME_BOUNDS_S) + 1)  # the last one: longer than every bound
        self._steps_s = 0.0
        if broadcast is not None:  # the other ranks begin
            broadcast(config)
        token_rules = TokenRules(rules, tokenizer.specials, model.sizes.vocabulary, model.device)
        kernels, self.kernels_report = choose(config.kernels, model, token_rules)
        self._runner = Runner(model, rules, tokenizer, config, kernels, broadcast)
        self._slots = SlotTable(config.num_slots, config.beam_size, self._runner.row_sizes)
        self._stages = Stages()
        parts = self._runner, tokenizer, self._slots, self._stages
        self._loop = DecodeLoop(*parts, bool(config.lookahead), self._report)
        self._encoding: list[tuple[Pending, list[ActiveChunk]]] = []
        self._detecting: list[tuple[HostCopy, list[ActiveChunk]]] = []
        self._aligning: list[PendingAlignment] = []  # ended, but for the times of their tokens
        self._timed: deque[tuple[ActiveChunk, Future[ChunkResult]]] = deque()  # then these, in a thread
        # 100 tokens in 30 s would hold up a step for 5 ms; numpy gives the interpreter's lock away.
        self._token_times = ThreadPoolExecutor(1, "token-times")
        self._events: list[Event] = []
        self._seconds_per_encode = 0.0
        self._window = self._runner.window
        # On CPU each worker fills a window; otherwise all are encoded as one.
        each_alone = config.device == "cpu" and config.short_audio == "tail"
        self._most_encoded = config.chunks_per_encode
        self._num_loads = config.compute_workers if each_alone else 1
        self._most_encodes = 1 if config.device == "cpu" else _ENCODES_IN_FLIGHT * config.compute_workers
        self._most_positions = self._window.num_positions * (1 if each_alone else config.encode_batch)

    @classmethod
    def load(cls, config: EngineConfig, broadcast: Broadcast | None = None, shard: Shard = WHOLE) -> Engine:
        """Load the checkpoint and make an engine.

        Raises CheckpointError, ValueError or OSError: the checkpoint is damaged, the device missing or small.
        """
        started = time.monotonic()
        try:
            loaded = load(config, shard)
            loaded_at = time.monotonic()
            engine = cls(*loaded, broadcast)
            if engine.config.device == "cuda":
                made_at = time.monotonic()
                warm_up(engine._runner, engine.tokenizer, engine.num_slots)
                logger.info(
                    "weights %.1f s, kernels and graphs %.1f s, warm-up %.1f s; %.1f GiB of the GPU at most",
                    *(loaded_at - started, made_at - loaded_at, time.monotonic() - made_at),
                    torch.cuda.max_memory_reserved() / (1 << 30),
                )
            return engine
        except torch.OutOfMemoryError as error:
            remedy = f"lower {naming('max_slots')} or {naming('beam_size')}, or share the GPU less"
            raise ValueError(f"the GPU's memory does not hold the engine: {remedy} ({error})") from error

    # -- What others see ----------------------------------------------------------------------------------

    def initial_credit(self) -> Credit:
        """Return how many chunks may be sent at first: one encode batch.

        A chunk gives its credit back when it leaves the queue, so that the dispatcher, which is fair,
        decides late.
        """
        info = engine_info(self.config, self.kernels_report)
        return Credit(self._most_encoded, self.num_slots, info)

    @property
    def slots_in_use(self) -> int:
        return len(self._slots)

    def heartbeat(self) -> Heartbeat:
        """Return how far it has come; layers show progress within a step. Thread-safe."""
        return Heartbeat(
            num_steps=self.num_steps,
            slots_in_use=self.slots_in_use,
            num_decode_steps=self._loop.num_steps,
            num_decoded_tokens=self._loop.num_tokens,
            step_times=StepTimes(tuple(self._step_counts), self._steps_s),
            num_layers=self.model.encoder.progress[0] + self.model.decoder.progress[0],
            search_steps=self._loop.search_steps,
        )

    @property
    def has_work(self) -> bool:
        """Return whether a step would do anything: not if all chunks wait for SetLanguage."""
        can_admit = self._num_admissible > 0 and self._waiting()
        ready = self._not_held(Stage.ENCODED) or self._stages[Stage.DECODED] or self._loop.has_work
        on_device = self._encoding or self._detecting or self._aligning or self._timed
        return bool(can_admit or ready or on_device or self._events)

    def handle(self, command: Command) -> None:
        """Take a command. If a chunk cannot be decoded, the next step emits Failed."""
        match command:
            case Submit():
                given = command.id, command.samples, command.options, command.options.language
                self._submit(ActiveChunk(*given, beam_size=self.config.beam_size))
            case SetLanguage():
                for chunk in [asked for asked in self._stages[Stage.ASKED] if asked.id == command.id]:
                    chunk.language = command.language  # one of those that were asked about
                    self._stages.move(chunk, Stage.ENCODED)
            case Cancel():
                self._cancel(command)
            case Drain():
                self.draining = True

    def step(self) -> list[Event]:
        """Do one step; return the events since the last one."""
        self.num_steps += 1
        started_at, has_work = time.monotonic(), self.has_work
        with self._runner.launching():
            self._encode(self._admit())
            self._prefill()
            self._decode()
            self._align()
        if has_work:
            step_s = time.monotonic() - started_at
            self._step_counts[bisect_left(STEP_TIME_BOUNDS_S, step_s)] += 1
            self._steps_s += step_s
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        self._token_times.shutdown(cancel_futures=True)
        self._runner.close()

    # -- Commands -----------------------------------------------------------------------------------------

    def _submit(self, chunk: ActiveChunk) -> None:
        try:
            chunk.check(self.tokenizer.specials, self.model.sizes)
        except ValueError as error:
            self._finish(chunk, Failed(chunk.id, str(error)))
        else:
            if self.config.short_audio == "tail":
                chunk.end_with_audio(self.tokenizer.specials.timestamp_begin)
            self._stages.move(chunk, Stage.WAITING)

    def _cancel(self, command: Cancel) -> None:
        for chunk in self._stages.of_request(command.handle_id):
            if command.id not in (None, chunk.id):
                continue
            if chunk.stage is Stage.ENCODING:  # its slot is being written to: it is freed afterwards
                self._stages.move(chunk, Stage.CANCELLED)
            elif chunk.stage is not Stage.CANCELLED:
                self._finish(chunk)

    # -- Admit --------------------------------------------------------------------------------------------

    def _admit(self) -> list[ActiveChunk]:
        count = min(self._num_admissible, self._most_encoded)
        if self._loop.chunks and self._seconds_per_encode > 0.0:
            count = min(count, max(1, int(_ENCODE_BUDGET_S / self._seconds_per_encode)))
        if len(self._encoding) >= self._most_encodes:
            count = 0  # what comes meanwhile is encoded together, when one of them is done
        admitted: list[ActiveChunk] = []
        loads = [0] * self._num_loads  # positions encoded one after another, or as one
        for chunk in self._waiting()[:count]:
            load = loads.index(min(loads))
            loads[load] += self._window.positions_for(len(chunk.samples))
            if loads[load] > self._most_positions:
                break
            admitted.append(chunk)
            self._stages.move(chunk, Stage.ENCODING)
            self._slots.place(chunk)
            chunk.admitted_at = time.monotonic()
            self._events.append(Credit(1))
        return admitted

    def _waiting(self) -> list[ActiveChunk]:
        """Return the chunks that may be admitted, urgent ones first."""
        waiting = self._not_held(Stage.WAITING, beside=(Stage.WAITING, *_AT_WORK))
        return sorted(waiting, key=lambda chunk: -chunk.options.urgency)

    def _not_held(self, stage: Stage, beside: tuple[Stage, ...] = _AT_WORK) -> list[ActiveChunk]:
        """Leave out what waits for urgent chunks while one is in these stages, but not for ever."""
        chunks = list(self._stages[stage])
        if self.config.device != "cpu" or all(chunk.options.urgency >= 0 for chunk in chunks):
            return chunks  # on a GPU what is encoded and decoded beside an urgent chunk hardly delays it
        if not any(each.options.urgency > 0 for other in beside for each in self._stages[other]):
            return chunks
        since = time.monotonic() - _LONGEST_HELD_S
        return [chunk for chunk in chunks if chunk.options.urgency >= 0 or chunk.came_at < since]

    @property
    def _num_admissible(self) -> int:
        return self.num_slots - self.slots_in_use

    # -- Encode -------------------------------------------------------------------------------------------

    def _encode(self, admitted: list[ActiveChunk]) -> None:
        started = time.perf_counter()
        if admitted:
            with self._failing(admitted):
                slots = [chunk.slot for chunk in admitted]
                audio_slots = [chunk.audio_slot for chunk in admitted]
                samples = [chunk.samples for chunk in admitted]
                pending = self._runner.encode(slots, audio_slots, samples)
                self._encoding.append((pending, admitted))
                for chunk in admitted:
                    chunk.drop_samples()
            if len(admitted) > 1:  # one alone is encoded later, perhaps beside decoding
                self._seconds_per_encode = (time.perf_counter() - started) / len(admitted)
        self._take_encoded()

    def _take_encoded(self) -> None:
        idle = not self._loop.has_work
        while self._encoding and (idle or self._encoding[0][0].is_ready()):  # in the order they began
            pending, run = self._encoding.pop(0)
            with self._failing(run):
                pending.join()
                for chunk in run:
                    chunk.encoded_at = time.monotonic()
                    if chunk.stage is Stage.CANCELLED:
                        self._finish(chunk)
                    else:
                        self._stages.move(chunk, Stage.ENCODED)

    @contextmanager
    def _failing(self, run: list[ActiveChunk], doing: str = "encoding") -> Iterator[None]:
        """Let lack of memory and ValueError fail these chunks alone; other errors end the replica."""
        try:
            yield
        except (torch.OutOfMemoryError, MemoryError, ValueError) as error:
            for chunk in run:
                self._finish(chunk, Failed(chunk.id, f"{doing} failed: {error}"))

    # -- Prefill ------------------------------------------------------------------------------------------

    def _prefill(self) -> None:
        ready = self._not_held(Stage.ENCODED)
        unknown = [chunk for chunk in ready if self._needs_detection(chunk)]
        known = [chunk for chunk in ready if not self._needs_detection(chunk)]
        if unknown:
            with self._failing(unknown, "language detection"):
                slots = [chunk.slot for chunk in unknown]
                self._detecting.append((self._runner.language_probabilities(slots), unknown))
                for chunk in unknown:  # in their slots, until the answer comes
                    self._stages.move(chunk, Stage.ASKED)
        self._report_languages()
        for chunk in known:
            chunk.set_prompt(self.tokenizer.specials, self.model.sizes.text_positions)
        given = [chunk for chunk in known if chunk.options.given_tokens]
        for chunk in given:
            chunk.tokens = list(chunk.options.given_tokens)
            chunk.decoded = chunk.result("stop", self.tokenizer)
            self._stages.move(chunk, Stage.DECODED)
        groups: dict[tuple[int, int], list[ActiveChunk]] = {}
        for chunk in sorted(known, key=lambda chunk: chunk.slot):
            if chunk not in given:
                groups.setdefault((len(chunk.prompt), chunk.sot_index), []).append(chunk)
        for alike in groups.values():
            self._feed_prompts(alike)

    def _needs_detection(self, chunk: ActiveChunk) -> bool:
        return chunk.language is None and bool(self.tokenizer.specials.candidate_languages(chunk.options))

    def _report_languages(self) -> None:
        idle = not self._loop.has_work
        while self._detecting and (idle or self._detecting[0][0].is_ready()):
            rows, run = self._detecting.pop(0)
            for chunk, row in zip(run, rows.array().tolist(), strict=True):
                if chunk.stage is Stage.ASKED:
                    self._events.append(LanguageDetected(chunk.id, self._candidates(chunk, row)))

    def _candidates(self, chunk: ActiveChunk, probabilities: list[float]) -> dict[str, float]:
        weights = dict(zip(self.tokenizer.specials.languages, probabilities, strict=True))
        asked = self.tokenizer.specials.candidate_languages(chunk.options)
        total = sum(weights[code] for code in asked) or 1.0
        return {code: weights[code] / total for code in asked}

    def _feed_prompts(self, run: list[ActiveChunk]) -> None:
        start = run[0].sot_index
        fed = max(len(run[0].prompt) - 1, start + 1)
        slots = [chunk.slot for chunk in run]
        with self._failing(run, "prefill"):
            self._runner.prefill(slots, [chunk.prompt[:fed] for chunk in run], start)
            self._loop.start(run)

    # -- Decode -------------------------------------------------------------------------------------------

    def _decode(self) -> None:
        if moves := self._slots.compact(self._loop.chunks):
            self._runner.move(moves, self._loop.context)
        for chunk, result in self._loop.step():
            if is_broken(result):
                self._finish(chunk, Failed(chunk.id, NAN))
                continue
            is_full = 0 < chunk.options.full_letters <= self.tokenizer.num_letters(result.tokens)
            result = msgspec.structs.replace(result, is_full=is_full)
            if self._wants_alignment(chunk, result):
                chunk.decoded = result
            else:
                self._finish(chunk, Result(chunk.id, result, chunk.times()))

    def _wants_alignment(self, chunk: ActiveChunk, result: ChunkResult) -> bool:
        options = chunk.options
        if not options.word_timestamps or (options.text_only and result.is_full):
            return False
        return any(map(self.tokenizer.is_text, result.tokens))

    def _report(self, chunk: ActiveChunk, result: ChunkResult) -> None:
        self._events.append(EarlyResult(chunk.id, result))

    # -- Align --------------------------------------------------------------------------------------------

    def _align(self) -> None:
        room = _MOST_ALIGNING - len(self._aligning) - len(self._timed)
        batch = list(islice(self._stages[Stage.DECODED], max(0, min(room, ALIGN_BATCH))))
        if batch:
            with self._failing(batch, "alignment"):
                self._aligning += self._runner.align([(each, each.decoded) for each in batch if each.decoded])
                for chunk in batch:
                    self._finish(chunk)
        waits = not self._loop.has_work or not self.config.lookahead
        for pending in self._aligning[:ALIGN_BATCH]:
            if not waits and not pending.sums.is_ready():
                break  # they end in the order they began
            self._aligning.remove(pending)
            pending.sums.array()  # only this thread waits for a device
            self._timed.append((pending.chunk, self._token_times.submit(pending.aligned_result)))
        while self._timed and (waits or self._timed[0][1].done()):
            chunk, result = self._timed.popleft()
            with self._failing([chunk], "alignment"):
                self._events.append(Result(chunk.id, result.result(), chunk.times()))

    def _finish(self, chunk: ActiveChunk, event: Event | None = None) -> None:
        self._stages.move(chunk, Stage.ENDED)
        if chunk.slot >= 0:
            self._slots.free(chunk)
        elif not chunk.admitted_at:
            self._events.append(Credit(1))
        if event is not None:
            self._events.append(event)
