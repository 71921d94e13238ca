"""Each choice that a configuration leaves open, on a CPU and on a GPU, without the memory of either."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from asr_server.checkpoint.tokenizer import Tokenizer
from asr_server.config import Settings
from asr_server.engine import EngineConfig, config
from asr_server.engine.config import (
    check_fp8,
    choose_cache_dtype,
    choose_device,
    choose_dtype,
    choose_int8,
    choose_num_slots,
    engine_info,
    keep_freed_memory,
)
from asr_server.engine.tokens import GenerationRules
from asr_server.model import WHOLE, DecoderCache, WhisperSizes
from asr_server.model.float8 import FP8

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SIZES = WhisperSizes(100, 80, 64, 1, 2, 128, 2, 2, 128)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight threads, and memory for ten slots with all of a quarter of it."""
    chunk_bytes = DecoderCache.bytes_per_chunk(SIZES, torch.float32)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(
        config, "free_bytes", lambda device, num_on_device: 4 * 10 * chunk_bytes // num_on_device
    )


def resolved(device: torch.device, **given: Any) -> EngineConfig:
    return EngineConfig(**given).resolved(SIZES, device, torch.float32)


@pytest.mark.parametrize(
    ("device", "given", "expected"),
    [
        (CPU, {}, {"device": "cpu", "dtype": "float32", "num_slots": 10, "lookahead": False}),
        (CPU, {"short_audio": "exact"}, {"compute_workers": 4, "encode_batch": 4, "short_audio": "exact"}),
        (CPU, {"short_audio": "tail"}, {"compute_workers": 4, "encode_batch": 32, "short_audio": "tail"}),
        (CPU, {"compute_workers": 6, "short_audio": "tail"}, {"compute_workers": 6, "encode_batch": 48}),
        (CPU, {"encode_batch": 5}, {"compute_workers": 4, "encode_batch": 5}),
        (CPU, {"num_ranks": 2}, {"compute_workers": 1, "cuda_graphs": False}),
        (CPU, {"lookahead": True}, {"lookahead": True}),
        (CPU, {"num_on_device": 2}, {"num_slots": 5}),
        (CPU, {"num_slots": 3}, {"num_slots": 3}),
        (CPU, {"beam_size": 5}, {"num_slots": 10}),
        (GPU, {}, {"device": "cuda", "compute_workers": 1, "encode_batch": 11, "lookahead": True}),
        (GPU, {}, {"num_slots": 24, "cuda_graphs": True}),
        (GPU, {"lookahead": False, "encode_batch": 3}, {"lookahead": False, "encode_batch": 3}),
        (GPU, {"cuda_graphs": False}, {"cuda_graphs": False}),
        (GPU, {"num_ranks": 2}, {"cuda_graphs": False, "num_slots": 48}),
        (GPU, {"compute_workers": 2}, {"compute_workers": 2}),
    ],
)
def test_what_is_left_open_is_chosen_for_the_device(
    device: torch.device, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = resolved(device, **given)
    assert {name: getattr(found, name) for name in expected} == expected


def test_few_threads_and_8_bits_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert resolved(CPU).compute_workers == 3
    assert EngineConfig().resolved(SIZES, CPU, torch.float32, int8=True).dtype == "int8"
    large = replace(SIZES, window=replace(SIZES.window, num_positions=20_000))
    assert EngineConfig(num_slots=1).resolved(large, GPU, torch.float32).encode_batch == 1


def test_a_gpu_has_memory_for_half_as_many_searches_as_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    of_chunk = DecoderCache.bytes_per_chunk(SIZES, torch.float32, None, 1 + 4 / 2)
    monkeypatch.setattr(config, "free_bytes", lambda *_: round(of_chunk * 7.5 / 0.6))
    assert resolved(GPU, beam_size=5).num_slots == 7


@pytest.mark.parametrize(("device", "most"), [(CPU, 48), (GPU, 256)])
def test_there_are_at_least_one_and_at_most_so_many_slots(device: torch.device, most: int) -> None:
    assert choose_num_slots(SIZES, device, torch.float32, 0) == 1
    assert choose_num_slots(SIZES, device, torch.float32, 1 << 50) == most
    for_ten = round(
        10.5 * DecoderCache.bytes_per_chunk(SIZES, torch.float32) / (0.25 if device == CPU else 0.6)
    )
    assert choose_num_slots(SIZES, device, torch.float32, for_ten) == 10


def test_ranks_on_gpus_hold_a_part_of_a_slot_each_and_8_bits_take_less() -> None:
    of_chunk = DecoderCache.bytes_per_chunk(SIZES, torch.float32)
    assert choose_num_slots(SIZES, GPU, torch.float32, round(of_chunk * 10.5 / 0.6), num_ranks=2) == 21
    assert choose_num_slots(SIZES, CPU, torch.float32, of_chunk * 42, num_ranks=2) == 10
    assert choose_num_slots(SIZES, CPU, torch.float32, of_chunk * 42, audio_dtype=torch.uint8) > 15


@pytest.mark.parametrize(
    ("given", "chunks", "searches", "texts"),
    [
        ({"device": "cpu", "num_slots": 7, "encode_batch": 4, "beam_size": 5}, 4, 7, 35),
        ({"device": "cpu", "num_slots": 7, "encode_batch": 4, "short_audio": "tail"}, 4, 7, 7),
        ({"device": "cuda", "num_slots": 7, "encode_batch": 4, "beam_size": 5}, 4, 4, 23),
        ({"device": "cuda", "num_slots": 8, "encode_batch": 4, "short_audio": "tail"}, 12, 4, 8),
    ],
)
def test_chunks_of_a_batch_searches_and_texts(
    given: dict[str, Any], chunks: int, searches: int, texts: int
) -> None:
    made = EngineConfig(**given)
    assert (made.chunks_per_encode, made.num_searches, made.num_texts) == (chunks, searches, texts)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, None),
        ({"cache_dtype": "fp8"}, FP8),
        ({"cache_dtype": "int8"}, torch.uint8),
        ({"dtype": "int8"}, torch.uint8),
    ],
)
def test_the_audios_type_is_the_models_or_one_of_8_bits(given: dict[str, Any], expected: Any) -> None:
    assert EngineConfig(**given).audio_dtype is expected


