"""Read one stretch of a chunk to its end, in the detected language.

A stretch lies between long pauses; later it is what `judge` has read again: an unread tail, or speech without
text. One that loses more than a word or two beside loud sound is read again with that sound: music deafens
the detector more than the model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Final, NamedTuple

import msgspec

from asr_server import metrics
from asr_server.audio.recording import ChunkSource, PreprocessPool, Recording
from asr_server.checkpoint.tokenizer import Tokenizer
from asr_server.core import SAMPLE_RATE, Chunk, ChunkResult, DecodingOptions
from asr_server.dispatch.queue import RequestHandle
from asr_server.transcription import judge, segments
from asr_server.transcription.channels import ClearChannels, SplitChannels
from asr_server.transcription.heard import Heard, hear
from asr_server.transcription.judge import Known
from asr_server.transcription.language import LanguageDetector, joint_logprob
from asr_server.transcription.progress import ChunkProgress, EarlyResults, PreviousText, StallWatch
from asr_server.transcription.segments import DecodedPart

MAX_READINGS: Final = 8  # of one stretch, tails and speech without text included
MISSED_S: Final = 4.0  # of certain speech that was passed over: less may have text, at a time that is off
NOTHING_READ: Final = ChunkResult((), (), 0.0, 1.0, 0.0, 0.0, None, "stop")
MOST_PARTS: Final = 100  # of a stretch, numbered behind those of the stretches before it
SECOND_READING: Final = 50  # the number of its first part, above those of the first reading


class _Stretch(NamedTuple):
    chunk: Chunk
    is_again: bool = False  # it has speech that a reading before this one left out


@dataclass(eq=False)
class ChunkReader:
    handle: RequestHandle
    tokenizer: Tokenizer
    options: DecodingOptions
    language: LanguageDetector
    pool: PreprocessPool  # threads that listen for voices
    check_voice: bool  # else all text stands
    watch: StallWatch
    source: Recording | ChunkSource
    is_split: bool  # each of two channels is a speaker

    def __post_init__(self) -> None:
        self._channels: ClearChannels | SplitChannels | None = None
        if self.is_split:
            self._channels = SplitChannels(self.source)
        self._shows_words = self.options.word_timestamps
        # Speech without words is found, and no segment that is shown begins in a pause.
        if self.check_voice:
            self.options = msgspec.structs.replace(self.options, word_timestamps=True)
        prompt = self.options.prompt_tokens
        self._previous_texts = [PreviousText(prompt), PreviousText(prompt)]  # of channels that are kept apart

    async def hear(self, chunk: Chunk) -> Heard:
        """Find speech in the chunk; a client's limit on tokens keeps the chunk whole."""
        if not self.check_voice:
            return Heard(chunk, [chunk])
        with self.watch.waiting_for_pool():
            if self._channels is None and isinstance(self.source, Recording) and self.source.num_channels > 1:
                self._channels = ClearChannels(self.source)
            pool, channels = self.pool, self._channels
            heard = await (channels.hear(chunk, pool) if channels else pool.run(hear, chunk))
        if self.language.is_per_chunk:
            heard = heard.apart
        if self.options.max_new_tokens is None or not heard.stretches:
            return heard
        return msgspec.structs.replace(heard, stretches=[heard.chunk], is_loud_between=False)

    def close(self) -> None:
        if self._channels is not None:
            self._channels.close()

    async def read(self, heard: Heard, number: int, language: str | None, progress: ChunkProgress) -> None:
        """Read one of the chunk's stretches, while others are read."""
        parts = await self._read(heard, number, language, progress)
        progress.finish(parts if self._shows_words else list(map(segments.with_times_of_words, parts)))

    async def _read(
        self, heard: Heard, number: int, language: str | None, progress: ChunkProgress
    ) -> list[DecodedPart]:
        if language is not None or self.language.is_per_chunk:
            return await self._reading(heard, number, language, progress).run()
        parts = await self._reading(heard, number, None, progress).run()
        guess = self.language.guess if any(part.spans for part in parts) else None
        self.language.on_decoded(guess)
        progress.on_wait_for_others()
        if guess is not None and (settled := await self.language.conclusion()) != guess:
            self.handle.stats.on_read_again("language_outvoted")
            parts = await self._reading(heard, number, settled, progress, SECOND_READING).run()
        return parts

    def _reading(
        self, heard: Heard, number: int, language: str | None, progress: ChunkProgress, first_part: int = 0
    ) -> _Reading:
        previous_text = PreviousText(self.options.prompt_tokens)
        if self.options.condition_on_previous_text:
            previous_text = self._previous_texts[heard.chunk.channel]
        numbers = count(number * MOST_PARTS + first_part)
        return _Reading(self, heard, number, language, progress, previous_text, numbers)


