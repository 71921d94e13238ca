"""Garbage collection, which a process puts off while it loads."""

from __future__ import annotations

import contextlib
import gc
import os
import weakref
from pathlib import Path

import pytest

from asr_server import machine


def test_no_garbage_is_collected_in_a_pause_which_ends_as_it_began() -> None:
    for was_enabled in (True, False):
        (gc.enable if was_enabled else gc.disable)()
        try:
            with contextlib.suppress(ZeroDivisionError), machine.gc_paused():
                assert not gc.isenabled()
                raise ZeroDivisionError
            assert gc.isenabled() == was_enabled
        finally:
            gc.enable()


class Node:
    """Refers to itself, so that only a collection frees it."""

    def __init__(self) -> None:
        self.itself = self


def test_what_lives_on_is_exempt_from_collections_and_what_is_garbage_is_freed_first() -> None:
    garbage = weakref.ref(Node())
    gc.unfreeze()
    gc.disable()
    try:
        machine.freeze_gc()
        assert garbage() is None
        assert gc.get_freeze_count() > 10_000
    finally:
        gc.unfreeze()
        gc.enable()


@pytest.mark.parametrize(("count", "cores"), [(3, 3), (None, 1)])
def test_where_no_affinity_is_known_all_cores_count(
    count: int | None, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: count)
    assert machine.available_cores(tmp_path) == cores
