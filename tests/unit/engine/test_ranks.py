"""Rank 0 sends each operation before it runs it; another rank that follows holds the same slots."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch

from asr_server.core import ChunkId, ChunkResult, DecodingOptions
from asr_server.engine import ranks
from asr_server.engine.active_chunk import ActiveChunk
from asr_server.engine.alignment import Aligner
from asr_server.engine.config import EngineConfig, Loaded
from asr_server.engine.ranks import check_ranks, follow, join, lead
from asr_server.engine.runner import RanksFailed, Runner, StepPlan
from asr_server.engine.slots import SlotStart
from asr_server.engine.warm_up import warm_up
from asr_server.model import WHOLE
from tests.support.checkpoints import pocket_directory
from tests.unit.engine.small import PROMPT, clip, small

OPTIONS = DecodingOptions(language="de", word_timestamps=True)
CONFIG = EngineConfig(device="cpu", num_slots=3, beam_size=2, encode_batch=2, compute_workers=1, num_ranks=2)


def led(sent: list[bytes]) -> Runner:
    made = small()
    return Runner(made.model, made.rules, made.tokenizer, CONFIG, tell=lead(sent.append, CONFIG))


def followed(sent: list[bytes], monkeypatch: pytest.MonkeyPatch) -> Runner:
    """Follow operations as they arrive over the wire; return the runner that did."""
    runners: list[Any] = []

    class Kept(Runner):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            runners.append(self)

    monkeypatch.setattr(ranks, "Runner", Kept)
    arriving = iter(sent)
    made = small()
    loaded = Loaded(made.model, made.tokenizer, made.rules, replace(CONFIG, num_slots=1))
    follow(loaded, lambda: next(arriving, None))
    (runner,) = runners
    with pytest.raises(RuntimeError, match="after shutdown"):
        runner._encoder._workers.submit(print)
    assert isinstance(runner, Runner)
    return runner


def test_a_rank_that_follows_has_what_rank_0_has(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []
    runner = led(sent)
    detections: list[int] = []
    detect = Runner._probabilities

    def detected(own: Runner, hidden: Any) -> Any:
        detections.append(len(hidden))
        return detect(own, hidden)

    monkeypatch.setattr(Runner, "_probabilities", detected)
    with runner.launching():
        runner.encode([0, 2], [1, 2], [clip(0), clip(1, 2.0)]).join()
        assert len(runner.language_probabilities([0, 2]).array()) == 2
        runner.prefill([0, 2], [PROMPT[:2]] * 2, 0)
        runner.start([SlotStart(slot, PROMPT, OPTIONS) for slot in (0, 2)])
        texts = [runner.decode(StepPlan(3, 3 + step)).array()[0] for step in range(3)]
        text = [int(each[2]) for each in texts]
        runner.branch([2], [SlotStart(1, PROMPT, OPTIONS, tokens=text)])
        runner.decode(StepPlan(3, 6))
        chunk = ActiveChunk(ChunkId("a", 0), clip(1, 2.0), OPTIONS, "de", [1], 2)
        result = ChunkResult((text[0], 50, 60, text[0] + 50), (), 0.0, 0.0, 0.0, 0.0, "de", "stop")
        (pending,) = runner.align([(chunk, result)])
        assert len(pending.aligned_result().token_times_s) == 3
        runner.move([(2, 0)], 6)
    names = [msgspec.msgpack.decode(each)[0] for each in sent[1:]]
    assert names == [
        *("encode", "language_probabilities", "prefill", "start", "decode", "decode", "decode"),
        *("branch", "decode", "attend", "move"),
    ]
    here = len(detections)
    other = followed(sent, monkeypatch)
    assert detections[:here] == detections[here:] != [], "whose sums need all ranks"
    for name in ("keys", "values", "cross_keys", "cross_values", "audio_of"):
        assert torch.equal(getattr(runner.cache, name), getattr(other.cache, name)), name
    for name in ("token", "previous", "position", "num_generated", "no_speech", "active", "generated"):
        assert torch.equal(getattr(runner.state, name), getattr(other.state, name)), name
    runner.close()
    with pytest.raises(RuntimeError, match="after shutdown"):
        runner._encoder._workers.submit(print)  # type: ignore[union-attr]


def test_ranks_align_the_text_that_rank_0_has_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its samples: their number, the language, the tokens and the end decide what is computed."""
    sent: list[bytes] = []
    runner = led(sent)
    aligned: list[Any] = []

    def start(_: Aligner, texts: Any, slots: Any) -> list[Any]:
        aligned.append(texts)
        return [None]

    monkeypatch.setattr(Aligner, "start", start)
    chunk = ActiveChunk(ChunkId("a", 0), clip(0, 0.7), OPTIONS, "de", [2], 1)
    result = ChunkResult((50, 60), (), 0.0, 0.0, 0.0, 0.0, "de", "length")
    runner.align([(chunk, result)])
    followed(sent, monkeypatch)
    ((text,), others) = aligned
    assert (text.slot, text.audio_slot, text.num_positions) == (2, 1, 35)
    assert [token for token in text.tokens if token in result.tokens] == [50, 60]
    assert others == [text]
    runner.close()


def test_ranks_warm_up_together(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []
    runner = led(sent)
    warm_up(runner, small().tokenizer, CONFIG.num_slots)
    other = followed(sent, monkeypatch)
    assert torch.equal(runner.state.integers, other.state.integers)
    assert torch.equal(runner.cache.keys, other.cache.keys)
    runner.close()


@pytest.mark.parametrize("error", [MemoryError("full"), ValueError("odd"), torch.OutOfMemoryError("full")])
def test_what_fails_on_rank_0_ends_all_ranks(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []
    runner = led(sent)

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(runner.cache, "copy_text", fail)
    with pytest.raises(RanksFailed, match=f"move failed on rank 0: {error}"):
        runner.move([(0, 1)], 3)
    assert len(sent) == 2, "sent first"
    runner.close()


def test_on_a_cpu_ranks_join_when_all_are_there() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, ThreadPoolExecutor(2) as pool:
        leading = pool.submit(join, CONFIG, 0, "", [ours])
        following = pool.submit(join, CONFIG, 1, "", [theirs])
        shards = leading.result(30), following.result(30)
        assert [(shard.rank, shard.count) for shard in shards] == [(0, 2), (1, 2)]
        parts = torch.full((3,), 1.0), torch.full((3,), 5.0)
        sums = list(pool.map(lambda shard, part: shard.sum(part), shards, parts))
    assert [each.tolist() for each in sums] == [[6.0] * 3] * 2


def test_a_rank_does_not_begin_without_the_others() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours, pytest.raises(OSError):
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
    with pytest.raises(ValueError, match="--tensor-parallel-size 3 does not divide"):
        check_ranks(replace(config, num_ranks=3))
    monkeypatch.setattr(ranks, "choose_device", torch.device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_ranks(replace(config, device="cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="--tensor-parallel-size 2 needs as many GPUs; this replica has 1"):
        check_ranks(replace(config, device="cuda"))
    assert WHOLE.count == 1
