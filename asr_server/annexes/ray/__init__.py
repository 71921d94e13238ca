"""Replicas on many hosts."""

from pydantic.dataclasses import dataclass

from asr_server.config import CHECKED, Settings, setting


@dataclass(frozen=True, config=CHECKED)
class RaySettings(Settings):
    ray_address: str = setting(
        "auto",
        "Ray cluster for --executor ray, as host:port; auto: the one that runs here, else local; "
        "local: one of this machine alone",
        pattern=r"^(auto|local|[^/]+:\d+)$",
        allowed="auto, local or host:port",
    )
