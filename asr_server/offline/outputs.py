"""Says what `batch.py` expects of a place for results: `folder.py` and `standard_output.py` are two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from asr_server.core import Transcript
from asr_server.offline.inputs import Failure


class OutputError(Exception):
    """Nothing more can be written there, whatever the input; the message is a line."""


class Outputs(Protocol):
    """Takes the result of each input, by the input's index, in any order."""

    def is_done(self, index: int) -> bool:
        """Whether this input can be skipped, because its results are there."""
        ...

    def prepare(self, index: int) -> Failure | None:
        """Before the input is transcribed: why its result could not be written; None: it can."""
        ...

    def begin(self, indices: Sequence[int]) -> None:
        """These inputs, in this order, will each be written or left out."""
        ...

    async def write(self, index: int, transcript: Transcript) -> str:
        """Writes the result; says in which files. Raises OSError for this one, OutputError for all."""
        ...

    async def leave_out(self, index: int) -> None:
        """There will be no result for this input."""
        ...

    def close(self) -> None:
        """Nothing more comes, perhaps because of an interruption."""
        ...
