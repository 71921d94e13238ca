"""The life of turns, as a pure function of state and event, without a clock.

Times are samples at 16 kHz from the session's start. The rules, tested on random events:

1. At most one turn is open. It grows until committed or dropped; turns never overlap.
2. With voice detection, speech opens a turn and its end commits it. Without, the first sample after a
   commit opens one, and the client commits.
3. A client's commit of under 100 ms is an error and changes nothing.
4. Every committed turn names the one before it, and ends in one `completed` or `failed`.
5. A dropped turn ends in neither.
6. Deltas come before the turn's end, are only appended, and follow the chunks' order.
7. A result for a missing turn has no effect.
8. `speech_stopped` follows a `speech_started` of the same turn.
"""

from typing import Final

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from asr_server.annexes.realtime import server_events as out
from asr_server.annexes.realtime import turn_types as turns
from asr_server.annexes.realtime.turn_types import SAMPLES_PER_MS, Effect, Event, State, Step, Turn
from asr_server.annexes.speakers.labels import UNKNOWN
from asr_server.api.schemas import ErrorDetail
from asr_server.core import SAMPLE_RATE, TokenLogprob, Word
from asr_server.language_codes import continuation

MIN_COMMIT_MS: Final = 100

Logprobs = tuple[TokenLogprob, ...] | UnsetType


def next_state(state: State, event: Event) -> Step:
    match event:
        case turns.AudioWritten():
            return _on_audio(replace(state, num_samples=state.num_samples + event.num_samples))
        case turns.VoiceStarted():
            return _on_voice_started(state, event.at)
        case turns.Signal.VOICE_PAUSED if state.open:
            paused = replace(state.open, is_paused=True, is_reading=False, read_to=state.num_samples)
            return replace(state, open=paused), [turns.ReadAhead(paused.item_id)]
        case turns.Signal.VOICE_RESUMED if state.open:
            return _go_on(state, state.open)
        case turns.Signal.VOICE_STOPPED if state.open and state.open.is_announced:
            end_ms = _ms(state.num_samples)
            return _commit(state, out.SpeechStopped(item_id=state.open.item_id, audio_end_ms=end_ms))
        case turns.CommitRequested():
            return _on_commit(state, event.event_id)
        case turns.Signal.CLEAR_REQUESTED:
            state, effects = _drop(state)
            return state, [*effects, turns.RestartDetection(), turns.Send(out.Cleared())]
        case turns.DetectionSet():
            return _on_detection_set(state, event)
        case turns.Signal.INPUT_ENDED if state.open:
            is_long = _ms(state.num_samples - state.open.start) >= MIN_COMMIT_MS
            return _commit(state) if is_long else _drop(state)
        case turns.InterimRead() | turns.ChunkRead() | turns.TurnRead() | turns.TurnFailed():
            return _on_result(state, event)
    return state, []


def _on_audio(state: State) -> Step:
    if state.open:
        return _read_interim(state, state.open)
    return (state, []) if state.is_detecting else _open(state, state.uncommitted_from)


def _read_interim(state: State, turn: Turn) -> Step:
    is_due = state.num_samples - turn.read_to >= state.interim_samples > 0
    if turn.is_reading or turn.is_paused or not is_due:
        return state, []
    reading = replace(turn, is_reading=True, read_to=state.num_samples)
    return replace(state, open=reading), [turns.ReadInterim(turn.item_id)]


def _on_voice_started(state: State, at: int) -> Step:
    start = max(state.uncommitted_from, min(at, state.num_samples) - state.padding)
    state, opened = (state, []) if state.open else _open(state, start)
    assert state.open
    if state.open.is_announced:  # detection was off and on again within the turn
        return state, opened
    turn = replace(state.open, is_announced=True, is_paused=False)
    started = out.SpeechStarted(item_id=turn.item_id, audio_start_ms=_ms(turn.start))
    return replace(state, open=turn), [*opened, turns.Send(started)]


