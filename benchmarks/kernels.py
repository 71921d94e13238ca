"""Compile every kernel for GPUs that need not be there, as a server with large-v3 or turbo would have it.

Products of one row, whose blocks depend on the width, are compiled for base and tiny, too.

    python -m benchmarks.kernels --arch 80 90 100
    python -m benchmarks.kernels --start        how many kernels a start compiles, and how long that takes

Each kernel goes through the functions that launch it, Triton's compiler and NVIDIA's assembler, which come
with Triton; only the launch itself is left out. What the interpreter does not notice, this does: types that
a device lacks, shapes the compiler refuses, registers that do not suffice (spilled to local memory).
"""

import argparse
import hashlib
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.cache import get_cache_manager

from asr_server.engine.beam import num_candidates, num_named
from asr_server.engine.cuda import sizes_up_to
from asr_server.engine.slots import SlotState
from asr_server.model.kernels.choose_token import advance, choose_token
from asr_server.model.kernels.flash_decode import flash_decode, row_lengths
from asr_server.model.kernels.layers import add_norm, norm_product, row_product, store_audio
from asr_server.model.whisper import padded_vocabulary

HEADS, DEPTH, POSITIONS, CONTEXT = 20, 64, 1500, 448
WIDTH, VOCABULARY = 1280, 51866
HALVES = [torch.bfloat16, torch.float16, torch.float32]
OTHER_WIDTHS = {"base": 512, "tiny": 384}
SLOTS, BEAM = 1280, 5  # texts of the default's 256 chunks; its beam
LINES = 2 * num_candidates(BEAM)
REPORTED_LINES = LINES + 2 * num_named(BEAM)
_REPORT = "report.txt"
PADDED_VOCABULARY = padded_vocabulary(VOCABULARY, torch.device("cuda"))


class Compiled(NamedTuple):
    kernel: str
    registers: int
    shared_bytes: int
    spilled_bytes: int
    loads_16_bytes: bool  # whether some load takes 16 bytes at once, as fast memory traffic wants


class CompilingDriver:
    """Takes a GPU's place in Triton: kernels are compiled for it, and launched nowhere."""

    def __init__(self, arch: int, inspects: bool = True) -> None:
        """
        Args:
            inspects: tells what the assembler made of each kernel, which takes time.
        """
        self._inspects = inspects
        self.utils = self
        self._target = GPUTarget("cuda", arch, 32)
        self._compiled: list[Compiled] = []
        self._launches: list[tuple[Any, ...]] = []

    def take(self) -> tuple[list[Compiled], list[tuple[Any, ...]]]:
        """What was compiled and launched since the last call."""
        taken = self._compiled, self._launches
        self._compiled, self._launches = [], []
        return taken

    def get_current_device(self) -> int:
        return id(self)  # Triton keeps what it compiled by device

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {"max_shared_mem": 99 << 10}  # what all of these devices have, and some have more

    def load_binary(self, name: str, cubin: bytes, *_: Any) -> tuple[str, str, int, int, int]:
        self._compiled.append(resources(name, cubin) if self._inspects else Compiled(name, 0, 0, 0, False))
        return name, name, 0, 0, 1024  # module, function, registers, spills, most threads

    def unload_module(self, _: Any) -> None: ...

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        def launch(*arguments: Any) -> None:
            grid, numbers = arguments[:3], [each for each in arguments[9:] if not isinstance(each, Tensor)]
            self._launches.append((metadata.name, *grid, *numbers))

        return launch


def resources(kernel: str, cubin: bytes) -> Compiled:
    """What the assembler made of a kernel. Kept beside what Triton keeps: a report takes half a second."""
    cache = get_cache_manager(hashlib.sha256(triton.__version__.encode() + cubin).hexdigest())
    path = cache.get_file(_REPORT) or cache.put(_dump(cubin), _REPORT)
    report = Path(path).read_text()
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", report)}
    wide = re.search(r"LDG\.E[.\w]*\.128", report) is not None
    return Compiled(kernel, found["REG"], found["SHARED"], found["STACK"] + found["LOCAL"], wide)


def _dump(cubin: bytes) -> str:
    """Its resources and its code."""
    folder = Path(triton.__file__).parent / "backends/nvidia/bin"
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(folder / "cuobjdump"), "--dump-resource-usage", "--dump-sass", file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout


