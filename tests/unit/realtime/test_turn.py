"""The life of turns: the rules in `turn.py`, on random events, and the usual courses."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from asr_server.annexes.realtime import server_events as out
from asr_server.annexes.realtime import turn_types as t
from asr_server.annexes.realtime.turn import next_state
from asr_server.core import Segment, TokenLogprob

MS = t.SAMPLES_PER_MS
ERROR = out.ItemError("server_error", None, "broken", None)


def run(events: Iterable[t.Event], state: t.State | None = None) -> tuple[t.State, list[t.Effect]]:
    state, effects = state or t.State(), []
    for event in events:
        state, more = next_state(state, event)
        effects += more
    return state, effects


def sent(effects: list[t.Effect]) -> list[out.ServerEvent]:
    return [effect.event for effect in effects if isinstance(effect, t.Send)]


def segment(start_s: float, end_s: float, text: str, speaker: str) -> Segment:
    return Segment(0, 0, start_s, end_s, text, (), 0.0, -0.1, 1.0, 0.0, speaker=speaker)


def named(effects: list[t.Effect]) -> list[str]:
    """Names of effects; of events sent, their type's last word."""
    return [type(effect.event if isinstance(effect, t.Send) else effect).__name__ for effect in effects]


SPEECH_THAT_PAUSES: list[t.Event] = [
    t.DetectionSet(True, padding=300 * MS),
    t.AudioWritten(1000 * MS),
    t.VoiceStarted(800 * MS),
    t.AudioWritten(1000 * MS),
    t.Signal.VOICE_PAUSED,
]


def test_speech_opens_a_turn_with_its_padding_and_the_end_of_speech_commits_it() -> None:
    state, effects = run([*SPEECH_THAT_PAUSES, t.Signal.VOICE_STOPPED])
    assert named(effects) == [
        *("OpenTurn", "SpeechStarted", "ReadAhead"),
        *("FinishTurn", "SpeechStopped", "Committed", "ItemAdded", "ItemDone"),
    ]
    events = sent(effects)
    assert isinstance(events[0], out.SpeechStarted)
    assert events[0].audio_start_ms == 500
    assert isinstance(events[1], out.SpeechStopped)
    assert events[1].audio_end_ms == 2000
    assert state.open is None
    assert len(state.committed) == 1


def test_at_the_end_of_the_input_a_turn_of_100_ms_is_committed_and_a_sliver_is_dropped() -> None:
    for num_samples, last in (
        (100 * MS - 1, ["DropTurn"]),
        (100 * MS, ["Committed", "ItemAdded", "ItemDone"]),
    ):
        state, effects = run([t.AudioWritten(num_samples), t.Signal.INPUT_ENDED])
        assert state.open is None
        assert named(effects)[-len(last) :] == last


def test_speech_that_goes_on_after_a_manual_commit_is_a_new_turn() -> None:
    state, effects = run(
        [
            t.DetectionSet(True, padding=300 * MS),
            t.AudioWritten(1000 * MS),
            t.VoiceStarted(900 * MS),
            t.CommitRequested(),
            t.AudioWritten(500 * MS),
            t.VoiceStarted(1050 * MS),
        ]
    )
    assert "RestartDetection" in named(effects)
    assert state.open is not None
    assert state.open.start == 1000 * MS  # the padding does not reach into the turn before


def test_deltas_are_what_two_readings_agree_on_and_the_rest_comes_at_the_end() -> None:
    state, _ = run([t.AudioWritten(5000 * MS)], t.State(interim_samples=500 * MS))
    assert state.open
    item = state.open.item_id
    readings = ["one to", "one two three", "one two free four"]
    _, effects = run(
        [
            *(t.InterimRead(item, 0, text) for text in readings),
            t.CommitRequested(),
            t.ChunkRead(item, "one two three four"),
            t.ChunkRead(item, "five"),
            t.TurnRead(item, 5.0),
        ],
        state,
    )
    deltas = [event.delta for event in sent(effects) if isinstance(event, out.Delta)]
    assert deltas == ["one", " two", " three four", " five"]
    completed = sent(effects)[-1]
    assert isinstance(completed, out.Completed)
    assert completed.transcript == "one two three four five"


def test_segments_come_before_the_end_of_their_turn_with_times_of_the_session() -> None:
    state, _ = run([t.AudioWritten(2000 * MS), t.CommitRequested(), t.AudioWritten(3000 * MS)])
    assert state.open
    item = state.open.item_id
    spoken = (segment(0.25, 1.0, " one", "A"), segment(1.0, 2.5, " two", "B"))
    _, effects = run(
        [t.CommitRequested(), t.ChunkRead(item, "one two"), t.TurnRead(item, 3.0, segments=spoken)], state
    )
    *_, first, second, completed = sent(effects)
    assert isinstance(first, out.SpokenSegment)
    assert isinstance(second, out.SpokenSegment)
    assert isinstance(completed, out.Completed)
    assert (first.start, first.end, first.text, first.speaker) == (2.25, 3.0, "one", "A")
    assert (second.start, second.end, second.text, second.speaker) == (3.0, 4.5, "two", "B")
    assert {first.item_id, second.item_id} == {item}
    assert first.id != second.id


