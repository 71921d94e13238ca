"""The HTTP API: routes, OpenAI's request and response shapes, errors, limits and probes.

`cli.serve` starts it. Nothing here imports torch or blocks the event loop.
"""
