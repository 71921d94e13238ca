"""Kernels are used where they run and agree with torch; else torch decodes, and one warning says why."""

import logging
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from asr_server.core import SAMPLE_RATE, AudioWindow
from asr_server.engine import warm_up
from asr_server.engine.tokens import TokenRules
from asr_server.model import Whisper
from asr_server.model.kernels import TORCH, Kernels, triton_kernels
from tests.unit.engine.device_stand_ins import take_few_programs
from tests.unit.engine.small import RULES, SIZES, SPECIALS
from tests.unit.model.test_rows_in_place import IN_PLACE, plain_flash_decode

CPU = torch.device("cpu")
WHOLE = AudioWindow()


def model_of(dtype: torch.dtype, window: AudioWindow = WHOLE) -> Whisper:
    model = Whisper(replace(SIZES, window=window), CPU, dtype).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.normal_(std=0.1, generator=generator)
    return model


def checked(kernels: Kernels, model: Whisper) -> tuple[Kernels, str]:
    return warm_up.checked(lambda: kernels, model, TokenRules(RULES, SPECIALS, SIZES.vocabulary, CPU))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_that_leaves_out_64_of_1500_keys_is_refused(
    dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_of(dtype)
    assert model.sizes.audio_positions == 30 * SAMPLE_RATE // 320 == 1500
    assert checked(IN_PLACE, model) == (IN_PLACE, "triton")

    def leaves_out(
        query: Tensor, keys: Tensor, values: Tensor, slots: Tensor, lengths: Tensor, *rest: Any, **new: Any
    ) -> Tensor:
        return plain_flash_decode(query, keys, values, slots, lengths - 64 * (lengths == 1500), *rest, **new)

    assert checked(Kernels(flash_decode=leaves_out), model)[0] == TORCH
    (record,) = caplog.records
    assert "two to three times as long" in record.message
    assert "differ from torch" in record.message


def test_attention_that_does_not_store_the_newest_text_is_refused() -> None:
    def forgets(query: Tensor, keys: Tensor, values: Tensor, *rest: Any, **new: Any) -> Tensor:
        return plain_flash_decode(query, keys.clone(), values.clone(), *rest, **new)

    assert checked(Kernels(flash_decode=forgets), model_of(torch.float32))[0] == TORCH


def test_a_choice_of_other_tokens_is_refused() -> None:
    def choose(scores: Tensor, *rest: Any) -> None:
        *_, tokens, _, _ = rest
        tokens.fill_(SPECIALS.timestamp_begin)

    assert checked(replace(IN_PLACE, choose_token=choose), model_of(torch.float32))[0] == TORCH


def test_without_a_c_compiler_torch_decodes_and_one_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Triton compiles a launcher when a kernel first runs; slim images have no compiler."""
    from triton.runtime.build import _build

    monkeypatch.setenv("PATH", "/empty")
    monkeypatch.delenv("CC", raising=False)

    def launch(*_: Any, **__: Any) -> Tensor:
        _build("cuda_utils", "/dev/null", "/tmp", [], [], [], [])
        raise AssertionError

    with caplog.at_level(logging.WARNING):
        kernels, report = checked(Kernels(flash_decode=launch), model_of(torch.float32))
    assert kernels == TORCH
    assert "C compiler" in report
    (record,) = caplog.records
    assert "C compiler" in record.message


@pytest.mark.slow
def test_tritons_kernels_agree_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    take_few_programs(monkeypatch)
    kernels = triton_kernels()
    assert checked(kernels, model_of(torch.float32, AudioWindow(150))) == (kernels, "triton")


def test_on_a_cpu_torch_decodes_without_a_word() -> None:
    model = model_of(torch.float32)
    rules = TokenRules(RULES, SPECIALS, SIZES.vocabulary, CPU)
    assert warm_up.choose("auto", model, rules) == (TORCH, "")


COMPILE = """
import torch
from triton.runtime import driver
from asr_server.model.kernels.layers import add_norm, norm_product
from benchmarks.kernels import CompilingDriver
driver.set_active(CompilingDriver(90, inspects=False))
x, weight = torch.empty(1, 64, dtype=torch.float16), torch.empty(64, 64, dtype=torch.float16)
of_norm = x[0], x[0], 1e-5, 64504.0
{call}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "call", ["add_norm(x, x, *of_norm)", "norm_product(x, x, *of_norm, weight, x[0], False)"]
)
def test_a_limited_sum_keeps_nan_so_that_the_engine_refuses_it(call: str, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    subprocess.run([sys.executable, "-c", COMPILE.format(call=call)], env=environment, check=True)
    (code,) = tmp_path.rglob("*.ptx")
    limits = re.findall(r"\t(?:min|max)\.(\S*)f32", code.read_text())
    assert limits
    assert set(limits) == {"NaN."}
