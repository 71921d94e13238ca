"""Define each setting once; its flag and environment name derive from the field.

A flag wins over the environment. `Settings` checks all values together; `cli/options.py` checks what
depends on the machine. Imports no torch.
"""

from __future__ import annotations

import os
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, cast

from pydantic import ConfigDict, Field, field_validator
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo

from asr_server.core import TEMPERATURE_LADDER
from asr_server.machine import available_cores, default_preprocess_workers, num_gpus

DEFAULT_MODEL: Final = "base"
ANY_NAME: Final = "*"  # as a model alias
EMBEDDED_MODEL = Path(__file__).parent / "models" / "whisper-digits"
EMBEDDED_MODEL_LIMIT = "hears English digits only, about 1 in 20 of them wrongly"
MIB = 1 << 20
NO_PORT: Final = -1
DEFAULT_NICENESS: Final = 5  # beside a busy machine a quarter of what others get; 10 is a tenth
LOWEST_PRIORITY: Final = 19  # of Linux
# Beyond what any machine has: a number with some digits too many is refused, rather than tried.
MOST_PROCESSES: Final = 1024  # or threads
MOST_SLOTS: Final = 10**6
MOST_BYTES: Final = 10**18
MOST_CHUNK_S: Final = 3600.0
MOST_IDLE_S: Final = 1e7
API_KEY: Final = "[!-~]+"  # what fits an Authorization header as it is
_ORIGIN: Final = r"[a-z][a-z0-9+.-]*://[^\s,/?#]+"  # as browsers send it: no path, no slash
_HOST: Final = r"[A-Za-z0-9._-]+"


def _setting(default: Any, help: str, env: str = "", allowed: str = "", **constraints: Any) -> Any:
    extra: Any = {"env": env, "allowed": allowed}
    return Field(default, description=help, json_schema_extra=extra, **constraints)


