"""Who holds which slot, and what each slot knows of its text."""

import numpy as np
import torch

from asr_server.core import ChunkId, DecodingOptions
from asr_server.engine.active_chunk import ActiveChunk
from asr_server.engine.cuda import Transfers
from asr_server.engine.slots import SlotStart, SlotState, SlotTable

END, FIRST_TIME = 60, 70
CPU = torch.device("cpu")
PROMPT = [61, 67, 65]


def placed(table: SlotTable, *names: str) -> list[ActiveChunk]:
    nothing = np.zeros(0, np.float32)
    chunks = [ActiveChunk(ChunkId(name, 0), nothing, DecodingOptions(), None) for name in names]
    for chunk in chunks:
        table.place(chunk)
    return chunks


def test_a_chunk_gets_as_many_slots_as_it_wants_and_gives_them_back() -> None:
    table = SlotTable(num_chunks=3, beam_size=4)
    first, second = placed(table, "first", "second")
    assert ((first.slots, first.audio_slot), (second.slots, second.audio_slot)) == (([0], 0), ([1], 1))
    table.resize(first, 4)
    assert first.slots == [0, 2, 3, 4]
    table.resize(first, 2)
    table.resize(second, 3)
    assert (first.slots, second.slots) == ([0, 2], [1, 3, 4])
    table.resize(second, 2)
    assert second.slots == [1, 3]


def test_what_a_chunk_held_is_free_for_the_next() -> None:
    table = SlotTable(num_chunks=2, beam_size=2)
    first, second = placed(table, "first", "second")
    table.resize(first, 2)
    assert len(table) == 2
    table.free(first)
    assert (len(table), first.slots) == (1, [])
    table.resize(second, 2)
    (third,) = placed(table, "third")
    assert (second.slots, third.slots, third.audio_slot, len(table)) == ([1, 0], [2], 0, 2)


def test_chunks_move_from_the_last_slots_into_free_ones() -> None:
    table = SlotTable(num_chunks=4, beam_size=2)
    first, second, third = placed(table, "first", "second", "third")
    table.resize(third, 2)
    table.free(first)
    assert table.compact([second, third]) == [(3, 0)]
    assert (second.slots, third.slots) == ([1], [2, 0])
    assert table.compact([second, third]) == []
    table.free(second)
    (fourth,) = placed(table, "fourth")
    assert fourth.slots == [1]


def begun(*starts: SlotStart, num_positions: int = 8) -> SlotState:
    state = SlotState.empty(3, num_positions, CPU)
    state.begin(starts, FIRST_TIME - 1, Transfers(CPU, overlap=False))
    return state


def history(state: SlotState, slot: int) -> tuple[int, ...]:
    columns = (state.token, state.previous, state.position, state.num_generated, state.last_time)
    return tuple(int(column[slot]) for column in columns)


def test_a_slot_that_is_held_does_not_run_over_its_last_position() -> None:
    state = begun(SlotStart(0, PROMPT, DecodingOptions()), num_positions=4)
    for token in range(1, 7):
        state.advance(torch.tensor([token] * 3), FIRST_TIME, END)
    assert history(state, 0)[:4] == (6, 5, 3, 6)
    assert state.generated[:, 0].tolist() == [1, 2, 3, 6]
