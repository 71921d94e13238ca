"""Who holds which slot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from asr_server.engine.sequence import Sequence


class SlotTable:
    """Slots and their sequences; a sequence knows its slot too."""

    def __init__(self, num_slots: int) -> None:
        self._holders: list[Sequence | None] = [None] * num_slots

    def __len__(self) -> int:
        """Slots in use."""
        return sum(holder is not None for holder in self._holders)

    def place(self, sequence: Sequence, slot: int | None = None) -> None:
        """Into a given slot, or the first free one."""
        sequence.slot = self._holders.index(None) if slot is None else slot
        self._holders[sequence.slot] = sequence

    def free(self, sequence: Sequence) -> None:
        self._holders[sequence.slot] = None

    def compact(self) -> list[tuple[int, int]]:
        """Moves the last sequences into free slots before them; from where to where."""
        used = len(self)
        gaps = [slot for slot in range(used) if self._holders[slot] is None]
        last = [sequence for sequence in self._holders[used:] if sequence is not None]
        moves = [(sequence.slot, gap) for sequence, gap in zip(last, gaps, strict=True)]
        for sequence, gap in zip(last, gaps, strict=True):
            self.free(sequence)
            self.place(sequence, gap)
        return moves


def contiguous_runs(
    sequences: Iterable[Sequence], key: Callable[[Sequence], object] = lambda sequence: None
) -> Iterator[list[Sequence]]:
    """Groups sequences with the same key that lie in neighbouring slots."""
    run: list[Sequence] = []
    for sequence in sorted(sequences, key=lambda sequence: sequence.slot):
        if run and (sequence.slot != run[-1].slot + 1 or key(sequence) != key(run[-1])):
            yield run
            run = []
        run.append(sequence)
    if run:
        yield run
