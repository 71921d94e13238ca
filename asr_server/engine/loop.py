"""Decode one token for every running chunk, with or without lookahead. `runner.py` launches the work."""

from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from asr_server.checkpoint.tokenizer import Tokenizer
from asr_server.core import ChunkResult
from asr_server.engine.active_chunk import ActiveChunk, Stage, Stages
from asr_server.engine.beam import NUM_NAMED, BeamSearch, Candidates, NextTokens, leads
from asr_server.engine.boost import Row, keyword_boost
from asr_server.engine.cuda import HostCopy
from asr_server.engine.runner import Runner, StepPlan
from asr_server.engine.slots import SlotStart, SlotTable
from asr_server.engine.tokens import noise_seed_of


class LaunchedChunk(NamedTuple):
    """The work of a step for one chunk."""

    chunk: ActiveChunk
    beam: BeamSearch | None
    slots: tuple[int, ...]  # one, or of a search one for each hypothesis
    restarts: int  # of the chunk, before this step

    @property
    def is_current(self) -> bool:
        """Return whether the results are for what the chunk decodes now."""
        return self.chunk.stage is Stage.DECODING and self.chunk.restarts == self.restarts


def _launched(chunk: ActiveChunk) -> LaunchedChunk:
    return LaunchedChunk(chunk, chunk.beam, tuple(chunk.slots), chunk.restarts)


class LaunchedDraft(NamedTuple):
    """The check of a draft; the report has a column for each of its places."""

    chunk: LaunchedChunk
    draft: Sequence[int]
    report: HostCopy


class Launched(NamedTuple):
    chunks: list[LaunchedChunk]
    report: HostCopy | None  # None: no chunk but those with drafts
    drafts: list[LaunchedDraft]


Rows = list[tuple[int, Row]]  # slots, and what keywords name in each


class Report:
    """A step's outcome on the host; the lines are of `Runner.decode`."""

    def __init__(self, lines: npt.NDArray[np.float64], end_of_text: int) -> None:
        self.tokens, self.logprobs, self.no_speech = lines[:3].tolist()
        if len(lines) > 3:
            # The likeliest tokens of each slot and those that keywords name: [2, candidates, slots].
            self.candidates, self.named = (
                each.reshape(2, -1, lines.shape[1]) for each in np.split(lines[3:], [-2 * NUM_NAMED])
            )
            self._likeliest: list[float] = self.candidates[0, 0].tolist()
            tokens, logprobs = self.candidates.transpose(0, 2, 1)
            self._likeliest_logprobs, self._leads = leads(tokens, logprobs, end_of_text)

    def append_if_sure(self, beam: BeamSearch, slot: int, has_keywords: bool) -> bool:
        """Continue a search of one hypothesis by the device's token, if no other is close."""
        token = self.tokens[slot]
        if token != self._likeliest[slot]:
            return False
        others: NextTokens = ()
        if has_keywords:
            tokens, logprobs = self._all_but_likeliest
            others = zip(map(int, tokens[slot]), logprobs[slot], strict=True)
        return beam.append_if_sure(int(token), self._likeliest_logprobs[slot], self._leads[slot], others)

    @cached_property  # as each look into arrays takes longer than all of the rules
    def _all_but_likeliest(self) -> list[list[list[float]]]:
        """Return tokens and log-probabilities, [slots, candidates] each."""
        both = np.concatenate([self.candidates[:, 1:], self.named], axis=1)
        values: list[list[list[float]]] = both.transpose(0, 2, 1).tolist()
        return values


def _pairs(lines: npt.NDArray[np.float64], slots: Sequence[int]) -> Candidates:
    rows = lines[:, :, slots].transpose(2, 0, 1).tolist()
    return [zip(map(int, tokens), logprobs, strict=True) for tokens, logprobs in rows]


Finished = list[tuple[ActiveChunk, ChunkResult]]
Branches = list[tuple[int, SlotStart]]  # slots to set, with those of their parents
OnEarlyResult = Callable[[ActiveChunk, ChunkResult], None]