def attention(dtype: torch.dtype, rows: int, of_audio: bool, is_prompt: bool = False) -> None:
    """A step's attention with `rows` rows, over the audio or the text of two slots; that to the text stores
    a row's last position, but with prompts.
    """
    if of_audio:
        keys = torch.zeros(2, HEADS, DEPTH, -(-POSITIONS // 16) * 16).to(dtype)[..., :POSITIONS].mT
    else:
        keys = torch.zeros(2, HEADS, CONTEXT, DEPTH).to(dtype)
    values = torch.zeros(2, HEADS, keys.shape[2], DEPTH).to(dtype)
    query, new_keys, new_values = torch.zeros(rows, 3 * HEADS, DEPTH, dtype=dtype).chunk(3, dim=1)
    new = () if of_audio or is_prompt else (new_keys, new_values)
    slots, lengths = torch.zeros(2, rows, dtype=torch.long).unbind()
    flash_decode(query, keys, values, slots, lengths, 3 if is_prompt else keys.shape[2], *new)


def slot_integers(rows: int) -> Tensor:
    """Return the state of so many slots of a server's."""
    return SlotState.empty(SLOTS, CONTEXT, torch.device("cpu"))[slice(rows)].integers


def token_choice(lines: int = LINES, rows: int = 128) -> None:
    """The end of a step over large-v3's vocabulary."""
    tokens, integers = torch.zeros(rows, dtype=torch.long), slot_integers(rows)
    suppressed = torch.zeros(PADDED_VOCABULARY, dtype=torch.int8)
    scores, logprobs = torch.zeros(rows, PADDED_VOCABULARY)[:, :VOCABULARY], torch.zeros(rows)
    chosen = (tokens, logprobs, torch.zeros(REPORTED_LINES, SLOTS)[:lines, :rows])
    choose_token(scores, suppressed, integers, 50257, 50365, 50415, *chosen)


def state_change(rows: int = 128, lines: int = REPORTED_LINES) -> None:
    tokens, numbers = torch.zeros(rows, dtype=torch.long), torch.zeros(rows)
    candidates = torch.zeros(lines, SLOTS)[:, :rows]
    report = torch.zeros(3 + lines, rows, dtype=torch.double)
    advance(tokens, numbers, numbers, slot_integers(rows), candidates, 50365, 50257, report)


def addition_and_norm(dtype: torch.dtype, batch: int = 1) -> None:
    x = torch.empty(batch, POSITIONS, WIDTH, dtype=dtype)
    for change in (x[0], x):
        add_norm(x, change, x[0, 0], x[0, 0], 1e-5, 64504.0 if dtype == torch.float16 else None)


def audio_into_slots(length: int = POSITIONS, batch: int = 2) -> None:
    """A layer's keys and values, and the silence behind them."""
    slots, padded = torch.zeros(batch, dtype=torch.long), -(-POSITIONS // 16) * 16
    keys = torch.zeros(batch, HEADS, DEPTH, -(-length // 8) * 8, dtype=torch.bfloat16)[..., :length]
    values = torch.zeros(batch, length, HEADS, DEPTH, dtype=torch.bfloat16).transpose(1, 2)
    all_keys = torch.zeros(2, HEADS, DEPTH, padded, dtype=torch.bfloat16)[..., :POSITIONS]
    all_values = torch.zeros(2, HEADS, POSITIONS, DEPTH, dtype=torch.bfloat16)
    store_audio(keys, slots, all_keys)
    store_audio(values, slots, all_values)
    if length < POSITIONS:
        store_audio(all_keys[:1, ..., length:].expand(batch, -1, -1, -1), slots, all_keys[..., length:])
        store_audio(all_values[:1, :, length:].expand(batch, -1, -1, -1), slots, all_values[:, :, length:])


def lengths_of_rows(rows: int = 128) -> None:
    numbers = torch.zeros(SLOTS, dtype=torch.long)
    row_lengths(slice(0, rows), numbers[:rows, None], numbers[:rows], numbers, POSITIONS)


def products_of_one_row(dtype: torch.dtype, width: int = WIDTH) -> None:
    """Of a decoder layer: behind a norm, with GELU, and of attention or the hidden layer."""
    x, hidden = torch.empty(1, 1, width, dtype=dtype), torch.empty(1, 1, 4 * width, dtype=dtype)
    norm = x[0, 0], x[0, 0], 1e-5, 64504.0 if dtype == torch.float16 else None
    for outputs, gelu in ((3 * width, False), (width, False), (4 * width, True)):
        weight = torch.empty(outputs, width, dtype=dtype)
        norm_product(x, x, *norm, weight, weight[:, 0].contiguous(), gelu)
    for inputs in (x, hidden):
        row_product(inputs, torch.empty(width, inputs.shape[-1], dtype=dtype), x[0, 0])


Case = tuple[str, Callable[[], None]]


def attention_cases() -> Iterator[Case]:
    for dtype in HALVES:
        yield f"audio, {_name(dtype)}, 128 rows", partial(attention, dtype, 128, True)
    yield "audio, bfloat16, 1 row, in parts", lambda: attention(torch.bfloat16, 1, True)
    yield "text, bfloat16, 128 rows", lambda: attention(torch.bfloat16, 128, False)
    yield "text, bfloat16, 1 row", lambda: attention(torch.bfloat16, 1, False)


def step_cases() -> Iterator[Case]:
    for lines, reported, name in ((LINES, REPORTED_LINES, "beams"), (0, 0, "greedy")):
        yield f"end of a step, 128 rows, {name}", partial(token_choice, lines)
        yield f"change of state, 128 rows, {name}", partial(state_change, lines=reported)
    yield "lengths of 128 rows", lengths_of_rows


def product_cases() -> Iterator[Case]:
    for dtype in HALVES:
        yield f"products of one row, {_name(dtype)}", partial(products_of_one_row, dtype)
    for name, width in OTHER_WIDTHS.items():
        compute = partial(products_of_one_row, torch.bfloat16, width)
        yield f"products of one row, bfloat16, {name}", compute


def encoder_cases() -> Iterator[Case]:
    for dtype in (torch.bfloat16, torch.float16):
        yield f"encoder, addition and norm, {_name(dtype)}", partial(addition_and_norm, dtype)
    for length in (POSITIONS, 500):
        yield f"audio of {length} positions into slots", partial(audio_into_slots, length)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


CASES: dict[str, Callable[[], Iterator[Case]]] = {
    "attention": attention_cases,
    "step": step_cases,
    "products": product_cases,
    "encoder": encoder_cases,
}


def compile_all(arch: int, parts: Iterable[str] = CASES) -> list[tuple[str, Compiled]]:
    """The kernels of these cases. Each case is launched twice, and must launch the same: graphs replay it."""
    device = CompilingDriver(arch)
    driver.set_active(device)
    results: list[tuple[str, Compiled]] = []
    for name, launch in chain.from_iterable(CASES[part]() for part in parts):
        launch()
        compiled, launches = device.take()
        launch()
        again = device.take()
        assert again == ([], launches), f"{name}: launched {launches} first, then {again}"
        results += [(name, each) for each in compiled]
    return results


def compile_start(arch: int, num_text_slots: int = SLOTS) -> list[str]:
    """The kernels that a start in bfloat16 compiles for its check, its graphs and its warm-up."""
    device = CompilingDriver(arch, inspects=False)
    driver.set_active(device)
    for rows in sizes_up_to(num_text_slots, 16):
        for of_audio in (True, False):
            attention(torch.bfloat16, rows, of_audio)
        token_choice(rows=rows)
        state_change(rows)
        lengths_of_rows(rows)
    products_of_one_row(torch.bfloat16)
    for batch in range(1, 9):
        addition_and_norm(torch.bfloat16, batch)
        for length in (500, 1000, POSITIONS):
            audio_into_slots(length, batch)
    for rows in (2, 10):  # one prompt, and five
        attention(torch.bfloat16, rows, False, is_prompt=True)
    return [each.kernel for each in device.take()[0]]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--arch", type=int, nargs="+", default=[90], help="compute capabilities, as 90 for 9.0"
    )
    parser.add_argument(
        "--start", action="store_true", help="what a start compiles (TRITON_CACHE_DIR: empty)"
    )
    parser.add_argument("--parts", nargs="+", choices=CASES, default=list(CASES))
    options = parser.parse_args(arguments)
    if options.start:
        started = time.perf_counter()
        compiled = compile_start(options.arch[0])
        print(f"{len(compiled)} kernels compiled in {time.perf_counter() - started:.1f} s:", *compiled)
        return
    print("| sm | case | kernel | registers | shared, bytes | spilled, bytes | 16-byte loads |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for arch in options.arch:
        for case, each in compile_all(arch, options.parts):
            wide = "yes" if each.loads_16_bytes else "no"
            print(
                f"| {arch} | {case} | {each.kernel} | {each.registers} | {each.shared_bytes} | "
                f"{each.spilled_bytes} | {wide} |"
            )


if __name__ == "__main__":
    main()
