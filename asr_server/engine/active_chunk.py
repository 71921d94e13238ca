"""The host's record of one chunk: prompt, tokens, tries, result.

Checks a chunk's length, language and tokens before anything is computed. Knows no tensors and no device.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property
from typing import Final, Literal

import msgspec
import numpy as np

from asr_server.checkpoint.sizes import WhisperSizes
from asr_server.checkpoint.tokenizer import SpecialTokens, Tokenizer
from asr_server.core import POSITIONS_PER_S, SAMPLE_RATE, ChunkId, ChunkResult, DecodingOptions, Samples
from asr_server.engine.beam import BeamSearch
from asr_server.engine.boost import KeywordBoost, Row
from asr_server.levels import Pauses, find_pauses
from asr_server.transport.messages import ChunkTimes

# A sentence that somebody says twice compresses to less than this; a loop of the model's to a fifth and less.
LOOP_COMPRESSION_RATIO: Final = 3.5
# Above it only what repeats itself is read again: of an unlikely text a try there is hardly ever likelier.
HIGHEST_FOR_UNLIKELY: Final = 0.4
# A text that repeats itself for so many tokens a second, which nobody says, will go on so.
_LOOP_TOKENS_PER_S: Final = 5.4
_FEWEST_LOOP_TOKENS: Final = 48
_LONGEST_REPEATED: Final = 32
_TOKENS_PER_LOOP_CHECK: Final = 8
_TOKENS_ALIKE: Final = 2  # at the end of text and draft, behind which the draft goes on
_FEWEST_DRAFTED: Final = 3  # tokens: a check takes as long as two steps
_BESIDE_GIVEN: Final = 3  # tokens: a language that is detected yet, <|notimestamps|> and the text's end


class Stage(Enum):
    """A chunk's way through the engine."""

    NEW = auto()
    WAITING = auto()  # for a slot
    ENCODING = auto()
    CANCELLED = auto()  # while it is encoded: its slot is still being written
    ASKED = auto()  # for its language
    ENCODED = auto()  # its audio is in; the prompt is not
    DECODING = auto()
    DECODED = auto()  # in its slot until its words are aligned
    ENDED = auto()  # finished, failed or cancelled: what still comes for it is dropped


class Stages:
    """The chunks of each stage, in the order in which they came to it."""

    def __init__(self) -> None:
        self._chunks: dict[Stage, dict[ActiveChunk, None]] = {stage: {} for stage in Stage}

    def __getitem__(self, stage: Stage) -> Collection[ActiveChunk]:
        return self._chunks[stage].keys()

    def of_request(self, handle_id: str) -> list[ActiveChunk]:
        return [each for own in self._chunks.values() for each in own if each.id.handle_id == handle_id]

    def move(self, chunk: ActiveChunk, stage: Stage) -> None:
        self._chunks[chunk.stage].pop(chunk, None)
        chunk.stage = stage
        if stage is not Stage.ENDED:
            self._chunks[stage][chunk] = None


