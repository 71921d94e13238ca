"""Makes a transcript of the last event of a stream, such that it renders as it would have on the server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pydantic import BaseModel

from asr_server.core import Segment, Task, Transcript, Word
from asr_server.formats.bodies import Language, TokensUsage, VerboseSegment, VerboseWord


class Done(BaseModel):
    """`transcript.text.done` as a server sends it that was asked to include segments."""

    text: str
    language: str
    duration: float
    segments: list[VerboseSegment]
    words: list[VerboseWord] = []
    usage: TokensUsage
    languages: list[Language] = []
    truncated: bool = False


def transcript_of(done: Done, task: Task) -> Transcript:
    words = _words_by_segment(done.segments, done.words)
    return Transcript(
        text=done.text,
        segments=tuple(map(_segment, done.segments, words)),
        logprobs=(),
        language=done.language,
        duration_s=done.duration,
        num_audio_tokens=done.usage.input_tokens,
        num_text_tokens=done.usage.output_tokens,
        task=task,
        languages=tuple(language.code for language in done.languages),
        is_cut_short=done.truncated,
    )


def _segment(body: VerboseSegment, words: tuple[Word, ...]) -> Segment:
    fields = body.model_dump(exclude={"start", "end", "tokens"})
    return Segment(**fields, start_s=body.start, end_s=body.end, tokens=tuple(body.tokens), words=words)


def _words_by_segment(
    segments: Sequence[VerboseSegment], words: Sequence[VerboseWord]
) -> Iterator[tuple[Word, ...]]:
    """Words come in one list and without the spaces before them; the segments' texts have these. Where
    speakers overlap, so do their words.
    """
    speakers = {word.speaker for word in words}
    remaining = {speaker: iter([word for word in words if word.speaker == speaker]) for speaker in speakers}
    for segment in segments:
        yield tuple(_words_of(segment.text, remaining.get(segment.speaker, iter(()))))


def _words_of(text: str, remaining: Iterator[VerboseWord]) -> Iterator[Word]:
    """As many words as the text has, each with the space that is before it there."""
    while text.strip() and (word := next(remaining, None)) is not None:
        end = text.find(word.word) + len(word.word)
        yield Word(text[:end], word.start, word.end)
        text = text[end:]
