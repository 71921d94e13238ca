"""Render a transcript in OpenAI's response formats: JSON bodies with its names, text and subtitles."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from asr_server.core import DroppedReason, Segment, TokenLogprob, Transcript, Word
from asr_server.formats.subtitles import READABLE_LAYOUT, SubtitleLayout, srt, tsv, vtt


class Body(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)


Time = Annotated[float, Field(description="In seconds from the start of the recording.")]
Duration = Annotated[float, Field(description="The recording's length in seconds.")]
WholeText = Annotated[str, Field(description="What was said; empty where nothing was.")]
Speaker = Annotated[
    str | None,
    Field(description="Not OpenAI's: who speaks, where `diarize` or `channels=split` asks for it."),
]
_DAMAGED = "true where the recording is damaged or cut short; the text is of what could be read"
Truncated = Annotated[bool | None, Field(description=f"Not OpenAI's: {_DAMAGED}.")]


class DurationUsage(Body):
    type: Literal["duration"] = "duration"
    """The kind of usage."""
    seconds: int
    """The recording's length, rounded up."""


RecordingUsage = Annotated[DurationUsage, Field(description="The recording's length.")]


class TokensUsage(Body):
    type: Literal["tokens"] = "tokens"
    """The kind of usage."""
    input_tokens: int
    """Positions of the encoder, 50 for each second."""
    output_tokens: int
    """Tokens of the text, times included."""
    total_tokens: int
    """Both together."""


class Logprob(Body):
    token: str
    """The token's text; a token may be a part of a character."""
    logprob: float
    """Its log-probability, before temperature."""
    bytes: list[int]
    """Its bytes: joined over the tokens they are the text in UTF-8."""


class Language(Body):
    code: str
    """ISO 639-1, or 639-3 where there is none."""


class AudioTrack(Body):
    number: int
    """From 1, among the audio tracks of the file."""
    language: str | None = None
    """Its language, as the file states it."""
    title: str | None = None
    """Its title, as the file states it."""


_READ = "the audio tracks that were read, of a file that has several"
Tracks = Annotated[list[AudioTrack] | None, Field(description=f"Not OpenAI's: {_READ}.")]


class VerboseSegment(Body):
    id: int
    """0, 1, 2 ... through the whole recording."""
    seek: int
    """Start of the decoded window, in hundredths of a second."""
    start: Time
    end: Time
    text: str
    """As the model wrote it, with the space before it."""
    tokens: list[int]
    """Tokens of the text, timestamps included."""
    temperature: float
    """Temperature the segment was decoded at."""
    avg_logprob: float
    """The mean log-probability of the tokens; below -1 it is improbable."""
    compression_ratio: float
    """How much the text can be compressed; above 2.4 it repeats itself."""
    no_speech_prob: float
    """The probability that nobody speaks."""
    speaker: Speaker = None


class VerboseWord(Body):
    word: str
    """The word, punctuation included."""
    start: Time
    end: Time
    probability: float | None = None
    """Not OpenAI's: the mean probability of its tokens, as faster-whisper has it."""
    confidence: float | None = None
    """Not OpenAI's: how probable it is that the word was said, by its tokens and their attention."""
    speaker: Speaker = None


class DiarizedSegment(Body):
    type: Literal["transcript.text.segment"] = "transcript.text.segment"
    """The kind of event."""
    id: str
    """Of the segment, within the recording."""
    start: Time
    end: Time
    speaker: str
    """Who speaks."""
    text: str
    """What was said."""
    usage: TokensUsage | None = None
    """So far, in a stream with `stream_continuous_usage_stats`."""


class Json(Body):
    text: WholeText
    languages: list[Language]
    """What was spoken; empty where nothing was said."""
    logprobs: list[Logprob] | None = None
    """Of each token, with `include[]=logprobs`."""
    usage: RecordingUsage
    truncated: Truncated = None
    tracks: Tracks = None


class DroppedSegment(Body):
    start: Time
    end: Time
    text: str
    """As the model wrote it."""
    reason: DroppedReason
    """`judged_silence` by the model itself; `no_voice` to the detector; `echo` of the sentence before;
    `same_channel`: both channels are equal, so the second one is not read."""