def test_what_a_pause_reads_is_no_delta_where_no_interim_readings_are_wanted() -> None:
    readings = [t.InterimRead("item_000000", 0, "one two")] * 2
    _, effects = run([*SPEECH_THAT_PAUSES, *readings, t.Signal.VOICE_RESUMED])
    assert "Delta" not in named(effects)
    assert effects[-1] == t.GoOn("item_000000", is_shown=False)


def test_an_interim_reading_of_a_chunk_whose_text_is_final_counts_no_more() -> None:
    state, _ = run([t.AudioWritten(5000 * MS)])
    assert state.open
    item = state.open.item_id
    late = [t.InterimRead(item, 0, "one two"), t.InterimRead(item, 0, "one two")]
    _, effects = run([t.ChunkRead(item, "one"), *late], state)
    assert [event.delta for event in sent(effects) if isinstance(event, out.Delta)] == ["one"]


def test_interim_readings_are_asked_for_one_at_a_time() -> None:
    state = t.State(interim_samples=1000 * MS)
    state, effects = run([t.AudioWritten(600 * MS)] * 5, state)
    assert named(effects) == ["OpenTurn", "ReadInterim"]
    assert state.open
    _, effects = run([t.InterimRead(state.open.item_id), t.AudioWritten(1)], state)
    assert named(effects) == ["ReadInterim"]


# -- The rules --

IDS = st.integers(0, 6).map(lambda number: f"item_{number:06d}")
WORDS = st.lists(st.sampled_from(["one", "two", "Three,", "four."]), max_size=5).map(" ".join)
EVENTS = st.lists(
    st.one_of(
        st.integers(1, 800).map(lambda ms: t.AudioWritten(ms * MS)),
        st.integers(0, 3000).map(lambda ms: t.VoiceStarted(ms * MS)),
        st.sampled_from([t.Signal.VOICE_PAUSED, t.Signal.VOICE_RESUMED, t.Signal.VOICE_STOPPED]),
        st.sampled_from([t.CommitRequested(), t.Signal.CLEAR_REQUESTED, t.Signal.INPUT_ENDED]),
        st.sampled_from([t.DetectionSet(True, 300 * MS), t.DetectionSet(False), t.DetectionSet(True)]),
        st.builds(
            t.InterimRead, IDS, st.integers(0, 2), st.none() | WORDS, st.sampled_from([None, "en", "zh"])
        ),
        st.builds(t.ChunkRead, IDS, WORDS, st.sampled_from([None, "en", "zh"])),
        st.builds(t.TurnRead, IDS, st.just(1.0)),
        st.builds(t.TurnFailed, IDS, st.just(ERROR)),
    ),
    max_size=60,
)


@dataclass
class Witness:
    """Follows the effects, and knows nothing of the state."""

    open: str | None = None
    open_start: int = 0
    last_end: int = 0
    committed: list[str] = field(default_factory=list)
    ended: set[str] = field(default_factory=set)
    dropped: set[str] = field(default_factory=set)
    announced: set[str] = field(default_factory=set)
    num_samples: int = 0

    def see(self, effect: t.Effect) -> None:
        match effect:
            case t.OpenTurn():
                assert self.open is None
                assert self.last_end <= effect.start <= self.num_samples
                self.open, self.open_start = effect.item_id, effect.start
            case t.FinishTurn() | t.DropTurn():
                assert self.open == effect.item_id
                self.open, self.last_end = None, self.num_samples
                if isinstance(effect, t.DropTurn):
                    self.dropped.add(effect.item_id)
                else:
                    assert self.num_samples - self.open_start >= 0
            case t.ReadInterim() | t.ReadAhead() | t.GoOn():
                assert self.open == effect.item_id
            case t.Send():
                self.see_event(effect.event)

    def see_event(self, event: Any) -> None:
        match event:
            case out.SpeechStarted():
                assert event.item_id == self.open
                self.announced.add(event.item_id)
            case out.SpeechStopped():
                assert event.item_id in self.announced
            case out.Committed():
                assert event.previous_item_id == (self.committed[-1] if self.committed else None)
                self.committed.append(event.item_id)
            case out.Delta():
                assert event.delta
                assert event.item_id not in self.ended | self.dropped
                assert event.item_id == self.open or event.item_id in self.committed
            case out.Completed() | out.Failed():
                assert event.item_id in self.committed
                assert event.item_id not in self.ended
                self.ended.add(event.item_id)


