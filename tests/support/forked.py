"""A process of its own for what changes or ends the process that calls it."""

import ctypes
import json
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

LIMIT_S = 60
_GET_PARENT_DEATH_SIGNAL = 2  # prctl's PR_GET_PDEATHSIG


class Ended(NamedTuple):
    status: int
    told: Any  # by `tell`
    errors: str  # what it wrote to standard error
    output: bytes


class Fork:
    """A copy of this process that runs `work(tell)`; `give` writes to its standard input."""

    def __init__(self, work: Callable[[Callable[[Any], None]], object]) -> None:
        pipes = [os.pipe() for _ in range(4)]
        (stdin, self._give), (self._out, stdout), (self._err, stderr), (self._told, tell) = pipes
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of the threads that are not copied
            self.pid = os.fork()
        if not self.pid:
            for number, end in enumerate((stdin, stdout, stderr)):
                os.dup2(end, number)
            for end in (self._give, self._out, self._err, self._told):
                os.close(end)
            self._run(work, tell)
        for end in (stdin, stdout, stderr, tell):
            os.close(end)

    def _run(self, work: Callable[[Callable[[Any], None]], object], tell: int) -> None:
        signal.alarm(LIMIT_S)
        sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
        try:
            work(lambda value: (os.write(tell, json.dumps(value).encode()), None)[1])
            os._exit(0)
        except BaseException:
            os.write(2, traceback.format_exc().encode())
            os._exit(99)

    def give(self, data: bytes) -> None:
        os.write(self._give, data)

    def give_no_more(self) -> None:
        os.close(self._give)
        self._give = -1

    def line(self) -> str:
        """Return the next line of its output."""
        found = b""
        while not found.endswith(b"\n"):
            byte = os.read(self._out, 1)
            assert byte, self.end().errors
            found += byte
        return found.decode().strip()

    def end(self) -> Ended:
        out, err, told = (self._all_of(end) for end in (self._out, self._err, self._told))
        _, status = os.waitpid(self.pid, 0)
        if self._give >= 0:
            os.close(self._give)
        return Ended(os.waitstatus_to_exitcode(status), json.loads(told or b"null"), err.decode(), out)

    @staticmethod
    def _all_of(end: int) -> bytes:
        with os.fdopen(end, "rb") as file:
            return file.read()


def parent_death_signal() -> int:
    """Return the signal that Linux sends this process when its parent ends, or 0."""
    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(_GET_PARENT_DEATH_SIGNAL, ctypes.byref(number))
    return number.value