_LEFT_OUT = "text that the model wrote where nobody seems to speak, and that is left out"
Dropped = Annotated[list[DroppedSegment] | None, Field(description=f"Not OpenAI's: {_LEFT_OUT}.")]


LanguageProbability = Annotated[
    float | None,
    Field(description="Not OpenAI's: that `language` is right, from 0 to 1, where it was detected."),
]


class DiarizedJson(Body):
    task: Literal["transcribe"] = "transcribe"
    """What was done."""
    duration: Duration
    text: WholeText
    segments: list[DiarizedSegment]
    """The text in segments with their speakers."""
    usage: RecordingUsage
    truncated: Truncated = None
    tracks: Tracks = None


class VerboseJson(Body):
    task: Literal["transcribe", "translate"]
    """What was done."""
    language: str
    """The lower-case English name of the text's language; `unknown` where nothing tells."""
    duration: Duration
    text: WholeText
    segments: list[VerboseSegment] | None = None
    """The text in segments with times; left out where only words were asked for."""
    words: list[VerboseWord] | None = None
    """The words with times, where they were asked for."""
    usage: RecordingUsage
    truncated: Truncated = None
    tracks: Tracks = None
    dropped: Dropped = None
    language_probability: LanguageProbability = None
    languages: list[Language] | None = None
    """Not OpenAI's: all languages of a recording that has several."""


class TextDone(Body):
    type: Literal["transcript.text.done"] = "transcript.text.done"
    """The kind of event."""
    text: str
    """The whole text: all deltas joined."""
    languages: list[Language] = []
    """What was spoken; empty where nothing was said."""
    logprobs: list[Logprob] | None = None
    """Of all tokens, where they were asked for."""
    usage: TokensUsage | None = None
    """In tokens; left out with `stream_include_usage` false."""
    truncated: Truncated = None
    tracks: Tracks = None
    dropped: Dropped = None
    language: str | None = None
    """The lower-case English name, with `stream_include_segments` as all that follows."""
    duration: float | None = None
    """Of the recording, in seconds."""
    segments: list[VerboseSegment] | None = None
    """The text in segments with times."""
    words: list[VerboseWord] | None = None
    """The words with times, where they were asked for."""
    language_probability: LanguageProbability = None


ResponseFormat = Literal["json", "text", "srt", "vtt", "verbose_json", "diarized_json"]
FileFormat = ResponseFormat | Literal["tsv"]  # that of files besides, as whisper's command writes it


@dataclass(frozen=True)
class RenderOptions:
    with_logprobs: bool = False
    with_segments: bool = True
    with_words: bool = False
    layout: SubtitleLayout = READABLE_LAYOUT

    def needs_words(self, formats: Iterable[FileFormat]) -> bool:
        has_cues = any(FORMATS[each].has_cues for each in formats)
        return self.with_words or (has_cues and self.layout.needs_words)


DEFAULTS = RenderOptions()


def render(transcript: Transcript, response_format: FileFormat, options: RenderOptions = DEFAULTS) -> str:
    return FORMATS[response_format].write(transcript, options)


def _dump(body: BaseModel) -> str:
    return body.model_dump_json(exclude_none=True)


def _of_recording(transcript: Transcript) -> dict[str, Any]:
    """Return what every body of JSON has."""
    return {
        "text": transcript.text,
        "usage": DurationUsage(seconds=math.ceil(_seconds(transcript.duration_s))),
        "truncated": transcript.is_cut_short or None,
        "tracks": tracks_body(transcript),
    }


def json_body(transcript: Transcript, with_logprobs: bool = False) -> Json:
    return Json(
        languages=languages_body(transcript),
        logprobs=logprobs_body(transcript.logprobs) if with_logprobs else None,
        **_of_recording(transcript),
    )


