"""What `auto` and 0 stand for."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from asr_server.config import Settings
from asr_server.dispatch.dispatcher import describe
from asr_server.engine import EngineConfig, config, runner
from asr_server.engine.config import choose_device, choose_dtype, choose_num_slots, engine_info
from asr_server.model import WhisperSizes, products
from asr_server.model.whisper import Decoder, padded_vocabulary
from asr_server.replica import CannotStart, load_engine
from tests.support.checkpoints import pocket_directory

CPU = torch.device("cpu")


def sizes() -> WhisperSizes:
    return WhisperSizes.from_directory(pocket_directory())


@pytest.mark.parametrize(("flags", "dtype"), [({"avx512_bf16"}, torch.bfloat16), ({"avx2"}, torch.float32)])
def test_auto_precision_is_bfloat16_where_the_processor_has_it(
    monkeypatch: pytest.MonkeyPatch, flags: set[str], dtype: torch.dtype
) -> None:
    monkeypatch.setattr(config, "cpu_flags", lambda: flags)
    assert choose_dtype("auto", CPU) == dtype
    assert choose_dtype("float16", CPU) == torch.float16


@pytest.mark.parametrize(
    ("flags", "has_products", "can"),
    [({"avx2", "fma"}, True, True), ({"sse4_2"}, True, False), ({"avx2"}, False, False)],
)
def test_products_in_8_bits_need_avx2_and_a_torch_that_has_them(
    flags: set[str], has_products: bool, can: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "cpu_flags", lambda: flags)
    functions = {"qlinear_prepack": None} if has_products else {}
    monkeypatch.setattr(torch.ops, "onednn", SimpleNamespace(**functions))
    assert products.can_multiply_in_int8() == can


@pytest.mark.parametrize(("in_hardware", "dtype"), [(True, torch.bfloat16), (False, torch.float16)])
def test_a_gpu_that_only_emulates_bfloat16_gets_float16(
    in_hardware: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or in_hardware
    )
    assert choose_dtype("auto", torch.device("cuda")) == dtype


def test_slots_follow_from_free_memory_which_replicas_on_one_device_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slot = 2 * 2 * (448 + 1500) * 128 * 4  # keys and values, layers, positions, width, bytes
    # A quarter is for slots.
    assert choose_num_slots(sizes(), CPU, torch.float32, 4 * 10 * slot) == 10
    assert choose_num_slots(sizes(), CPU, torch.float32, 0) == 1
    assert choose_num_slots(sizes(), CPU, torch.float32, 1 << 50) == 48
    assert EngineConfig(num_slots=5).resolved(sizes(), CPU, torch.float32).num_slots == 5
    monkeypatch.setattr(config, "free_memory_bytes", lambda: 4 * 30 * slot)
    shared = EngineConfig.from_settings(Settings(), num_on_device=3).resolved(sizes(), CPU, torch.float32)
    assert shared.num_slots == 10


def test_a_default_servers_scores_take_at_most_300_mb_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, turbo = torch.device("cuda"), WhisperSizes(51866, 128, 1280, 32, 20, 5120, 4, 20, 5120)
    monkeypatch.setattr(config, "free_bytes", lambda *_: 80 << 30)
    chosen = EngineConfig(beam_size=5).resolved(turbo, gpu, torch.bfloat16)
    assert chosen.num_text_slots == 1280
    with FakeTensorMode():
        embedding = torch.empty(padded_vocabulary(turbo.vocabulary, gpu), 1, device="cuda")
        decoder: Any = SimpleNamespace(embedding=embedding)
        scores = Decoder.new_scores(decoder, chosen.num_text_slots)
    assert scores is not None
    assert scores.nbytes <= 0.3e9


def test_a_gpu_without_memory_ends_the_start_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 8.15 GiB")

    monkeypatch.setattr(runner, "record_graphs", fail)
    with pytest.raises(CannotStart, match=r"memory does not hold the engine: lower --max-slots") as failure:
        load_engine(Settings(model=str(pocket_directory()), device="cpu"), 1)
    assert "8.15 GiB" in str(failure.value)
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize(
    ("free_gib", "num_on_device", "expected_gib"), [(75, 1, 75), (75, 2, 35), (35, 2, 35), (20, 2, 20)]
)
def test_replicas_on_one_gpu_take_alike_whoever_starts_first(
    free_gib: int, num_on_device: int, expected_gib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 80 GiB, with weights of 5: the first finds 75 free, the second 35 less than that or so."""
    gib = 1 << 30
    freed: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(1))
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda device: ((free_gib if freed else 0) * gib, 80 * gib)
    )
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5 * gib)
    assert config.free_bytes(torch.device("cuda"), num_on_device) == expected_gib * gib


@pytest.mark.parametrize(
    ("num_on_device", "is_running", "line"),
    [
        (1, None, "replicas 1"),
        (3, None, "replicas 3 (3 share a GPU in turns, as no MPS daemon runs)"),
        (3, True, "replicas 3 (3 share a GPU at once, through MPS)"),
        (3, False, "replicas 3 (3 share a GPU in turns, as no MPS daemon runs)"),
    ],
)
def test_the_start_line_says_how_replicas_share_a_gpu(
    num_on_device: int, is_running: bool | None, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    if is_running is not None:
        daemon_pid = os.getpid() if is_running else 1 << 30
        (tmp_path / "control").touch()
        (tmp_path / "nvidia-cuda-mps-control.pid").write_text(f"{daemon_pid}\n")
    info = engine_info(
        EngineConfig(device="cuda", dtype="bfloat16", num_slots=9, num_on_device=num_on_device)
    )
    assert describe(Settings(device="cuda"), info, num_on_device).endswith(line)


def test_the_device_is_the_cpu_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == CPU


@pytest.mark.parametrize(
    ("failure", "error", "said"),
    [
        ("CUDA error: no kernel image is available for execution on the device", ValueError, "GTX 1080"),
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", RuntimeError, "busy"),
    ],
)
def test_a_gpu_that_torch_was_not_built_for_is_said_in_one_line_and_a_busy_one_may_be_tried_again(
    failure: str, error: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError(failure)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA GeForce GTX 1080")
    monkeypatch.setattr(torch, "zeros", fail)
    with pytest.raises(error, match=said) as raised:
        choose_device("auto")
    assert type(raised.value) is error
