"""Every setting once: field, flag, environment name, default, meaning.

The flag is the field's name with dashes; the environment name is `ASR_SERVER_` and the field's name in
capitals unless `env` says otherwise. A flag wins over the environment.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from asr_server.core import WINDOW_S

EMBEDDED_MODEL = Path(__file__).parent / "models" / "whisper-digits"
EMBEDDED_MODEL_CHUNK_S = 6.0  # it was trained mostly on less, and drops digits in fuller windows
MIB = 1 << 20


def _setting(default: Any, help: str, env: str | None = None, choices: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"help": help, "env": env, "choices": choices})


def default_preprocess_workers() -> int:
    return max(1, min(os.cpu_count() or 1, 2))


@dataclass(frozen=True)
class Settings:
    # The model and where it runs
    model: str = _setting(str(EMBEDDED_MODEL), "Whisper checkpoint: a directory or a Hugging Face hub name")
    served_model_name: str = _setting("", "name clients ask for; empty: the model's own name")
    model_alias: str = _setting("whisper-1", "further names the model answers to, separated by commas")
    device: str = _setting("auto", "where the model runs", choices=("auto", "cpu", "cuda"))
    dtype: str = _setting(
        "auto",
        "precision; auto: bfloat16 where the processor has it, else float32",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    executor: str = _setting(
        "multiprocess",
        "how replicas run: processes of their own, or inside this one (debugging)",
        choices=("multiprocess", "inline"),
    )
    replicas: int = _setting(1, "engine replicas, each with the whole model")
    cpu_threads: int = _setting(0, "torch threads a replica on CPU; 0: one a core, shared between replicas")
    max_slots: int = _setting(0, "chunks decoded at once by a replica; 0: from free memory")
    encode_batch: int = _setting(
        0, "chunks encoded together at most; 0: one a compute worker on CPU, 8 on CUDA"
    )
    compute_workers: int = _setting(
        0, "encode batches under way at once, up to 4; 0: one a core, up to 4, on CPU, 1 on CUDA"
    )
    copy_overlap: bool = _setting(False, "CUDA: copies to and from the device on streams of their own")

    # The front end
    preprocess_workers: int = _setting(
        default_preprocess_workers(),
        "threads that decode and split audio",
        env="VLLM_MAX_AUDIO_PREPROCESS_WORKERS",
    )
    max_upload_bytes: int = _setting(25 * MIB, "largest upload, in bytes")
    max_audio_s: float = _setting(12 * 3600.0, "longest recording once decoded, in seconds")
    max_decoded_bytes: int = _setting(1 << 36, "most bytes of samples, before resampling")
    max_sample_rate: int = _setting(384_000, "highest sample rate taken, in Hz")
    max_channels: int = _setting(32, "most channels taken")
    max_preprocess_s: float = _setting(600.0, "most seconds of work spent on decoding one file")
    max_concurrent_requests: int = _setting(256, "requests in flight at once; more are told 429")
    max_chunk_s: float = _setting(
        0.0, "longest chunk cut from a recording, in seconds, up to 30; 0: 6 for the embedded model, else 30"
    )
    chunks_ahead: int = _setting(4, "decoded chunks a request may hold that no replica has taken yet")

    # HTTP
    host: str = _setting("127.0.0.1", "address to listen on")
    port: int = _setting(8000, "port to listen on; 0: any free one")
    api_key: str = _setting("", "key that /v1 requires; empty: none", env="VLLM_API_KEY")
    root_path: str = _setting("", "path prefix set by a proxy in front")
    cors_origins: str = _setting("", "origins allowed by CORS, separated by commas; * for all")
    ssl_certfile: str = _setting("", "TLS certificate file")
    ssl_keyfile: str = _setting("", "TLS key file")
    drain_s: float = _setting(30.0, "seconds that running requests get to finish at shutdown")
    log_level: str = _setting("info", "least level logged", choices=("debug", "info", "warning", "error"))

    @property
    def chunk_s(self) -> float:
        """Length of the window in which a chunk ends, in seconds."""
        if self.max_chunk_s > 0:
            return min(self.max_chunk_s, WINDOW_S)
        return EMBEDDED_MODEL_CHUNK_S if Path(self.model) == EMBEDDED_MODEL else WINDOW_S

    @property
    def model_names(self) -> tuple[str, ...]:
        """What clients may ask for: the served name first, then the aliases."""
        name = self.served_model_name or (Path(self.model).name if Path(self.model).is_dir() else self.model)
        return (name, *(alias for alias in self.model_alias.split(",") if alias))


def environment_name(setting: str) -> str:
    """The environment variable that sets this field of `Settings`."""
    for candidate in fields(Settings):
        if candidate.name == setting:
            return candidate.metadata["env"] or f"ASR_SERVER_{setting.upper()}"
    raise KeyError(setting)


def flag_name(setting: str) -> str:
    return "--" + setting.replace("_", "-")


def naming(setting: str) -> str:
    """How an error message names a setting: `--max-audio-s (ASR_SERVER_MAX_AUDIO_S)`."""
    return f"{flag_name(setting)} ({environment_name(setting)})"
