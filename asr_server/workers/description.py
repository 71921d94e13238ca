"""The line that says what is being served, once it is: what was chosen, and why."""

from __future__ import annotations

from pathlib import Path

from asr_server.checkpoint import revision_of
from asr_server.config import Settings, flag_name
from asr_server.core import EngineInfo
from asr_server.machine import available_cores

_FP8 = {"cache_dtype": "the audio's keys and values", "encoder_dtype": "encoder"}  # where settings ask for it


def describe(settings: Settings, engine: EngineInfo, num_replicas: int) -> str:
    """Without line breaks. `engine` is that of the first replica that is ready; the others are alike."""
    revision = revision_of(Path(settings.model)) or f"of the files in {settings.model}"

    def chosen(value: object, setting: str, why: str) -> str:
        asked = getattr(settings, setting) not in ("auto", 0)
        return f"{value} ({flag_name(setting) if asked else why})"

    shared = engine.reasons.get("num_replicas")
    parts = (
        f"device {chosen(engine.device, 'device', engine.reasons['device'])}",
        f"dtype {chosen(engine.dtype, 'dtype', engine.reasons['dtype'])}",
        f"slots {chosen(engine.num_slots, 'max_slots', engine.reasons['num_slots'])}",
        *(
            f"{what} fp8 ({flag_name(name)})"
            for name, what in _FP8.items()
            if getattr(settings, name) == "fp8"
        ),
        f"threads {chosen(engine.num_threads, 'cpu_threads', _why_threads(num_replicas))}",
        f"replicas {num_replicas}{f' ({shared})' if shared else ''}",
    )
    return f"serving {settings.model_names[0]}, revision {revision}: {', '.join(parts)}{_kernels(engine)}"


def _why_threads(replicas: int) -> str:
    cores = available_cores()
    return f"{cores} cores" if replicas == 1 else f"{cores} cores for {replicas} replicas"


def _kernels(engine: EngineInfo) -> str:
    """Where there was something to choose."""
    chosen = engine.reasons.get("kernels")
    return f", kernels: {chosen}" if chosen else ""
