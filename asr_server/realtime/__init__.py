"""Live audio: OpenAI's realtime transcription sessions over a WebSocket, in the API process.

`route.py` takes a connection, `session.py` holds its state, `turn.py` decides what happens next. Each
chunk of a turn goes to the dispatcher as a request of its own. Nothing here imports torch or blocks the event
loop. `api/app.py` mounts the routes.
"""
