"""What was shown of a live session, and when: figures by the field's definitions.

- Time to final: from a sentence's end to the final text of its last turn. A false end is a turn too many.
- Latency of a word: from its end to the first event that shows it, as text that may change (interim) or as
  text that stays (confirmed): Argmax, OpenBench, 2025.
- LongYAAL: how far confirmed words lag behind an even pace through their sentence, on the clock (computation
  aware) and by the audio that was read (unaware): Polak et al., "Better Late Than Never", 2025.
- Normalized erasure: words taken back for each word of the final text: Arivazhagan et al., 2020.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from statistics import fmean
from typing import Any, Final, NamedTuple

from rapidfuzz.distance import Levenshtein

from harness.speech.error_rates import Score, word_errors
from harness.speech.synthesis import SaidSentence, Speech

_TRANSCRIPTION: Final = "conversation.item.input_audio_transcription."


class Entry(NamedTuple):
    at_s: float  # since the audio began
    sent_s: float  # of the audio, by then
    event: dict[str, Any]


@dataclass
class Turn:
    sentence: SaidSentence
    ended_s: float | None = None  # in the audio
    deltas: str = ""
    tail: str = ""  # behind them: it may change
    final: str | None = None
    final_at_s: float = 0.0
    confirmed: list[tuple[float, float]] = field(default_factory=list)  # of each word: by audio, by the clock
    num_erased: int = 0

    @property
    def kept(self) -> str:
        return self.deltas if self.final is None else self.final

    @property
    def shown(self) -> str:
        return f"{self.deltas} {self.tail}" if self.final is None else self.final


@dataclass
class Figures:
    """Of one session, or of several added up."""

    num_sentences: int = 0
    num_missed: int = 0
    num_false_ends: int = 0
    num_failed: int = 0
    to_final_s: list[float] = field(default_factory=list)
    interim_s: list[float] = field(default_factory=list)  # of each word that was shown
    confirmed_s: list[float] = field(default_factory=list)
    yaal_unaware_s: list[float] = field(default_factory=list)  # of each sentence
    yaal_aware_s: list[float] = field(default_factory=list)
    num_erased: int = 0
    num_shown: int = 0  # words of the final text
    live: Score = field(default_factory=Score)
    final: Score = field(default_factory=Score)
    file: Score = field(default_factory=Score)

    def __add__(self, other: Figures) -> Figures:
        return Figures(*(own + others for own, others in zip(_values(self), _values(other), strict=True)))

    @property
    def erasure(self) -> float:
        return self.num_erased / max(1, self.num_shown)


def _values(figures: Figures) -> Iterable[Any]:
    return vars(figures).values()


def figures_of(speech: Speech, record: Sequence[Entry], file_text: str) -> Figures:
    replay = Replay(speech)
    for entry in record:
        replay.add(entry)
    finals, deltas = (" ".join(getattr(turn, name) for turn in replay.all) for name in ("kept", "deltas"))
    by_sentence = [(each, [t for t in replay.all if t.sentence is each]) for each in speech.sentences]
    heard = [(each, turns) for each, turns in by_sentence if turns]
    lags = [_yaal_s(each, turns, speech.duration_s) for each, turns in heard]
    return Figures(
        num_sentences=len(by_sentence),
        num_missed=len(by_sentence) - len(heard),
        num_false_ends=sum(len(turns) - 1 for _, turns in heard),
        num_failed=replay.num_failed,
        to_final_s=[max(turn.final_at_s for turn in turns) - each.end_s for each, turns in heard],
        interim_s=list(replay.interim_s.values()),
        confirmed_s=list(replay.confirmed_s.values()),
        yaal_unaware_s=[lag[0] for lag in lags if lag],
        yaal_aware_s=[lag[1] for lag in lags if lag],
        num_erased=sum(turn.num_erased for turn in replay.all),
        num_shown=len(finals.split()),
        live=word_errors(speech.text, deltas),
        final=word_errors(speech.text, finals),
        file=word_errors(speech.text, file_text) if file_text else Score(),
    )


class Replay:
    """What a client has on its screen after each event."""

    def __init__(self, speech: Speech) -> None:
        self.interim_s: dict[int, float] = {}  # latencies by the word's number
        self.confirmed_s: dict[int, float] = {}
        self.num_failed = 0
        self._sentences = speech.sentences
        self._said = [
            (_plain(word), start_s, end_s)
            for sentence in speech.sentences
            for word, (start_s, end_s) in zip(sentence.text.split(), sentence.words_s, strict=False)
        ]
        self._turns: dict[str, Turn] = {}

    @property
    def all(self) -> list[Turn]:
        return list(self._turns.values())

    def add(self, entry: Entry) -> None:
        event, kind = entry.event, entry.event["type"].removeprefix(_TRANSCRIPTION)
        if kind == "input_audio_buffer.speech_started":
            start_s = event["audio_start_ms"] / 1000
            own = next((each for each in self._sentences if each.end_s > start_s), self._sentences[-1])
            self._turns[event["item_id"]] = Turn(own)
        if not (turn := self._turns.get(event.get("item_id", ""))):
            return
        before = turn.shown.split()
        match kind:
            case "input_audio_buffer.speech_stopped":
                turn.ended_s = event["audio_end_ms"] / 1000
            case "delta":
                num_words = len(event["delta"].split())
                turn.deltas += event["delta"]
                turn.tail = " ".join(turn.tail.split()[num_words:])
                read_s = entry.sent_s if turn.ended_s is None else turn.ended_s
                turn.confirmed += [(read_s, entry.at_s)] * num_words
            case "interim":
                turn.tail = event["tail"]
                if turn.ended_s is None:  # the deltas of this reading came just before it
                    read_s = event["audio_end_ms"] / 1000
                    turn.confirmed = [
                        (read_s if at_s == entry.at_s else s, at_s) for s, at_s in turn.confirmed
                    ]
            case "completed" | "failed":
                turn.final, turn.final_at_s = event.get("transcript", ""), entry.at_s
                self.num_failed += kind == "failed"
        self._note(turn, before, entry.at_s)

    def _note(self, turn: Turn, before: list[str], at_s: float) -> None:
        now = turn.shown.split()
        if now == before:
            return
        num_same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, now, strict=False)))
        turn.num_erased += len(before) - num_same
        for latencies, name in ((self.interim_s, "shown"), (self.confirmed_s, "kept")):
            heard = " ".join(getattr(each, name) for each in self.all)
            for number in self._right(heard, at_s):
                latencies.setdefault(number, at_s - self._said[number][2])

    def _right(self, heard: str, at_s: float) -> Iterator[int]:
        """Yield the numbers of the words that were said by now and are heard as what they are."""
        said = [word for word, start_s, _ in self._said if start_s <= at_s]
        for each in Levenshtein.opcodes(said, list(map(_plain, heard.split()))):
            if each.tag == "equal":
                yield from range(each.src_start, each.src_end)


def _yaal_s(
    sentence: SaidSentence, turns: Sequence[Turn], recording_end_s: float
) -> tuple[float, float] | None:
    """Return a sentence's LongYAAL, computation-unaware and -aware; None: no word came in time."""
    words = [word for turn in turns for word in turn.confirmed]
    pace_s = (sentence.end_s - sentence.start_s) / max(1, len(words), len(sentence.text.split()))

    def lag_s(emitted_s: Iterable[float]) -> list[float]:
        in_time = takewhile(lambda at_s: at_s < recording_end_s, emitted_s)
        return [at_s - sentence.start_s - number * pace_s for number, at_s in enumerate(in_time)]

    unaware, aware = lag_s(read_s for read_s, _ in words), lag_s(at_s for _, at_s in words)
    return (fmean(unaware), fmean(aware)) if aware else None


def _plain(word: str) -> str:
    return "".join(letter for letter in word.lower() if letter.isalnum())
