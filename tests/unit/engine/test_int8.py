"""8-bit integers where --dtype int8 asks for them, or the processor has instructions for their sums."""

import pytest
import torch

from asr_server.config import EMBEDDED_MODEL
from asr_server.core import DecodingOptions
from asr_server.engine import Engine, EngineConfig, config
from asr_server.engine.config import choose_dtype, choose_int8, engine_info
from asr_server.model.products import can_multiply_in_int8
from asr_server.model.rows import rows_of
from harness.engine_helpers import Checkpoint, transcribe
from tests.support.speech import say

CPU = torch.device("cpu")
# Those that the server chooses here: without instructions for it, bfloat16 takes a minute.
DTYPES = sorted({torch.float32, choose_dtype("auto", CPU)}, key=str)
needs_int8 = pytest.mark.skipif(not can_multiply_in_int8(), reason="oneDNN has no such products here")


@pytest.mark.parametrize(
    ("name", "flags", "int8"),
    [
        ("auto", {"avx2", "avx512_vnni", "avx512_bf16"}, True),
        ("auto", {"avx2", "avx_vnni"}, True),
        ("auto", {"avx2"}, False),  # sums in 16 bits: a step of few rows is slower than in float32
        ("int8", {"avx2"}, True),
        ("float32", {"avx2", "avx512_vnni"}, False),
    ],
)
def test_auto_takes_int8_where_the_processor_sums_in_32_bits(
    name: str, flags: set[str], int8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "cpu_flags", lambda: flags)
    monkeypatch.setattr(config, "can_multiply_in_int8", lambda: True)
    assert choose_int8(name, CPU) == int8
    assert not choose_int8("auto", torch.device("cuda"))
    assert choose_dtype("int8", CPU) == choose_dtype("auto", CPU)


@needs_int8
def test_without_vnni_products_are_in_float32_beside_a_cache_in_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "cpu_flags", lambda: {"avx2"})
    engine = Engine.load(EngineConfig(str(EMBEDDED_MODEL)))
    clips = [say(digits, "f3").samples for digits in ("427", "9081")]
    exact = Engine.load(EngineConfig(str(EMBEDDED_MODEL), dtype="float32"))
    options = DecodingOptions(max_new_tokens=30)
    found, expected = transcribe(engine, clips, options), transcribe(exact, clips, options)
    assert [each.tokens for each in found] == [each.tokens for each in expected]
    assert found[0].logprobs != expected[0].logprobs
    info = engine_info(engine.config)
    assert (info.dtype, "keys and values in int8" in info.reasons["dtype"]) == ("float32", True)


def test_where_it_cannot_be_it_is_refused_by_the_settings_name(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = r"--dtype \(ASR_SERVER_DTYPE\) int8 needs --device \(ASR_SERVER_DEVICE\) cpu"
    with pytest.raises(ValueError, match=refusal):
        choose_int8("int8", torch.device("cuda"))
    monkeypatch.setattr(config, "can_multiply_in_int8", lambda: False)
    with pytest.raises(ValueError, match=refusal):
        Engine.load(EngineConfig(str(EMBEDDED_MODEL), device="cpu", dtype="int8"))
    assert not choose_int8("auto", CPU)


@needs_int8
@pytest.mark.parametrize("short_audio", ["exact", "tail"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_digits_are_heard_as_in_float32_with_nearly_the_same_probabilities(
    dtype: torch.dtype, short_audio: str, embedded: Checkpoint
) -> None:
    clips = [say(digits, voice).samples for digits, voice in (("427", "f3"), ("9081", "rms"), ("317", "m5"))]
    options = DecodingOptions(word_timestamps=True, max_new_tokens=30)
    expected = transcribe(embedded.engine(short_audio=short_audio), clips, options)
    engine = Checkpoint.load(EMBEDDED_MODEL, dtype, int8=True).engine(num_slots=2, short_audio=short_audio)
    errors = []
    for result, exact in zip(transcribe(engine, clips, options), expected, strict=True):
        assert result.tokens == exact.tokens
        errors += [abs(a - b) for a, b in zip(result.logprobs, exact.logprobs, strict=True)]
        assert result.token_times_s == pytest.approx(exact.token_times_s, abs=0.1)
    assert 0 < max(errors) < 0.2


@torch.inference_mode()
def test_a_slot_that_was_never_written_may_lie_between_others(embedded: Checkpoint) -> None:
    """As where encoding into it has failed."""
    model = embedded.model
    cache = model.new_cache(3, int8_audio=True)
    audio = model.encoder(model.log_mel([say("427", "f3").samples]))
    cache.write_audio(2, model.decoder.cross_keys_values(audio))
    heads, depth = cache.keys.shape[2], cache.keys.shape[-1]
    query = torch.randn(1, 1, heads, depth).expand(3, -1, -1, -1)
    positions = torch.zeros(3, 1, dtype=torch.long)
    among = rows_of(cache, slice(0, 3), positions, 1).attend_audio(0, query)
    alone = rows_of(cache, slice(2, 3), positions[:1], 1).attend_audio(0, query[:1])
    torch.testing.assert_close(among[2:], alone)
