"""The objects that all routes share, created once in `create_app`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from starlette.requests import HTTPConnection

from asr_server.api.admission import AdmissionLimiter
from asr_server.api.api_keys import ApiKeys
from asr_server.api.realtime.registry import RealtimeSessions
from asr_server.api.upload import UploadMemory
from asr_server.audio import AudioLimits, PreprocessPool
from asr_server.config import Settings
from asr_server.dispatch.dispatcher import Dispatcher
from asr_server.errors import EngineUnavailable, ShuttingDown
from asr_server.transcription import Transcriber


@dataclass
class AppState:
    settings: Settings
    dispatcher: Dispatcher
    pool: PreprocessPool
    transcriber: Transcriber
    admission: AdmissionLimiter
    upload_memory: UploadMemory
    audio_limits: AudioLimits
    realtime: RealtimeSessions
    api_keys: ApiKeys
    started_at: int  # Unix seconds

    @property
    def is_idle(self) -> bool:
        """No request for a transcript is on its way, from its headers on, and no realtime session open."""
        return not (self.admission.num_open or self.realtime.num_active)

    def check_health(self) -> None:
        """Raises EngineUnavailable once every replica has been given up for good."""
        if self.dispatcher.given_up:
            raise EngineUnavailable("The engine has failed and is not being restarted.", retry_after_s=60)

    def require_engine(self) -> None:
        """Raises EngineUnavailable while no replica can take new work."""
        if self.dispatcher.draining:
            raise ShuttingDown
        self.check_health()
        if not self.dispatcher.ready:
            raise EngineUnavailable("The engine is starting.", retry_after_s=5)


def get_state(connection: HTTPConnection) -> AppState:
    return cast(AppState, connection.app.state.server)
