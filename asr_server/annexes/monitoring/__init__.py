"""What an operator sees of the server: metrics, the last minutes, traces."""

from pydantic.dataclasses import dataclass

from asr_server.config import CHECKED, NO_PORT, Settings, setting


@dataclass(frozen=True, config=CHECKED)
class MonitoringSettings(Settings):
    metrics_port: int = setting(
        NO_PORT,
        "port of its own for /metrics and the probes, without a key and TLS; 0: any free one; -1: none, "
        "/metrics is at --port",
        ge=-1,
        le=65535,
    )
    metrics_host: str = setting("", "address to listen on for --metrics-port; empty: that of --host")

    @property
    def has_metrics_port(self) -> bool:
        return self.metrics_port != NO_PORT
