"""Decodes one token for every running sequence, with or without lookahead.

Runs in the replica's process, on the engine's thread. Used by `engine.py`; `runner.py` launches the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from asr_server.checkpoint.tokenizer import Tokenizer
from asr_server.core import ChunkResult
from asr_server.engine.active_chunk import ActiveChunk
from asr_server.engine.beam import BeamSearch, leads
from asr_server.engine.ranks import LeadingRunner
from asr_server.engine.runner import Runner, StepPlan, StepResult
from asr_server.engine.slots import SlotStart, SlotTable
from asr_server.engine.tokens import noise_seed_of


class LaunchedSearch(NamedTuple):
    sequence: ActiveChunk
    beam: BeamSearch
    slots: tuple[int, ...]  # of its hypotheses
    restarts: int  # of the sequence, before this step


class Launched(NamedTuple):
    """A step on the device, and the sequence of each of its rows."""

    rows: list[tuple[ActiveChunk, int, int]]  # sequence, its slot, and its restarts before this step
    searches: list[LaunchedSearch]
    result: StepResult


class Candidates:
    """The likeliest next tokens of all hypotheses of a step, as in `StepResult`."""

    def __init__(self, values: npt.NDArray[np.float64]) -> None:
        self._values = values
        self._leads = leads(values[:, 1])
        self._likeliest: list[tuple[float, float]] = values[:, :, 0].tolist()

    def append_if_sure(self, beam: BeamSearch, row: int, chosen: float) -> bool:
        """Continues a search of one hypothesis by the token that the device has chosen, if none is close."""
        token, logprob = self._likeliest[row]
        return token == chosen and beam.append_if_sure(int(token), logprob, self._leads[row])

    def of(self, rows: slice) -> list[Iterable[tuple[int, float]]]:
        return [
            zip(map(int, tokens), logprobs, strict=True) for tokens, logprobs in self._values[rows].tolist()
        ]


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
        # Searches that have more hypotheses than slots, and which of those before each one continues.
        self._waiting: list[tuple[ActiveChunk, BeamSearch, list[int]]] = []

    @property
    def has_work(self) -> bool:
        return bool(self.sequences) or self._in_flight is not None

    @property
    def context(self) -> int:
        """Text positions that are looked at, in the next step or already."""
        unread = 0 if self._in_flight is None else 1
        last = max(sequence.position for sequence in self.sequences)
        return min(1 + unread + last, self._runner.model.sizes.text_positions)

    def step(self) -> Finished:
        self._branch_waiting()
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
        """Begins the first try of sequences that are fed with their prompts."""
        for sequence in sequences:
            sequence.begin(self._tokenizer.specials.end_of_text)
        self._start(sequences)
        self.sequences.extend(sequences)

    def _start(self, sequences: list[ActiveChunk]) -> None:
        """Sets slots to their prompts' ends: at first, and again at each step of the temperature ladder."""
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
            if sequence.beam is not None and self._can_go_on(sequence, sequence.beam)
        ]
        if not single and not searches:
            return None
        plan = self._plan(single, searches)
        self.num_steps += 1
        self.num_tokens += len(single) + len(plan.beams)
        rows = [(sequence, sequence.slot, sequence.restarts) for sequence in single]
        return Launched(rows, searches, self._runner.decode(plan))

    def _can_go_on(self, sequence: ActiveChunk, beam: BeamSearch) -> bool:
        """Whether a search takes part in the next step. With lookahead one of several hypotheses waits until
        the host has said how these go on; a single one goes on with the token that the device has chosen.
        """
        if any(sequence is waiting for waiting, _, _ in self._waiting):
            return False
        in_flight = self._in_flight.searches if self._in_flight else []
        unread = [(id(each.sequence), each.restarts) for each in in_flight]
        return len(beam.running) == 1 or (id(sequence), sequence.restarts) not in unread

    def _plan(self, single: list[ActiveChunk], searches: list[LaunchedSearch]) -> StepPlan:
        hypotheses = [slot for each in searches for slot in each.slots]
        return StepPlan(
            num_rows=1 + max([*(sequence.slot for sequence in single), *hypotheses]),
            context=self.context,
            sampled=tuple(sequence.slot for sequence in single if sequence.temperature > 0),
            restricted=any(sequence.is_restricted for sequence in single if sequence.temperature > 0),
            penalised=tuple(
                sequence.slot for sequence in single if sequence.is_penalised and sequence.temperature == 0
            ),
            beams=tuple(hypotheses),
            num_candidates=max((each.beam.num_candidates for each in searches), default=0),
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
            if sequence.next_try(result):
                again.append(sequence)
            else:
                sequence.finished = True
                kept = sequence.best_result(result)
                finished.append((sequence, sequence.with_fallbacks(kept)))
        self._start(again)
        self.sequences = [sequence for sequence in self.sequences if not sequence.finished]
        return finished

    def _collect_tokens(self, launched: Launched) -> Finished:
        """Gives each sequence without a beam its token; returns the tries that ended with it."""
        ended: Finished = []
        tokens, logprobs, no_speech = launched.result.tokens.read()
        for sequence, slot, restarts in launched.rows:
            if sequence.finished or sequence.restarts != restarts:
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

    def _collect_candidates(self, launched: Launched) -> Finished:
        """Continues searches with their likeliest hypotheses; returns those that ended."""
        if launched.result.candidates is None:
            return []
        ended: Finished = []
        branches: list[tuple[int, SlotStart]] = []
        chosen, _, no_speech = launched.result.tokens.read()
        candidates = Candidates(launched.result.candidates.array())
        end = 0
        for sequence, beam, slots, restarts in launched.searches:
            rows = slice(end, end := end + len(slots))
            if sequence.finished or sequence.restarts != restarts:
                continue
            sequence.no_speech_prob = no_speech[slots[0]]
            is_sure = candidates.append_if_sure(beam, rows.start, chosen[slots[0]])
            parents = [0] if is_sure else beam.advance(candidates.of(rows))
            if beam.is_over or sequence.is_loop(beam.running[0].tokens, self._tokenizer.specials.end_of_text):
                self._slots.resize(sequence, 1)
                result = sequence.result_of_beam(beam, self._tokenizer)
                ended.append((sequence, sequence.keep_early_result(result)))
                continue
            if early_result := sequence.next_early_result(self._tokenizer):
                self._on_early_result(sequence, early_result)
            if not is_sure:  # else it goes on in its slot with the token that the device has chosen
                branches += self._branch(sequence, beam, parents, [int(chosen[slot]) for slot in slots])
        self._apply(branches)
        return ended

    def _branch(
        self, sequence: ActiveChunk, beam: BeamSearch, parents: list[int], chosen: Sequence[int]
    ) -> list[tuple[int, SlotStart]]:
        """Gives each hypothesis a slot, that of its parent where it can.

        Args:
            chosen: the token by which each slot's text has gone on already, on the device.
        Returns:
            the slots that have to be set, and for each the slot of its parent.
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
        """Goes on with searches that waited for slots, in order."""
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
    """Orders hypotheses so that as many as can be take the places of their parents.

    Args:
        parents: of each hypothesis, the place of the one that it continues.
    Returns:
        for each place the index of a hypothesis.
    """
    count = len(parents)
    first = {parent: index for index, parent in reversed(list(enumerate(parents))) if parent < count}
    others = iter(sorted({*range(count)} - {*first.values()}))
    return [first[place] if place in first else next(others) for place in range(count)]
