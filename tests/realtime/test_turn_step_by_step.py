"""What one event does to a session's turns, sample by sample."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from asr_server.core import TokenLogprob
from asr_server.realtime import server_events as out
from asr_server.realtime import turn_types as t
from asr_server.realtime.turn import next_state
from asr_server.realtime.turn_types import State
from tests.realtime.test_turn import ERROR, MS, named, run, sent

DETECTING = State(is_detecting=True, padding=300 * MS)
FIRST, SECOND = "item_000000", "item_000001"


def after(*events: t.Event, state: State | None = None) -> State:
    return run(events, state)[0]


# -- Interim readings --


@pytest.mark.parametrize(("num_samples", "is_read"), [(999, False), (1000, True)])
def test_a_turn_is_read_when_it_has_grown_by_the_interval_since_its_start(
    num_samples: int, is_read: bool
) -> None:
    state = after(t.AudioWritten(500), state=State(interim_samples=1000))
    state, effects = next_state(state, t.AudioWritten(num_samples - 500))
    assert effects == [t.ReadInterim(FIRST)] * is_read
    assert state.open
    assert (state.open.is_reading, state.open.read_to) == (is_read, 1000 * is_read)


def test_an_interval_of_0_asks_for_no_interim_reading() -> None:
    assert run([t.AudioWritten(10**6)] * 3)[1] == [t.OpenTurn(FIRST, 0)]
    assert run([t.AudioWritten(1)] * 2, State(interim_samples=1))[1][1:] == [t.ReadInterim(FIRST)]


def test_the_next_interval_begins_where_the_last_reading_was_asked_for() -> None:
    state = after(*[t.AudioWritten(900)] * 2, t.InterimRead(FIRST), state=State(interim_samples=1000))
    assert next_state(state, t.AudioWritten(999))[1] == []
    assert next_state(state, t.AudioWritten(1000))[1] == [t.ReadInterim(FIRST)]


def test_a_pause_reads_ahead_in_place_of_an_interim_reading_and_is_taken_back() -> None:
    state = replace(DETECTING, interim_samples=1000)
    state = after(t.AudioWritten(100), t.VoiceStarted(0), t.AudioWritten(1000), state=state)
    assert state.open
    assert state.open.is_reading
    state, effects = next_state(state, t.VoicePaused())
    assert effects == [t.ReadAhead(FIRST)]
    assert state.open
    assert (state.open.is_paused, state.open.is_reading, state.open.read_to) == (True, False, 1100)
    state, effects = next_state(state, t.AudioWritten(5000))
    assert effects == []
    state, effects = next_state(state, t.VoiceResumed())
    assert effects == [t.DiscardAhead(FIRST)]
    assert state.open
    assert not state.open.is_paused
    assert next_state(state, t.AudioWritten(1))[1] == [t.ReadInterim(FIRST)]


@pytest.mark.parametrize("event", [t.VoicePaused(), t.VoiceResumed(), t.VoiceStopped(), t.InputEnded()])
def test_without_a_turn_the_voice_changes_nothing(event: t.Event) -> None:
    state = after(t.AudioWritten(1000), state=DETECTING)
    assert next_state(state, event) == (state, [])


def test_speech_that_nobody_announced_is_not_stopped() -> None:
    state = after(t.AudioWritten(5000))
    assert next_state(state, t.VoiceStopped()) == (state, [])


# -- Speech --


@pytest.mark.parametrize(
    ("uncommitted_from", "at", "start"),
    [(0, 10_000, 5200), (0, 3000, 0), (7000, 10_000, 7000), (0, 99_999, 15_200)],
)
def test_a_turn_begins_with_its_padding_but_not_before_the_end_of_the_last_one(
    uncommitted_from: int, at: int, start: int
) -> None:
    state = replace(DETECTING, num_samples=20_000, uncommitted_from=uncommitted_from)
    state, effects = next_state(state, t.VoiceStarted(at))
    begun = out.SpeechStarted(item_id=FIRST, audio_start_ms=start // 16)
    assert effects == [t.OpenTurn(FIRST, start), t.Send(begun)]
    assert state.open
    assert (state.open.start, state.open.read_to, state.open.is_announced) == (start, start, True)


def test_speech_within_a_turn_that_a_client_began_is_announced_and_ends_a_pause() -> None:
    state = after(t.AudioWritten(1600), t.VoicePaused(), t.DetectionSet(True, 100))
    state, effects = next_state(state, t.VoiceStarted(1000))
    assert effects == [t.Send(out.SpeechStarted(item_id=FIRST, audio_start_ms=0))]
    assert state.open
    assert (state.open.is_announced, state.open.is_paused) == (True, False)
    assert next_state(state, t.VoiceStarted(1200)) == (state, [])


def test_the_end_of_speech_sends_it_before_the_commit_and_starts_the_engine_first() -> None:
    state = after(t.AudioWritten(1600), t.VoiceStarted(0), t.AudioWritten(32_007), state=DETECTING)
    state, effects = next_state(state, t.VoiceStopped())
    message = out.UserMessage(FIRST)
    assert effects == [
        t.FinishTurn(FIRST),
        t.Send(out.SpeechStopped(item_id=FIRST, audio_end_ms=2100)),
        t.Send(out.Committed(item_id=FIRST, previous_item_id=None)),
        t.Send(out.ItemAdded(item=message, previous_item_id=None)),
        t.Send(out.ItemDone(item=message, previous_item_id=None)),
    ]
    assert (state.open, state.uncommitted_from, state.previous_item_id) == (None, 33_607, FIRST)
    assert [turn.item_id for turn in state.committed] == [FIRST]


def test_detection_that_is_set_takes_its_values_and_leaves_a_turn_that_does_not_pause() -> None:
    state = after(t.AudioWritten(1600))
    changed, effects = next_state(state, t.DetectionSet(True, 7, 9))
    assert effects == []
    assert changed == replace(state, is_detecting=True, padding=7, idle_timeout=9)
    assert next_state(changed, t.DetectionSet(False)) == (state, [])
    paused = after(t.VoicePaused(), state=changed)
    assert next_state(paused, t.DetectionSet(True))[1] == []
    resumed, effects = next_state(paused, t.DetectionSet(False))
    assert effects == [t.DiscardAhead(FIRST)]
    assert resumed.open
    assert not resumed.open.is_paused


# -- Silence --


@pytest.mark.parametrize(("num_samples", "is_committed"), [(15_999, False), (16_000, True)])
def test_a_silence_is_committed_at_its_limit_with_what_is_held_of_it(
    num_samples: int, is_committed: bool
) -> None:
    state = replace(DETECTING, idle_timeout=16_000, num_samples=8000, uncommitted_from=8000)
    state, effects = next_state(state, t.AudioWritten(num_samples))
    if not is_committed:
        assert effects == []
        return
    timeout = out.TimeoutTriggered(item_id=FIRST, audio_start_ms=500, audio_end_ms=1500)
    assert effects[:3] == [t.OpenTurn(FIRST, 24_000 - 4800), t.FinishTurn(FIRST), t.Send(timeout)]
    assert named(effects[3:]) == ["Committed", "ItemAdded", "ItemDone"]
    assert state.uncommitted_from == 24_000


def test_without_a_limit_of_silence_nothing_is_committed() -> None:
    assert run([t.AudioWritten(10**8)], DETECTING)[1] == []


# -- Commits, clears and the end --


@pytest.mark.parametrize(("num_samples", "is_committed"), [(1599, False), (1600, True)])
def test_a_commit_takes_100_ms_of_a_turn_or_of_what_is_held(num_samples: int, is_committed: bool) -> None:
    held = replace(DETECTING, padding=num_samples, num_samples=50_000)
    for state in (after(t.AudioWritten(num_samples)), held):
        committed, effects = next_state(state, t.CommitRequested("mine"))
        if is_committed:
            assert named(effects)[-5:] == [
                "FinishTurn",
                "Committed",
                "ItemAdded",
                "ItemDone",
                "RestartDetection",
            ]
            assert committed.uncommitted_from == state.num_samples
        else:
            (error,) = sent(effects)
            assert isinstance(error, out.Error)
            assert error.error.message.endswith("at least 100 ms of audio, but it holds only 99.94 ms.")
            assert (error.error.event_id, error.error.type) == ("mine", "invalid_request_error")
            assert committed == state
    opened = next_state(replace(held, padding=1600), t.CommitRequested())[1][0]
    assert opened == t.OpenTurn(FIRST, 48_400)


def test_turns_are_numbered_within_their_session_and_name_the_one_before() -> None:
    state, effects = run([t.AudioWritten(1600), t.CommitRequested()] * 2, State(tag="abc"))
    committed = [event for event in sent(effects) if isinstance(event, out.Committed)]
    assert [(event.item_id, event.previous_item_id) for event in committed] == [
        ("item_abc000000", None),
        ("item_abc000001", "item_abc000000"),
    ]
    assert state.num_turns == 2
    assert [turn.start for turn in state.committed] == [0, 1600]


def test_a_clear_drops_the_turn_and_the_next_one_begins_behind_it() -> None:
    state = after(t.AudioWritten(5000))
    state, effects = next_state(state, t.ClearRequested())
    assert effects == [t.DropTurn(FIRST), t.RestartDetection(), t.Send(out.Cleared())]
    assert (state.open, state.uncommitted_from, state.previous_item_id) == (None, 5000, None)
    assert next_state(state, t.ClearRequested())[1] == [t.RestartDetection(), t.Send(out.Cleared())]
    assert next_state(state, t.AudioWritten(9))[1] == [t.OpenTurn(SECOND, 5000)]


def test_the_end_of_the_input_commits_without_a_word_of_speech() -> None:
    _, effects = run([t.AudioWritten(1600), t.InputEnded()])
    assert named(effects) == ["OpenTurn", "FinishTurn", "Committed", "ItemAdded", "ItemDone"]
    assert run([t.AudioWritten(1599), t.InputEnded()])[1][-1] == t.DropTurn(FIRST)
    later: list[t.Event] = [t.AudioWritten(16_000), t.CommitRequested(), t.AudioWritten(1599), t.InputEnded()]
    assert run(later)[1][-1] == t.DropTurn(SECOND)


# -- Results --


@pytest.fixture
def two() -> State:
    """A committed turn and an open one."""
    return after(t.AudioWritten(16_000), t.CommitRequested(), t.AudioWritten(16_000))


def read(item_id: str = FIRST, **values: Any) -> t.TurnRead:
    return t.TurnRead(item_id, 1.0, **values)


def test_a_turn_ends_only_behind_its_commit(two: State) -> None:
    for early in (read(SECOND), t.TurnFailed(SECOND, ERROR)):
        assert next_state(two, early) == (two, [])
    failed, effects = next_state(two, t.TurnFailed(FIRST, ERROR))
    assert effects == [t.Send(out.Failed(item_id=FIRST, error=ERROR))]
    assert (failed.committed, failed.open) == ((), two.open)
    done, effects = next_state(two, read())
    assert (done.committed, done.open) == ((), two.open)
    assert named(effects) == ["Completed"]


def test_an_interim_reading_of_a_committed_turn_is_too_late(two: State) -> None:
    late = [t.InterimRead(FIRST, 0, "one"), t.InterimRead(FIRST, 0, "one")]
    assert run(late, two) == (two, [])


@pytest.mark.parametrize(
    "event", [t.InterimRead(FIRST), t.InterimRead(FIRST, 1, "one"), t.InterimRead(FIRST, 0, None, "en")]
)
def test_an_interim_reading_that_says_nothing_of_the_growing_chunk_frees_the_next(
    event: t.InterimRead,
) -> None:
    state = after(*[t.AudioWritten(1000)] * 2, state=State(interim_samples=1000))
    assert state.open
    read, effects = next_state(state, event)
    assert effects == []
    assert read == replace(state, open=replace(state.open, is_reading=False))


def test_final_texts_go_to_their_own_turn_and_are_joined(two: State) -> None:
    state, effects = run([t.ChunkRead(FIRST, "one", "en"), t.ChunkRead(SECOND, "two", "en")], two)
    state, more = run([t.ChunkRead(FIRST, "three", "en")], state)
    deltas = [
        (event.item_id, event.delta) for event in sent([*effects, *more]) if isinstance(event, out.Delta)
    ]
    assert deltas == [(FIRST, "one"), (SECOND, "two"), (FIRST, " three")]
    (first,) = state.committed
    assert state.open
    assert (first.text, first.deltas, first.num_chunks) == ("one three", "one three", 2)
    assert (state.open.text, state.open.num_chunks) == ("two", 1)
    (completed,) = sent(next_state(state, read())[1])
    assert isinstance(completed, out.Completed)
    assert completed.transcript == "one three"


def test_what_was_said_before_counts_for_the_chunk_that_grows_only() -> None:
    state = after(t.AudioWritten(1000))
    state, effects = run([t.InterimRead(FIRST, 0, "one two", "en")] * 2, state)
    assert [event.delta for event in sent(effects) if isinstance(event, out.Delta)] == ["one two"]
    state, effects = next_state(state, t.ChunkRead(FIRST, "one two three", "en"))
    assert [event.delta for event in sent(effects) if isinstance(event, out.Delta)] == [" three"]
    assert state.open
    assert state.open.agreement == t.Agreement()
    _, effects = run([t.InterimRead(FIRST, 1, "four", "en")] * 2, state)
    assert [event.delta for event in sent(effects) if isinstance(event, out.Delta)] == [" four"]


def test_a_chunk_in_which_nothing_was_said_is_counted_and_sends_nothing(two: State) -> None:
    state, effects = next_state(two, t.ChunkRead(SECOND, ""))
    assert effects == []
    assert state.open
    assert state.open.num_chunks == 1


def test_what_a_turn_had_is_told_at_its_end(two: State) -> None:
    logprobs = (TokenLogprob(" one", -0.1, tuple(b" one")),)
    (plain,), (full,) = (
        sent(next_state(two, event)[1])
        for event in (
            t.TurnRead(FIRST, 1.23456),
            t.TurnRead(FIRST, 1.23456, ("en", "de"), logprobs),
        )
    )
    assert isinstance(plain, out.Completed)
    assert isinstance(full, out.Completed)
    assert (plain.languages, plain.logprobs, plain.usage.seconds) == (UNSET, UNSET, 1.235)
    assert full.languages == (out.LanguageCode("en"), out.LanguageCode("de"))
    assert full.logprobs == logprobs


def test_segments_are_numbered_from_1_and_rounded_to_the_millisecond() -> None:
    state = after(t.AudioWritten(16_000), t.CommitRequested(), t.AudioWritten(16_000), t.CommitRequested())
    spoken = (t.SpeakerSegment(0.00049, 0.50051, "one", "A"), t.SpeakerSegment(0.6, 0.9, "two", "B"))
    first, second, _ = sent(next_state(state, read(SECOND, segments=spoken))[1])
    assert isinstance(first, out.SpokenSegment)
    assert isinstance(second, out.SpokenSegment)
    assert (first.id, second.id) == ("seg_000001_001", "seg_000001_002")
    assert (first.start, first.end, second.start, second.end) == (1.0, 1.501, 1.6, 1.9)


@pytest.mark.parametrize("logprobs", [None, ()])
def test_deltas_have_log_probabilities_where_the_reading_has(logprobs: tuple[()] | None) -> None:
    state = after(t.AudioWritten(1000))
    (delta,) = sent(next_state(state, t.ChunkRead(FIRST, "one", "en", logprobs))[1])
    assert isinstance(delta, out.Delta)
    assert delta.logprobs == (UNSET if logprobs is None else ())
