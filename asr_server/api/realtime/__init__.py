"""Live audio: OpenAI's realtime transcription sessions over a WebSocket."""

from asr_server.api.realtime.registry import RealtimeSessions

__all__ = ["RealtimeSessions"]
