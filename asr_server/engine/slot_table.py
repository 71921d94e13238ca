"""Which sequence holds which slot. Used by `engine.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from asr_server.engine.sequence import Sequence


class SlotTable:
    """Slots and their sequences; a sequence knows its slot too."""

    def __init__(self, num_slots: int) -> None:
        self._holders: list[Sequence | None] = [None] * num_slots

    def __len__(self) -> int:
        """Slots in use."""
        return len(self._holders) - self._holders.count(None)

    def place(self, sequence: Sequence, slot: int | None = None) -> None:
        """Into a given slot, or the first free one."""
        sequence.slot = self._holders.index(None) if slot is None else slot
        self._holders[sequence.slot] = sequence

    def free(self, sequence: Sequence) -> None:
        self._holders[sequence.slot] = None

    def compact(self, movable: Iterable[Sequence]) -> list[tuple[int, int]]:
        """Moves the last of these sequences into free slots before them; from where to where."""
        gaps = [slot for slot, holder in enumerate(self._holders) if holder is None]
        moves: list[tuple[int, int]] = []
        last_first = sorted(movable, key=lambda sequence: sequence.slot, reverse=True)
        for sequence, gap in zip(last_first, gaps, strict=False):
            if gap > sequence.slot:
                break
            moves.append((sequence.slot, gap))
            self.free(sequence)
            self.place(sequence, gap)
        return moves


def grouped(sequences: Iterable[Sequence], key: Callable[[Sequence], object]) -> list[list[Sequence]]:
    """Sequences with the same key together, in the order of their slots."""
    groups: dict[object, list[Sequence]] = {}
    for sequence in sorted(sequences, key=lambda sequence: sequence.slot):
        groups.setdefault(key(sequence), []).append(sequence)
    return list(groups.values())
