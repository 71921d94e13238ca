"""Parts of a recording, read with the times of the file."""

import math
from pathlib import Path

import numpy as np
import pytest
import soundfile

from asr_server.audio.recording import Recording
from asr_server.core import SAMPLE_RATE, Clip, Samples
from asr_server.errors import InvalidAudio

SECONDS = 12


def loud(path: Path) -> Samples:
    """Write noise whose every sample is far from silence; return it."""
    signs = np.random.default_rng(0).choice([-0.5, 0.5], SECONDS * SAMPLE_RATE)
    soundfile.write(path, signs, SAMPLE_RATE, subtype="FLOAT")
    return signs.astype(np.float32)


def read(path: Path, *clips: Clip) -> tuple[Samples, Recording]:
    heard: list[Samples] = []
    recording = Recording(path, listener=lambda samples: heard.append(samples.copy()), clips=clips)
    while not recording.next_slice().finished:
        pass
    return np.concatenate(heard), recording


def test_outside_of_the_clips_is_silence_and_the_last_one_ends_the_recording(tmp_path: Path) -> None:
    whole = loud(tmp_path / "a.wav")
    found, recording = read(tmp_path / "a.wav", Clip(1.5, 2.25), Clip(7.0, 9.125))
    expected = np.zeros(round(9.125 * SAMPLE_RATE), np.float32)
    for start_s, end_s in ((1.5, 2.25), (7.0, 9.125)):
        inside = slice(round(start_s * SAMPLE_RATE), round(end_s * SAMPLE_RATE))
        expected[inside] = whole[inside]
    assert np.array_equal(found, expected)
    assert recording.duration_s == recording.expected_duration_s == 9.125
    assert not recording.truncated


def test_a_clip_without_an_end_goes_on_to_that_of_the_recording(tmp_path: Path) -> None:
    whole = loud(tmp_path / "a.wav")
    found, recording = read(tmp_path / "a.wav", Clip(11.0, math.inf))
    assert np.array_equal(found[11 * SAMPLE_RATE :], whole[11 * SAMPLE_RATE :])
    assert recording.expected_duration_s == recording.duration_s == SECONDS


def test_each_channel_is_clipped(tmp_path: Path) -> None:
    sound = np.full((4 * SAMPLE_RATE, 2), (0.25, 0.5), np.float32)
    soundfile.write(tmp_path / "a.wav", sound, SAMPLE_RATE, subtype="FLOAT")
    heard: list[Samples] = []
    recording = Recording(
        tmp_path / "a.wav",
        split_channels=True,
        listener=lambda samples: heard.append(samples.copy()),
        clips=[Clip(1.0, 2.0)],
    )
    while not recording.next_slice().finished:
        pass
    found = np.concatenate(heard)
    assert found.shape == (2 * SAMPLE_RATE, 2)
    assert not found[:SAMPLE_RATE].any()
    assert found[SAMPLE_RATE + 800 : -800].mean(axis=0) == pytest.approx([0.25, 0.5], abs=0.01)


def test_a_first_clip_behind_the_end_is_refused_with_both_times(tmp_path: Path) -> None:
    loud(tmp_path / "a.wav")
    with pytest.raises(InvalidAudio, match=r"begins at 60 s, and the recording is 12\.0 s long"):
        read(tmp_path / "a.wav", Clip(60.0, 90.0))
    with pytest.raises(InvalidAudio, match=r"begins at 12 s, and the recording is 12\.0 s long"):
        read(tmp_path / "a.wav", Clip(12.0, 13.0))


def test_what_is_damaged_behind_the_last_clip_does_not_cut_it_short(tmp_path: Path) -> None:
    loud(tmp_path / "a.wav")
    soundfile.write(tmp_path / "b.wav", np.zeros((SAMPLE_RATE, 2)), SAMPLE_RATE, subtype="PCM_16")
    with (tmp_path / "a.wav").open("ab") as file:  # of another format: its sound is missing
        file.write((tmp_path / "b.wav").read_bytes())
    assert not read(tmp_path / "a.wav", Clip(1.0, 2.0))[1].truncated
    assert read(tmp_path / "a.wav", Clip(1.0, math.inf))[1].truncated
