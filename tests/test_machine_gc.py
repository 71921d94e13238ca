"""Garbage collection, which a process puts off while it loads."""

from __future__ import annotations

import contextlib
import gc

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
