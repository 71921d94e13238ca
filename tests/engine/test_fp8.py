"""8-bit floats where --cache-dtype and --encoder-dtype ask for them, on the CPU, which imitates them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from asr_server.config import EMBEDDED_MODEL, Settings
from asr_server.core import ChunkResult, DecodingOptions
from asr_server.dispatch.dispatcher import describe
from asr_server.engine import EngineConfig
from asr_server.engine.config import check_fp8, engine_info
from asr_server.engine.runner import Runner
from asr_server.model import load_whisper
from asr_server.model.float8 import Float8Linear
from benchmarks.clips import make_clip
from benchmarks.engine_helpers import Checkpoint, transcribe
from tests.checkpoints import short_window_directory
from tests.engine.device_stand_ins import imitate_graphs, take_few_programs
from tests.speech import say

SPOKEN = [say(digits, voice).samples for digits, voice in (("427", "f3"), ("9081", "rms"), ("317", "m5"))]
FP8_CACHE = {"cache_dtype": "fp8"}


@pytest.fixture(scope="module")
def fp8_encoder(embedded: Checkpoint) -> Checkpoint:
    return replace(embedded, model=load_whisper(EMBEDDED_MODEL, "cpu", torch.float32, fp8_encoder=True))


def heard(checkpoint: Checkpoint, **config: Any) -> list[ChunkResult]:
    options = DecodingOptions(word_timestamps=True, max_new_tokens=30)
    return transcribe(checkpoint.engine(num_slots=2, **config), SPOKEN, options)


@pytest.mark.parametrize("short_audio", ["exact", "tail"])
@pytest.mark.parametrize("where", ["cache", "encoder", "both"])
def test_speech_is_heard_as_in_float32_with_nearly_the_same_probabilities(
    where: str, short_audio: str, embedded: Checkpoint, fp8_encoder: Checkpoint
) -> None:
    expected = heard(embedded, short_audio=short_audio)
    checkpoint = embedded if where == "cache" else fp8_encoder
    found = heard(checkpoint, short_audio=short_audio, **({} if where == "encoder" else FP8_CACHE))
    errors = []
    for result, exact in zip(found, expected, strict=True):
        assert result.tokens == exact.tokens
        errors += [abs(a - b) for a, b in zip(result.logprobs, exact.logprobs, strict=True)]
        assert result.token_times_s == pytest.approx(exact.token_times_s, abs=0.1)
    assert 0 < max(errors) < 0.2


def test_nothing_is_in_8_bits_where_nobody_asks_for_it(embedded: Checkpoint) -> None:
    assert (Settings().cache_dtype, Settings().encoder_dtype) == ("auto", "auto")
    assert not any(isinstance(module, Float8Linear) for module in embedded.model.modules())
    runner = embedded.engine()._runner
    assert isinstance(runner, Runner)
    cache = runner.cache
    assert cache.audio_scales is None
    assert cache.cross_keys.dtype == cache.cross_values.dtype == torch.float32


@pytest.mark.trial
def test_triton_reads_an_8_bit_cache_and_gives_the_tokens_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    take_few_programs(monkeypatch)
    checkpoint = Checkpoint.load(short_window_directory())
    clips = [make_clip(i, 2.0 + 1.5 * i) for i in range(3)]  # the third takes a slot that was used
    options = DecodingOptions(language="de", max_new_tokens=3)

    def tokens(kernels: str) -> list[tuple[int, ...]]:
        engine = checkpoint.engine(num_slots=2, kernels=kernels, short_audio="tail", **FP8_CACHE)
        return [result.tokens for result in transcribe(engine, clips, options)]

    expected = tokens("torch")
    imitate_graphs(monkeypatch)
    assert tokens("triton") == expected
    assert len(set(expected)) > 1


def test_a_moved_slot_keeps_its_scales(embedded: Checkpoint) -> None:
    cache = embedded.model.new_cache(3, audio_dtype=torch.float8_e4m3fn)
    audio = embedded.model.encoder(embedded.model.log_mel(SPOKEN[:2]))
    cache.write_audio([2, 0], embedded.model.decoder.cross_keys_values(audio))
    cache.copy_text([(2, 1)], torch.tensor([[2, 1]]), 0)
    for moved, own in zip(
        cache.audio(1, cache.audio_slots(slice(1, 2))), cache.audio(1, torch.tensor([2])), strict=True
    ):
        assert moved.any()
        assert torch.equal(moved, own)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_memory_holds_more_slots(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asr_server.engine.config.free_memory_bytes", lambda: 20 << 20)
    sizes = Checkpoint.load(short_window_directory()).model.sizes
    plain, halved = (
        EngineConfig(cache_dtype=name).resolved(sizes, torch.device("cpu"), dtype) for name in ("auto", "fp8")
    )
    cost = {plain: 848 * dtype.itemsize, halved: 448 * dtype.itemsize + 400}  # a position of each kind
    assert halved.num_slots > plain.num_slots
    for each, positions in cost.items():
        assert each.num_slots == (5 << 20) // (2 * 2 * 128 * positions)


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ({"cache_dtype": "fp8"}, "--cache-dtype (ASR_SERVER_CACHE_DTYPE)"),
        ({"encoder_dtype": "fp8"}, "--encoder-dtype (ASR_SERVER_ENCODER_DTYPE)"),
    ],
)
def test_a_gpu_that_cannot_is_refused_with_the_name_of_the_setting(
    asked: dict[str, Any], names: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ValueError, match=r"8\.9 or later; NVIDIA A100 has 8\.0") as refusal:
        check_fp8(EngineConfig(device="cuda", **asked), torch.device("cuda"))
    assert str(refusal.value).startswith(f"{names} fp8 needs")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    check_fp8(EngineConfig(device="cuda", **asked), torch.device("cuda"))


def test_the_start_line_says_what_is_in_8_bits() -> None:
    info = engine_info(EngineConfig(device="cpu", dtype="float32", num_slots=2))
    line = describe(Settings(cache_dtype="fp8", encoder_dtype="fp8"), info, 1)
    assert "the audio's keys and values fp8 (--cache-dtype), encoder fp8 (--encoder-dtype)" in line
    assert " fp8 (" not in describe(Settings(), info, 1)
    assert "keys and values int8 (--cache-dtype)" in describe(Settings(cache_dtype="int8"), info, 1)
