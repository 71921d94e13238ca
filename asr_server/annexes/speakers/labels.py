"""Give each word its speaker, and split segments where the speaker changes. Knows no voices."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, groupby, islice, pairwise
from typing import Final, NamedTuple

import msgspec

from asr_server.core import Segment

UNKNOWN: Final = "A"  # the label where nobody was found to speak: that of the first person
# A word's times are no finer: whoever spoke last keeps it unless another has that much more of its time.
_SLACK_S: Final = 0.05


BytesOf = Callable[[int], bytes]  # a token's text, empty for a special one


class Turn(NamedTuple):
    """A stretch of one person; turns may overlap."""

    start_s: float
    end_s: float
    speaker: str


class SpeakerOfTime:
    """Answer who speaks at a time, from turns ordered by start."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self._turns = turns
        self._starts_s = [turn.start_s for turn in turns]
        # Until when somebody of those who have begun speaks.
        self._reached_s = list(accumulate((turn.end_s for turn in turns), max))
        self._last_speaker = turns[0].speaker if turns else UNKNOWN

    def of(self, start_s: float, end_s: float) -> str:
        """Return who speaks most, or is nearest in a pause; in doubt, the last speaker."""
        spoken_s: dict[str, float] = {}
        nearest_s: dict[str, float] = {}
        for turn in islice(self._turns, self._first_near(start_s), None):
            overlap_s = min(turn.end_s, end_s) - max(turn.start_s, start_s)
            if overlap_s > 0:
                spoken_s[turn.speaker] = spoken_s.get(turn.speaker, 0.0) + overlap_s
            nearest_s[turn.speaker] = max(nearest_s.get(turn.speaker, overlap_s), overlap_s)
            if turn.start_s > end_s:
                break
        scores = spoken_s or nearest_s
        if scores:
            best = max(scores, key=scores.__getitem__)
            if scores.get(self._last_speaker, -1e9) < scores[best] - _SLACK_S:
                self._last_speaker = best
        return self._last_speaker

    def _first_near(self, start_s: float) -> int:
        num_begun = bisect_right(self._starts_s, start_s)
        if not num_begun:
            return 0
        return bisect_left(self._reached_s, min(start_s, self._reached_s[num_begun - 1]) - _SLACK_S)


def label_segments(segments: Iterable[Segment], turns: Sequence[Turn], bytes_of: BytesOf) -> list[Segment]:
    """Label segments and split them between speakers by each token's text; texts and tokens stay."""
    speakers = SpeakerOfTime(turns)
    labelled = [part for segment in segments for part in _split(segment, speakers, bytes_of)]
    return [msgspec.structs.replace(segment, id=number) for number, segment in enumerate(labelled)]


def _split(segment: Segment, speakers: SpeakerOfTime, bytes_of: BytesOf) -> Iterator[Segment]:
    spoken = [(word, speakers.of(word.start_s, word.end_s)) for word in segment.words]
    parts = [
        (speaker, [word for word, _ in group]) for speaker, group in groupby(spoken, lambda each: each[1])
    ]
    if len(parts) < 2:
        speaker = parts[0][0] if parts else speakers.of(segment.start_s, segment.end_s)
        yield msgspec.structs.replace(segment, speaker=speaker)
        return
    texts = ["".join(word.text for word in words) for _, words in parts]
    tokens_of_parts = _shared_out(segment.tokens, texts, bytes_of)
    for number, ((speaker, words), tokens) in enumerate(zip(parts, tokens_of_parts, strict=True)):
        yield msgspec.structs.replace(
            segment,
            start_s=segment.start_s if number == 0 else words[0].start_s,
            end_s=segment.end_s if number + 1 == len(parts) else words[-1].end_s,
            text=texts[number],
            words=tuple(words),
            tokens=tokens,
            speaker=speaker,
        )


def _shared_out(tokens: Sequence[int], texts: Sequence[str], bytes_of: BytesOf) -> list[tuple[int, ...]]:
    starts = list(accumulate((len(bytes_of(token)) for token in tokens), initial=0))[:-1]
    text_starts = list(accumulate(len(text.encode()) for text in texts[:-1]))
    borders = [0, *(bisect_left(starts, start) for start in text_starts), len(tokens)]
    return [tuple(tokens[first:last]) for first, last in pairwise(borders)]
