"""The kernel under Triton's interpreter (on a GPU: compiled) against products and a softmax in float32."""

import pytest
import torch
from torch import Tensor

from asr_server.model import rows
from asr_server.model.kernels import flash_decode as module
from asr_server.model.kernels.flash_decode import flash_decode, plan_splits, row_lengths

SLOW = pytest.mark.slow  # of Triton's interpreter: many positions, or many programs
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ERROR = {torch.float32: 3e-6 if DEVICE == "cpu" else 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def expected(query: Tensor, keys: Tensor, values: Tensor, length: int) -> Tensor:
    scores = torch.einsum("hd,hnd->hn", query.float(), keys[:, :length].float())
    return torch.einsum("hn,hnd->hd", scores.softmax(-1), values[:, :length].float())


@pytest.mark.parametrize(
    ("num_rows", "num_heads", "depth", "positions", "transposed", "dtype"),
    [
        (3, 2, 16, 150, True, torch.float32),
        (3, 2, 64, 150, True, torch.bfloat16),
        pytest.param(3, 2, 64, 150, False, torch.float16, marks=SLOW),
        (2, 3, 16, 33, False, torch.float32),
        # twelve parts: as many as there may be, but none empty
        pytest.param(1, 1, 64, 1500, True, torch.float32, marks=SLOW),
        pytest.param(1, 1, 128, 300, False, torch.bfloat16, marks=SLOW),
        (4, 1, 32, 7, True, torch.float32),
    ],
)
def test_rows_attend_to_their_slots_as_far_as_they_reach(
    num_rows: int, num_heads: int, depth: int, positions: int, transposed: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(positions)
    num_slots, stride = num_rows + 2, -(-positions // 16) * 16
    stored = torch.randn(num_slots, num_heads, depth, stride, device=DEVICE)
    stored[..., positions:] = float("nan")  # what lies behind a row's end must not matter
    keys = stored.to(dtype)[..., :positions].transpose(2, 3)
    if not transposed:
        keys = keys.contiguous()
    values = torch.randn(num_slots, num_heads, positions, depth, device=DEVICE).to(dtype)
    packed = torch.randn(num_rows, 3 * num_heads, depth, device=DEVICE).to(dtype) * 0.3
    query = packed[:, num_heads : 2 * num_heads]  # as it comes from the product of queries, keys and values
    slots = torch.randperm(num_slots)[:num_rows]
    lengths = torch.randint(1, positions + 1, (num_rows,))
    lengths[0] = positions
    if num_rows > 1:
        lengths[1] = 0

    found = flash_decode(query, keys, values, slots.to(DEVICE), lengths.to(DEVICE), positions)

    for row, (slot, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
        if length == 0:
            assert not found[row].any(), "a row that looks at nothing must give zeros"
        else:
            wanted = expected(query[row], keys[slot], values[slot], length)
            torch.testing.assert_close(found[row].float(), wanted, atol=ERROR[dtype], rtol=0)


@pytest.mark.parametrize("transposed", [True, False])
def test_a_slot_may_begin_beyond_2_to_the_31_numbers(transposed: bool) -> None:
    """As those of large caches do. Of the memory between them no page is ever touched."""
    torch.manual_seed(0)
    positions, depth, slot_stride, start = 48, 32, 1 << 30, 1 << 31
    memory = torch.empty(5 * slot_stride, dtype=torch.bfloat16, device=DEVICE)
    memory[: 1 << 12] = 0.0  # where 32 bits lead to, which have no more than 2**31 in both directions
    shape = (3, 1, depth, positions) if transposed else (3, 1, positions, depth)
    keys = memory.as_strided(shape, (slot_stride, 1, shape[3], 1), start)
    values = memory.as_strided(
        (3, 1, positions, depth), (slot_stride, 1, depth, 1), 2 * slot_stride + (1 << 11)
    )
    for each in (keys, values):
        each[2] = torch.randn(each.shape[1:], device=DEVICE).to(memory.dtype)
    query = torch.randn(1, 1, depth, device=DEVICE)
    slots, lengths = torch.tensor([2], device=DEVICE), torch.tensor([40], device=DEVICE)
    keys = keys.transpose(2, 3) if transposed else keys
    found = flash_decode(query, keys, values, slots, lengths, positions)
    wanted = expected(query[0], keys[2].float(), values[2].float(), 40)
    torch.testing.assert_close(found[0], wanted, atol=ERROR[torch.float32], rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_newest_keys_and_values_are_read_from_where_they_come_and_stored(dtype: torch.dtype) -> None:
    """One looks at its newest position alone, one at nothing."""
    torch.manual_seed(0)
    keys, values = torch.randn(2, 5, 1, 300, 64, device=DEVICE).to(dtype).unbind()
    query, new_keys, new_values = torch.randn(4, 3, 64, device=DEVICE).to(dtype).chunk(3, dim=1)
    slots, lengths = torch.tensor([1, 4, 0, 2], device=DEVICE), torch.tensor([300, 129, 1, 0], device=DEVICE)
    wanted_keys, wanted_values = keys.clone(), values.clone()
    for row, slot, length in [(0, 1, 300), (1, 4, 129), (2, 0, 1)]:
        wanted_keys[slot, :, length - 1], wanted_values[slot, :, length - 1] = new_keys[row], new_values[row]
        for each in (keys, values):
            each[slot, :, length - 1] = float("nan")  # it is not read from there
    found = flash_decode(
        query * 0.3, keys, values, slots, lengths, 300, new_keys=new_keys, new_values=new_values
    )
    assert torch.equal(keys, wanted_keys)
    assert torch.equal(values, wanted_values)
    assert not found[3].any()
    for row, slot, length in [(0, 1, 300), (1, 4, 129), (2, 0, 1)]:
        wanted = expected((query * 0.3)[row], keys[slot], values[slot], length)
        torch.testing.assert_close(found[row].float(), wanted, atol=ERROR[dtype], rtol=0)


@pytest.mark.parametrize("num_rows", [1, 70])
def test_the_rows_of_a_step_are_those_that_torch_looks_up(num_rows: int) -> None:
    numbers = torch.arange(100, device=DEVICE)
    positions, active = numbers[:num_rows, None] * 3, (numbers[:num_rows] % 4 != 2).long()
    step = slice(2, 2 + num_rows), positions, active, numbers.flip(0), 150
    for found, expected in zip(row_lengths(*step), rows.row_lengths(*step), strict=True):
        assert found.dtype == expected.dtype
        assert found.is_contiguous()
        assert torch.equal(found, expected)


@pytest.mark.parametrize("num_programs", [1, 20, 160, 2560])
@pytest.mark.parametrize("most", [1, 64, 65, 448, 1500, 3000])
def test_parts_cover_all_positions_and_none_is_empty_for_the_longest(num_programs: int, most: int) -> None:
    num_splits, split = plan_splits(num_programs, most)
    assert num_splits * split >= most
    assert num_splits <= module._MAX_SPLITS
    assert (num_splits - 1) * split < most
