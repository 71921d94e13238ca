"""Files as people have them, each with its known words; they lie beside the repository, in ../shared/data.

What is odd about each is made and read in tests/unit/audio; here words come out of it, of most in the trials.
"""

import io
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile

from harness.speech.error_rates import word_errors
from tests.conftest import Server
from tests.support.speech import RECORDINGS

FIELD = RECORDINGS.parent / "field"
A = "And so my fellow Americans ask not what your country can do for you ask what you can do for your country"
B = "we must find a new home in the stars"
QUIET = (
    "The GNU General Public License is a free, copyleft license for software and other kinds of works. "
    "The licenses for most software and other practical works are designed to take away your freedom to "
    "share and change the works. By contrast, the GNU General Public License is intended to guarantee "
    "your freedom to share and change all versions of a program to make sure it remains free software "
    "for all its users. We, the Free Software Foundation, use the GNU General Public License for most "
    "of our software; it applies also to any other work released this way by its authors. You can apply "
    "it to your programs, too. When we speak of free software, we are referring to freedom, not price. "
    "Our General Public Licenses "
)
D = "It was my reports from the north which chiefly induced people to buy"

pytestmark = pytest.mark.slow


def transcribed(server: Server, file: bytes, **fields: str) -> dict[str, Any]:
    data = {"model": "whisper-1", "response_format": "verbose_json", "timestamp_granularities[]": "word"}
    reply = httpx.post(
        f"{server.url}/v1/audio/transcriptions", files={"file": file}, data=data | fields, timeout=120
    )
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def content_of(name: str) -> bytes:
    path: Path = FIELD / name
    if not path.exists():
        pytest.skip(f"{path} is not here: recordings of people are not part of the repository")
    return path.read_bytes()


def errors(answer: dict[str, Any], spoken: str) -> int:
    return word_errors(spoken, answer["text"]).errors


def start_of(answer: dict[str, Any], word: str) -> float:
    return next(
        float(entry["start"]) for entry in answer["words"] if entry["word"].strip(",.").lower() == word
    )


@pytest.mark.parametrize(
    ("name", "spoken"),
    [
        ("c01_mp3_joined_small.mp3", f"{B} {D}"),
        ("c06_phase.flac", A),
        *(("c06_B16m_A44s.aac", f"{B} {A}"), ("c24_24in32.wav", B), ("c42_over_B.wav", B)),
        *(
            pytest.param(name, spoken, marks=pytest.mark.trial)
            for name, spoken in (("c06_opus_B1_A2.ogg", f"{B} {A}"), ("c20_tag_wav.wav", B))
        ),
        *(
            pytest.param(name, A, marks=pytest.mark.trial)
            for name in (
                "c02_flac_total_third.flac",
                "c04_default_second.mkv",
                "c09_small_size.wav",
                "c19_video_longer.mkv",
            )
        ),
    ],
)
def test_all_words_are_read_and_none_called_damaged(real_server: Server, name: str, spoken: str) -> None:
    answer = transcribed(real_server, content_of(name))
    assert errors(answer, spoken) == 0
    assert "truncated" not in answer


@pytest.mark.trial
def test_words_keep_the_time_of_the_picture_and_of_a_gap(real_server: Server) -> None:
    late, gap = (transcribed(real_server, content_of(name)) for name in ("c03_late.mkv", "c03_gap.mkv"))
    assert start_of(late, "and") == pytest.approx(4.15, abs=0.15)
    assert late["duration"] == pytest.approx(15.0, abs=0.15)
    assert 8.55 < start_of(gap, "not") < 8.85
    assert errors(gap, A) <= 1


def test_a_silent_default_track_is_read_and_named_and_another_by_number(real_server: Server) -> None:
    file = content_of("c04_silent_first.mp4")
    default, second = transcribed(real_server, file), transcribed(real_server, file, track="2")
    assert (default["text"], default["tracks"][0]["number"]) == ("", 1)
    assert (errors(second, A), second["tracks"][0]["number"]) == (0, 2)


@pytest.mark.trial
def test_a_float_file_at_the_scale_of_16_bits_is_read(real_server: Server) -> None:
    if not (RECORDINGS / "jfk.wav").exists():
        pytest.skip("no recordings in ../shared/data/audio")
    samples, rate = soundfile.read(RECORDINGS / "jfk.wav", dtype="float32")
    buffer = io.BytesIO()
    soundfile.write(buffer, (samples * 2**15).astype(np.float32), rate, format="WAV", subtype="FLOAT")
    assert errors(transcribed(real_server, buffer.getvalue()), A) == 0


def test_speech_in_a_second_language_lies_in_segments(real_server: Server) -> None:
    answer = transcribed(
        real_server, content_of("e1_en_es_zh.opus"), **{"timestamp_granularities[]": "segment"}
    )
    spoken_s = sum(
        max(0.0, min(segment["end"], 23.0) - max(segment["start"], 8.5)) for segment in answer["segments"]
    )
    assert spoken_s >= 12.0, answer["segments"]


@pytest.mark.trial
def test_faint_speech_under_an_offset_is_read_whole(real_server: Server) -> None:
    answer = transcribed(real_server, content_of("c14_dc50_quiet50.flac"), language="en")
    assert errors(answer, QUIET) <= 9


def text_in(server: Server, file: bytes, response_format: str, **fields: str) -> str:
    data = {"model": "whisper-1", "response_format": response_format} | fields
    url = f"{server.url}/v1/audio/transcriptions"
    return httpx.post(url, files={"file": file}, data=data, timeout=120).raise_for_status().text


@pytest.mark.parametrize(
    "response_format", ["srt", *(pytest.param(name, marks=pytest.mark.trial) for name in ("json", "text"))]
)
def test_every_format_has_a_sentence_said_four_times(real_server: Server, response_format: str) -> None:
    text = text_in(real_server, content_of("c26_C4.flac"), response_format)
    assert text.lower().replace("\n", " ").count("small dog") == 4


def test_noise_in_one_channel_hides_no_sentence_of_the_other(real_server: Server) -> None:
    assert errors(transcribed(real_server, content_of("c25_noise_then_clean.ogg")), f"{A} {B}") == 0


def test_two_equal_channels_are_one_speaker_and_the_answer_says_so(real_server: Server) -> None:
    answer = transcribed(real_server, content_of("c04_same.ogg"), channels="split")
    assert answer["text"].lower().count("ask not") == 1
    assert {segment["speaker"] for segment in answer["words"]} == {"A"}
    assert [each["reason"] for each in answer["dropped"]] == ["same_channel"]


def test_no_cue_ends_behind_the_recording(real_server: Server) -> None:
    file = content_of("c32_L_end80.wav")
    duration_s = soundfile.info(io.BytesIO(file)).duration
    last = text_in(real_server, file, "srt").strip().split("\n\n")[-1].splitlines()[1]
    minutes, seconds = last.split(" --> ")[1].replace(",", ".").split(":")[1:]
    assert 60 * int(minutes) + float(seconds) <= duration_s + 0.0005
