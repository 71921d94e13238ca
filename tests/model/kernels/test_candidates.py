"""The kernels that are tried at load, on stand-ins and under Triton's interpreter (on a GPU: compiled)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from asr_server.checkpoint.files import AudioWindow
from asr_server.model import WhisperSizes, layers
from asr_server.model.float8 import FP8, quantise
from asr_server.model.kernels import TORCH, Kernels, candidates
from asr_server.model.kernels.candidates import (
    choose_kernels,
    decode_attention,
    encoder_layer,
    lengths_of_rows,
    products_of_one_row,
)
from asr_server.model.kernels.table import Candidate, Choice, choose, judge
from asr_server.model.rows import row_lengths
from tests.model.kernels.test_table import candidate, kernel

SIZES = WhisperSizes(100, 80, 64, 1, 2, 128, 1, 2, 128, AudioWindow(100))
CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HAS_FP8 = DEVICE.type == "cpu" or torch.cuda.get_device_capability() >= (8, 9)


def test_a_kernel_that_is_wrong_for_one_row_is_not_used_for_many() -> None:
    shapes: list[int] = []

    def wrong_for_one(query: Tensor, keys: Tensor, values: Tensor, *_: Any, **new: Tensor) -> Tensor:
        shapes.append(len(query))
        if "new_keys" in new:
            keys[:, :, -1], values[:, :, -1] = new["new_keys"], new["new_values"]
        scores = torch.softmax(torch.einsum("bhd,bhpd->bhp", query, keys.float()), -1)
        right = torch.einsum("bhp,bhpd->bhd", scores, values)
        return right + float(len(query) == 1)

    ours = Kernels(flash_decode=wrong_for_one)
    many, one = (decode_attention(ours, SIZES, CPU, torch.float32, rows=rows) for rows in (3, 1))
    tried = list(candidates._right_for_one_row_too(many, one))
    reports = [judge(each, lambda compute: 0.0).reason for each in tried]
    assert reports == ["torch: triton differs by 1, more than 0.0001"] * len(tried)
    assert set(shapes) == {3, 1}


@torch.inference_mode()
def test_attention_that_cannot_take_a_single_window_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "HAS_AMX", True)  # then a CPU calls the same function as a GPU

    def for_several(query: Tensor, *others: Any, **scale: Any) -> Tensor:
        if len(query) == 1:
            raise RuntimeError("no plan")
        return F.scaled_dot_product_attention(query, *others, **scale)

    ours, rows = Kernels(whole_attention=for_several), 2 * SIZES.audio_positions
    tried = encoder_layer(ours, SIZES, CPU, torch.bfloat16, fp8=False, rows=rows)
    (attention,) = (each for each in tried if each.name == "whole_attention")
    assert judge(attention, lambda compute: 0.0).reason == "torch: cudnn failed with RuntimeError: no plan"


def test_on_cpu_torch_is_the_choice_and_triton_must_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_kernels("auto", SIZES, CPU, torch.float32) == (TORCH, "", None)
    assert choose_kernels("torch", SIZES, CPU, torch.float32) == (TORCH, "", None)
    assert choose_kernels("triton", SIZES, DEVICE, torch.float32).kernels.flash_decode is not None
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="needs a GPU"):
        choose_kernels("triton", SIZES, CPU, torch.float32)


@pytest.mark.parametrize("audio_dtype", [None, *([FP8] if HAS_FP8 else [])])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_attention_tried_at_load_agrees_with_torch(
    dtype: torch.dtype, audio_dtype: torch.dtype | None
) -> None:
    kernels = choose_kernels("triton", SIZES, DEVICE, dtype).kernels
    tried = list(decode_attention(kernels, SIZES, DEVICE, dtype, audio_dtype, rows=1))
    assert len(tried) > 1
    for each in tried:
        chosen = choose(kernels, [each], lambda compute, own=each: float(compute is not own.kernel))  # type: ignore[misc]
        assert chosen.kernels.flash_decode is each.implementation, chosen.report


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes how long each range of numbers is that is made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lengths: list[int] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if "arange" in str(function):
            self.lengths.append(len(made))
        return made


def test_torchs_attention_is_timed_without_making_what_the_cache_has() -> None:
    tried = next(decode_attention(Kernels(flash_decode=kernel), SIZES, CPU, torch.float32, rows=1))
    with Counting() as counting:
        tried.reference()
    assert max(counting.lengths, default=0) <= SIZES.width


@pytest.mark.parametrize("noticed_at_once", [False, True])
def test_a_kernel_that_leaves_the_gpu_unusable_is_said_in_one_line(
    noticed_at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After it every call of torch's fails too, so that it cannot be a reason to use torch."""

    def fail() -> Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with ...")

    def tried() -> Iterator[Candidate]:
        yield candidate(fail)
        if noticed_at_once:
            yield candidate(fail())  # as making its data would

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    with pytest.raises(ValueError, match=r"illegal memory access was encountered\): --kernels torch"):
        candidates._try_on_gpu(Kernels(flash_decode=kernel), tried())