@dataclass(eq=False)
class _Reading:
    reader: ChunkReader
    heard: Heard
    stretch: int  # of those heard
    language: str | None
    progress: ChunkProgress
    previous_text: PreviousText
    numbers: Iterator[int]  # of parts

    def __post_init__(self) -> None:
        self.parts: list[DecodedPart] = []
        self._tokenizer, self._stats = self.reader.tokenizer, self.reader.handle.stats
        self._prompt_before = self.previous_text.tokens
        self._is_alone = False  # the next stretch is read without the text before: the last one repeated it
        self._drowned_s: list[float] = []  # where likely text is heard badly

    async def run(self) -> list[DecodedPart]:
        if not self.heard.may_be_spoken:
            chunk = self.heard.chunk
            return [DecodedPart(chunk.start_s, chunk.duration_s, NOTHING_READ, (), 0, channel=chunk.channel)]
        await self._read_whole(self.heard.stretches[self.stretch])
        await self._read_uncut()
        return self.parts

    async def _read_whole(self, chunk: Chunk) -> None:
        todo = deque([_Stretch(chunk)])
        num_left = MAX_READINGS
        while todo:
            stretch = todo.popleft()
            num_left -= 1
            part = await self._read_stretch(stretch, is_last=num_left <= len(todo))
            is_again = stretch.is_again or part.reason == "speech_passed_over"
            rest = segments.unread(stretch.chunk, part)
            todo.extendleft(_Stretch(unread, is_again) for unread in reversed(rest))

    async def _read_stretch(self, stretch: _Stretch, is_last: bool) -> DecodedPart:
        chunk, options = stretch.chunk, self._options(stretch.chunk, is_last)
        if stretch.is_again and self.heard.spoken_in_s(chunk) < MISSED_S:
            options = _tentative(options)
        may_go_on = not is_last and options.max_new_tokens is None
        known = self._known(may_go_on, stretch.is_again)
        decoded = self._decode(chunk, await self._result(chunk, options, known), options)
        self._drowned_s += [
            decoded.start_s + span.start_s for span in decoded.spans if judge.is_drowned(span, decoded, known)
        ]
        known = msgspec.structs.replace(known, num_sent=self.progress.num_spans(part=len(self.parts)))
        return self._add(judge.judge(decoded, chunk, known))

    def _options(self, chunk: Chunk, is_last: bool) -> DecodingOptions:
        own = self.reader.options
        if self.heard.is_checked:
            own = msgspec.structs.replace(own, full_letters=judge.full_letters(self.heard, chunk))
        if not self._is_alone:
            tokens = self.previous_text.tokens
            own = msgspec.structs.replace(own, prompt_tokens=tokens, language=self.language)
        if is_last:  # what is sent of it early could not be followed by another part
            own = msgspec.structs.replace(own, early_results=False, is_last_part=True)
        return own

    def _known(self, may_go_on: bool = True, is_again: bool = False) -> Known:
        tokenizer = self._tokenizer
        spans = [span for part in self.parts for span in part.spans]
        return Known(
            self.heard,
            tokenizer,
            prompt=set() if self._is_alone else judge.sentences_of(self.parts, tokenizer),
            before=judge.letters_of(spans[-1], tokenizer) if spans else "",
            may_go_on=may_go_on,
            may_complete=may_go_on and self.heard.is_checked,
            is_again=is_again,
        )

    async def _result(self, chunk: Chunk, options: DecodingOptions, known: Known) -> ChunkResult:
        early_results, language = EarlyResults(self._tokenizer), self.reader.language
        rivals = dict[str, float]()  # languages that the part may be in

        def on_language(probabilities: dict[str, float]) -> str:
            nonlocal rivals
            rivals = language.rivals(probabilities)
            choose = language.likeliest_of_part if self._is_alone else language.on_probabilities
            return choose(probabilities)

        def on_early_result(result: ChunkResult) -> None:
            if rivals or not language.is_settled:
                return
            decoded = segments.decode_part(chunk, result, options, self._tokenizer)
            if judge.may_leave(decoded, chunk, known) and early_results.add(result):
                self.progress.report([*self.parts, decoded])

        number, submit = next(self.numbers), self.reader.handle.submit
        result = await submit(chunk, options, number, on_language, on_early_result)
        result = early_results.keep(result, options)
        if rivals and not result.is_silence(options):
            result = await self._likelier(result, chunk, options, rivals)
        self.language = options.language or result.language or language.guess
        return self.heard.with_silences(result, chunk)

    async def _likelier(
        self, result: ChunkResult, chunk: Chunk, options: DecodingOptions, rivals: dict[str, float]
    ) -> ChunkResult:
        """Read in the second likeliest language too: text in a language that nobody speaks is less likely."""
        self._stats.on_read_again("language_doubtful")
        (_, share), (rival, its_share) = rivals.items()
        own = msgspec.structs.replace(
            _tentative(options),
            language=rival,
            early_results=False,
            draft_tokens=(),  # in another language
        )
        other = await self.reader.handle.submit(chunk, own, next(self.numbers))
        has_text = any(map(self._tokenizer.is_text, other.tokens))  # no text is always likely
        is_likelier = self._rank(other, its_share, chunk) > self._rank(result, share, chunk)
        return other if has_text and is_likelier and not other.is_implausible(options) else result

    def _rank(self, result: ChunkResult, language_probability: float, chunk: Chunk) -> tuple[bool, float]:
        """Return how good a reading is: one that leaves speech without text is the worse, however likely."""
        least = judge.FULL_LETTERS_PER_S * self.heard.spoken_in_s(chunk)
        is_full = self._tokenizer.num_letters(result.tokens) >= least
        return is_full, joint_logprob(result, language_probability)

    def _decode(self, chunk: Chunk, result: ChunkResult, options: DecodingOptions) -> DecodedPart:
        """Cut the result into segments, unless Whisper hears silence and the detector no speech."""
        is_surely_speech = self.heard.is_surely_speech(chunk.start_s, chunk.start_s + chunk.duration_s)
        if result.is_silence(options) and not is_surely_speech:
            spans = segments.spans_of(chunk, result, self._tokenizer)
            part = DecodedPart(chunk.start_s, chunk.duration_s, result, (), 0, channel=chunk.channel)
            return segments.with_dropped(part, spans, "judged_silence", self._tokenizer)
        part = segments.decode_part(chunk, result, options, self._tokenizer)
        may_lack_times = options.text_only and result.is_full
        if not options.word_timestamps or result.token_times_s or may_lack_times:
            return part
        part = segments.with_words_by_length(part, options, self._tokenizer)
        metrics.words_guessed.inc(sum(len(span.words) for span in part.spans))
        return part

    def _add(self, part: DecodedPart) -> DecodedPart:
        self.parts.append(part)
        self.previous_text.add(part)
        self._is_alone = part.tail_s is not None and part.reason == "prompt_repeated"
        if part.tail_s is not None:
            self._stats.on_read_again(part.reason)
        for dropped in part.dropped:
            self._stats.on_segments_dropped(dropped.reason, 1)
        return part

    async def _read_uncut(self) -> None:
        """Read the stretch again with the sound around it if it lost text; what is likely stands."""
        if not self.heard.is_loud_between:
            return
        chunk, heard = self.heard.around(self.stretch), self.heard.uncut
        sent, end_s = self._sent()
        rest = segments.rest_of(chunk, max(0, round(end_s * SAMPLE_RATE) - chunk.start_sample))
        if not any(at_s >= rest.start_s for at_s in self._drowned_s):
            return
        self._stats.on_read_again("uncut")
        language = self.language or self.reader.language.code
        previous_text = PreviousText(self._prompt_before)
        progress = ChunkProgress()
        progress.report([*sent])
        again = _Reading(self.reader, heard, self.stretch, language, progress, previous_text, self.numbers)
        again.parts = sent
        for part in sent:
            previous_text.add(part)
        if await again._read_trusted(rest):
            self.parts, self.previous_text.tokens = again.parts, previous_text.tokens

    def _sent(self) -> tuple[list[DecodedPart], float]:
        """Return the parts that a client may have, and their end in the file."""
        sent = self.progress.parts
        if not any(part.spans for part in sent):
            return [], 0.0
        *before, last = self.parts[: len(sent)]
        spans = last.spans[: len(sent[-1].spans)]
        end_s = spans[-1].end_s if spans else 0.0
        return [*before, segments.ending_at(last, len(spans), end_s)], last.start_s + end_s

    async def _read_trusted(self, chunk: Chunk) -> bool:
        """Return False if the text is in doubt, as what higher temperatures make of it would be."""
        options, known = _tentative(self._options(chunk, is_last=False)), self._known()
        result = await self._result(chunk, options, known)
        decoded = self._decode(chunk, result, options)
        if result.is_implausible(options) or not judge.is_trusted(decoded, known):
            return False
        part = self._add(judge.judge(decoded, chunk, known))
        for rest in segments.unread(chunk, part):
            await self._read_whole(rest)
        return True


def _tentative(options: DecodingOptions) -> DecodingOptions:
    """Return options for one try, which ends where it begins to repeat itself."""
    return msgspec.structs.replace(options, temperatures=options.temperatures[:1], is_tentative=True)
