"""Rank 0 and the others' lives: real processes, in which a few lines stand for the engine."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asr_server.replica import ranks
from asr_server.replica.ranks import Ranks, RankSpec
from tests.support.embedded import embedded
from tests.support.forked import Ended, Fork, parent_death_signal

SETTINGS = embedded(tensor_parallel_size=3).core


def with_ranks(rank: str, work: Callable[[Ranks, Callable[[Any], None]], None], **limits: float) -> Ended:
    """Run `work` in a copy of this process. Its ranks run this function of `tests.unit.replica.short_rank`."""  # noqa: E501

    def run(tell: Callable[[Any], None]) -> None:
        os.environ["PYTHON_SHORT_RANK"] = rank  # inherited
        ranks.MODULE = "tests.unit.replica.short_rank"  # type: ignore[misc]
        for name, value in limits.items():
            setattr(ranks, name, value)
        logging.basicConfig(level="INFO", force=True)
        atexit._clear()  # what the process of the tests leaves for its own end
        started = Ranks(5, SETTINGS, 2)
        work(started, tell)
        for each in started._ranks:
            each.process.kill()
        os._exit(0)

    return Fork(run).end()


def test_each_other_rank_is_a_process_that_is_told_who_it_is() -> None:
    def ask(started: Ranks, tell: Callable[[Any], None]) -> None:
        tell([link.recv(65536).decode() for link in started.links])

    ended = with_ranks("tell_spec", ask)
    specs = [msgspec.json.decode(line, type=RankSpec) for line in ended.told]
    assert [(spec.replica, spec.rank, spec.num_on_device) for spec in specs] == [(5, 1, 2), (5, 2, 2)]
    assert {spec.settings for spec in specs} == {SETTINGS}
    assert len({spec.store_fd for spec in specs}) == 1


def wait(started: Ranks, tell: Callable[[Any], None]) -> None:
    tell([each.process.pid for each in started._ranks])
    time.sleep(3600)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False


def test_the_end_of_one_rank_ends_all_and_is_told_with_its_status() -> None:
    ended = with_ranks("rank_2_fails", wait)
    assert ended.status == 1
    assert "ERROR" in ended.errors
    assert "replica 5 rank 2 (pid" in ended.errors
    assert "exited with status 3: the replica ends" in ended.errors
    assert not any(map(is_running, ended.told))


@pytest.mark.parametrize(
    ("rank", "limits", "is_ended"),
    [
        ("never_ready", {"SILENT_STARTUP_LIMIT_S": 0.03, "FROZEN_AFTER_S": 3600.0}, True),
        ("ready_and_silent", {"SILENT_STARTUP_LIMIT_S": 3600.0, "FROZEN_AFTER_S": 0.03}, True),
        ("beats", {"SILENT_STARTUP_LIMIT_S": 3600.0, "FROZEN_AFTER_S": 30.0}, False),
    ],
)
def test_a_rank_that_is_silent_for_too_long_ends_all(
    rank: str, limits: dict[str, float], is_ended: bool
) -> None:
    def wait_for_beats(started: Ranks, tell: Callable[[Any], None]) -> None:
        if is_ended:
            wait(started, tell)
        for link in started.links:
            link.recv(1)

    ended = with_ranks(rank, wait_for_beats, TICK_S=0.01, **limits)
    assert ended.status == is_ended
    assert ("has been silent for 0 s" in ended.errors) == is_ended


@pytest.mark.parametrize(
    ("given", "own"),
    [("", {}), ("4,5,6", {"CUDA_VISIBLE_DEVICES": "6"}), ("a,b,c", {"CUDA_VISIBLE_DEVICES": "c"})],
)
def test_each_rank_sees_the_gpu_of_its_number(
    given: str, own: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert ranks._device_of(2) == own


# -- The process of a rank --


def test_a_rank_settles_itself_and_beats_before_it_loads_anything() -> None:
    spec = RankSpec(4, 2, embedded(log_level="debug"), 1, 3, 4, 5)

    def work(tell: Callable[[Any], None]) -> None:
        has_beaten, tell_parent = threading.Event(), ranks._tell

        def tell_and_note(sign: bytes) -> None:
            tell_parent(sign)
            has_beaten.set()

        def run(spec: RankSpec) -> None:
            assert has_beaten.wait(60)
            ignored = [signal.getsignal(each) is signal.SIG_IGN for each in (signal.SIGINT, signal.SIGTERM)]
            title = Path("/proc/self/cmdline").read_bytes().strip(b"\0").decode()
            logging.getLogger("asr_server").warning("loads")
            keeps_alive = [each.name for each in threading.enumerate() if not each.daemon][1:]
            tell([ignored, title, logging.root.level, spec.rank, parent_death_signal(), keeps_alive])
            time.sleep(3600)

        ranks.run, ranks._tell = run, tell_and_note
        ranks.main()

    process = Fork(work)
    process.give(spec.to_line())
    assert os.read(process._told, 65536) == b'[[true, true], "asr-server replica 4 rank 2", 10, 2, 9, []]'
    process.give_no_more()  # rank 0 has ended
    ended = process.end()
    assert ended.status == 1
    assert ended.output == ranks.BEAT
    assert "replica 4 rank 2" in ended.errors
