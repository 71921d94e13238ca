"""The kernels under Triton's interpreter (on a GPU: compiled) against torch's addition, norm and product."""

import pytest
import torch
from torch import Tensor, nn

from asr_server.model.kernels import TORCH, Kernels, layers
from asr_server.model.products import Linear
from asr_server.model.whisper import add_norm, norm_product

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ADD_NORM = Kernels(add_norm=layers.add_norm)
ONE_ROW = Kernels(norm_product=layers.norm_product, row_product=layers.row_product)
# Some roundings: of norms up to 4, and of products up to 8. The interpreter cuts bfloat16 off, where a GPU
# rounds.
NORM_ERROR = {
    torch.float32: 2e-6 if DEVICE.type == "cpu" else 1e-5,
    torch.bfloat16: 2**-5,
    torch.float16: 2**-9,
}
PRODUCT_ERROR = {torch.float32: 1e-5, torch.bfloat16: 2**-4, torch.float16: 2**-7}


def norm_of(width: int, dtype: torch.dtype) -> nn.LayerNorm:
    norm = nn.LayerNorm(width, device=DEVICE, dtype=dtype)
    norm.weight.copy_(torch.rand(width) + 0.5)
    norm.bias.copy_(torch.randn(width))
    return norm


def linear(num_inputs: int, num_outputs: int, dtype: torch.dtype, gelu: bool = False) -> Linear:
    made = Linear(num_inputs, num_outputs, gelu).to(DEVICE, dtype)
    made.weight.copy_(torch.randn(num_outputs, num_inputs, device=DEVICE) * num_inputs**-0.5)
    made.bias.copy_(torch.randn(num_outputs, device=DEVICE))
    return made


def check(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], error: float) -> None:
    rounding = 2**-7 if expected[0].dtype == torch.bfloat16 else 0
    torch.testing.assert_close(found[0], expected[0], atol=0, rtol=rounding)
    torch.testing.assert_close(found[1], expected[1], atol=error, rtol=0)


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks in several rounds, and outputs that fill the last block in part."""
    torch.manual_seed(0)
    monkeypatch.setattr(layers, "_WEIGHTS", 128)
    monkeypatch.setattr(layers, "_ENOUGH_PROGRAMS", 4)


@pytest.mark.parametrize("dtype", NORM_ERROR)
@pytest.mark.parametrize(
    ("shape", "of_change"), [((2, 7, 128), (2, 7, 128)), ((3, 5, 80), (5, 80)), ((1, 1, 1280), (1, 1, 1280))]
)
@torch.inference_mode()
def test_the_sum_and_its_norm_are_torchs(
    shape: tuple[int, ...], of_change: tuple[int, ...], dtype: torch.dtype
) -> None:
    norm = norm_of(shape[-1], dtype)
    x = torch.randn(shape, device=DEVICE).to(dtype)
    change = (torch.randn(of_change, device=DEVICE) * 3 + 1).to(dtype)
    before = x.clone()
    check(add_norm(x, change, norm, ADD_NORM), add_norm(x, change, norm, TORCH), NORM_ERROR[dtype])
    assert torch.equal(x, before), "a graph computes it again from the same memory"


@pytest.mark.parametrize("num_rows", [3, 4])
@torch.inference_mode()
def test_programs_may_have_two_rows_the_last_missing(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "_ROWS", 2)
    norm = nn.LayerNorm(80, device=DEVICE)
    x, change = torch.randn(2, num_rows, 80, device=DEVICE)
    check(add_norm(x, change, norm, ADD_NORM), add_norm(x, change, norm, TORCH), 1e-5)


@pytest.mark.parametrize("dtype", PRODUCT_ERROR)
@pytest.mark.parametrize(("width", "outputs"), [(64, 50), (80, 7)])
@pytest.mark.parametrize("gelu", [False, True])
@torch.inference_mode()
def test_the_sum_and_the_product_of_its_norm_are_torchs(
    width: int, outputs: int, gelu: bool, dtype: torch.dtype
) -> None:
    norm = norm_of(width, dtype)
    x, change = (torch.randn(2, 1, 1, width, device=DEVICE) * 2).to(dtype).unbind()
    before, product = x.clone(), linear(width, outputs, dtype, gelu)
    found, expected = (norm_product(x, change, norm, product, kernels) for kernels in (ONE_ROW, TORCH))
    check(found, expected, PRODUCT_ERROR[dtype])
    assert torch.equal(x, before), "a graph computes it again from the same memory"


@pytest.mark.parametrize("dtype", PRODUCT_ERROR)
@torch.inference_mode()
def test_a_product_without_norm_is_torchs(dtype: torch.dtype) -> None:
    x, product = torch.randn(1, 1, 96, device=DEVICE).to(dtype), linear(96, 37, dtype)
    torch.testing.assert_close(product(x, ONE_ROW), product(x), atol=PRODUCT_ERROR[dtype], rtol=0)


@torch.inference_mode()
def test_rows_beside_each_other_have_programs_of_their_own() -> None:
    norm, product = nn.LayerNorm(40, device=DEVICE), linear(40, 9, torch.float32)
    x, change = torch.randn(2, 3, 1, 40, device=DEVICE).unbind()
    weights = norm.weight, norm.bias, norm.eps, None, product.weight, product.bias, False
    total, found = layers.norm_product(x, change, *weights)
    torch.testing.assert_close(total, x + change)
    torch.testing.assert_close(found, product(norm(x + change)))
    torch.testing.assert_close(layers.row_product(x, product.weight, product.bias), product(x))


@pytest.mark.parametrize("kernels", [TORCH, ADD_NORM, ONE_ROW])
@torch.inference_mode()
def test_what_leaves_float16_is_kept_within_it(kernels: Kernels) -> None:
    norm = nn.LayerNorm(16, device=DEVICE, dtype=torch.float16)
    num_rows = 1 if kernels is ONE_ROW else 3
    large = torch.full((1, num_rows, 16), 60_000.0, device=DEVICE, dtype=torch.float16)
    large[..., ::2] *= -1
    total, product = norm_product(large, large, norm, linear(16, 8, torch.float16), kernels)
    assert total.abs().max() == torch.tensor(torch.finfo(torch.float16).max - 1000).half()
    assert torch.isfinite(product).all()


@torch.inference_mode()
def test_several_rows_are_left_to_torch() -> None:
    def fail(*_: object) -> Tensor:
        raise AssertionError

    rows, product = torch.randn(2, 1, 32, device=DEVICE), linear(32, 8, torch.float32)
    kernels = Kernels(norm_product=fail, row_product=fail)  # type: ignore[arg-type]
    product(rows, kernels)
    norm_product(rows, rows, nn.LayerNorm(32, device=DEVICE), product, kernels)
