"""One model that this server has: the facts of its checkpoint, its replicas and its limits.

Made by `server.py`, kept by `models.py`, used by all routes, `realtime` and `wyoming.py`. Runs in the API
process, on its event loop; never blocks it; imports no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from asr_server.audio.limits import AudioLimits
from asr_server.audio.pool import PreprocessPool
from asr_server.checkpoint.files import AudioWindow
from asr_server.checkpoint.tokenizer import Tokenizer
from asr_server.config import Settings
from asr_server.dispatch.dispatcher import Dispatcher
from asr_server.errors import EngineUnavailable, ShuttingDown
from asr_server.transcription import StallLimits, Transcriber

RETRY_AFTER_S: Final = 5
INTERIM_SHARE: Final = 8  # of the slots, or fewer, are at work when an interim reading may begin
ENGINE_LOST: Final = "The engine has ended and is started again; the server's log says why."


class ServedModel:
    def __init__(
        self,
        settings: Settings,
        dispatcher: Dispatcher,
        pool: PreprocessPool,
        tokenizer: Tokenizer,
        window: AudioWindow,
    ) -> None:
        """`settings`: of this model; those of the server are the same for all."""
        self.settings = settings
        self.dispatcher = dispatcher
        self.transcriber = Transcriber(
            dispatcher, pool, tokenizer, settings.check_voice, StallLimits.from_settings(settings)
        )
        self.audio_limits = AudioLimits.from_settings(settings, window)

    @classmethod
    def from_checkpoint(cls, settings: Settings, pool: PreprocessPool) -> ServedModel:
        """Read the small files of the checkpoint at `settings.model`, a directory. Starts nothing."""
        directory = Path(settings.model)
        window, tokenizer = AudioWindow.from_directory(directory), Tokenizer.from_directory(directory)
        return cls(settings, Dispatcher(settings, window=window), pool, tokenizer, window)

    @property
    def name(self) -> str:
        return self.settings.model_names[0]

    @property
    def may_read_interim(self) -> bool:
        """Return whether the engine has time for interim readings: final text comes before them."""
        return self.dispatcher.num_chunks < max(1, self.dispatcher.num_slots // INTERIM_SHARE)

    def check_health(self) -> None:
        """Raises EngineUnavailable once every replica has been given up for good."""
        if self.dispatcher.supervisor.given_up:
            raise EngineUnavailable("The engine has failed and is not being restarted.", retry_after_s=60)

    def require_engine(self) -> None:
        """Raises EngineUnavailable while no replica can take new work."""
        if self.dispatcher.draining:
            raise ShuttingDown
        self.check_health()
        if not self.dispatcher.ready:
            supervisor = self.dispatcher.supervisor
            reason = ENGINE_LOST if supervisor.was_ready else "The engine is starting."
            raise EngineUnavailable(reason, retry_after_s=max(RETRY_AFTER_S, supervisor.start_s))
