"""Decodes one token for every running sequence, with or without lookahead.

Heartbeats carry its histogram of step times to `/metrics`. Runs in the replica's process, on the engine's
thread. Used by `engine.py`; launches nothing on the device itself, `runner.py` does.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

from asr_server.channel.messages import STEP_TIME_BOUNDS_S, StepTimes
from asr_server.checkpoint.tokenizer import Tokenizer
from asr_server.core import ChunkResult
from asr_server.engine.active_chunk import ActiveChunk
from asr_server.engine.beam import BeamSearch
from asr_server.engine.ranks import LeadingRunner
from asr_server.engine.runner import Runner, StepPlan, StepResult
from asr_server.engine.slots import SlotStart, SlotTable
from asr_server.engine.tokens import noise_seed_of


class Launched(NamedTuple):
    """A step on the device, and the sequence of each of its rows."""

    rows: list[tuple[ActiveChunk, int, int]]  # sequence, its slot, and the number of tries before this one
    beams: list[tuple[ActiveChunk, BeamSearch]]
    result: StepResult


Finished = list[tuple[ActiveChunk, ChunkResult]]
OnEarlyResult = Callable[[ActiveChunk, ChunkResult], None]


class DecodeLoop:
    """Gives every sequence one token a step, and says which are finished."""

    def __init__(
        self,
        runner: Runner | LeadingRunner,
        tokenizer: Tokenizer,
        slots: SlotTable,
        overlapped: bool,
        on_early_result: OnEarlyResult,
    ) -> None:
        self.sequences: list[ActiveChunk] = []
        self.num_steps = 0
        self.num_tokens = 0
        self._runner = runner
        self._tokenizer = tokenizer
        self._slots = slots
        self._overlapped = overlapped
        self._on_early_result = on_early_result
        self._in_flight: Launched | None = None

    @property
    def has_work(self) -> bool:
        return bool(self.sequences) or self._in_flight is not None

    @property
    def num_slots_wanted(self) -> int:
        """How many slots beam searches wait for."""
        return sum(each.beam_size - 1 for each in self.sequences if _waits_for_slots(each))

    def step(self) -> Finished:
        self._begin_beams()
        return self._step_overlapped() if self._overlapped else self._step_plain()

    def _step_plain(self) -> Finished:
        """Reads each step before the next one starts."""
        return self._collect(self._launch())

    def _step_overlapped(self) -> Finished:
        """Starts step t + 1 from the tokens on the device; reads step t, copied to the host meanwhile.

        A sequence that ended with step t is still computed in t + 1; that result is dropped.
        """
        launched = self._launch()
        finished = self._collect(self._in_flight)
        self._in_flight = launched
        return finished

    def start(self, sequences: list[ActiveChunk]) -> None:
        """Sets slots to their prompts' ends: at first, and again at each step of the temperature ladder."""
        if sequences:
            self._runner.start([self._slot_start(sequence, sequence.slot) for sequence in sequences])

    def _slot_start(self, sequence: ActiveChunk, slot: int, tokens: tuple[int, ...] = ()) -> SlotStart:
        options, temperature = sequence.options, sequence.temperature
        noise_seed = noise_seed_of(options.seed, sequence.id, temperature) if temperature > 0 else 0
        return SlotStart(slot, sequence.prompt, options, temperature, noise_seed, tokens)

    # -- Launch -------------------------------------------------------------------------------------------

    def _launch(self) -> Launched | None:
        """A beam search takes part when the host has said with which tokens it goes on: with lookahead in
        every second step.
        """
        in_flight = [sequence for sequence, _ in self._in_flight.beams] if self._in_flight else []
        single = [sequence for sequence in self.sequences if sequence.beam is None]
        beams = [
            (sequence, sequence.beam)
            for sequence in self.sequences
            if sequence.beam and not _waits_for_slots(sequence) and sequence not in in_flight
        ]
        if not single and not beams:
            return None
        plan = self._plan(single, beams)
        self.num_steps += 1
        self.num_tokens += len(single) + len(plan.beams)
        rows = [(sequence, sequence.slot, len(sequence.tries)) for sequence in single]
        return Launched(rows, beams, self._runner.decode(plan))

    def _plan(self, single: list[ActiveChunk], beams: list[tuple[ActiveChunk, BeamSearch]]) -> StepPlan:
        unread = 0 if self._in_flight is None else 1
        positions = [sequence.position + unread for sequence in single]
        positions += [sequence.position_behind(len(beam.running[0].tokens)) for sequence, beam in beams]
        hypotheses = [slot for sequence, beam in beams for slot in sequence.slots[: len(beam.running)]]
        return StepPlan(
            num_rows=1 + max([*(sequence.slot for sequence in single), *hypotheses]),
            context=min(1 + max(positions), self._runner.model.sizes.text_positions),
            sampled=tuple(sequence.slot for sequence in single if sequence.temperature > 0),
            restricted=any(sequence.is_restricted for sequence in single if sequence.temperature > 0),
            penalised=tuple(
                sequence.slot for sequence in single if sequence.is_penalised and sequence.temperature == 0
            ),
            beams=tuple(hypotheses),
            num_candidates=max((beam.num_candidates for _, beam in beams), default=0),
        )

    # -- Collect ------------------------------------------------------------------------------------------

    def _collect(self, launched: Launched | None) -> Finished:
        """Hands the tokens of a step to their sequences."""
        if launched is None:
            return []
        ended = self._collect_tokens(launched) + self._collect_candidates(launched)
        finished: Finished = []
        again: list[ActiveChunk] = []
        for sequence, result in ended:
            if sequence.next_try(result, self._tokenizer.specials.end_of_text):
                again.append(sequence)
            else:
                sequence.finished = True
                kept = sequence.best_result(result)
                finished.append((sequence, sequence.with_counts(kept)))
        self.start([sequence for sequence in again if sequence.beam is None])
        self.sequences = [sequence for sequence in self.sequences if not sequence.finished]
        return finished

    def _collect_tokens(self, launched: Launched) -> Finished:
        """Gives each sequence without a beam its token; returns the tries that ended with it."""
        ended: Finished = []
        tokens, logprobs, no_speech = launched.result.tokens.read()
        for sequence, slot, num_tries in launched.rows:
            if sequence.finished or len(sequence.tries) != num_tries:
                continue
            sequence.no_speech_prob = no_speech[slot]
            reason = sequence.append(int(tokens[slot]), logprobs[slot], self._tokenizer.specials.end_of_text)
            if reason is not None:
                result = sequence.result(reason, self._tokenizer)
                ended.append((sequence, sequence.keep_early_result(result)))
            elif early_result := sequence.next_early_result(self._tokenizer):
                self._on_early_result(sequence, early_result)
        return ended

    # -- Beam search --------------------------------------------------------------------------------------

    def _begin_beams(self) -> None:
        """Starts waiting beam searches in order, each once there are slots for all its hypotheses."""
        for sequence in filter(_waits_for_slots, self.sequences):
            if self._slots.num_free < sequence.beam_size - 1:
                return
            self._slots.place(sequence, sequence.beam_size - 1)
            self._runner.fork(sequence.slot, sequence.slots[1:])
            self.start([sequence])  # the first hypothesis, from which all others come

    def _collect_candidates(self, launched: Launched) -> Finished:
        """Continues beam searches with their likeliest hypotheses; returns those that ended."""
        if launched.result.candidates is None:
            return []
        ended: Finished = []
        sources: list[int] = []
        starts: list[SlotStart] = []
        candidates = iter(launched.result.candidates.array().tolist())
        for sequence, beam in launched.beams:
            rows = [next(candidates) for _ in beam.running]
            if sequence.finished:
                continue
            parents = beam.advance(
                [zip(map(int, tokens), logprobs, strict=True) for tokens, logprobs in rows]
            )
            if beam.is_over:
                self._slots.free(sequence, kept=1)
                ended.append((sequence, sequence.result_of_beam(beam, self._tokenizer)))
                continue
            for slot, parent, hypothesis in zip(sequence.slots, parents, beam.running, strict=False):
                sources.append(sequence.slots[parent])
                starts.append(self._slot_start(sequence, slot, hypothesis.tokens))
        if starts:
            self._runner.branch(sources, starts)
        return ended


def _waits_for_slots(sequence: ActiveChunk) -> bool:
    return sequence.beam is not None and len(sequence.slots) < sequence.beam_size


class StepTimer:
    """Counts each step under the smallest bound that it keeps within. One thread writes, others may read."""

    def __init__(self) -> None:
        self._counts = [0] * (len(STEP_TIME_BOUNDS_S) + 1)  # the last one: longer than every bound
        self._sum_s = 0.0

    def add(self, step_s: float) -> None:
        self._counts[bisect_left(STEP_TIME_BOUNDS_S, step_s)] += 1
        self._sum_s += step_s

    @property
    def times(self) -> StepTimes:
        return StepTimes(tuple(self._counts), self._sum_s)
