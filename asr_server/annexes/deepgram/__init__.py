"""Deepgram's `/v1/listen`: whole recordings by POST, live speech over a WebSocket.

A reading of the server's own routes and realtime sessions in another dialect; it transcribes nothing itself.
"""