def test_settings_become_a_replicas_configuration() -> None:
    settings = Settings(max_slots=9, cpu_threads=3, tensor_parallel_size=2, beam_size=4, device="cpu")
    made = EngineConfig.from_settings(settings, num_on_device=3)
    assert (made.num_slots, made.cpu_threads, made.num_on_device, made.num_ranks) == (9, 3, 3, 2)
    assert (made.beam_size, made.device) == (4, "cpu")
    assert EngineConfig.from_settings(settings).num_on_device == 1


# -- Precision ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "device", "flags", "can", "expected"),
    [
        ("auto", CPU, {"avx512_vnni"}, True, True),
        ("auto", CPU, {"avx2"}, True, False),
        ("auto", CPU, {"avx512_vnni"}, False, False),
        ("auto", GPU, {"avx512_vnni"}, True, False),
        ("int8", CPU, {"avx2"}, True, True),
        ("float32", CPU, {"avx512_vnni"}, True, False),
    ],
)
def test_products_are_in_8_bits_where_they_are_asked_for_or_faster(
    name: str,
    device: torch.device,
    flags: set[str],
    can: bool,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(config, "cpu_flags", lambda: flags)
    monkeypatch.setattr(config, "can_multiply_in_int8", lambda: can)
    assert choose_int8(name, device) is expected


@pytest.mark.parametrize(("device", "can"), [(CPU, False), (GPU, True)])
def test_8_bits_that_a_device_does_not_have_are_refused(
    device: torch.device, can: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "can_multiply_in_int8", lambda: can)
    with pytest.raises(ValueError, match=r"--dtype .* int8 needs --device .* cpu and a processor with AVX2"):
        choose_int8("int8", device)
    with pytest.raises(ValueError, match=r"--cache-dtype .* int8 needs"):
        choose_cache_dtype(EngineConfig(cache_dtype="int8"), device)
    assert choose_cache_dtype(EngineConfig(), device) == "auto"


@pytest.mark.parametrize(
    ("cache_dtype", "dtype", "expected"),
    [
        ("auto", "auto", "int8"),
        ("auto", "float32", "auto"),
        ("int8", "float32", "int8"),
        ("fp8", "auto", "fp8"),
    ],
)
def test_the_cache_is_in_8_bits_unless_a_precision_is_set(
    cache_dtype: str, dtype: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "can_multiply_in_int8", lambda: True)
    assert choose_cache_dtype(EngineConfig(cache_dtype=cache_dtype, dtype=dtype), CPU) == expected


def test_int8_keeps_the_rest_in_the_processors_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "cpu_flags", lambda: {"amx_bf16"})
    assert choose_dtype("int8", CPU) == choose_dtype("auto", CPU) == torch.bfloat16
    assert choose_dtype("float32", CPU) == torch.float32


@pytest.mark.parametrize(
    ("capability", "hip", "given", "refused"),
    [
        ((8, 9), None, {"cache_dtype": "fp8"}, None),
        ((9, 0), None, {"encoder_dtype": "fp8"}, None),
        ((8, 6), None, {"cache_dtype": "fp8"}, r"--cache-dtype .* fp8 needs .* 8\.9 or later; A10 has 8\.6"),
        ((9, 4), "6.0", {"encoder_dtype": "fp8"}, r"--encoder-dtype .* fp8 needs"),
        (
            (8, 6),
            None,
            {"cache_dtype": "fp8", "encoder_dtype": "fp8"},
            r"--cache-dtype .* and --encoder-dtype",
        ),
        ((8, 6), None, {}, None),
    ],
)
def test_8_bit_floats_need_a_gpu_that_has_them(
    capability: tuple[int, int],
    hip: str | None,
    given: dict[str, Any],
    refused: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A10")
    monkeypatch.setattr(torch.version, "hip", hip)
    if refused is None:
        check_fp8(EngineConfig(**given), GPU)
    else:
        with pytest.raises(ValueError, match=refused):
            check_fp8(EngineConfig(**given), GPU)
    check_fp8(EngineConfig(**given), CPU)


# -- Devices and what is said of them -------------------------------------------------------------------


def test_a_gpu_is_taken_where_there_is_one_and_refused_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device("auto") == choose_device("cuda") == GPU
    assert choose_device("cpu") == CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="finds no GPU that it can use"):
        choose_device("cuda")


