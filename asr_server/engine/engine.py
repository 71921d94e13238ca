"""The step loop: admit, encode, decode, emit.

Chunks wait in one queue, first in, first out. A step takes some of them into free slots, encodes these, and
then decodes one token of every sequence, so that new ones join while others run. Sequences lie in slots 0 to
n - 1; where one leaves early, the next chunk or else the last sequence takes its place.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch

from asr_server.checkpoint import resolve_checkpoint
from asr_server.core import (
    Cancel,
    Command,
    Credit,
    Drain,
    Event,
    Failed,
    LanguageDetected,
    Result,
    SetLanguage,
    Submit,
)
from asr_server.engine.config import (
    ENCODE_BATCH,
    EngineConfig,
    available_cores,
    choose_device,
    choose_dtype,
    choose_num_slots,
)
from asr_server.engine.memory import keep_freed_memory
from asr_server.engine.rules import GenerationRules
from asr_server.engine.runner import Runner, StepPlan
from asr_server.engine.sampling import uniforms_of
from asr_server.engine.sequence import Sequence
from asr_server.model import Whisper, load_whisper
from asr_server.tokenizer import Tokenizer

_ENCODE_BUDGET_S = 0.5  # longest that encoding may hold up sequences that are being decoded


class Engine:
    """One replica's engine. Not thread-safe: one thread hands it commands and steps it."""

    def __init__(self, config: EngineConfig) -> None:
        """Loads the checkpoint.

        Raises:
            CheckpointError, ValueError, FileNotFoundError: the checkpoint cannot be had or is no Whisper.
        """
        device = choose_device(config.device)
        dtype = choose_dtype(config.dtype, device)
        if device.type == "cpu":
            torch.set_num_threads(config.cpu_threads or available_cores())
        directory = resolve_checkpoint(config.model)
        model = load_whisper(directory, device, dtype)
        if device.type == "cpu":
            keep_freed_memory()  # from here on: what loading needed is given back
        self._set_up(
            model,
            Tokenizer.from_directory(directory),
            GenerationRules.from_directory(directory),
            choose_num_slots(config.max_slots, model.sizes, device, dtype),
            config.encode_batch or ENCODE_BATCH[device.type],
        )

    @classmethod
    def of(
        cls,
        model: Whisper,
        tokenizer: Tokenizer,
        rules: GenerationRules,
        num_slots: int = 16,
        encode_batch: int = 8,
    ) -> Engine:
        """An engine on a model that is loaded already."""
        engine = cls.__new__(cls)
        engine._set_up(model, tokenizer, rules, num_slots, encode_batch)
        return engine

    def _set_up(
        self, model: Whisper, tokenizer: Tokenizer, rules: GenerationRules, num_slots: int, encode_batch: int
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.num_slots = num_slots
        self.encode_batch = encode_batch
        self.num_steps = 0
        self.draining = False
        self._runner = Runner(model, rules, tokenizer.specials, num_slots)
        self._waiting: deque[Sequence] = deque()
        self._slots: list[Sequence | None] = [None] * num_slots
        self._encoded: list[Sequence] = []  # their audio is in; the prompt is not
        self._held: list[Sequence] = []  # waiting for SetLanguage
        self._decoding: list[Sequence] = []
        self._events: list[Event] = []
        self._seconds_per_encode = 0.0
        self.num_decode_steps = 0
        self.num_decoded_tokens = 0

    # -- What others see ----------------------------------------------------------------------------------

    def initial_credit(self) -> Credit:
        """What a dispatcher may send before anything comes back: one encode batch.

        A credit is a place in the queue before the slots, given back when its chunk leaves that queue:
        the dispatcher, which knows what is fair, decides as late as it can.
        """
        return Credit(self.encode_batch, self.num_slots)

    @property
    def slots_in_use(self) -> int:
        return sum(sequence is not None for sequence in self._slots)

    @property
    def decode_batch_mean(self) -> float:
        """Sequences per decode step since the start."""
        return self.num_decoded_tokens / max(1, self.num_decode_steps)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything: not while all that is left waits for SetLanguage."""
        can_admit = bool(self._waiting) and self.slots_in_use < self.num_slots
        return bool(can_admit or self._encoded or self._decoding or self._events)

    def handle(self, command: Command) -> None:
        """Takes a command. What is wrong with a chunk does not raise: the next step emits Failed."""
        match command:
            case Submit():
                self._submit(Sequence.of(command))
            case SetLanguage():
                self._set_language(command)
            case Cancel():
                self._cancel(command.request_id)
            case Drain():
                self.draining = True

    def step(self) -> list[Event]:
        """Moves everything on by one token; what came of it since the last step."""
        self.num_steps += 1
        self._encode(self._admit())
        self._prefill()
        self._decode()
        return self._emit()

    # -- Commands -----------------------------------------------------------------------------------------

    def _submit(self, sequence: Sequence) -> None:
        try:
            self._check(sequence)
        except ValueError as error:
            self._finish(sequence, Failed(sequence.id, str(error)))
        else:
            self._waiting.append(sequence)

    def _check(self, sequence: Sequence) -> None:
        """Settles the language where it is plain. Raises ValueError for what cannot be decoded."""
        specials, options = self.tokenizer.specials, sequence.options
        candidates = self._candidates(sequence)
        if sequence.language is None and len(candidates) == 1:
            sequence.language = candidates[0]
        if not specials.is_multilingual:
            sequence.language = None
        elif sequence.language is not None and sequence.language not in specials.languages:
            raise ValueError(f"this checkpoint does not know the language {sequence.language!r}")
        if not options.temperatures or min(options.temperatures) < 0:
            raise ValueError("temperatures must be one or more numbers not below 0")
        if options.max_new_tokens is not None and options.max_new_tokens < 1:
            raise ValueError("max_new_tokens must be at least 1")
        if any(not 0 <= token < self.model.sizes.vocabulary for token in options.prompt_tokens):
            raise ValueError("a prompt token is not in this checkpoint's vocabulary")
        if len(sequence.samples) == 0 or not np.isfinite(sequence.samples).all():
            raise ValueError("no samples, or samples that are no numbers")
        sequence.set_prompt(specials, self.model.sizes.text_positions)

    def _candidates(self, sequence: Sequence) -> list[str]:
        """Languages to choose from: the request's as far as known, else all; English-only has none."""
        specials = self.tokenizer.specials
        if not specials.is_multilingual:
            return []
        wanted = [code for code in sequence.options.candidate_languages if code in specials.languages]
        return wanted or list(specials.languages)

    def _set_language(self, command: SetLanguage) -> None:
        for sequence in [held for held in self._held if held.id == command.id]:
            self._held.remove(sequence)
            if command.language in self.tokenizer.specials.languages:
                sequence.language = command.language
                self._encoded.append(sequence)
            else:
                message = f"this checkpoint does not know the language {command.language!r}"
                self._finish(sequence, Failed(sequence.id, message))

    def _cancel(self, request_id: str) -> None:
        for sequences in (self._waiting, self._encoded, self._held, self._decoding):
            for sequence in [each for each in sequences if each.id.request_id == request_id]:
                sequences.remove(sequence)
                self._finish(sequence)

    # -- Admit --------------------------------------------------------------------------------------------

    def _admit(self) -> list[Sequence]:
        """Gives waiting chunks the lowest free slots, as many as may be encoded now."""
        free = [slot for slot, sequence in enumerate(self._slots) if sequence is None]
        count = min(len(free), len(self._waiting), self._encode_allowance())
        admitted = [self._waiting.popleft() for _ in range(count)]
        for sequence, slot in zip(admitted, free, strict=False):
            self._place(sequence, slot)
            self._events.append(Credit(1))
        return admitted

    def _encode_allowance(self) -> int:
        """Chunks to encode in one step: fewer where that would stall sequences being decoded for long."""
        if not self._decoding or self._seconds_per_encode == 0.0:
            return self.encode_batch
        return max(1, min(self.encode_batch, int(_ENCODE_BUDGET_S / self._seconds_per_encode)))

    def _place(self, sequence: Sequence, slot: int) -> None:
        sequence.slot = slot
        self._slots[slot] = sequence

    # -- Encode -------------------------------------------------------------------------------------------

    def _encode(self, admitted: list[Sequence]) -> None:
        started = time.perf_counter()
        for run in _runs(admitted):
            try:
                self._runner.encode(run[0].slot, [sequence.samples for sequence in run])
            except (RuntimeError, ValueError) as error:  # out of memory, or samples of an impossible shape
                for sequence in run:
                    self._finish(sequence, Failed(sequence.id, f"encoding failed: {error}"))
            else:
                self._encoded.extend(run)
        if admitted:
            self._seconds_per_encode = (time.perf_counter() - started) / len(admitted)

    def _prefill(self) -> None:
        """Feeds prompts to sequences whose audio is in, but for the last token: the decode step does."""
        ready, self._encoded = self._encoded, []
        unknown = [sequence for sequence in ready if self._needs_detection(sequence)]
        known = [sequence for sequence in ready if not self._needs_detection(sequence)]
        for run in _runs(unknown):
            self._detect_language(run)
        for sequence in known:
            sequence.set_prompt(self.tokenizer.specials, self.model.sizes.text_positions)
        for run in _runs(known, key=lambda sequence: (len(sequence.prompt), sequence.sot_index)):
            self._feed_prompts(run)

    def _needs_detection(self, sequence: Sequence) -> bool:
        return sequence.language is None and bool(self._candidates(sequence))

    def _detect_language(self, run: list[Sequence]) -> None:
        """One decoder step on <|startoftranscript|> alone; the slots are held until the answer comes."""
        specials = self.tokenizer.specials
        codes = list(specials.languages)
        hidden = self._runner.prefill(run[0].slot, [[specials.start_of_transcript]] * len(run))[:, 0]
        rows = self._runner.probabilities(hidden, list(specials.languages.values()))
        for sequence, row in zip(run, rows, strict=True):
            weights = dict(zip(codes, row, strict=True))
            total = sum(weights[code] for code in self._candidates(sequence)) or 1.0
            probabilities = {code: weights[code] / total for code in self._candidates(sequence)}
            self._held.append(sequence)
            self._events.append(LanguageDetected(sequence.id, probabilities))

    def _feed_prompts(self, run: list[Sequence]) -> None:
        """Fills the text part of a run of slots and notes how likely each chunk is silence."""
        specials, start = self.tokenizer.specials, run[0].sot_index
        fed = max(len(run[0].prompt) - 1, start + 1)
        hidden = self._runner.prefill(run[0].slot, [sequence.prompt[:fed] for sequence in run])
        if specials.no_speech is not None:
            rows = self._runner.probabilities(hidden[:, start], [specials.no_speech])
            for sequence, (probability,) in zip(run, rows, strict=True):
                sequence.no_speech_prob = probability
        for sequence in run:
            self._start_decoding(sequence)
            self._decoding.append(sequence)

    def _start_decoding(self, sequence: Sequence) -> None:
        """Sets the slot to the prompt's end: at first, and again at each step of the temperature ladder."""
        options, state = sequence.options, self._runner.state
        uniforms = uniforms_of(options.seed, sequence.id, sequence.temperature, state.uniforms.shape[1])
        state.begin(sequence.slot, sequence.prompt, self.tokenizer.specials.timestamp_begin - 1)
        state.set_options(sequence.slot, options, sequence.temperature, uniforms)

    # -- Decode -------------------------------------------------------------------------------------------

    def _decode(self) -> None:
        """One token for every sequence."""
        self._close_gaps()
        if not self._decoding:
            return
        self.num_decode_steps += 1
        self.num_decoded_tokens += len(self._decoding)
        tokens, logprobs = self._runner.decode(self._plan())
        end_of_text = self.tokenizer.specials.end_of_text
        running: list[Sequence] = []
        for sequence in self._decoding:
            reason = sequence.append(tokens[sequence.slot], logprobs[sequence.slot], end_of_text)
            if reason is None:
                running.append(sequence)
                continue
            result = sequence.result(reason, self.tokenizer)
            if sequence.next_rung(result):
                self._start_decoding(sequence)
                running.append(sequence)
            else:
                self._finish(sequence, Result(sequence.id, result))
        self._decoding = running

    def _plan(self) -> StepPlan:
        return StepPlan(
            num_rows=self.slots_in_use,
            context=1 + max(sequence.position for sequence in self._decoding),
            timestamps=any(sequence.options.timestamps for sequence in self._decoding),
            sampled=tuple(sequence.slot for sequence in self._decoding if sequence.temperature > 0),
            penalised=tuple(sequence.slot for sequence in self._decoding if sequence.is_penalised),
        )

    def _close_gaps(self) -> None:
        """Moves the last sequences into free slots before them."""
        used = self.slots_in_use
        gaps = [slot for slot in range(used) if self._slots[slot] is None]
        last = [sequence for sequence in self._slots[used:] if sequence is not None]
        for gap, sequence in zip(gaps, last, strict=True):
            self._runner.move(sequence.slot, gap)
            self._slots[sequence.slot] = None
            self._place(sequence, gap)

    # -- Emit ---------------------------------------------------------------------------------------------

    def _finish(self, sequence: Sequence, event: Event | None = None) -> None:
        """Frees what the sequence holds: its slot or its place in the queue."""
        if sequence.slot >= 0:
            self._slots[sequence.slot] = None
        else:
            self._events.append(Credit(1))
        if event is not None:
            self._events.append(event)

    def _emit(self) -> list[Event]:
        events, self._events = self._events, []
        return events


def _runs(
    sequences: Iterable[Sequence], key: Callable[[Sequence], object] = lambda sequence: None
) -> Iterator[list[Sequence]]:
    """Groups sequences with the same key that lie in neighbouring slots."""
    run: list[Sequence] = []
    for sequence in sorted(sequences, key=lambda sequence: sequence.slot):
        if run and (sequence.slot != run[-1].slot + 1 or key(sequence) != key(run[-1])):
            yield run
            run = []
        run.append(sequence)
    if run:
        yield run
