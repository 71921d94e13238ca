"""The entry of the command `asr-server`, the same as `python -m asr_server`.

Ctrl-C while the modules load, which takes a second, ends the process like any other, without a traceback.
"""

from __future__ import annotations

import signal


def main() -> None:
    at_ctrl_c = signal.getsignal(signal.SIGINT)
    if at_ctrl_c is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from asr_server import cli

    signal.signal(signal.SIGINT, at_ctrl_c)
    cli.main()


if __name__ == "__main__":
    main()
