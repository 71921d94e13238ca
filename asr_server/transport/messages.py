"""Messages between the API process and a replica.

Commands go to a replica, events come back; what is about a chunk names (handle, chunk, part, attempt).
"""

from typing import Final, Protocol

import msgspec

from asr_server.core import ChunkId, ChunkResult, DecodingOptions, Samples

HEARTBEAT_S: Final = 1.0

# The signs of life that processes watch for in each other.
FROZEN_AFTER_S: Final = 4.0  # noticed within 5 s: ticks are coarse
# Loading a library may hold the interpreter's lock, and with it the heartbeat, for long.
SILENT_STARTUP_LIMIT_S: Final = 120.0


class Submit(msgspec.Struct, frozen=True, tag=True):
    id: ChunkId
    samples: Samples
    options: DecodingOptions


class SetLanguage(msgspec.Struct, frozen=True, tag=True):
    """Answer `LanguageDetected`: the chunk's slot waits for it."""

    id: ChunkId
    language: str


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Drop a request's chunks, or one of them; `Cancelled` answers."""

    handle_id: str
    id: ChunkId | None = None


class Drain(msgspec.Struct, frozen=True, tag=True):
    pass


Command = Submit | SetLanguage | Cancel | Drain


class EngineInfo(msgspec.Struct, frozen=True):
    device: str
    dtype: str
    num_slots: int
    num_threads: int  # of torch, on the CPU
    reasons: dict[str, str] = {}  # by field: why it was chosen, where that was left to the engine


class Credit(msgspec.Struct, frozen=True, tag=True):
    """Take `count` more chunks. The first credit means that the replica is ready."""

    count: int
    num_slots: int = 0  # with the first one: how many chunks the replica decodes at once
    engine: EngineInfo | None = None  # with the first one


class StartFailed(msgspec.Struct, frozen=True, tag=True):
    """The engine can never start: the model or the device is at fault."""

    reason: str


class LanguageDetected(msgspec.Struct, frozen=True, tag=True):
    id: ChunkId
    probabilities: dict[str, float]


class ChunkTimes(msgspec.Struct, frozen=True, array_like=True):
    encode_s: float
    decode_s: float  # language detection and fallbacks included


class Result(msgspec.Struct, frozen=True, tag=True):
    id: ChunkId
    result: ChunkResult
    times: ChunkTimes | None = None


class EarlyResult(msgspec.Struct, frozen=True, tag=True):
    """The segments closed so far. The chunk's result begins with these tokens."""

    id: ChunkId
    result: ChunkResult


class Failed(msgspec.Struct, frozen=True, tag=True):
    id: ChunkId
    message: str


class Cancelled(msgspec.Struct, frozen=True, tag=True):
    handle_id: str
    id: ChunkId | None = None


STEP_TIME_BOUNDS_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class StepTimes(msgspec.Struct, frozen=True, array_like=True):
    counts: tuple[int, ...] = ()  # within each bound and not the one before; the last: above them all
    sum_s: float = 0.0


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    num_steps: int  # of the engine since its start
    slots_in_use: int = 0
    num_decode_steps: int = 0
    num_decoded_tokens: int = 0  # divided by the steps: the mean decode batch
    step_times: StepTimes = StepTimes()
    num_layers: int = 0  # of the model, computed since its start: progress within a step
    search_steps: tuple[int, int, int] = (0, 0, 0)  # of chunks: all, sure ones, those of several hypotheses

    @property
    def progress(self) -> tuple[int, int]:
        """Return numbers that grow with each beat, except while the engine hangs."""
        return self.num_steps, self.num_layers


class Released(msgspec.Struct, frozen=True, tag=True):
    """Slots of the shared memory can be written again."""

    slots: tuple[int, ...]


class LogLine(msgspec.Struct, frozen=True, tag=True):
    text: str


Event = (
    Credit
    | StartFailed
    | LanguageDetected
    | EarlyResult
    | Result
    | Failed
    | Cancelled
    | Heartbeat
    | Released
    | LogLine
)


class EngineServer(Protocol):
    """The replica's end of the connection."""

    def receive(self, wait_s: float) -> list[Command]: ...

    def send(self, event: Event) -> None:
        """Callable from any thread."""

    def close(self) -> None:
        return
