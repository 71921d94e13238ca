"""Decode one token for every running chunk, with or without lookahead. `runner.py` launches the work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from asr_server.checkpoint.tokenizer import Tokenizer
from asr_server.core import ChunkResult
from asr_server.engine.active_chunk import ActiveChunk
from asr_server.engine.beam import BeamSearch, leads
from asr_server.engine.boost import keyword_boost
from asr_server.engine.cuda import HostCopy
from asr_server.engine.ranks import LeadingRunner
from asr_server.engine.runner import Runner, StepPlan
from asr_server.engine.slots import SlotStart, SlotTable
from asr_server.engine.tokens import noise_seed_of


class LaunchedSearch(NamedTuple):
    sequence: ActiveChunk
    beam: BeamSearch
    slots: tuple[int, ...]  # of its hypotheses
    restarts: int  # of the sequence, before this step


class Launched(NamedTuple):
    rows: list[tuple[ActiveChunk, int, int]]  # sequence, its slot, and its restarts before this step
    searches: list[LaunchedSearch]
    report: HostCopy


class Report:
    def __init__(self, lines: npt.NDArray[np.float64]) -> None:
        self.tokens, self.logprobs, self.no_speech = lines[:3].tolist()
        self._candidates = lines[3:].reshape(2, -1, lines.shape[1])
        self._likeliest: list[float] = []
        if len(lines) > 3:
            self._likeliest, self._likeliest_logprobs = self._candidates[:, 0].tolist()
            self._leads = leads(self._candidates[1].T)

    def append_if_sure(self, beam: BeamSearch, slot: int) -> bool:
        """Continue a search of one hypothesis by the device's token, if no other is close."""
        token = self.tokens[slot]
        return token == self._likeliest[slot] and beam.append_if_sure(
            int(token), self._likeliest_logprobs[slot], self._leads[slot]
        )

    def candidates(self, slots: Sequence[int]) -> list[Iterable[tuple[int, float]]]:
        rows = self._candidates[:, :, slots].transpose(2, 0, 1).tolist()
        return [zip(map(int, tokens), logprobs, strict=True) for tokens, logprobs in rows]


Finished = list[tuple[ActiveChunk, ChunkResult]]
OnEarlyResult = Callable[[ActiveChunk, ChunkResult], None]


