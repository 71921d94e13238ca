"""References of known speakers by themselves: which are data URLs, and how long they may be."""

import base64
from collections.abc import Iterator

import pytest

from asr_server.annexes.speakers.track import decode_reference
from asr_server.audio.recording import PreprocessPool
from asr_server.core import SAMPLE_RATE
from asr_server.errors import InvalidValue
from tests.support.fake_replica import noise, wav


@pytest.fixture
def pool() -> Iterator[PreprocessPool]:
    pool = PreprocessPool(1)
    yield pool
    pool.shutdown()


def encoded(content: bytes) -> str:
    return base64.b64encode(content).decode()


async def refusal(url: str, pool: PreprocessPool) -> str:
    with pytest.raises(InvalidValue) as caught:
        await decode_reference(url, pool)
    assert caught.value.param == "known_speaker_references[]"
    return caught.value.message


@pytest.mark.parametrize(("duration_s", "head"), [(2.0, "audio/wav"), (10.0, "audio/x-wav;codecs=1")])
async def test_a_reference_lasts_2_to_10_seconds(duration_s: float, head: str, pool: PreprocessPool) -> None:
    url = f"data:{head};base64,{encoded(wav(noise(duration_s)))}"
    assert len(await decode_reference(url, pool)) == round(duration_s * SAMPLE_RATE)


@pytest.mark.parametrize(("duration_s", "told"), [(1.8, "1.8"), (10.2, "10.2"), (40.0, "40.0")])
async def test_a_shorter_or_longer_one_is_refused_with_its_length(
    duration_s: float, told: str, pool: PreprocessPool
) -> None:
    url = f"data:audio/wav;base64,{encoded(wav(noise(duration_s)))}"
    expected = f"'known_speaker_references[]' are 2 to 10 s long; one has {told} s."
    assert await refusal(url, pool) == expected


@pytest.mark.parametrize(
    "url",
    [
        "",
        encoded(b"RIFF"),
        "data:audio/wav;base64,",
        "data:audio/wav,RIFF",
        "data:audio/wav;base64,UklGRg=",
        "data:audio/wav;base64,Ukl GRg==",
        f"https://host/data:audio/wav;base64,{encoded(b'RIFF')}",
        f"data:audio wav;base64,{encoded(b'RIFF')}",
    ],
)
async def test_what_is_no_data_url_is_told_how_one_looks(url: str, pool: PreprocessPool) -> None:
    expected = "'known_speaker_references[]' are data URLs: data:audio/wav;base64,..."
    assert await refusal(url, pool) == expected


async def test_what_is_no_audio_is_told_so(pool: PreprocessPool) -> None:
    message = await refusal(f"data:audio/wav;base64,{encoded(b'no audio')}", pool)
    assert message.startswith("One of 'known_speaker_references[]' cannot be read: ")
