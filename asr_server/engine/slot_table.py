"""Which sequence holds which slots. Used by `engine.py` and `loop.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from asr_server.engine.sequence import Sequence


class SlotTable:
    """Slots and their sequences; a sequence knows its slots too."""

    def __init__(self, num_slots: int) -> None:
        self._holders: list[Sequence | None] = [None] * num_slots

    def __len__(self) -> int:
        """Slots in use."""
        return len(self._holders) - self.num_free

    @property
    def num_free(self) -> int:
        return self._holders.count(None)

    def place(self, sequence: Sequence, count: int = 1) -> None:
        """Gives the sequence so many more slots, the first that are free."""
        for _ in range(count):
            slot = self._holders.index(None)
            self._holders[slot] = sequence
            sequence.slots.append(slot)

    def free(self, sequence: Sequence, kept: int = 0) -> None:
        """Takes the sequence's slots back, but for the first `kept`. It still knows where it lay."""
        for slot in sequence.slots[kept:]:
            self._holders[slot] = None
        if kept:
            del sequence.slots[kept:]

    def compact(self, movable: Iterable[Sequence]) -> list[tuple[int, int]]:
        """Moves what these sequences have in the last slots into free slots before; from where to where."""
        gaps = [slot for slot, holder in enumerate(self._holders) if holder is None]
        held = [(slot, sequence) for sequence in movable for slot in sequence.slots]
        moves: list[tuple[int, int]] = []
        for (slot, sequence), gap in zip(sorted(held, key=_slot, reverse=True), gaps, strict=False):
            if gap > slot:
                break
            moves.append((slot, gap))
            self._holders[slot], self._holders[gap] = None, sequence
            sequence.slots[sequence.slots.index(slot)] = gap
        return moves


def _slot(held: tuple[int, Sequence]) -> int:
    return held[0]


def grouped(sequences: Iterable[Sequence], key: Callable[[Sequence], object]) -> list[list[Sequence]]:
    """Sequences with the same key together, in the order of their slots."""
    groups: dict[object, list[Sequence]] = {}
    for sequence in sorted(sequences, key=lambda sequence: sequence.slot):
        groups.setdefault(key(sequence), []).append(sequence)
    return list(groups.values())