@dataclass(eq=False)
class ActiveChunk:
    """A chunk from submission to result. Its slots change as others free up.

    The first try is a beam search; it is greedy for a `beam_size` of 1, a translation, a temperature or
    penalties.
    """

    id: ChunkId
    samples: Samples
    options: DecodingOptions
    language: str | None  # None: to be detected
    slots: list[int] = field(default_factory=list)  # one, or of a beam search one for each hypothesis
    audio_slot: int = -1  # what all of them attend to
    beam_size: int = 1  # most hypotheses of its beam search; 1: there is none
    prompt: list[int] = field(default_factory=list)
    sot_index: int = 0  # of <|startoftranscript|> in the prompt
    max_tokens: int = 0
    audio_end: float = math.inf  # the timestamp from which on no segment may begin
    temperature_index: int = 0  # of the temperature ladder
    beam: BeamSearch | None = None  # where the try under way is one
    boost: KeywordBoost | None = None  # of its keywords
    boost_state: int = KeywordBoost.start  # without a beam
    guess: int | None = None  # this state in the step under way, where the token before was not read yet
    restarts: int = 0  # how often its slots were set anew: results of steps before that are dropped
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sum_logprob: float = 0.0  # end-of-text included
    no_speech_prob: float = 0.0
    came_at: float = field(default_factory=time.monotonic)  # to the engine
    admitted_at: float = 0.0  # to its slot
    encoded_at: float = 0.0
    pauses: Pauses = field(default_factory=lambda: np.empty((0, 2)))  # of the audio, for word times
    num_examined: int = 0  # tokens up to the last segment that was examined for an early result
    early_result: ChunkResult | None = None  # reported: what follows may not take it back
    tries: list[ChunkResult] = field(default_factory=list)  # that have ended, each at the whole chunk
    stage: Stage = Stage.NEW  # set by `Stages.move` alone
    decoded: ChunkResult | None = None  # whose words are to be aligned

    @property
    def slot(self) -> int:
        return self.slots[0] if self.slots else -1

    def end_with_audio(self, first_time: int) -> None:
        """Let no segment begin after the audio's end, where it would repeat the last sentence.

        Whole windows keep openai-whisper's texts, which have such segments. `first_time` is timestamp 0.
        """
        self.audio_end = first_time - (-len(self.samples) * POSITIONS_PER_S // SAMPLE_RATE)

    def drop_samples(self) -> None:
        if self.options.word_timestamps:
            self.pauses = find_pauses(self.samples)
        self.samples = np.broadcast_to(np.float32(0), len(self.samples))

    @property
    def temperature(self) -> float:
        return self.options.temperatures[self.temperature_index]

    @property
    def running_tokens(self) -> Sequence[int]:
        return self.tokens if self.beam is None else self.beam.running[0].tokens

    @property
    def position(self) -> int:
        return len(self.prompt) - 1 + len(self.running_tokens)

    @cached_property
    def is_restricted(self) -> bool:
        return (self.options.top_k, self.options.top_p, self.options.min_p) != (0, 1.0, 0.0)

    @cached_property
    def is_penalised(self) -> bool:
        options = self.options
        return bool(options.frequency_penalty or options.presence_penalty) or options.repetition_penalty != 1

    def check(self, specials: SpecialTokens, sizes: WhisperSizes) -> None:
        """Set the language if it is given or only one is possible.

        Raises ValueError: the chunk cannot be decoded as asked.
        """
        options, possible = self.options, specials.candidate_languages(self.options)
        self.language = options.language or (possible[0] if len(possible) == 1 else None)
        if not specials.is_multilingual:
            self.language = None
        elif self.language is not None and self.language not in specials.languages:
            raise ValueError(f"this checkpoint does not know the language {self.language!r}")
        tokens = (*options.prompt_tokens, *options.given_tokens)
        if any(not 0 <= token < sizes.vocabulary for token in tokens):
            raise ValueError("a token of the prompt or the given text is not in this checkpoint's vocabulary")
        if len(self.samples) > sizes.window.num_samples:  # as a text's stretch of 30 s for a model of 8 s
            raise ValueError(f"the chunk is longer than the model's window of {sizes.window.duration_s:g} s")
        prompt, _ = specials.prompt(options, self.language, sizes.text_positions)
        if len(prompt) + _BESIDE_GIVEN + len(options.given_tokens) > sizes.text_positions:
            raise ValueError(f"the given text has more than {sizes.text_positions} tokens")

    def set_prompt(self, specials: SpecialTokens, num_positions: int) -> None:
        """Set the prompt and the most tokens after it. Raises ValueError: the checkpoint cannot translate."""
        self.prompt, self.sot_index = specials.prompt(self.options, self.language, num_positions)
        room = num_positions - len(self.prompt)
        wanted = self.options.max_new_tokens
        self.max_tokens = room if wanted is None else min(room, wanted)

    @property
    def is_greedy(self) -> bool:
        """Return whether the likeliest tokens are chosen, by a search or one by one."""
        return self.temperature == 0 and not self.is_penalised

    def begin(self, end_of_text: int, boost: KeywordBoost | None = None) -> None:
        self.boost = boost
        if self.beam_size > 1 and self.is_greedy and self.options.task != "translate":
            size = self.beam_size, self.max_tokens
            self.beam = BeamSearch(*size, end_of_text, audio_end=self.audio_end, boost=boost)

    @property
    def boost_states(self) -> list[int]:
        if self.beam is None:
            return [self.boost_state]
        return [each.match.state for each in self.beam.running]

    def boost_rows(self, has_unread: bool) -> list[tuple[int, Row]]:
        """Return the tokens that keywords name in each slot. Behind an unread token the state is a guess."""
        self.guess = None
        if self.boost is None or not self.is_greedy:
            return []
        states = self.boost_states
        if has_unread:
            self.guess = self.boost.guess(states[0])
            states = [self.guess]
        return list(zip(self.slots, map(self.boost.row, states), strict=True))

    def has_guessed_wrong(self) -> bool:
        if self.boost is None or self.guess is None or self.boost_states == [self.guess]:
            return False
        return self.boost.row(self.boost_states[0]) != self.boost.row(self.guess)

    def rest_of_draft(self) -> Sequence[int]:
        """Return what the draft says behind the text's last two tokens, wherever they stand in it."""
        draft = self.options.draft_tokens
        if not draft or self.temperature_index or not self.is_greedy or self.boost is not None:
            return ()
        if self.beam is not None and not self.beam.agrees:
            return ()
        tokens = self.running_tokens
        last, count = tuple(tokens[-_TOKENS_ALIKE:]), len(tokens)
        ends = [end for end in range(len(draft)) if draft[max(0, end - _TOKENS_ALIKE) : end] == last]
        rest = draft[min(ends, key=lambda end: abs(end - count)) :] if ends else ()
        return rest[: self.max_tokens - count] if len(rest) >= _FEWEST_DRAFTED else ()

    def append(self, token: int, logprob: float, end_of_text: int) -> Literal["stop", "length"] | None:
        self.sum_logprob += logprob
        begins_after_audio = bool(self.tokens) and self.tokens[-1] > end_of_text and token >= self.audio_end
        # NaN ends it at once: it is not to be moved into other slots.
        if token == end_of_text or begins_after_audio or is_no_number(logprob):
            return "stop"
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.boost is not None:
            self.boost_state = self.boost.step(self.boost_state, token)
        return "length" if len(self.tokens) >= self.max_tokens else None

    def is_loop(self, tokenizer: Tokenizer) -> bool:
        """Return whether the text goes on repeating itself; checked every few tokens.

        A try that another follows, or a tentative one, is over at once. The last try repeats itself for
        longer than anybody speaks; a greedy one is exempt, as it follows openai-whisper to the end.
        """
        tokens, options = self.running_tokens, self.options
        has_enough = options.is_tentative or len(tokens) >= _FEWEST_LOOP_TOKENS
        if not has_enough or len(tokens) % _TOKENS_PER_LOOP_CHECK:
            return False
        if options.is_tentative or self.temperature_index + 1 < len(options.temperatures):
            failing_ratio = max(LOOP_COMPRESSION_RATIO, options.compression_ratio_threshold)
            return compression_ratio(tokenizer.decode(tokens).strip()) > failing_ratio
        if self.beam is None and self.temperature == 0:
            return False
        duration_s = len(self.samples) / SAMPLE_RATE
        count = max(_FEWEST_LOOP_TOKENS, round(duration_s * _LOOP_TOKENS_PER_S))
        text = [token for token in tokens if token < tokenizer.specials.end_of_text][-count:]
        periods = range(1, min(_LONGEST_REPEATED, count // 3) + 1)
        return len(text) == count and any(text[period:] == text[:-period] for period in periods)

    def result(self, reason: Literal["stop", "length"], tokenizer: Tokenizer) -> ChunkResult:
        return ChunkResult(
            tokens=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            avg_logprob=self.sum_logprob / (len(self.tokens) + 1),
            no_speech_prob=self.no_speech_prob,
            compression_ratio=compression_ratio(tokenizer.decode(self.tokens).strip()),
            temperature=self.temperature,
            language=self.language if len(tokenizer.specials.languages) > 1 else None,
            finish_reason=reason,
        )

    def result_of_beam(self, beam: BeamSearch, tokenizer: Tokenizer) -> ChunkResult:
        best = beam.best()
        self.tokens, self.logprobs = list(best.tokens), list(best.logprobs)
        self.sum_logprob = best.sum_logprob - best.match.earned
        return self.result("stop" if best.is_ended else "length", tokenizer)

    def next_early_result(self, tokenizer: Tokenizer) -> ChunkResult | None:
        """Return the closed segments if there is a new one and they are plausible.

        A segment closed at the audio's start is not reported: nothing could follow. The search is bound
        by its report.
        """
        if not self.options.early_results or (self.beam is not None and not self.beam.agrees):
            return None
        tokens = self.running_tokens
        num_tokens = _num_closed(tokens, self.num_examined, tokenizer.specials.timestamp_begin)
        if num_tokens == self.num_examined:
            return None
        self.num_examined = num_tokens
        if self.beam is not None:
            self.logprobs = list(self.beam.running[0].logprobs[:num_tokens])
            self.tokens, self.sum_logprob = list(tokens[:num_tokens]), sum(self.logprobs)
        result = self.result("length", tokenizer)
        if result.is_implausible(self.options):
            return None
        if self.beam is not None:
            self.beam.bind(num_tokens)
        self.early_result = result
        return result

    def keep_early_result(self, result: ChunkResult) -> ChunkResult:
        """Return the early result if the final one is silence or wholly unread."""
        early = self.early_result
        if early is None or not result.is_implausible(self.options):
            return result
        is_last = self.temperature_index + 1 == len(self.options.temperatures)
        if is_last and result.needs_fallback(self.options):
            return result  # there is no further step: it is taken as it is
        del self.tokens[len(early.tokens) :], self.logprobs[len(early.tokens) :]
        return early

    def times(self) -> ChunkTimes:
        return ChunkTimes(self.encoded_at - self.admitted_at, time.monotonic() - self.encoded_at)

    def next_try(self, result: ChunkResult) -> bool:
        """Start the next temperature if the result needs it; return whether it does."""
        if self.early_result is not None or is_broken(result):
            return False
        self.tries.append(result)
        above = self.options.temperatures[self.temperature_index + 1 :]
        if not above or not self._best_try().needs_fallback(self.options):
            return False
        if above[0] > HIGHEST_FOR_UNLIKELY and self._fluent_tries():
            return False
        self.beam = None
        self.temperature_index += 1
        self.restarts += 1
        self.tokens.clear()
        self.logprobs.clear()
        self.sum_logprob = 0.0
        self.boost_state = KeywordBoost.start
        self.num_examined = 0
        return True

    def best_result(self, result: ChunkResult) -> ChunkResult:
        """Return the likeliest try without repetition, as faster-whisper does.

        If none is likely enough, slightly repetitive ones count too: somebody may say a sentence twice.
        """
        if self.early_result is None and not is_broken(result):
            result = self._best_try()
        return msgspec.structs.replace(result, num_fallbacks=self.temperature_index)

    def _best_try(self) -> ChunkResult:
        fluent = self._fluent_tries()
        if not any(each.avg_logprob >= self.options.logprob_threshold for each in fluent):
            fluent = [each for each in self.tries if each in fluent or repeats_a_little(each)]
        return max(fluent or self.tries, key=lambda each: each.avg_logprob)

    def _fluent_tries(self) -> list[ChunkResult]:
        return [each for each in self.tries if not each.is_repetitive(self.options)]


def _num_closed(tokens: Sequence[int], num_before: int, first_time: int) -> int:
    for end in range(len(tokens), max(1, num_before), -1):
        if tokens[end - 1] > first_time and tokens[end - 2] < first_time:
            return end
    return num_before


def repeats_a_little(result: ChunkResult) -> bool:
    """Return whether a repetitive text may be real speech; a loop that was cut off is not."""
    return result.finish_reason == "stop" and result.compression_ratio <= LOOP_COMPRESSION_RATIO


def compression_ratio(text: str) -> float:
    raw = text.encode()
    return len(raw) / len(zlib.compress(raw))


def is_broken(result: ChunkResult) -> bool:
    return is_no_number(result.avg_logprob)


def is_no_number(logprob: float) -> bool:
    return not logprob <= 1.0  # NaN, or no logarithm of a probability, whatever the rounding