def reasons(**given: Any) -> dict[str, str]:
    asked: dict[str, Any] = {"device": "cpu", "num_slots": 9} | given
    return engine_info(EngineConfig(**asked), "kernels of chance").reasons


def test_the_operator_is_given_the_reason_of_each_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H100")
    monkeypatch.setattr(config, "mps_is_running", lambda: True)
    assert reasons(dtype="float32") == {
        "device": "no GPU was found",
        "dtype": "the processor has no bfloat16",
        "num_slots": "25% of the memory that was free",
        "kernels": "kernels of chance",
    }
    assert reasons(dtype="bfloat16", num_on_device=2)["dtype"] == "the processor multiplies in it"
    assert reasons(dtype="int8")["dtype"] == "the processor multiplies in it"
    in_8_bits = reasons(dtype="float32", cache_dtype="int8")["dtype"]
    assert in_8_bits == "the processor has no bfloat16; the audio's keys and values in int8"
    assert reasons(num_slots=48)["num_slots"] == "more would only lengthen a step"
    assert "num_replicas" not in reasons(num_on_device=2)
    on_gpu: dict[str, Any] = {"device": "cuda", "dtype": "float16"}
    assert reasons(**on_gpu)["device"] == "H100"
    assert reasons(**on_gpu)["dtype"] == "the GPU has no bfloat16"
    assert reasons(**on_gpu, num_slots=256)["num_slots"] == "more would only lengthen a step"
    assert reasons(**on_gpu)["num_slots"] == "60% of the memory that was free"
    assert "num_replicas" not in reasons(**on_gpu)
    assert reasons(**on_gpu, num_on_device=2)["num_replicas"] == "2 share a GPU at once, through MPS"
    info = engine_info(EngineConfig(device="cpu", dtype="float32", num_slots=9))
    assert (info.device, info.dtype, info.num_slots, info.num_threads) == ("cpu", "float32", 9, 8)
    assert info.reasons["kernels"] == ""


def test_freed_memory_is_kept_by_glibc_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    class Library:
        def __init__(self, name: object) -> None:
            assert name is None

        def mallopt(self, option: int, value: int) -> None:
            asked.append((option, value))

    monkeypatch.setattr(ctypes, "CDLL", Library)
    monkeypatch.setattr(sys, "platform", "darwin")
    keep_freed_memory()
    assert asked == []
    monkeypatch.setattr(sys, "platform", "linux")
    keep_freed_memory()
    assert asked == [(-4, 0), (-1, 2**31 - 1)]
    monkeypatch.delattr(Library, "mallopt")
    keep_freed_memory()  # another C library


@pytest.mark.parametrize("is_cpu", [True, False])
def test_a_model_is_loaded_as_it_is_configured(is_cpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Any] = []
    threads: list[int] = []
    kept: list[int] = []
    checked: list[tuple[str, Any]] = []
    device = CPU if is_cpu else GPU
    for name, stand_in in {
        "choose_device": lambda name: device,
        "check_fp8": lambda given, on: checked.append((given.model, on)),
        "choose_dtype": lambda *_: torch.float16,
        "choose_int8": lambda *_: is_cpu,
        "choose_cache_dtype": lambda *_: "int8",
        "load_whisper": lambda *arguments: loaded.append(arguments) or _Model(),  # type: ignore[func-returns-value]
        "keep_freed_memory": lambda: kept.append(1),
        "check_timestamps": lambda *given: checked.append(("timestamps", given)),
        "available_cores": lambda: 5,
    }.items():
        monkeypatch.setattr(config, name, stand_in)
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(Tokenizer, "from_directory", lambda _: _Model())
    monkeypatch.setattr(GenerationRules, "from_directory", lambda path: path)
    found = config.load(EngineConfig("somewhere", encoder_dtype="fp8" if is_cpu else "auto"))
    assert loaded == [(Path("somewhere"), device, torch.float16, WHOLE, is_cpu, is_cpu)]
    assert threads == [5]
    assert kept == [1] * is_cpu
    assert checked == [("somewhere", device), ("timestamps", (None, None))]
    assert found.config.cache_dtype == "int8"
    config.load(EngineConfig("somewhere", cpu_threads=2))
    assert threads == [5, 2]


class _Model:
    specials = sizes = None