def _on_detection_set(state: State, event: turns.DetectionSet) -> Step:
    if state.is_detecting and not state.open:  # what is older is not held any more
        state = replace(state, uncommitted_from=_held_from(state))
    state = replace(state, **msgspec.structs.asdict(event))
    if event.is_detecting or not state.open or not state.open.is_paused:
        return state, []
    # Nothing will tell that speech goes on: what was read ahead is not the end of the turn.
    return _go_on(state, state.open)


def _go_on(state: State, turn: Turn) -> Step:
    going_on = turns.GoOn(turn.item_id, is_shown=state.interim_samples > 0)
    return replace(state, open=replace(turn, is_paused=False)), [going_on]


def _open(state: State, start: int) -> Step:
    item_id = f"item_{state.tag}{state.num_turns:06d}"
    turn = Turn(item_id, start, read_to=start)
    return replace(state, open=turn, num_turns=state.num_turns + 1), [turns.OpenTurn(item_id, start)]


def _on_commit(state: State, event_id: str | None) -> Step:
    start = state.open.start if state.open else _held_from(state)
    length_ms = (state.num_samples - start) / SAMPLES_PER_MS
    if length_ms < MIN_COMMIT_MS:
        return state, [turns.Send(_commit_too_short(length_ms, event_id))]
    state, opened = (state, []) if state.open else _open(state, start)
    state, committed = _commit(state)
    return state, [*opened, *committed, turns.RestartDetection()]


def _commit(state: State, *said: out.ServerEvent) -> Step:
    """Commit the open turn. The engine starts before anything is sent."""
    assert state.open
    turn, before = state.open, state.previous_item_id
    if not turn.is_paused:  # else it was read ahead
        turn = replace(turn, read_to=state.num_samples)
    message = out.UserMessage(turn.item_id)
    state = replace(
        state,
        open=None,
        committed=(*state.committed, turn),
        previous_item_id=turn.item_id,
        uncommitted_from=state.num_samples,
    )
    return state, [
        turns.FinishTurn(turn.item_id),
        *map(turns.Send, said),
        turns.Send(out.Committed(item_id=turn.item_id, previous_item_id=before)),
        turns.Send(out.ItemAdded(item=message, previous_item_id=before)),
        turns.Send(out.ItemDone(item=message, previous_item_id=before)),
    ]


def _drop(state: State) -> Step:
    effects: list[Effect] = [turns.DropTurn(state.open.item_id)] if state.open else []
    return replace(state, open=None, uncommitted_from=state.num_samples), effects


def _on_result(state: State, event: turns.Result) -> Step:
    known = {turn.item_id: turn for turn in (state.open, *state.committed) if turn}
    if (turn := known.get(event.item_id)) is None:
        return state, []
    is_open = turn is state.open
    match event:
        case turns.InterimRead() if is_open:
            return _on_interim(state, turn, event)
        case turns.ChunkRead():
            return _on_chunk(state, turn, event)
        case turns.TurnRead() if not is_open:
            segments = [turns.Send(each) for each in _segments(turn, event)]
            return _without(state, turn), [*segments, turns.Send(_completed(turn, event))]
        case turns.TurnFailed() if not is_open:
            return _without(state, turn), [turns.Send(out.Failed(item_id=turn.item_id, error=event.error))]
    return state, []


def _on_interim(state: State, turn: Turn, event: turns.InterimRead) -> Step:
    turn = replace(turn, is_reading=False)
    if event.text is None or event.chunk != turn.num_chunks or not state.interim_samples:
        return replace(state, open=turn), []
    turn = replace(turn, read_to=max(turn.read_to, turn.start + event.num_samples))
    num_sent = turn.agreement.num_sent
    agreement, text = turns.agree(turn.agreement, event.text, event.language)
    logprobs = _logprobs(event, num_sent, agreement.num_sent)
    turn, sent = _send_text(replace(turn, agreement=agreement), text, event.language, logprobs)
    rest = turns.conclude(agreement, event.text, event.language)
    tail = continuation(turn.deltas, rest, event.language)
    return replace(state, open=turn), sent + _interim(state, turn, event, tail)