class DecodeLoop:
    """Give every chunk one token a step; return the finished ones."""

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
        # Searches that have more hypotheses than slots, and which of those before each one continues.
        self._waiting: list[tuple[ActiveChunk, BeamSearch, list[int]]] = []

    @property
    def has_work(self) -> bool:
        return bool(self.sequences) or self._in_flight is not None

    @property
    def context(self) -> int:
        """Return the text positions that the next step reads."""
        unread = 0 if self._in_flight is None else 1
        last = max(sequence.position for sequence in self.sequences)
        return min(1 + unread + last, self._runner.model.sizes.text_positions)

    def step(self) -> Finished:
        self._branch_waiting()
        # With keywords the next scores depend on this token, which only the host knows.
        is_boosted = any(sequence.boost is not None for sequence in self.sequences)
        return self._step_overlapped() if self._overlapped and not is_boosted else self._step_plain()

    def _step_plain(self) -> Finished:
        finished, self._in_flight = self._collect(self._in_flight), None
        return finished + self._collect(self._launch())

    def _step_overlapped(self) -> Finished:
        """Start step t + 1 from tokens on the device while step t is copied.

        A chunk that ended with step t is computed once more, and dropped.
        """
        launched = self._launch()
        finished = self._collect(self._in_flight)
        self._in_flight = launched
        return finished

    def start(self, sequences: list[ActiveChunk]) -> None:
        for sequence in sequences:
            keywords = sequence.options.keywords
            boost = keyword_boost(self._tokenizer, keywords) if keywords else None
            sequence.begin(self._tokenizer.specials.end_of_text, boost)
        self._start(sequences)
        self.sequences.extend(sequences)

    def _start(self, sequences: list[ActiveChunk]) -> None:
        if sequences:
            self._runner.start([self._slot_start(sequence, sequence.slot) for sequence in sequences])

    def _slot_start(self, sequence: ActiveChunk, slot: int, tokens: tuple[int, ...] = ()) -> SlotStart:
        options, temperature = sequence.options, sequence.temperature
        noise_seed = noise_seed_of(options.seed, sequence.id, temperature) if temperature > 0 else 0
        return SlotStart(slot, sequence.prompt, options, temperature, noise_seed, tokens)

    # -- Launch -------------------------------------------------------------------------------------------

    def _launch(self) -> Launched | None:
        single = [sequence for sequence in self.sequences if sequence.beam is None]
        searches = [
            LaunchedSearch(sequence, sequence.beam, tuple(sequence.slots), sequence.restarts)
            for sequence in self.sequences
            if sequence.beam is not None
        ]
        waiting = self._waiting_searches()
        searches = [each for each in searches if id(each.sequence) not in waiting]
        if not single and not searches:
            return None
        hypotheses = [slot for each in searches for slot in each.slots]
        self.num_steps += 1
        self.num_tokens += len(single) + len(hypotheses)
        plan = self._plan(single, hypotheses, [*single, *(each.sequence for each in searches)])
        rows = [(sequence, sequence.slot, sequence.restarts) for sequence in single]
        return Launched(rows, searches, self._runner.decode(plan))

    def _waiting_searches(self) -> set[int]:
        """Return the chunks that skip the next step.

        With lookahead, a search of several hypotheses waits for the host.
        """
        in_flight = self._in_flight.searches if self._in_flight else []
        unread = (
            each.sequence
            for each in in_flight
            if len(each.beam.running) > 1 and each.sequence.restarts == each.restarts
        )
        return {id(sequence) for sequence in chain(unread, (waiting for waiting, _, _ in self._waiting))}

    def _plan(
        self, single: list[ActiveChunk], hypotheses: list[int], sequences: list[ActiveChunk]
    ) -> StepPlan:
        return StepPlan(
            num_rows=1 + max([*(sequence.slot for sequence in single), *hypotheses]),
            context=self.context,
            sampled=tuple(sequence.slot for sequence in single if sequence.temperature > 0),
            restricted=any(sequence.is_restricted for sequence in single if sequence.temperature > 0),
            penalised=tuple(
                sequence.slot for sequence in single if sequence.is_penalised and sequence.temperature == 0
            ),
            boosted=tuple(
                (slot, row) for sequence in sequences for slot, row in sequence.boost_rows() if row.tokens
            ),
        )

    # -- Collect ------------------------------------------------------------------------------------------

    def _collect(self, launched: Launched | None) -> Finished:
        if launched is None:
            return []
        report = Report(launched.report.array())
        ended = self._collect_tokens(launched, report) + self._collect_searches(launched, report)
        finished: Finished = []
        again: list[ActiveChunk] = []
        for sequence, result in ended:
            if sequence.next_try(result):
                again.append(sequence)
            else:
                sequence.finished = True
                kept = sequence.best_result(result)
                finished.append((sequence, sequence.with_fallbacks(kept)))
        self._start(again)
        self.sequences = [sequence for sequence in self.sequences if not sequence.finished]
        return finished

    def _collect_tokens(self, launched: Launched, report: Report) -> Finished:
        ended: Finished = []
        end_of_text = self._tokenizer.specials.end_of_text
        for sequence, slot, restarts in launched.rows:
            if sequence.finished or sequence.restarts != restarts:
                continue
            sequence.no_speech_prob = report.no_speech[slot]
            reason = sequence.append(int(report.tokens[slot]), report.logprobs[slot], end_of_text)
            if reason is not None:
                result = sequence.result(reason, self._tokenizer)
                ended.append((sequence, sequence.keep_early_result(result)))
            elif early_result := sequence.next_early_result(self._tokenizer):
                self._on_early_result(sequence, early_result)
        return ended

    # -- Beam search --------------------------------------------------------------------------------------

    def _collect_searches(self, launched: Launched, report: Report) -> Finished:
        ended: Finished = []
        branches: list[tuple[int, SlotStart]] = []
        for sequence, beam, slots, restarts in launched.searches:
            if sequence.finished or sequence.restarts != restarts:
                continue
            sequence.no_speech_prob = report.no_speech[slots[0]]
            is_sure = report.append_if_sure(beam, slots[0])
            parents = [0] if is_sure else beam.advance(report.candidates(slots))
            if beam.is_over or sequence.is_loop(beam.running[0].tokens, self._tokenizer.specials.end_of_text):
                self._slots.resize(sequence, 1)
                result = sequence.result_of_beam(beam, self._tokenizer)
                ended.append((sequence, sequence.keep_early_result(result)))
                continue
            if early_result := sequence.next_early_result(self._tokenizer):
                self._on_early_result(sequence, early_result)
            if not is_sure:  # else it goes on in its slot with the token that the device has chosen
                branches += self._branch(
                    sequence, beam, parents, [int(report.tokens[slot]) for slot in slots]
                )
        self._apply(branches)
        return ended

    def _branch(
        self, sequence: ActiveChunk, beam: BeamSearch, parents: list[int], chosen: Sequence[int]
    ) -> list[tuple[int, SlotStart]]:
        """Give each hypothesis a slot, its parent's if possible.

        Args:
            chosen: the token that the device has appended to each slot.
        Returns:
            the slots to set, each with its parent's slot.
        """
        slots_before = list(sequence.slots)
        order = _in_place(parents)
        if not self._slots.resize(sequence, len(order)):
            self._waiting.append((sequence, beam, parents))
            sequence.restarts += 1
            return []
        beam.reorder(order)
        going_on = [
            parents[index] == place and chosen[place : place + 1] == [beam.running[place].tokens[-1]]
            for place, index in enumerate(order)
        ]
        if self._overlapped and (len(slots_before) > 1 or len(order) > 1 or not all(going_on)):
            going_on = [False] * len(order)  # all have run on, in a step that is not for these hypotheses
        branches = [
            (slots_before[parents[index]], self._slot_start(sequence, slot, hypothesis.tokens))
            for index, slot, hypothesis, goes_on in zip(
                order, sequence.slots, beam.running, going_on, strict=True
            )
            if not goes_on
        ]
        sequence.restarts += bool(branches)
        return branches

    def _branch_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        branches: list[tuple[int, SlotStart]] = []
        for sequence, beam, parents in waiting:
            if not sequence.finished:
                branches += self._branch(sequence, beam, parents, [])
        self._apply(branches)

    def _apply(self, branches: list[tuple[int, SlotStart]]) -> None:
        if branches:
            sources, starts = zip(*branches, strict=True)
            self._runner.branch(sources, starts)


def _in_place(parents: list[int]) -> list[int]:
    """Order hypotheses so that most take their parents' places; return the hypothesis of each place."""
    count = len(parents)
    first = {parent: index for index, parent in reversed(list(enumerate(parents))) if parent < count}
    others = iter(sorted({*range(count)} - {*first.values()}))
    return [first[place] if place in first else next(others) for place in range(count)]
