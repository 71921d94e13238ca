"""The answers to an alignment: ours, ElevenLabs', and a transcript for subtitles."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from pydantic import AfterValidator

from asr_server.annexes.alignment.align import GREATEST_LOSS, AlignedWord, Alignment
from asr_server.core import Segment, Word
from asr_server.formats.render import Body, Duration, RecordingUsage, Time, Tracks, Truncated, verbose_body
from asr_server.formats.subtitles import srt, vtt

Granularity = Literal["word", "character"]
_TimeMs = Annotated[Time, AfterValidator(lambda time_s: round(time_s, 3))]
_Loss = Annotated[float, AfterValidator(lambda loss: round(loss, 4))]


class AlignedWordBody(Body):
    word: str
    """The word as the text has it, punctuation included."""
    start: _TimeMs
    end: _TimeMs
    confidence: float | None = None
    """How probable it is that the word was said; absent after a replica was lost."""
    loss: _Loss | None = None
    """Minus the logarithm of its tokens' mean probability; absent likewise."""


class AlignedCharacter(Body):
    character: str
    """One of a word's characters."""
    start: _TimeMs
    end: _TimeMs


class NotSpoken(Body):
    text: str
    """Words of the text, in a row, that nobody says."""
    at: _TimeMs


class NotInText(Body):
    text: str
    """What was said there, by the transcript."""
    start: _TimeMs
    end: _TimeMs


class AlignmentJson(Body):
    language: str
    """The lower-case English name of the language; `unknown` where nothing tells."""
    duration: Duration
    words: list[AlignedWordBody] | None = None
    """The words of the text that are said, with `granularity` word."""
    characters: list[AlignedCharacter] | None = None
    """Their characters, with `granularity` character: each has a share of its word's time."""
    loss: _Loss | None = None
    """The mean of the words' losses; absent where no word is said."""
    not_spoken: list[NotSpoken]
    """What of the text nobody says, and where it would come."""
    not_in_text: list[NotInText]
    """What somebody says that the text lacks."""
    usage: RecordingUsage
    truncated: Truncated = None
    tracks: Tracks = None


def alignment_body(alignment: Alignment, granularity: Granularity) -> AlignmentJson:
    spoken = [word for word in alignment.words if word.is_spoken]
    by_word = granularity == "word"
    whole = verbose_body(alignment.transcript)
    return AlignmentJson(
        language=whole.language,
        duration=whole.duration,
        words=list(map(_word, spoken)) if by_word else None,
        characters=None if by_word else list(_characters(spoken)),
        loss=alignment.loss,
        not_spoken=[NotSpoken(text=run.text, at=run.start_s) for run in alignment.not_spoken()],
        not_in_text=[
            NotInText(text=word.text, start=word.start_s, end=word.end_s) for word in alignment.not_in_text
        ],
        usage=whole.usage,
        truncated=whole.truncated,
        tracks=whole.tracks,
    )


def _word(word: AlignedWord) -> AlignedWordBody:
    times = {"start": word.start_s, "end": word.end_s}
    return AlignedWordBody(word=word.text, **times, confidence=word.confidence, loss=word.loss)


def _characters(words: list[AlignedWord]) -> Iterator[AlignedCharacter]:
    for word in words:
        for character, start_s, end_s in word.characters:
            yield AlignedCharacter(character=character, start=start_s, end=end_s)


def forced_alignment_answer(alignment: Alignment) -> bytes:
    """Return ElevenLabs' body: all of the text; what is not spoken has no length, and the greatest loss."""
    losses = [GREATEST_LOSS if word.loss is None else word.loss for word in alignment.words]
    words = [
        _timed(word.text, word.start_s, word.end_s) | {"loss": loss}
        for word, loss in zip(alignment.words, losses, strict=True)
    ]
    characters = [_timed(*character) for word in alignment.words for character in word.characters]
    body = {"characters": characters, "words": words, "loss": sum(losses) / len(losses)}
    return msgspec.json.encode(body)


def _timed(text: str, start_s: float, end_s: float) -> dict[str, Any]:
    return {"text": text, "start": round(start_s, 3), "end": round(end_s, 3)}


def rendered(alignment: Alignment, file_format: str, granularity: Granularity) -> str:
    if file_format == "json":
        return alignment_body(alignment, granularity).model_dump_json(exclude_none=True) + "\n"
    write, space = vtt if file_format == "vtt" else srt, " " if alignment.is_spaced else ""
    words = [Word(space + each.text, each.start_s, each.end_s) for each in alignment.words if each.is_spoken]
    segments = [  # subtitles reach across them
        Segment(0, 0, each.start_s, each.end_s, each.text, (), 0.0, 0.0, 1.0, 0.0, (each,)) for each in words
    ]
    return write(segments, end_s=alignment.transcript.duration_s)
