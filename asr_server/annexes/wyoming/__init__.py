"""Home Assistant's protocol, on a port of its own."""

from pydantic.dataclasses import dataclass

from asr_server.config import CHECKED, NO_PORT, Settings, setting


@dataclass(frozen=True, config=CHECKED)
class WyomingSettings(Settings):
    wyoming_port: int = setting(
        NO_PORT,
        "port to listen on for Wyoming clients (Home Assistant); 0: any free one; -1: none",
        ge=-1,
        le=65535,
    )
