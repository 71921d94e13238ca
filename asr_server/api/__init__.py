"""The HTTP API: routes, OpenAI's request and response shapes, errors, limits and probes.

`cli.serve` starts it. Nothing here imports torch or blocks the event loop.
"""

from asr_server.api.app import create_app

__all__ = ["create_app"]
