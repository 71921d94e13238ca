"""Files as people have them: how long each is, and whether it is whole.

Their words come out in tests/system/api/test_field_files.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile

from asr_server.core import Samples
from tests.support.speech import RECORDINGS
from tests.unit.audio.audio_files import audio_of, pieces_of, real_recordings

FIELD = RECORDINGS.parent / "field"
TRUNCATED = ("c05_zeros.webm",)


def field(name: str) -> Path:
    if not (FIELD / name).exists():
        pytest.skip(f"{FIELD / name} is not here: recordings of people are not part of the repository")
    return FIELD / name


@pytest.mark.parametrize(
    ("name", "duration_s"),
    [
        *(("c01_mp3_joined_small.mp3", 7.6), ("c01_steps.mkv", 58.2), ("c02_flac_total_third.flac", 11.0)),
        *(("c03_dtx1.amr", 20.54), ("c03_gap.mkv", 16.07), ("c03_late.mkv", 15.1)),
        *(("c04_default_second.mkv", 11.07), ("c05_zeros.webm", 20.55), ("c06_B16m_A44s.aac", 14.7)),
        *(("c06_opus_B1_A2.ogg", 14.59), ("c09_small_size.wav", 11.0), ("c19_video_longer.mkv", 11.07)),
        *(("c20_tag_wav.wav", 3.59), ("c24_24in32.wav", 3.59), ("c42_over_B.wav", 3.59)),
    ],
)
def test_a_file_has_its_length_and_says_whether_it_is_whole(name: str, duration_s: float) -> None:
    pieces, recording = pieces_of(field(name))
    assert recording.duration_s == pytest.approx(duration_s, abs=0.1)
    assert recording.truncated == (name in TRUNCATED)
    assert loudness(audio_of(pieces)) > 0.04


def loudness(samples: Samples) -> float:
    return float(np.sqrt(np.mean(np.square(samples, dtype=np.float64))))


SPEECH = [path for path in real_recordings() if path.suffix == ".wav" and "silence" not in path.name]


@pytest.mark.parametrize("path", SPEECH or [None], ids=lambda path: getattr(path, "name", "none"))
def test_a_bump_against_the_microphone_changes_no_sample_of_the_speech(
    tmp_path: Path, path: Path | None
) -> None:
    if path is None:
        pytest.skip("no recordings in ../shared/data/audio")
    sound, sample_rate = soundfile.read(path, dtype="float32", always_2d=True)
    bump = 12 * np.sin(np.arange(int(0.3 * sample_rate)) / 40).astype(np.float32)
    bumped = np.concatenate([sound, np.repeat(bump[:, None], sound.shape[1], axis=1), sound])
    soundfile.write(tmp_path / "a.wav", bumped, sample_rate, subtype="FLOAT")
    samples = audio_of(pieces_of(tmp_path / "a.wav")[0])
    alone = audio_of(pieces_of(path)[0])
    num_alone = len(alone) - 1600
    assert np.abs(samples[:num_alone] - alone[:num_alone]).max() < 1e-3
    behind = samples[-num_alone:] - alone[-num_alone:]
    assert loudness(behind[1600:]) < 0.1 * loudness(alone)