def test_the_rows_tried_at_load_agree_with_torchs() -> None:
    (tried,) = lengths_of_rows(choose_kernels("triton", SIZES, DEVICE, torch.float32).kernels, DEVICE)
    verdict = judge(tried, lambda compute: float(compute is not tried.kernel))
    assert verdict.seconds == 0, verdict.reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_the_encoders_kernels_tried_at_load_agree_with_torch(dtype: torch.dtype) -> None:
    kernels = choose_kernels("triton", SIZES, DEVICE, dtype).kernels
    tried = encoder_layer(kernels, SIZES, DEVICE, dtype, fp8=True, rows=3)
    names = []
    for each in tried:
        names.append(each.name)
        if each.name != "quantise_rows":  # the interpreter rounds in its own way
            verdict = judge(each, lambda compute, own=each: float(compute is not own.kernel))  # type: ignore[misc]
            assert verdict.seconds == 0, verdict.reason
    in_16_bits = ["linear_gelu", "whole_attention"] if dtype == torch.bfloat16 else []
    assert names == ["add_norm", *in_16_bits, "quantise_rows"]
    assert [each.name for each in encoder_layer(kernels, SIZES, CPU, dtype, fp8=False, rows=3)] == names[:-1]


# -- What is tried ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_all_kernels_are_those_for_the_type(dtype: torch.dtype) -> None:
    chosen = choose_kernels("triton", SIZES, DEVICE, dtype)
    assert chosen.report == "all triton (--kernels)"
    assert chosen.forms is None
    in_16_bits = dtype != torch.float32
    for name, value in vars(chosen.kernels).items():
        assert (value is not None) is (in_16_bits or name not in ("linear_gelu", "whole_attention")), name


def test_several_ranks_and_a_gpu_without_triton_use_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    assert choose_kernels("auto", SIZES, gpu, torch.float32, num_ranks=2) == (TORCH, "", None)

    def fail(*_: Any) -> Kernels:
        raise ValueError("Triton cannot be imported: no")

    monkeypatch.setattr(candidates, "_all_kernels", fail)
    chosen = choose_kernels("auto", SIZES, gpu, torch.float32)
    assert chosen == (TORCH, "torch: Triton cannot be imported: no", None)
    with pytest.raises(ValueError, match="Triton cannot be imported"):
        choose_kernels("triton", SIZES, gpu, torch.float32)


