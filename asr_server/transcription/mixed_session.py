"""Reads each channel by itself where the mix of a recording's channels gave no text.

Speech on one side may lie under noise on the other. Runs on the event loop of the API process for
`transcriber.py`. Decodes nothing itself.
"""

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
    """One request, as `TranscriptionSession`: iterate over its deltas, then ask for the transcript."""

    def __init__(
        self, session: TranscriptionSession, recording: Recording, open_session: OpenSession
    ) -> None:
        """`open_session`: runs until the request ends."""
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

    def transcript(self) -> Transcript:
        """The whole transcript. May be asked for only after the last delta."""
        return self._session.transcript()

    async def _read_channels(self) -> list[TranscriptDelta]:
        """Return the deltas of the channel with most text, whose session is then this one's."""
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
