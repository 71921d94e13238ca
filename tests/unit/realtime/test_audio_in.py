"""G.711 against libsndfile, the resampler against a whole one, appends cut anywhere."""

import io

import numpy as np
import pytest
import soundfile
import soxr

from asr_server.annexes.realtime.audio_in import AudioBuffer, AudioInput
from asr_server.annexes.realtime.client_events import AlawFormat, PcmFormat, UlawFormat


@pytest.mark.parametrize(("format", "subtype"), [(UlawFormat(), "ULAW"), (AlawFormat(), "ALAW")])
def test_every_code_of_g711_is_what_libsndfile_hears(format: UlawFormat | AlawFormat, subtype: str) -> None:
    codes = bytes(range(256)) * 4
    file = io.BytesIO(codes)
    expected, _ = soundfile.read(
        file, samplerate=8000, channels=1, format="RAW", subtype=subtype, dtype="float32"
    )
    audio = AudioInput(format)
    heard = np.concatenate([audio.push(codes), audio.flush()])
    np.testing.assert_allclose(heard, soxr.resample(expected, 8000, 16_000, "HQ"), atol=1e-5)


@pytest.mark.parametrize("size", [1, 7, 1201, 10**6])
def test_appends_may_be_cut_anywhere_even_within_a_sample(size: int) -> None:
    rng = np.random.default_rng(0)
    values = (3000 * rng.standard_normal(24_000)).astype("<i2")
    data, audio = values.tobytes()[: 24_000 if size == 1 else None], AudioInput(PcmFormat())
    parts = [audio.push(data[at : at + size]) for at in range(0, len(data), size)]
    heard = np.concatenate([*parts, audio.flush()])
    whole = np.frombuffer(data, "<i2").astype(np.float32) / 2**15
    np.testing.assert_allclose(heard, soxr.resample(whole, 24_000, 16_000, "HQ"), atol=1e-5)


def test_after_a_flush_all_that_was_appended_has_come_out() -> None:
    audio = AudioInput(PcmFormat())
    for _ in range(3):
        num_samples = len(audio.push(bytes(4800))) + len(audio.flush())
        assert num_samples == 1600  # 100 ms


def test_the_buffer_keeps_what_it_must_and_little_more() -> None:
    buffer = AudioBuffer(num_kept=1000)
    for block in range(200):
        buffer.push(np.full(100, block, np.float32))
    assert 1000 <= buffer.num_held <= 1200
    np.testing.assert_array_equal(buffer.since(buffer.end - 150), [198] * 50 + [199] * 100)
    assert len(buffer.since(0)) == buffer.num_held


def test_an_odd_byte_ends_with_its_turn() -> None:
    audio = AudioInput(PcmFormat())
    audio.push(bytes(4801))
    audio.flush()
    tone = (np.sin(np.arange(4800) / 20) * 8000).astype("<i2").tobytes()
    heard = np.concatenate([audio.push(tone), audio.flush()])
    fresh = AudioInput(PcmFormat())
    np.testing.assert_array_equal(heard, np.concatenate([fresh.push(tone), fresh.flush()]))
