"""HTTP: routes, OpenAI's shapes, errors, limits, probes."""

from asr_server.api.app import create_app

__all__ = ["create_app"]
