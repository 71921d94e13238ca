"""What a model answers with word times, and a sound that the voice detector knows."""

from collections.abc import Sequence

import msgspec
import numpy as np

from asr_server.core import SAMPLE_RATE, ChunkResult
from tests.support.fake_replica import say
from tests.support.noises import make_noise
from tests.support.speech import say as speak
from tests.support.tokens import t

COUGHS, TALK = make_noise("coughs", -20, 4.0, 1), speak("31415926", "rms").samples
TALK_S = len(TALK) / SAMPLE_RATE


def timed(text: Sequence[int], start_s: float, end_s: float, duration_s: float) -> ChunkResult:
    """One segment of the whole duration; its tokens share the time from `start_s` to `end_s`."""
    edges_s = np.linspace(start_s, end_s, len(text) + 1).tolist()
    result = say(t(0), *text, t(duration_s))
    return msgspec.structs.replace(
        result,
        token_times_s=tuple(edges_s),
        token_onsets_s=tuple(edge_s + 0.01 for edge_s in edges_s[:-1]),
        token_focus=(0.5,) * len(text),
    )
