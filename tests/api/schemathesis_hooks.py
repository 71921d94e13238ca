"""What schemathesis sends as files: recordings, and bytes that are none. Loaded by its command."""

from __future__ import annotations

import numpy as np
import schemathesis
from hypothesis import strategies as st

from tests.fake_replica import noise, wav

RECORDINGS = [wav(noise(1.0)), wav(np.zeros(16_000, np.float32)), wav(noise(0.05)), b"", b"RIFF"]

schemathesis.openapi.format("binary", st.sampled_from(RECORDINGS) | st.binary(max_size=200))
