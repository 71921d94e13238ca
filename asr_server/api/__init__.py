"""The HTTP API: routes, OpenAI's request and response shapes, errors, limits and probes.

Runs in the API process; `cli.serve` starts it. Nothing here imports torch or blocks the event loop.
"""
