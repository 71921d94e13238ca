"""The HTTP API: routes, OpenAI's shapes, errors, limits and probes.

Runs in the API process; imports no torch and never blocks the event loop.
"""