@dataclass(frozen=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class Settings:
    """Raises pydantic.ValidationError, which lists every wrong value."""

    # The model and where it runs
    model: str = _setting(
        DEFAULT_MODEL,
        "Whisper checkpoint: a short name such as turbo, a Hugging Face hub name, a directory or a file",
        min_length=1,
    )
    served_model_name: str = _setting(
        "",
        "name clients ask for; empty: the model's own name",
        pattern=r"^([!-~]([ -~]*[!-~])?)?$",
        allowed="empty, or printable ASCII without spaces at its ends",
    )
    model_alias: str = _setting(
        "whisper-1,gpt-4o-transcribe,gpt-4o-mini-transcribe,gpt-4o-mini-transcribe-2025-12-15,"
        "gpt-4o-transcribe-diarize,gpt-transcribe,gpt-live-transcribe,gpt-realtime-whisper",
        "further names the model answers to, separated by commas; *: any name",
    )
    models: str = _setting(
        "",
        "several models instead of one: name=MODEL,name=MODEL, or a YAML file; the first answers requests "
        "that name none",
    )
    load: Literal["eager", "lazy", "pinned"] = _setting(
        "eager", "when a model is loaded: at the start, at its first request, or at the start and for good"
    )
    idle_unload_s: float = _setting(
        0.0,
        "seconds without a request after which a model gives its memory back until the next one; 0: never",
        ge=0,
        le=MOST_IDLE_S,
    )
    max_load_wait_s: float = _setting(
        30.0, "seconds that a request waits for its model to be loaded, before it gets 503", gt=0
    )
    device: Literal["auto", "cpu", "cuda"] = _setting("auto", "where the model runs")
    dtype: Literal["auto", "float32", "bfloat16", "float16", "int8"] = _setting(
        "auto",
        "precision; auto: int8 on a CPU with VNNI, else bfloat16 where the device has it, else float32, "
        "on CUDA float16. What int8 does not multiply is in bfloat16 or float32",
    )
    executor: Literal["multiprocess", "inline", "ray"] = _setting(
        "multiprocess",
        "how replicas run: processes of their own, inside this one (debugging), or over a Ray cluster",
    )
    ray_address: str = _setting(
        "auto",
        "Ray cluster for --executor ray, as host:port; auto: the one that runs here, else local; "
        "local: one of this machine alone",
        pattern=r"^(auto|local|[^/]+:\d+)$",
        allowed="auto, local or host:port",
    )
    replicas: int = _setting(
        0,
        "engine replicas, each with the whole model; 0: one for each GPU, or one on the CPU",
        ge=0,
        le=MOST_PROCESSES,
    )
    replicas_per_device: int = _setting(
        1, "replicas for each device, where --replicas is 0", ge=1, le=MOST_PROCESSES
    )
    replica_niceness: int = _setting(
        DEFAULT_NICENESS,
        "how much replicas on the CPU give way to other processes, above the server's own niceness: 0 to 19",
        ge=0,
        le=LOWEST_PRIORITY,
    )
    tensor_parallel_size: int = _setting(
        1, "GPUs, or processes on the CPU, that share out each replica's weights and slots", ge=1
    )
    cpu_threads: int = _setting(
        0, "torch threads a replica on CPU; 0: one a core, shared between replicas", ge=0, le=MOST_PROCESSES
    )
    max_slots: int = _setting(
        0, "chunks decoded at once by a replica; 0: from free memory", ge=0, le=MOST_SLOTS
    )
    short_audio: Literal["auto", "exact", "tail"] = _setting(
        "auto",
        "exact: a chunk is encoded with the silence behind it, to the window's end. tail: that silence is "
        "encoded once for all, and a short chunk costs less. auto: exact with --dtype float32, else tail",
    )
    copy_overlap: bool = _setting(False, "CUDA: copies to and from the device on streams of their own")
    cuda_graphs: bool = _setting(True, "CUDA: steps are recorded once and replayed")
    kernels: Literal["auto", "torch"] = _setting(
        "auto",
        "CUDA: auto: Triton kernels, which need a C compiler; torch: decode steps take 2 to 3 times as long",
    )
    beam_size: int = _setting(
        5,
        "most hypotheses of a beam search, which has one while the model is sure; 1: greedy decoding",
        ge=1,
        le=16,
    )
    max_fallbacks: int = _setting(
        len(TEMPERATURE_LADDER) - 1,
        "times an implausible chunk is decoded again, each time at a higher temperature",
        ge=0,
        le=len(TEMPERATURE_LADDER) - 1,
    )

    check_voice: bool = _setting(
        True, "a doubtful text is dropped where a voice detector hears nobody speak in its chunk"
    )

    # The front end
    preprocess_workers: int = _setting(
        default_preprocess_workers(),
        "threads that decode and split audio",
        env="VLLM_MAX_AUDIO_PREPROCESS_WORKERS",
        ge=1,
        le=MOST_PROCESSES,
    )
    max_upload_bytes: int = _setting(1024 * MIB, "largest upload, in bytes", ge=1)
    max_upload_memory_bytes: int = _setting(
        256 * MIB, "bytes of all uploads held in memory; beyond them uploads go to the temporary folder", ge=0
    )
    max_audio_s: float = _setting(12 * 3600.0, "longest recording once decoded, in seconds", gt=0)
    max_decoded_bytes: int = _setting(
        1 << 36, "most bytes of samples, before resampling", ge=1, le=MOST_BYTES
    )
    max_sample_rate: int = _setting(384_000, "highest sample rate taken, in Hz", ge=1000, le=10**9)
    max_channels: int = _setting(32, "most channels taken", ge=1, le=65_535)
    max_stall_s: float = _setting(
        60.0, "abort a request that makes no progress for this long, in seconds", ge=1
    )
    max_preprocess_s: float = _setting(600.0, "most seconds of work spent on decoding one file", gt=0)
    max_concurrent_requests: int = _setting(
        256, "requests in flight at once; more are refused with 429", ge=1
    )
    max_realtime_sessions: int = _setting(64, "realtime sessions open at once", ge=1)
    max_realtime_session_s: float = _setting(3600.0, "longest realtime session, in seconds", gt=0)
    max_realtime_idle_s: float = _setting(
        600.0, "seconds without an event from the client that end a realtime session", gt=0
    )
    realtime_interim_s: float = _setting(
        1.0, "seconds of speech between interim readings of a realtime turn; 0: none", ge=0
    )
    max_chunk_s: float = _setting(
        0.0,
        "longest chunk cut, in seconds, from 3 up to the model's window; 0: what the model asks for",
        ge=0,
        le=MOST_CHUNK_S,
    )

    # HTTP
    host: str = _setting("127.0.0.1", "address to listen on", min_length=1)
    port: int = _setting(8000, "port to listen on; 0: any free one", ge=0, le=65535)
    reuse_port: bool = _setting(
        False,
        "take connections in turn with other servers on the same port that have --reuse-port too (Linux); "
        "each listens only from when it is ready until it drains",
    )
    wyoming_port: int = _setting(
        NO_PORT,
        "port to listen on for Wyoming clients (Home Assistant); 0: any free one; -1: none",
        ge=-1,
        le=65535,
    )
    metrics_port: int = _setting(
        NO_PORT,
        "port of its own for /metrics and the probes, without a key and TLS; 0: any free one; -1: none, "
        "/metrics is at --port",
        ge=-1,
        le=65535,
    )
    metrics_host: str = _setting("", "address to listen on for --metrics-port; empty: that of --host")
    api_key: str = _setting(
        "",
        "key that /v1 requires; empty: none",
        env="VLLM_API_KEY",
        pattern=rf"^({API_KEY})?$",
        allowed="empty, or printable ASCII without spaces",
    )
    keys_file: str = _setting(
        "",
        "YAML file of keys that /v1 takes, each with its name, hash, models and limits; read again when it "
        "changes",
    )
    usage_log: str = _setting(
        "", "file that gets a JSON line for each finished request, with its key's name and seconds of audio"
    )
    root_path: str = _setting(
        "", "path prefix set by a proxy in front", pattern="^(/.*)?$", allowed="empty, or begins with /"
    )
    unknown_fields: Literal["refuse", "ignore"] = _setting(
        "refuse", "form fields that the API does not have: 400, or left out and named in a header"
    )
    cors_origins: str = _setting(
        "",
        "origins allowed by CORS, separated by commas; * for all",
        pattern=rf"^(\*|{_ORIGIN}(\s*,\s*{_ORIGIN})*)?$",
        allowed="*, or origins such as https://example.com or app://obsidian.md, separated by commas",
    )
    allowed_hosts: str = _setting(
        "",
        "names by which a server on a loopback address without a key is asked, beside this machine's own, "
        "separated by commas; * for all",
        pattern=rf"^(\*|{_HOST}(\s*,\s*{_HOST})*)?$",
        allowed="*, or names such as asr.example.com without a port, separated by commas",
    )
    ssl_certfile: str = _setting("", "TLS certificate file")
    ssl_keyfile: str = _setting("", "TLS key file")
    max_connections: int = _setting(
        1000,
        "connections open at once; beyond them idle and slow ones are closed, else uploads get 429",
        ge=1,
    )
    max_header_bytes: int = _setting(64 * 1024, "largest headers of one request, in bytes", ge=1024)
    header_timeout_s: float = _setting(10.0, "seconds a client may take to send a request's headers", gt=0)
    min_client_bytes_per_s: float = _setting(
        1000.0, "slowest that a client may send a body or read a reply, in bytes a second", gt=0
    )
    client_grace_s: float = _setting(
        20.0, "seconds that a client may stall, or be slower than that, before it is disconnected", gt=0
    )
    keep_alive_s: int = _setting(75, "seconds a connection may stay open between two requests", ge=1)
    drain_s: float = _setting(25.0, "seconds that running requests get to finish at shutdown", ge=0)
    log_level: Literal["debug", "info", "warning", "error"] = _setting("info", "least level logged")
    log_format: Literal["text", "json"] = _setting("text", "lines for people, or a JSON object a line")

    @field_validator("api_key", mode="before")
    @classmethod
    def _without_line_end(cls, key: object) -> object:
        """Strip what `echo KEY | kubectl create secret` leaves; a blank key is refused."""
        return (key.strip() or key) if isinstance(key, str) else key

    # Found out at the start, and no setting: why the embedded model serves in place of the default.
    why_embedded: str = ""

    @property
    def num_replicas(self) -> int:
        num_devices = max(1, num_gpus() // self.tensor_parallel_size) if self.device != "cpu" else 1
        return self.replicas or num_devices * self.replicas_per_device

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
    def has_metrics_port(self) -> bool:
        return self.metrics_port != NO_PORT

    @property
    def asks_for_key(self) -> bool:
        return bool(self.api_key or self.keys_file)

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
    def temperatures(self) -> tuple[float, ...]:
        return TEMPERATURE_LADDER[: 1 + self.max_fallbacks]


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
    return {field.name: getattr(settings, field.name) for field in fields(kind) if field.name in FIELDS}


# The settings by name, in the order declared.
FIELDS: Final[dict[str, FieldInfo]] = {
    name: field
    for name, field in Settings.__pydantic_fields__.items()  # type: ignore[attr-defined]
    if field.json_schema_extra is not None
}


def environment_name(setting: str) -> str:
    return environment_names(setting)[0]


def environment_names(setting: str) -> tuple[str, ...]:
    """Return all variables of a setting: `VLLM_API_KEY`, `ASR_SERVER_API_KEY`. The first one set counts."""
    own, shared = f"ASR_SERVER_{setting.upper()}", extra(setting)["env"]
    return (shared, own) if shared else (own,)


def flag_name(setting: str) -> str:
    return "--" + setting.replace("_", "-")


def naming(setting: str) -> str:
    """Return a setting's name for errors: `--max-audio-s (ASR_SERVER_MAX_AUDIO_S)`."""
    return f"{flag_name(setting)} ({environment_name(setting)})"


def extra(setting: str) -> dict[str, str]:
    return cast(dict[str, str], FIELDS[setting].json_schema_extra)
