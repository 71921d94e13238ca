"""Follow the speakers of a request, with references of known ones: data URLs of a few seconds.

Threads of the preprocess pool decode. References live as long as their request.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from contextlib import closing
from typing import Final

import numpy as np

from asr_server.annexes.speakers.track import SpeakerTrack, reference_embeddings
from asr_server.audio.decoder import AudioLimits
from asr_server.audio.recording import PreprocessPool, Recording, memory_file
from asr_server.core import SAMPLE_RATE, Samples, SpeakerCount
from asr_server.errors import InvalidValue, RequestError

_PARAM: Final = "known_speaker_references[]"
MIN_S, MAX_S = 2.0, 10.0
_SLACK_S: Final = 0.1  # that codecs add or take away
_LIMITS: Final = AudioLimits(max_audio_s=4 * MAX_S)
_DATA_URL: Final = re.compile(r"data:[\w.+/;=-]*;base64,", re.ASCII)


async def follow_speakers(
    count: SpeakerCount, names: Sequence[str], references: Sequence[str], pool: PreprocessPool
) -> SpeakerTrack:
    """Raises InvalidValue for a reference without speech."""
    samples = [await decode_reference(reference, pool) for reference in references]
    embeddings = await reference_embeddings(samples)
    if not all(embedding.any() for embedding in embeddings):
        raise InvalidValue(f"In one of '{_PARAM}' nobody speaks.", _PARAM)
    return SpeakerTrack(count, names, embeddings)


async def decode_reference(url: str, pool: PreprocessPool) -> Samples:
    match = _DATA_URL.match(url)
    try:
        content = base64.b64decode(url[match.end() :], validate=True) if match else b""
    except binascii.Error:
        content = b""
    if not content:
        raise InvalidValue(f"'{_PARAM}' are data URLs: data:audio/wav;base64,...", _PARAM)
    heard: list[Samples] = []
    with memory_file() as file:
        file.write(content)
        with closing(
            Recording(file, _LIMITS, listener=lambda samples: heard.append(samples.copy()))
        ) as recording:
            try:
                while not (await pool.decode_slice(recording)).finished:
                    pass
            except RequestError as error:
                raise InvalidValue(f"One of '{_PARAM}' cannot be read: {error.message}", _PARAM) from error
    samples = np.concatenate(heard)
    if not MIN_S - _SLACK_S <= len(samples) / SAMPLE_RATE <= MAX_S + _SLACK_S:
        raise InvalidValue(
            f"'{_PARAM}' are {MIN_S:g} to {MAX_S:g} s long; one has {len(samples) / SAMPLE_RATE:.1f} s.",
            _PARAM,
        )
    return samples
