"""All settings: the core's and each annex's."""

from typing import Final, cast

from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo

from asr_server.annexes.jobs import JobsSettings
from asr_server.annexes.keys import KeysSettings
from asr_server.annexes.monitoring import MonitoringSettings
from asr_server.annexes.ray import RaySettings
from asr_server.annexes.realtime import RealtimeSettings
from asr_server.annexes.wyoming import WyomingSettings
from asr_server.config import CHECKED, setting, variable_name


@dataclass(frozen=True, config=CHECKED)
class ServerSettings(
    RaySettings, RealtimeSettings, WyomingSettings, MonitoringSettings, KeysSettings, JobsSettings
):
    models: str = setting(
        "",
        "several models instead of one: name=MODEL,name=MODEL, or a YAML file; the first answers requests "
        "that name none",
    )


# The settings by name, in the order declared.
FIELDS: Final[dict[str, FieldInfo]] = {
    name: field
    for name, field in ServerSettings.__pydantic_fields__.items()  # type: ignore[attr-defined]
    if field.json_schema_extra is not None
}

# In a newcomer's order, for `--help` and docs/settings.md.
SECTIONS: Final[dict[str, tuple[str, ...]]] = {
    "To begin with": ("model", "device", "dtype", "host", "port", "api_key", "keys_file", "log_level"),
    "Models": ("models", "load", "idle_unload_s", "served_model_name", "model_alias"),
    "Text": ("beam_size", "check_voice", "short_audio"),
    "Uploads and recordings": (
        *("max_upload_bytes", "max_audio_s", "max_concurrent_requests", "preprocess_workers"),
        "unknown_fields",
    ),
    "Live audio": ("wyoming_port", "max_realtime_sessions", "max_realtime_session_s", "realtime_interim_s"),
    "Jobs": (
        *("jobs_dir", "jobs_keep_s", "jobs_keep_read_s", "max_jobs", "max_jobs_bytes", "max_jobs_audio_s"),
        *("callback_hosts", "callback_secret"),
    ),
    "HTTP and clients": (
        *("ssl_certfile", "ssl_keyfile", "root_path", "cors_origins", "allowed_hosts", "reuse_port"),
        *("max_connections", "keep_alive_s", "client_grace_s"),
    ),
    "Operation": ("log_format", "metrics_port", "metrics_host", "drain_s"),
    "Engine": (
        *("replicas", "tensor_parallel_size", "max_slots", "cpu_threads"),
        *("kernels", "executor", "ray_address"),
    ),
}


def extra(name: str) -> dict[str, str]:
    return cast(dict[str, str], FIELDS[name].json_schema_extra)


def environment_names(name: str) -> tuple[str, ...]:
    """Return all variables of a setting: `VLLM_API_KEY`, `ASR_SERVER_API_KEY`. The first one set counts."""
    own, shared = variable_name(name), extra(name)["env"]
    return (shared, own) if shared else (own,)