class DecodeLoop:
    """Give every chunk one token a step; return the finished ones."""

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer,
        slots: SlotTable,
        stages: Stages,
        looks_ahead: bool,
        on_early_result: OnEarlyResult,
    ) -> None:
        self._stages = stages
        self.num_steps = 0
        self.num_tokens = 0
        self.search_steps = (0, 0, 0)  # of chunks: all, sure ones, those of several hypotheses
        self._runner = runner
        self._tokenizer = tokenizer
        self._slots = slots
        self._looks_ahead = looks_ahead
        self._on_early_result = on_early_result
        self._in_flight: Launched | None = None

    @property
    def chunks(self) -> Collection[ActiveChunk]:
        return self._stages[Stage.DECODING]

    @property
    def has_work(self) -> bool:
        return bool(self.chunks) or self._in_flight is not None

    @property
    def context(self) -> int:
        """Return the text positions that the next step reads."""
        if self._in_flight and self._in_flight.drafts:
            return self._runner.model.sizes.text_positions  # how much of them stands is not known yet
        unread = 0 if self._in_flight is None else 1
        last = max(chunk.position for chunk in self.chunks)
        return min(1 + unread + last, self._runner.model.sizes.text_positions)

    def step(self) -> Finished:
        """With lookahead, start step t + 1 from tokens on the device while step t is copied.

        A chunk that ended with step t is computed once more, and dropped. So is a wrong guess of what
        keywords add behind the token of step t.
        """
        launched = self._launch()
        if not self._looks_ahead:
            return self._collect(launched)
        finished = self._collect(self._in_flight)
        self._in_flight = launched
        return finished

    def start(self, chunks: list[ActiveChunk]) -> None:
        for chunk in chunks:
            keywords = chunk.options.keywords
            boost = keyword_boost(self._tokenizer, keywords) if keywords else None
            chunk.begin(self._tokenizer.specials.end_of_text, boost)
        self._apply(self._restarts(chunks))
        for chunk in chunks:
            self._stages.move(chunk, Stage.DECODING)

    def _slot_start(self, chunk: ActiveChunk, slot: int, tokens: tuple[int, ...] = ()) -> SlotStart:
        options, temperature = chunk.options, chunk.temperature
        noise_seed = noise_seed_of(options.seed, chunk.id, temperature) if temperature > 0 else 0
        return SlotStart(slot, chunk.prompt, options, temperature, noise_seed, tokens)

    def _restart(self, chunk: ActiveChunk) -> SlotStart:
        """Return what sets the chunk's slot behind its text so far."""
        return self._slot_start(chunk, chunk.slot, tuple(chunk.running_tokens))

    def _restarts(self, chunks: list[ActiveChunk]) -> Branches:
        return [(chunk.slot, self._restart(chunk)) for chunk in chunks]

    # -- Launch -------------------------------------------------------------------------------------------

    def _launch(self) -> Launched | None:
        before = self._in_flight or Launched([], None, [])
        unread = {each.chunk for each in before.chunks if each.is_current}
        waiting = {each.chunk.chunk for each in before.drafts}
        # With lookahead, a search of several hypotheses waits for the host.
        waiting |= {chunk for chunk in unread if chunk.beam is not None and len(chunk.beam.running) > 1}
        going_on = [chunk for chunk in self.chunks if chunk not in waiting]
        if not going_on:
            return None
        self.num_steps += 1
        drafts = [
            LaunchedDraft(_launched(chunk), rest, self._runner.check_draft(self._restart(chunk), rest))
            for chunk in going_on
            if chunk not in unread and (rest := chunk.rest_of_draft())
        ]
        drafted = {each.chunk.chunk for each in drafts}
        stepping = [chunk for chunk in going_on if chunk not in drafted]
        if not stepping:
            return Launched([], None, drafts)
        self.num_tokens += sum(len(chunk.slots) for chunk in stepping)
        report = self._runner.decode(self._plan(stepping, unread))
        return Launched(list(map(_launched, stepping)), report, drafts)

    def _plan(self, chunks: list[ActiveChunk], unread: set[ActiveChunk]) -> StepPlan:
        boosted: Rows = []
        named: Rows = []
        for chunk in chunks:
            rows = chunk.boost_rows(chunk in unread)
            if chunk.beam is None:
                boosted += [(slot, row) for slot, row in rows if row.tokens]
            else:
                named += rows  # without tokens too: the step before has left some in its slot
        single = [chunk for chunk in chunks if chunk.beam is None]
        return StepPlan(
            num_rows=1 + max(max(chunk.slots) for chunk in chunks),
            context=self.context,
            sampled=tuple(chunk.slot for chunk in single if chunk.temperature > 0),
            restricted=any(chunk.is_restricted for chunk in single if chunk.temperature > 0),
            penalised=tuple(chunk.slot for chunk in single if chunk.is_penalised and chunk.temperature == 0),
            boosted=tuple(boosted),
            named=tuple(named),
        )

    # -- Collect ------------------------------------------------------------------------------------------

    def _collect(self, launched: Launched | None) -> Finished:
        if launched is None:
            return []
        current = [each for each in launched.chunks if each.is_current]
        ended: Finished = []
        branches: Branches = []
        if launched.report is not None:
            report = self._read(launched.report)
            for each in current:
                if result := self._take(each, report, branches):
                    ended.append((each.chunk, result))
        self._apply(branches)
        ended += [each for draft in launched.drafts for each in self._take_draft(draft)]
        finished: Finished = []
        again: list[ActiveChunk] = []
        for chunk, result in ended:
            if chunk.next_try(result):
                again.append(chunk)
            else:
                self._stages.move(chunk, Stage.DECODED)
                finished.append((chunk, chunk.best_result(result)))
        wrong = [each.chunk for each in current if each.is_current and each.chunk.has_guessed_wrong()]
        self._apply(self._restarts([*again, *wrong]))
        for chunk in wrong:
            chunk.restarts += 1
        return finished

    def _read(self, report: HostCopy) -> Report:
        return Report(report.array(), self._tokenizer.specials.end_of_text)

    def _take(
        self, launched: LaunchedChunk, report: Report, branches: Branches, is_draft: bool = False
    ) -> ChunkResult | None:
        """Go on by a step's outcome. Return the chunk's result if it has ended, else add to `branches`."""
        chunk, beam, slots, _ = launched
        slot, tokenizer = slots[0], self._tokenizer
        chunk.no_speech_prob = report.no_speech[slot]
        result, parents = None, None
        if beam is None:
            end_of_text = tokenizer.specials.end_of_text
            reason = chunk.append(int(report.tokens[slot]), report.logprobs[slot], end_of_text)
            if reason is None and chunk.is_loop(tokenizer):
                reason = "length"
            result = None if reason is None else chunk.result(reason, tokenizer)
        else:
            parents = self._advance(chunk, beam, slots, report)
            if beam.is_over or chunk.is_loop(tokenizer):
                self._slots.resize(chunk, 1)
                result = chunk.result_of_beam(beam, tokenizer)
        if result is not None:
            return chunk.keep_early_result(result)
        if early_result := chunk.next_early_result(tokenizer):
            self._on_early_result(chunk, early_result)
        if beam is not None and parents is not None:
            chosen = [] if is_draft else [int(report.tokens[each]) for each in slots]
            branches += self._branch(chunk, beam, parents, chosen)
        return None

    def _take_draft(self, launched: LaunchedDraft) -> Finished:
        """Take the places of a draft in turn, up to the first that says something else or is unsure."""
        chunk, beam = launched.chunk.chunk, launched.chunk.beam
        if not launched.chunk.is_current:
            return []
        report = self._read(launched.report)
        for place, token in enumerate((*launched.draft, None)):
            branches: Branches = []
            if result := self._take(launched.chunk._replace(slots=(place,)), report, branches, is_draft=True):
                return [(chunk, result)]
            is_wide = beam is not None and len(beam.running) > 1
            if is_wide or chunk.running_tokens[-1] != token:
                break
        if not is_wide:
            branches = self._restarts([chunk])
        self._apply(branches)
        return []

    # -- Beam search --------------------------------------------------------------------------------------

    def _advance(
        self, chunk: ActiveChunk, beam: BeamSearch, slots: Sequence[int], report: Report
    ) -> list[int] | None:
        """Return the parents of the new hypotheses; None if one goes on with the device's token."""
        has_keywords = chunk.boost is not None
        is_sure = report.append_if_sure(beam, slots[0], has_keywords)
        num_steps, num_sure, num_wide = self.search_steps
        self.search_steps = num_steps + 1, num_sure + is_sure, num_wide + (len(slots) > 1)
        if is_sure:
            return None
        named = _pairs(report.named, slots) if has_keywords else ()
        return beam.advance(_pairs(report.candidates, slots), named)

    def _branch(
        self, chunk: ActiveChunk, beam: BeamSearch, parents: list[int], chosen: Sequence[int]
    ) -> Branches:
        """Give each hypothesis a slot, its parent's if possible; return those to set, with their parents'.

        `chosen` are the tokens that the device has appended to the slots.
        """
        slots_before = list(chunk.slots)
        order = _in_place(parents)
        self._slots.resize(chunk, len(order))
        beam.running = [beam.running[index] for index in order]
        going_on = [
            parents[index] == place and chosen[place : place + 1] == [beam.running[place].tokens[-1]]
            for place, index in enumerate(order)
        ]
        if self._looks_ahead and (len(slots_before) > 1 or not all(going_on)):
            going_on = [False] * len(order)  # all have run on, in a step that is not for these hypotheses
        branches = [
            (slots_before[parents[index]], self._slot_start(chunk, slot, hypothesis.tokens))
            for index, slot, hypothesis, goes_on in zip(
                order, chunk.slots, beam.running, going_on, strict=True
            )
            if not goes_on
        ]
        chunk.restarts += bool(branches)
        return branches

    def _apply(self, branches: Branches) -> None:
        if branches:
            sources, starts = zip(*branches, strict=True)
            self._runner.branch(sources, starts)


def _in_place(parents: list[int]) -> list[int]:
    """Order hypotheses so that most take their parents' places; return the hypothesis of each place."""
    count = len(parents)
    first = {parent: index for index, parent in reversed(list(enumerate(parents))) if parent < count}
    others = iter(sorted({*range(count)} - {*first.values()}))
    return [first[place] if place in first else next(others) for place in range(count)]
