"""The entry of `asr-server`: prepares the process before the modules load, so that Ctrl-C is silent."""

import os
import signal
import sys
from typing import Final

STANDARD_ERROR: Final = 2  # the last of the three


def main() -> None:
    if sys.platform == "win32":  # before modules that only Unix has
        sys.exit("asr-server runs on Linux and macOS. On Windows, use WSL 2 or the container image.")
    _open_closed_streams()
    at_ctrl_c = signal.getsignal(signal.SIGINT)
    if at_ctrl_c is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from asr_server.process import SECRET_FLAG, hide_from_other_processes, hide_value, share_one_arena

    hide_value(SECRET_FLAG)
    hide_from_other_processes()
    share_one_arena()  # before the modules that start threads
    from asr_server import cli

    signal.signal(signal.SIGINT, at_ctrl_c)
    cli.main()


def _open_closed_streams() -> None:
    """Open closed standard streams on /dev/null: a socket could get their numbers, and their output."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= STANDARD_ERROR:
        os.set_inheritable(fd, True)
    os.close(fd)


if __name__ == "__main__":
    main()
