"""Keys of clients: who may ask, for which models, and how much."""

from pydantic import field_validator
from pydantic.dataclasses import dataclass

from asr_server.config import CHECKED, Settings, setting


@dataclass(frozen=True, config=CHECKED)
class KeysSettings(Settings):
    api_key: str = setting(
        "",
        "key that /v1 requires; empty: none",
        env="VLLM_API_KEY",
        pattern="^[!-~]*$",  # what fits an Authorization header as it is
        allowed="empty, or printable ASCII without spaces",
    )
    keys_file: str = setting(
        "",
        "YAML file of keys that /v1 takes, each with its name, hash, models and limits; read again when it "
        "changes",
    )

    @field_validator("api_key", mode="before")
    @classmethod
    def _without_line_end(cls, key: object) -> object:
        """Strip what `echo KEY | kubectl create secret` leaves; a blank key is refused."""
        return (key.strip() or key) if isinstance(key, str) else key
