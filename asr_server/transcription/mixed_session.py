"""Read each channel alone where their mix gave no text: noise may hide one side's speech."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from asr_server.audio.recording import Recording
from asr_server.core import Transcript, TranscriptDelta
from asr_server.transcription.session import TranscriptionSession

MAX_CHANNELS = 8  # read by themselves; a microphone array has more, and all of them hear the same

logger = logging.getLogger(__name__)

OpenSession = Callable[[Recording], Awaitable[TranscriptionSession]]


class MixedSession:
    def __init__(
        self, session: TranscriptionSession, recording: Recording, open_session: OpenSession
    ) -> None:
        self._session, self._recording, self._open = session, recording, open_session

    async def __aiter__(self) -> AsyncIterator[TranscriptDelta]:
        has_text = False
        async for delta in self._session:
            has_text = has_text or bool(delta.text)
            yield delta
        if has_text or self._recording.num_channels == 1:
            return
        for delta in await self._read_channels():
            yield delta

    @property
    def language_probability(self) -> float | None:
        return self._session.language_probability

    async def transcript(self) -> Transcript:
        return await self._session.transcript()

    async def _read_channels(self) -> list[TranscriptDelta]:
        most: list[TranscriptDelta] = []
        for channel in range(min(self._recording.num_channels, MAX_CHANNELS)):
            session = await self._open(self._recording.of_channel(channel))
            deltas = [delta async for delta in session]
            if _num_letters(deltas) > _num_letters(most):
                most, self._session = deltas, session
                logger.info("the mix of all channels gave no text: read channel %d alone", channel + 1)
        return most


def _num_letters(deltas: list[TranscriptDelta]) -> int:
    return sum(len(delta.text) for delta in deltas)


RequestSession = TranscriptionSession | MixedSession
