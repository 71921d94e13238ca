"""Define the core's settings; a setting's flag and environment name derive from its field."""

from __future__ import annotations

import os
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from asr_server.machine import available_cores, default_preprocess_workers, num_gpus

DEFAULT_MODEL: Final = "base"
ANY_NAME: Final = "*"  # as a model alias
EMBEDDED_MODEL = Path(__file__).parent / "models" / "whisper-digits"
EMBEDDED_MODEL_LIMIT = "hears English digits only, about 1 in 20 of them wrongly"
MIB = 1 << 20
NO_PORT: Final = -1
# Beyond what any machine has: a number with some digits too many is refused, rather than tried.
MOST_PROCESSES: Final = 1024  # or threads
MOST_SLOTS: Final = 10**6
MOST_IDLE_S: Final = 1e7
_ORIGIN: Final = r"[a-z][a-z0-9+.-]*://[^\s,/?#]+"  # as browsers send it: no path, no slash
_HOST: Final = r"[A-Za-z0-9._-]+"
HOSTS: Final = rf"^(\*|{_HOST}(\s*,\s*{_HOST})*)?$"  # names with commas between them, or * for any

Part = TypeVar("Part", bound="Settings")


def setting(default: Any, help: str, env: str = "", allowed: str = "", **constraints: Any) -> Any:
    extra: Any = {"env": env, "allowed": allowed}
    return Field(default, description=help, json_schema_extra=extra, **constraints)


