"""OpenAI's realtime transcription sessions over a WebSocket.

`route.py` connects, `session.py` holds the state, `turn.py` decides.
"""

from pydantic.dataclasses import dataclass

from asr_server.config import CHECKED, Settings, setting


@dataclass(frozen=True, config=CHECKED)
class RealtimeSettings(Settings):
    max_realtime_sessions: int = setting(64, "realtime sessions open at once", ge=1)
    max_realtime_session_s: float = setting(3600.0, "longest realtime session, in seconds", gt=0)
    realtime_interim_s: float = setting(
        0.5, "seconds of speech between interim readings of a realtime turn, at least; 0: none", ge=0
    )
