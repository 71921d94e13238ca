from __future__ import annotations

import numpy as np
import pytest

from benchmarks.uploads import FORMATS, check_distinct, encode, long_uploads, short_uploads

pytestmark = pytest.mark.slow


def test_files_differ_and_last_as_long_as_they_say() -> None:
    uploads = [*short_uploads(12), *short_uploads(3, ("wav", "flac", "mp3"), 5.0)]
    check_distinct(uploads)
    assert {upload.name.rpartition(".")[2] for upload in uploads} == set(FORMATS)
    assert all(2 <= upload.duration_s <= 30 for upload in uploads)


def test_long_files_repeat_nothing_exactly() -> None:
    first, second, third = long_uploads(("flac",), 3, minutes=(1.5, 2))
    check_distinct([first, second, third])
    assert [first.duration_s, second.duration_s, third.duration_s] == [90, 120, 90]


def test_the_same_file_posted_twice_is_noticed() -> None:
    (upload,) = short_uploads(1)
    with pytest.raises(AssertionError, match="differ"):
        check_distinct([upload, upload])


@pytest.mark.parametrize("num_samples", [185_010, 245_774])  # whose last AAC frame is short
def test_m4a_files_can_be_made_of_any_length(num_samples: int) -> None:
    noise = np.random.default_rng(1).normal(0, 0.1, num_samples).astype(np.float32)
    assert encode(noise, "m4a")


def test_wav_files_are_16_bit() -> None:
    (upload,) = short_uploads(1, ("wav",), 2.0)
    assert upload.data[34:36] == b"\x10\x00"