CHECKED: Final = ConfigDict(extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True, config=CHECKED)
class Settings:
    """The settings of the core; annexes add theirs in subclasses. Raises pydantic.ValidationError."""

    # The model and where it runs
    model: str = setting(
        DEFAULT_MODEL,
        "Whisper checkpoint: a short name such as turbo, a Hugging Face hub name, a directory or a file",
        min_length=1,
    )
    served_model_name: str = setting(
        "",
        "name clients ask for; empty: the model's own name",
        pattern=r"^([!-~]([ -~]*[!-~])?)?$",
        allowed="empty, or printable ASCII without spaces at its ends",
    )
    model_alias: str = setting(
        "whisper-1,gpt-4o-transcribe,gpt-4o-mini-transcribe,gpt-4o-mini-transcribe-2025-12-15,"
        "gpt-4o-transcribe-diarize,gpt-transcribe,gpt-live-transcribe,gpt-realtime-whisper",
        "further names the model answers to, separated by commas; *: any name",
    )
    load: Literal["eager", "lazy", "pinned"] = setting(
        "eager", "when a model is loaded: at the start, at its first request, or at the start and for good"
    )
    idle_unload_s: float = setting(
        0.0,
        "seconds without a request after which a model gives its memory back until the next one; 0: never",
        ge=0,
        le=MOST_IDLE_S,
    )
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "where the model runs")
    dtype: Literal["auto", "float32", "bfloat16", "float16", "int8"] = setting(
        "auto",
        "precision; auto: int8 on a CPU with VNNI, else bfloat16 where the device has it, else float32, "
        "on CUDA float16. What int8 does not multiply is in bfloat16 or float32",
    )
    executor: Literal["multiprocess", "inline", "ray"] = setting(
        "multiprocess",
        "how replicas run: processes of their own, inside this one (debugging), or over a Ray cluster",
    )
    replicas: int = setting(
        0,
        "engine replicas, each with the whole model; more than there are GPUs share these; 0: one for each "
        "GPU, or one on the CPU",
        ge=0,
        le=MOST_PROCESSES,
    )
    tensor_parallel_size: int = setting(
        1, "GPUs, or processes on the CPU, that share out each replica's weights and slots", ge=1
    )
    cpu_threads: int = setting(
        0, "torch threads a replica on CPU; 0: one a core, shared between replicas", ge=0, le=MOST_PROCESSES
    )
    max_slots: int = setting(
        0, "chunks decoded at once by a replica; 0: from free memory", ge=0, le=MOST_SLOTS
    )
    short_audio: Literal["auto", "exact", "tail"] = setting(
        "auto",
        "exact: a chunk is encoded with the silence behind it, to the window's end. tail: that silence is "
        "encoded once for all, and a short chunk costs less. auto: exact with --dtype float32, else tail",
    )
    kernels: Literal["auto", "torch"] = setting(
        "auto",
        "CUDA: auto: Triton kernels, which need a C compiler; torch: decode steps take 2 to 3 times as long",
    )
    beam_size: int = setting(
        5,
        "most hypotheses of a beam search, which has one while the model is sure; 1: greedy decoding",
        ge=1,
        le=16,
    )
    check_voice: bool = setting(
        True, "listen for voices: leave out what nobody says, read again what the model passed over"
    )

    # The front end
    preprocess_workers: int = setting(
        default_preprocess_workers(),
        "threads that decode and split audio, and listen for voices",
        env="VLLM_MAX_AUDIO_PREPROCESS_WORKERS",
        ge=1,
        le=MOST_PROCESSES,
    )
    max_upload_bytes: int = setting(1024 * MIB, "largest upload, in bytes", ge=1)
    max_audio_s: float = setting(12 * 3600.0, "longest recording once decoded, in seconds", gt=0)
    max_concurrent_requests: int = setting(
        256, "requests in flight at once; as many again wait, more are refused with 429", ge=1
    )

    # HTTP
    host: str = setting("127.0.0.1", "address to listen on", min_length=1)
    port: int = setting(8000, "port to listen on; 0: any free one", ge=0, le=65535)
    reuse_port: bool = setting(
        False,
        "take connections in turn with other servers on the same port that have --reuse-port too (Linux); "
        "each listens only from when it is ready until it drains",
    )
    root_path: str = setting(
        "", "path prefix set by a proxy in front", pattern="^(/.*)?$", allowed="empty, or begins with /"
    )
    unknown_fields: Literal["refuse", "ignore"] = setting(
        "refuse", "form fields that the API does not have: 400, or left out and named in a header"
    )
    cors_origins: str = setting(
        "",
        "origins allowed by CORS, separated by commas; * for all",
        pattern=rf"^(\*|{_ORIGIN}(\s*,\s*{_ORIGIN})*)?$",
        allowed="*, or origins such as https://example.com or app://obsidian.md, separated by commas",
    )
    allowed_hosts: str = setting(
        "",
        "names by which a server on a loopback address without a key is asked, beside this machine's own, "
        "separated by commas; * for all",
        pattern=HOSTS,
        allowed="*, or names such as asr.example.com without a port, separated by commas",
    )
    ssl_certfile: str = setting("", "TLS certificate file")
    ssl_keyfile: str = setting("", "TLS key file")
    max_connections: int = setting(
        1000,
        "connections open at once; beyond them idle and silent ones are closed, else uploads get 429",
        ge=1,
    )
    client_grace_s: float = setting(
        20.0, "seconds a client may stall, be too slow, or send headers, before it is disconnected", gt=0
    )
    keep_alive_s: int = setting(75, "seconds a connection may stay open between two requests", ge=1)
    drain_s: float = setting(25.0, "seconds that running requests get to finish at shutdown", ge=0)
    log_level: Literal["debug", "info", "warning", "error"] = setting("info", "least level logged")
    log_format: Literal["text", "json"] = setting("text", "lines for people, or a JSON object a line")

    # Found out at the start, and no setting: why the embedded model serves in place of the default.
    why_embedded: str = ""

    @property
    def num_replicas(self) -> int:
        num_devices = max(1, num_gpus() // self.tensor_parallel_size) if self.device != "cpu" else 1
        return self.replicas or num_devices

    @property
    def threads_per_rank(self) -> int:
        num_processes = self.num_replicas * self.tensor_parallel_size
        return self.cpu_threads or max(1, available_cores() // num_processes)

    @property
    def model_names(self) -> tuple[str, ...]:
        name = self.served_model_name or _own_name(self.model)
        return (name, *(alias for alias in _entries(self.model_alias) if alias != ANY_NAME))

    @property
    def takes_any_name(self) -> bool:
        return ANY_NAME in _entries(self.model_alias)

    @property
    def allowed_origins(self) -> tuple[str, ...]:
        return _entries(self.cors_origins)

    @property
    def allowed_host_names(self) -> tuple[str, ...]:
        return _entries(self.allowed_hosts.lower())

    @property
    def serves_embedded_model(self) -> bool:
        return self.model == str(EMBEDDED_MODEL)

    @property
    def model_limit(self) -> str:
        """Return an unexpected limit of the embedded model, else an empty text."""
        if not self.serves_embedded_model:
            return ""
        instead = f"; it serves because {DEFAULT_MODEL} could not be fetched" if self.why_embedded else ""
        return EMBEDDED_MODEL_LIMIT + instead

    @property
    def model_description(self) -> str:
        return f"a Whisper model{f' that {self.model_limit}' if self.model_limit else ''}"

    @property
    def core(self) -> Settings:
        """Return the core's settings alone, for other processes: they get no key."""
        return Settings(**values_for(Settings, self))

    def part(self, kind: type[Part]) -> Part:
        assert isinstance(self, kind)
        return self


def _entries(text: str) -> tuple[str, ...]:
    return tuple(entry.strip() for entry in text.split(",") if entry.strip())


@cache  # every request asks for it
def _own_name(model: str) -> str:
    path = Path(model).expanduser()
    # os.path, because Path's own tests raise where a name is too long for the disk.
    return path.stem if os.path.isfile(path) else path.name if os.path.isdir(path) else model


def in_mebibytes(num_bytes: float) -> str:
    """Return a size in words, in bytes under 0.1 MiB."""
    return f"{round(num_bytes / MIB, 1):g} MiB" if num_bytes >= MIB / 10 else f"{num_bytes:g} bytes"


def values_for(kind: type[Any], settings: Settings) -> dict[str, Any]:
    names = {field.name for field in fields(settings)}
    return {field.name: getattr(settings, field.name) for field in fields(kind) if field.name in names}


def flag_name(setting: str) -> str:
    return "--" + setting.replace("_", "-")


def variable_name(setting: str) -> str:
    return f"ASR_SERVER_{setting.upper()}"


def naming(setting: str) -> str:
    """Return a setting's name for errors: `--max-audio-s (ASR_SERVER_MAX_AUDIO_S)`."""
    return f"{flag_name(setting)} ({variable_name(setting)})"
