"""Sums that are limited, through Triton's compiler: its interpreter keeps NaN where a GPU may drop it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
