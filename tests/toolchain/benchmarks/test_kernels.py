"""Every kernel through Triton's compiler and NVIDIA's assembler, for devices that are not here."""

import os
import sys

import pytest

from benchmarks.kernels import CASES
from tests.support.commands import output_of

pytestmark = pytest.mark.slow


KERNELS = {
    "attention": {"_attend", "_combine"},
    "step": {"_choose", "_advance", "_row_lengths"},
    "products": {"_product"},
    "encoder": {"_add_norm", "_store_audio"},
}
NARROW = {
    "_combine",
    "_advance",
    "_row_lengths",
    "_store_audio",
}  # which read little, or columns of any number


@pytest.mark.parametrize("part", CASES)
@pytest.mark.parametrize("arch", [90, *(pytest.param(each, marks=pytest.mark.trial) for each in (80, 100))])
def test_every_kernel_compiles_without_spills_and_loads_16_bytes_at_once(arch: int, part: str) -> None:
    lines = compiled("--arch", str(arch), "--parts", part)[2:]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert {row[2] for row in rows} == KERNELS[part]
    assert {row[5] for row in rows} == {"0"}, rows
    assert all(row[6] == "yes" for row in rows if row[2] not in NARROW), rows


def test_a_start_compiles_few_kernels_whatever_the_batches_that_it_records() -> None:
    """Each takes the better part of a second on a machine that has none yet."""
    (line,) = compiled("--start")
    assert int(line.split()[0]) <= 20, line
    for kernel in ("_choose", "_combine", "_add_norm", "_advance"):
        assert line.split().count(kernel) == 1, line


def compiled(*arguments: str) -> list[str]:
    """Lines of the benchmark, run by itself: Triton's interpreter is on or off for a whole process."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_DEFAULT_FP_FUSION"] = "1"  # Triton's default, which it else warns of
    return output_of(sys.executable, "-m", "benchmarks.kernels", *arguments, env=environment).splitlines()