@pytest.mark.parametrize("fp8", [None, True])
def test_on_a_gpu_each_of_the_models_parts_is_tried(
    fp8: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few rows and one row are tried as well as many. Stand-ins: their data would lie on a GPU."""
    asked: dict[str, list[tuple[Any, ...]]] = {}
    for part in ("decode_attention", "encoder_layer", "lengths_of_rows", "products_of_one_row"):

        def note(*arguments: Any, part: str = part, **named: Any) -> Iterator[Candidate]:
            asked.setdefault(part, []).append((*arguments, *named.values()))
            yield replace(candidate(), name=part)

        monkeypatch.setattr(candidates, part, note)
    ours, gpu, dtype = Kernels(flash_decode=kernel), torch.device("cuda"), torch.bfloat16
    monkeypatch.setattr(candidates, "_all_kernels", lambda *_: ours)
    monkeypatch.setattr(candidates, "_versions", lambda device: ("H100",))
    monkeypatch.setattr(candidates, "remembered", lambda circumstances, try_all, _: try_all())
    monkeypatch.setattr(
        candidates,
        "_try_on_gpu",
        lambda kernels, tried: Choice(kernels, " ".join(each.name for each in tried)),
    )
    more: dict[str, Any] = {} if fp8 is None else {"audio_dtype": FP8, "fp8_encoder": fp8}
    chosen = choose_kernels(
        "auto", SIZES, gpu, dtype, more=lambda kernels: [replace(candidate(), name="more")], **more
    )
    assert chosen == (
        ours,
        "decode_attention decode_attention encoder_layer lengths_of_rows products_of_one_row more",
        None,
    )
    model = ours, SIZES, gpu, dtype
    attention = *model, more.get("audio_dtype")
    assert asked["decode_attention"] == [attention, (*attention, 1, 448), (*attention, 1, "flash_decode_few")]
    assert asked["encoder_layer"] == [(*model, bool(fp8))]
    assert asked["lengths_of_rows"] == [(ours, gpu)]
    assert asked["products_of_one_row"] == [model]


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    lengths: Tensor,
    most: int,
    *scales: Any,
    **new: Any,
) -> Tensor:
    """Do `flash_decode`'s work in torch."""
    keys, values = keys.to(query.dtype), values.to(query.dtype)
    if scales:
        keys, values = (each * scale for each, scale in zip((keys, values), scales, strict=True))
    found = []
    for row, (slot, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
        if "new_keys" in new:
            keys[slot, :, length - 1], values[slot, :, length - 1] = (
                new["new_keys"][row],
                new["new_values"][row],
            )
        scores = torch.einsum("hd,hnd->hn", query[row].float(), keys[slot, :, :length].float())
        found.append(torch.einsum("hn,hnd->hd", scores.softmax(-1), values[slot, :, :length].float()))
    return torch.stack(found).to(query.dtype)


def reason_of(tried: Candidate) -> str:
    return judge(tried, lambda compute: float(compute is not tried.kernel)).reason


@pytest.mark.parametrize("audio_dtype", [None, FP8])
def test_attention_is_tried_in_every_form_over_audio_and_text(audio_dtype: torch.dtype | None) -> None:
    calls: list[tuple[tuple[int, ...], tuple[int, ...], list[int], int, int, bool]] = []

    def noted(query: Tensor, keys: Tensor, *others: Any, num_warps: int, **new: Any) -> Tensor:
        lengths, most = others[2:4]
        calls.append(
            (tuple(query.shape), tuple(keys.shape), sorted(set(lengths.tolist())), most, num_warps, bool(new))
        )
        return attend(query, keys, *others, **new)

    tried = list(decode_attention(Kernels(flash_decode=noted), SIZES, CPU, torch.float32, audio_dtype))
    assert [each.form for each in tried] == [" of 2 warps", " of 1 warps", " of 4 warps"]
    assert {(each.name, each.tolerance, each.beside) for each in tried} == {("flash_decode", 1e-4, "torch")}
    assert [each.implementation.keywords for each in tried] == [{"num_warps": count} for count in (2, 1, 4)]
    assert reason_of(tried[1]).startswith("triton")
    audio, text = calls
    assert audio == ((64, 2, 32), (64, 2, 100, 32), [100], 100, 1, False)
    assert text == ((64, 2, 32), (64, 2, 128, 32), [128], 128, 1, True)
    assert candidates._tolerance(torch.bfloat16) == 0.125


@pytest.mark.parametrize("is_text", [False, True])
def test_attention_that_is_wrong_over_audio_or_text_alone_is_not_used(is_text: bool) -> None:
    def wrong(*arguments: Any, num_warps: int, **new: Any) -> Tensor:
        return attend(*arguments, **new) + 0.001 * (bool(new) is is_text)

    (tried, *_) = decode_attention(Kernels(flash_decode=wrong), SIZES, CPU, torch.float32, rows=2, context=9)
    assert reason_of(tried) == "torch: triton differs by 0.001, more than 0.0001"


def test_the_newest_text_is_read_from_where_it_comes() -> None:
    """A kernel that reads the cache alone reads what was there before."""

    def stale(*arguments: Any, num_warps: int, **_: Any) -> Tensor:
        return attend(*arguments)

    (tried, *_) = decode_attention(Kernels(flash_decode=stale), SIZES, CPU, torch.float32, rows=2, context=9)
    first = tried.kernel()
    assert (first - tried.reference()).abs().max() > 0.01


@torch.inference_mode()
def test_an_encoders_layer_is_tried_in_the_size_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "HAS_AMX", True)  # then a CPU calls the same function as a GPU
    shapes: dict[str, list[tuple[int, ...]]] = {
        "add_norm": [],
        "linear_gelu": [],
        "attention": [],
        "rows": [],
    }

    def add_norm(
        x: Tensor, change: Tensor, weight: Tensor, bias: Tensor, eps: float, limit: float | None
    ) -> Any:
        shapes["add_norm"].append(tuple(x.shape))
        total = x + change
        return total, F.layer_norm(total, total.shape[-1:], weight, bias, eps)

    def gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        shapes["linear_gelu"].append((*x.shape, *weight.shape))
        return F.gelu(F.linear(x, weight, bias))

    def attention(query: Tensor, *others: Any, **scale: Any) -> Tensor:
        shapes["attention"].append(tuple(query.shape))
        return F.scaled_dot_product_attention(query, *others, **scale)

    def rows(x: Tensor) -> tuple[Tensor, Tensor]:
        shapes["rows"].append(tuple(x.shape))
        return quantise(x, -1)

    ours = Kernels(add_norm=add_norm, linear_gelu=gelu, whole_attention=attention, quantise_rows=rows)
    tried = list(encoder_layer(ours, SIZES, CPU, torch.bfloat16, fp8=True))
    assert [reason_of(each).split()[0] for each in tried] == ["triton", "cublas", "cudnn", "triton"]
    assert [each.tolerance for each in tried] == [0.125] * 3 + [0.5]
    assert shapes == {
        "add_norm": [(1100, 64)],
        "linear_gelu": [(1100, 64, 128, 64)],
        "attention": [(11, 2, 100, 32), (1, 2, 100, 32)],
        "rows": [(1100, 128)],
    }


@torch.inference_mode()
def test_a_rounding_that_is_off_by_much_is_not_used() -> None:
    def doubled(x: Tensor) -> tuple[Tensor, Tensor]:
        rounded, scales = quantise(x, -1)
        return rounded, scales * 2

    *_, tried = encoder_layer(Kernels(quantise_rows=doubled), SIZES, CPU, torch.float32, fp8=True, rows=3)
    assert reason_of(tried).startswith("torch: triton differs by")


@pytest.mark.parametrize("place", range(4))
def test_rows_that_are_wrong_in_one_column_are_not_used(place: int) -> None:
    def wrong(*arguments: Any) -> tuple[Tensor, ...]:
        found = [each.clone() for each in row_lengths(*arguments)]
        assert len(found[0]) == 64
        found[place][-1] += 1
        return tuple(found)

    (tried,) = lengths_of_rows(Kernels(row_lengths=wrong), CPU)
    assert reason_of(tried) == "torch: triton differs by 1, more than 0"
    (tried,) = lengths_of_rows(Kernels(row_lengths=row_lengths), CPU)
    assert reason_of(tried).startswith("triton")
    lengths = set(tried.reference()[3].tolist())
    assert 0 in lengths
    assert len(lengths) > 3, "of rows that are read and of others"


@torch.inference_mode()
def test_products_of_one_row_are_those_of_several_layers() -> None:
    normed: list[tuple[int, int, bool]] = []
    plain: list[tuple[int, int]] = []

    def norm_product(
        x: Tensor,
        change: Tensor,
        weight: Tensor,
        bias: Tensor,
        eps: float,
        limit: Any,
        own: Tensor,
        *rest: Any,
    ) -> tuple[Tensor, Tensor]:
        own_bias, gelu = rest
        assert x.shape == change.shape == (1, 1, 64)
        normed.append((*own.shape, gelu))
        product = F.linear(F.layer_norm(x + change, (64,), weight, bias, eps), own, own_bias)
        return x + change, F.gelu(product) if gelu else product

    def row_product(x: Tensor, weight: Tensor, bias: Tensor, gelu: bool) -> Tensor:
        assert x.shape[:-1] == (1, 1)
        plain.append((weight.shape[0], weight.shape[1]))
        return F.linear(x, weight, bias)

    ours = Kernels(norm_product=norm_product, row_product=row_product)
    of_norm, of_others = products_of_one_row(ours, SIZES, CPU, torch.float32)
    assert (of_norm.name, of_others.name) == ("norm_product", "row_product")
    assert of_norm.tolerance == of_others.tolerance == 2e-4
    assert reason_of(of_norm).startswith("triton")
    assert normed == [(192, 64, False), (64, 64, False), (128, 64, True)] * 4
    assert reason_of(of_others).startswith("triton")
    assert plain == [(64, 64), (64, 64), (64, 128)] * 4
    wrong = Kernels(norm_product=lambda *a: (norm_product(*a)[0] + 0.01, norm_product(*a)[1]))
    of_norm, _ = products_of_one_row(wrong, SIZES, CPU, torch.float32, layers=1)
    assert reason_of(of_norm).startswith("torch: triton differs by 0.01"), "the sum, too"
