"""Rank 0 sends each operation before it runs it; another rank that follows holds the same slots."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import Pipe
from typing import Any

import pytest
import torch
from torch import Tensor

from asr_server.engine import ranks
from asr_server.engine.config import EngineConfig
from asr_server.engine.ranks import LinkSum, check_ranks, join
from asr_server.engine.runner import RanksFailed, Runner
from asr_server.model import WHOLE
from tests.support.checkpoints import pocket_directory
from tests.unit.engine.small import small

CONFIG = EngineConfig(device="cpu", num_slots=3, beam_size=2, encode_batch=2, compute_workers=1, num_ranks=2)


def led(sent: list[object]) -> Runner:
    made = small()
    return Runner(made.model, made.rules, made.tokenizer, CONFIG, broadcast=sent.append)


@pytest.mark.parametrize("error", [MemoryError("full"), ValueError("odd"), torch.OutOfMemoryError("full")])
def test_what_fails_on_rank_0_ends_all_ranks(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[object] = []
    runner = led(sent)

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(runner.cache, "copy_text", fail)
    with pytest.raises(RanksFailed, match=f"move failed on rank 0: {error}"):
        runner.move([(0, 1)], 3)
    assert sent == [("move", ([(0, 1)], 3))], "sent first"
    runner.close()


def test_on_a_cpu_ranks_join_when_all_are_there() -> None:
    ours, theirs = Pipe()
    with ours, theirs, ThreadPoolExecutor(2) as pool:
        leading = pool.submit(join, CONFIG, 0, "", [ours])
        following = pool.submit(join, CONFIG, 1, "", [theirs])
        shards = leading.result(30), following.result(30)
        assert [(shard.rank, shard.count) for shard in shards] == [(0, 2), (1, 2)]
        parts = torch.full((3,), 1.0), torch.full((3,), 5.0)
        sums = list(pool.map(lambda shard, part: shard.sum(part), shards, parts))
    assert [each.tolist() for each in sums] == [[6.0] * 3] * 2


def test_a_rank_does_not_begin_without_the_others() -> None:
    ours, theirs = Pipe()
    theirs.close()
    with ours, pytest.raises((EOFError, OSError)):
        join(CONFIG, 0, "", [ours])


def test_on_gpus_ranks_join_by_nccl_on_this_machine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    joined: dict[str, Any] = {}
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(ranks, "choose_device", torch.device)
    monkeypatch.setattr(torch.distributed, "FileStore", lambda *arguments: arguments)
    monkeypatch.setattr(
        torch.distributed,
        "init_process_group",
        lambda backend, **named: joined.update(named, backend=backend),
    )
    join(replace(CONFIG, device="cuda"), 0, "a file", [])
    assert "has not been run on GPUs yet" in caplog.text
    shard = join(replace(CONFIG, device="cuda"), 1, "a file", [])
    assert joined == {"backend": "nccl", "store": ("a file", 2), "rank": 1, "world_size": 2}
    assert os.environ.pop("NCCL_SOCKET_IFNAME") == "lo"
    assert (shard.rank, shard.count, shard.add_up) == (1, 2, torch.distributed.all_reduce)


def test_the_model_and_the_devices_have_to_be_enough_for_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(CONFIG, model=str(pocket_directory()))
    check_ranks(config)
    with pytest.raises(ValueError, match="--tensor-parallel-size 3 must divide"):
        check_ranks(replace(config, num_ranks=3))
    monkeypatch.setattr(ranks, "choose_device", torch.device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_ranks(replace(config, device="cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="--tensor-parallel-size 2 needs as many GPUs; this replica has 1"):
        check_ranks(replace(config, device="cuda"))
    assert WHOLE.count == 1


# -- Sums through links --------------------------------------------------------------------------------------


def add_up(parts: list[Tensor]) -> list[Tensor]:
    """Return what each rank has afterwards."""
    links = [Pipe() for _ in parts[1:]]
    ranks = [LinkSum(0, [ours for ours, _ in links])]
    ranks += [LinkSum(rank, [theirs]) for rank, (_, theirs) in enumerate(links, 1)]
    with ThreadPoolExecutor(len(parts)) as pool:
        list(pool.map(lambda rank, part: rank(part), ranks, parts))
    for pair in links:
        for link in pair:
            link.close()
    return parts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (0, 3), (1, 7, 13), (4, 1 << 19)])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_all_ranks_get_the_same_sum(shape: tuple[int, ...], dtype: torch.dtype, num_ranks: int) -> None:
    generator = torch.Generator().manual_seed(7)
    parts = [torch.randn(shape, generator=generator).to(dtype) for _ in range(num_ranks)]
    expected = parts[0].clone()
    for part in parts[1:]:
        expected += part
    for result in add_up(parts):
        assert torch.equal(result, expected)


def test_the_end_of_another_rank_is_an_error_and_no_wait() -> None:
    ours, theirs = Pipe()
    theirs.close()
    with ours, pytest.raises((EOFError, OSError)):
        LinkSum(0, [ours])(torch.zeros(3))
