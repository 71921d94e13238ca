"""What the benchmark of the front end reads."""

from __future__ import annotations

from pathlib import Path

import soundfile

from benchmarks.frontend.recordings import write


def test_a_recording_has_a_voice_in_each_channel(tmp_path: Path) -> None:
    path = tmp_path / "two.wav"
    write(path, "wav 48k stereo", 2.0)
    samples, rate = soundfile.read(path)
    assert rate == 48_000
    assert samples.shape == (96_000, 2)
    assert abs(samples[:, 0] - samples[:, 1]).max() > 0.1