def verbose_body(transcript: Transcript, options: RenderOptions = DEFAULTS) -> VerboseJson:
    return VerboseJson(
        task=transcript.task,
        language=transcript.language,
        duration=_seconds(transcript.duration_s),
        segments=[_segment(segment) for segment in transcript.segments] if options.with_segments else None,
        words=list(_words(transcript)) if options.with_words else None,
        dropped=dropped_body(transcript),
        language_probability=transcript.language_probability,
        languages=languages_body(transcript) if len(transcript.languages) > 1 else None,
        **_of_recording(transcript),
    )


_SAME_NAMED = VerboseSegment.model_fields.keys() & {*Segment.__struct_fields__}


def _segment(segment: Segment) -> VerboseSegment:
    same_named: dict[str, Any] = {name: getattr(segment, name) for name in _SAME_NAMED}
    return VerboseSegment(start=_seconds(segment.start_s), end=_seconds(segment.end_s), **same_named)


def _words(transcript: Transcript) -> Iterator[VerboseWord]:
    words = [(word, segment.speaker) for segment in transcript.segments for word in segment.words]
    if any(speaker is not None for _, speaker in words):
        words.sort(key=lambda each: each[0].start_s)
    for word, speaker in words:
        yield word_body(word, word.text.strip(), speaker, word.confidence)


def word_body(
    word: Word, text: str, speaker: str | None = None, confidence: float | None = None
) -> VerboseWord:
    times = {"start": _seconds(word.start_s), "end": _seconds(word.end_s)}
    return VerboseWord(
        word=text, **times, probability=word.probability, confidence=confidence, speaker=speaker
    )


def diarized_body(transcript: Transcript) -> DiarizedJson:
    return DiarizedJson(
        duration=_seconds(transcript.duration_s),
        segments=[diarized_segment(segment) for segment in transcript.segments],
        **_of_recording(transcript),
    )


def diarized_segment(segment: Segment) -> DiarizedSegment:
    assert segment.speaker is not None
    return DiarizedSegment(
        id=f"seg_{segment.id + 1:03d}",
        start=_seconds(segment.start_s),
        end=_seconds(segment.end_s),
        speaker=segment.speaker,
        text=segment.text.strip(),
    )


def _seconds(time_s: float) -> float:
    return round(time_s, 3)


def languages_body(transcript: Transcript) -> list[Language]:
    return [Language(code=code) for code in transcript.languages]


def tracks_body(transcript: Transcript) -> list[AudioTrack] | None:
    bodies = [AudioTrack(number=t.number, language=t.language, title=t.title) for t in transcript.tracks]
    return bodies or None


def dropped_body(transcript: Transcript) -> list[DroppedSegment] | None:
    bodies = [
        DroppedSegment(start=_seconds(d.start_s), end=_seconds(d.end_s), text=d.text, reason=d.reason)
        for d in transcript.dropped
    ]
    return bodies or None


def logprobs_body(entries: Iterable[TokenLogprob]) -> list[Logprob]:
    return [Logprob(token=e.token, logprob=e.logprob, bytes=list(e.bytes)) for e in entries]


JSON: Final = "application/json"


class Format(NamedTuple):
    write: Callable[[Transcript, RenderOptions], str]
    media_type: str
    ending: str  # of a file's name
    has_cues: bool = False  # subtitles
    shows_segments: bool = True


# Every format, as docs/formats.md lists them.
FORMATS: Final[dict[FileFormat, Format]] = {
    "text": Format(lambda t, _: t.text, "text/plain", ".txt", shows_segments=False),
    "json": Format(lambda t, o: _dump(json_body(t, o.with_logprobs)), JSON, ".json", shows_segments=False),
    "verbose_json": Format(lambda t, o: _dump(verbose_body(t, o)), JSON, ".verbose.json"),
    "diarized_json": Format(lambda t, _: _dump(diarized_body(t)), JSON, ".diarized.json"),
    # OpenAI sends srt as plain text.
    "srt": Format(lambda t, o: srt(t.segments, o.layout, t.duration_s), "text/plain", ".srt", has_cues=True),
    "vtt": Format(lambda t, o: vtt(t.segments, o.layout, t.duration_s), "text/vtt", ".vtt", has_cues=True),
    "tsv": Format(lambda t, _: tsv(t.segments), "text/tab-separated-values", ".tsv"),
}
