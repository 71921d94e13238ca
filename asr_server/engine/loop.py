"""Decodes one token for every running sequence, with or without lookahead. Used by `engine.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from asr_server.checkpoint.tokenizer import Tokenizer
from asr_server.core import ChunkResult
from asr_server.engine.ranks import LeadingRunner
from asr_server.engine.runner import Runner, StepPlan
from asr_server.engine.sampling import noise_seed_of
from asr_server.engine.sequence import Sequence
from asr_server.engine.slots import SlotStart
from asr_server.engine.transfers import HostCopy


class Launched(NamedTuple):
    """A step on the device, and whom its rows belong to."""

    rows: list[tuple[Sequence, int, int]]  # sequence, its slot, its step of the temperature ladder
    tokens: HostCopy


Finished = list[tuple[Sequence, ChunkResult]]
OnEarlyResult = Callable[[Sequence, ChunkResult], None]


class DecodeLoop:
    """Gives every sequence one token a step, and says which are finished."""

    def __init__(
        self,
        runner: Runner | LeadingRunner,
        tokenizer: Tokenizer,
        overlapped: bool,
        on_early_result: OnEarlyResult,
    ) -> None:
        self.sequences: list[Sequence] = []
        self.num_steps = 0
        self.num_tokens = 0
        self._runner = runner
        self._tokenizer = tokenizer
        self._overlapped = overlapped
        self._on_early_result = on_early_result
        self._in_flight: Launched | None = None

    @property
    def has_work(self) -> bool:
        return bool(self.sequences) or self._in_flight is not None

    def step(self) -> Finished:
        return self._step_overlapped() if self._overlapped else self._step_plain()

    def _step_plain(self) -> Finished:
        """Reads each step before the next one starts."""
        return self._collect(self._launch())

    def _step_overlapped(self) -> Finished:
        """Starts step t + 1 from the tokens on the device; reads step t, copied to the host meanwhile.

        Who finished with step t takes part in t + 1 for nothing; what comes of it is dropped.
        """
        launched = self._launch()
        finished = self._collect(self._in_flight)
        self._in_flight = launched
        return finished

    def start(self, sequences: list[Sequence]) -> None:
        """Sets slots to their prompts' ends: at first, and again at each step of the temperature ladder."""
        if sequences:
            self._runner.start([self._slot_start(sequence) for sequence in sequences])

    def _slot_start(self, sequence: Sequence) -> SlotStart:
        options, temperature = sequence.options, sequence.temperature
        noise_seed = noise_seed_of(options.seed, sequence.id, temperature) if temperature > 0 else 0
        return SlotStart(sequence.slot, sequence.prompt, options, temperature, noise_seed)

    def _launch(self) -> Launched | None:
        if not self.sequences:
            return None
        self.num_steps += 1
        self.num_tokens += len(self.sequences)
        rows = [(sequence, sequence.slot, sequence.temperature_index) for sequence in self.sequences]
        return Launched(rows, self._runner.decode(self._plan()))

    def _plan(self) -> StepPlan:
        unread = 0 if self._in_flight is None else 1
        context = 1 + unread + max(sequence.position for sequence in self.sequences)
        return StepPlan(
            num_rows=1 + max(sequence.slot for sequence in self.sequences),
            context=min(context, self._runner.model.sizes.text_positions),
            timestamps=any(sequence.options.timestamps for sequence in self.sequences),
            sampled=tuple(sequence.slot for sequence in self.sequences if sequence.temperature > 0),
            restricted=any(sequence.is_restricted for sequence in self.sequences if sequence.temperature > 0),
            penalised=tuple(
                sequence.slot
                for sequence in self.sequences
                if sequence.is_penalised and sequence.temperature == 0
            ),
        )

    def _collect(self, launched: Launched | None) -> Finished:
        """Hands the tokens of a step to their sequences."""
        if launched is None:
            return []
        finished: Finished = []
        retried: list[Sequence] = []
        tokens, logprobs, no_speech = launched.tokens.read()
        for sequence, slot, temperature_index in launched.rows:
            if sequence.finished or sequence.temperature_index != temperature_index:
                continue
            sequence.no_speech_prob = no_speech[slot]
            reason = sequence.append(int(tokens[slot]), logprobs[slot], self._tokenizer.specials.end_of_text)
            if reason is None:
                if early_result := sequence.next_early_result(self._tokenizer):
                    self._on_early_result(sequence, early_result)
                continue
            result = sequence.keep_early_result(sequence.result(reason, self._tokenizer))
            if sequence.next_temperature(result):
                retried.append(sequence)
            else:
                sequence.finished = True
                kept = sequence.best_result(result)
                kept = msgspec.structs.replace(kept, num_fallbacks=sequence.temperature_index)
                finished.append((sequence, kept))
        self.start(retried)
        self.sequences = [sequence for sequence in self.sequences if not sequence.finished]
        return finished