def _on_chunk(state: State, turn: Turn, event: turns.ChunkRead) -> Step:
    rest = turns.conclude(turn.agreement, event.text, event.language)
    text = turn.text + continuation(turn.text, event.text, event.language)
    turn, sent = _send_text(turn, rest, event.language, _logprobs(event, turn.agreement.num_sent, None))
    turn = replace(turn, text=text, num_chunks=turn.num_chunks + 1, agreement=turns.Agreement())
    return _with(state, turn), sent + _interim(state, turn, event)


def _interim(state: State, turn: Turn, event: turns.Reading, tail: str = "") -> list[Effect]:
    if not state.shows_interim:
        return []
    read = out.Interim(
        item_id=turn.item_id,
        text=event.text or "",
        tail=tail,
        words=tuple(_live_word(word, turn.start / SAMPLE_RATE) for word in event.words),
        audio_end_ms=_ms(turn.start + event.num_samples),
        is_final=isinstance(event, turns.ChunkRead),
    )
    return [turns.Send(read)]


def _live_word(word: Word, start_s: float) -> out.LiveWord:
    times = round(start_s + word.start_s, 3), round(start_s + word.end_s, 3)
    return out.LiveWord(word.text.strip(), *times, word.confidence)


def _logprobs(event: turns.Reading, first: int, end: int | None) -> Logprobs:
    if event.logprobs is None or event.text is None:
        return UNSET
    return turns.tokens_between(event.text, event.language, event.logprobs, first, end)


def _send_text(turn: Turn, text: str, language: str | None, logprobs: Logprobs) -> tuple[Turn, list[Effect]]:
    delta = continuation(turn.deltas, text, language)
    if not delta:
        return turn, []
    turn = replace(turn, deltas=turn.deltas + delta)
    return turn, [turns.Send(out.Delta(item_id=turn.item_id, delta=delta, logprobs=logprobs))]


def _segments(turn: Turn, event: turns.TurnRead) -> list[out.SpokenSegment]:
    start_s, tag = turn.start / SAMPLE_RATE, turn.item_id.removeprefix("item_")
    return [
        out.SpokenSegment(
            item_id=turn.item_id,
            id=f"seg_{tag}_{number:03d}",
            speaker=each.speaker or UNKNOWN,
            start=round(start_s + each.start_s, 3),
            end=round(start_s + each.end_s, 3),
            text=each.text.strip(),
        )
        for number, each in enumerate(event.segments, 1)
    ]


def _completed(turn: Turn, event: turns.TurnRead) -> out.Completed:
    return out.Completed(
        item_id=turn.item_id,
        transcript=turn.text,
        usage=out.DurationUsage(round(event.duration_s, 3)),
        languages=tuple(out.LanguageCode(code) for code in event.languages) or UNSET,
        logprobs=UNSET if event.logprobs is None else event.logprobs,
    )


def _with(state: State, turn: Turn) -> State:
    if state.open and state.open.item_id == turn.item_id:
        return replace(state, open=turn)
    committed = (turn if other.item_id == turn.item_id else other for other in state.committed)
    return replace(state, committed=tuple(committed))


def _without(state: State, turn: Turn) -> State:
    return replace(state, committed=tuple(t for t in state.committed if t.item_id != turn.item_id))


def _held_from(state: State) -> int:
    return max(state.uncommitted_from, state.num_samples - state.padding)


def _ms(num_samples: int) -> int:
    return num_samples // SAMPLES_PER_MS


def _commit_too_short(length_ms: float, event_id: str | None) -> out.Error:
    return out.error_event(
        ErrorDetail(
            message="Error committing input audio buffer: buffer too small. "
            f"Expected at least {MIN_COMMIT_MS} ms of audio, but it holds only {length_ms:.2f} ms.",
            type="invalid_request_error",
            param=None,
            code="input_audio_buffer_commit_empty",
        ),
        event_id,
    )
