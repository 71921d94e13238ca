"""OpenAI's realtime transcription sessions over a WebSocket.

`route.py` connects, `session.py` holds the state, `turn.py` decides. Each chunk of a turn is a request to
the dispatcher. Imports no torch and never blocks the event loop.
"""