@settings(max_examples=300, deadline=None)
@given(EVENTS)
def test_the_rules_hold_whatever_happens(events: list[t.Event]) -> None:
    state, witness = t.State(interim_samples=500 * MS), Witness()
    for event in events:
        if isinstance(event, t.AudioWritten):
            witness.num_samples += event.num_samples
        state, effects = next_state(state, event)
        for effect in effects:
            witness.see(effect)
        assert (state.open.item_id if state.open else None) == witness.open
    assert {turn.item_id for turn in state.committed} == set(witness.committed) - witness.ended


@settings(max_examples=100, deadline=None)
@given(EVENTS)
def test_a_result_for_a_turn_that_is_not_there_changes_nothing(events: list[t.Event]) -> None:
    state, _ = run(events)
    for late in (
        t.InterimRead("item_gone", 0, "one"),
        t.ChunkRead("item_gone", "one"),
        t.TurnRead("item_gone", 1.0),
    ):
        assert next_state(state, late) == (state, [])


@settings(max_examples=100, deadline=None)
@given(EVENTS)
def test_at_the_end_of_the_input_nothing_stays_open(events: list[t.Event]) -> None:
    state, effects = run([*events, t.Signal.INPUT_ENDED])
    assert state.open is None
    finished = {effect.item_id for effect in effects if isinstance(effect, t.FinishTurn | t.DropTurn)}
    assert finished == {effect.item_id for effect in effects if isinstance(effect, t.OpenTurn)}


def test_detection_turned_on_again_within_a_turn_announces_no_second_start() -> None:
    again: list[t.Event] = [
        t.DetectionSet(False),
        t.DetectionSet(True),
        t.VoiceStarted(1900 * MS),
        t.Signal.VOICE_STOPPED,
    ]
    _, effects = run([*SPEECH_THAT_PAUSES, *again])
    assert named(effects).count("SpeechStarted") == 1
    assert named(effects).count("SpeechStopped") == 1


def token(text: str) -> TokenLogprob:
    return TokenLogprob(text, -0.1, tuple(text.encode()))


def test_deltas_carry_the_tokens_of_their_words_and_all_tokens_are_sent_once() -> None:
    first = (token(" one"), token(" tw"), token("o"))
    second = (*first, token(" three"))
    events: list[t.Event] = [
        t.AudioWritten(1000 * MS),
        t.InterimRead("item_000000", 0, "one two", "en", first),
        t.InterimRead("item_000000", 0, "one two three", "en", second),
        t.CommitRequested(),
        t.ChunkRead("item_000000", "one two three four", "en", (*second, token(" four"))),
    ]
    effects = run(events, t.State(interim_samples=500 * MS))[1]
    deltas = [event for event in sent(effects) if isinstance(event, out.Delta)]
    assert [delta.delta for delta in deltas] == ["one two", " three four"]
    assert [[entry.token for entry in delta.logprobs or ()] for delta in deltas] == [
        [" one", " tw", "o"],
        [" three", " four"],
    ]


def test_detection_that_ends_after_a_silence_begins_a_turn_with_what_is_still_held() -> None:
    _, effects = run(
        [
            t.DetectionSet(True, padding=300 * MS),
            t.AudioWritten(60_000 * MS),
            t.DetectionSet(False),
            t.AudioWritten(100 * MS),
        ]
    )
    assert [each.start for each in effects if isinstance(each, t.OpenTurn)] == [59_700 * MS]


@given(
    st.sampled_from(["en", "zh", "ja"]),
    st.lists(st.text("ab \u4f60\u597d.,", min_size=1, max_size=12), min_size=1, max_size=6),
)
def test_readings_have_the_log_probabilities_of_their_deltas(language: str, readings: list[str]) -> None:
    state, _ = run([t.DetectionSet(False), t.AudioWritten(1000 * MS)])
    assert state.open
    item_id = state.open.item_id
    for text in readings:
        tokens = tuple(TokenLogprob(letter, -0.1, tuple(letter.encode())) for letter in text)
        state, effects = next_state(state, t.InterimRead(item_id, 0, text, language, tokens))
        for event in sent(effects):
            assert isinstance(event, out.Delta)
            told = b"".join(bytes(each.bytes) for each in event.logprobs or ()).decode()
            assert told.replace(" ", "") == event.delta.replace(" ", "")


def test_what_may_change_continues_the_deltas_as_a_delta_would() -> None:
    state = next_state(t.State(interim_samples=500 * MS, shows_interim=True), t.AudioWritten(500 * MS))[0]
    assert state.open
    readings = [t.InterimRead(state.open.item_id, 0, text, "en") for text in ("one two", "one two three")]
    _, effects = run(readings, state)
    events = [effect.event for effect in effects if isinstance(effect, t.Send)]
    assert [each.delta for each in events if isinstance(each, out.Delta)] == ["one two"]
    assert [each.tail for each in events if isinstance(each, out.Interim)] == ["one two", " three"]
