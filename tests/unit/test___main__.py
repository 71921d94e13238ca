"""The entry of the command, before there is anything to stop in order."""

import os
import signal
import subprocess
import sys

from tests.support.commands import run_command


def test_ctrl_c_while_modules_load_ends_it_without_a_traceback() -> None:
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "asr_server", "serve", "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    with process.stderr:
        for line in process.stderr:
            if line.endswith("click\n"):  # the first thing that the command line loads; much is to follow
                break
        process.send_signal(signal.SIGINT)
        assert "Traceback" not in process.stderr.read()
    assert process.wait(30) == -signal.SIGINT


def test_closed_standard_streams_are_opened_for_this_process_and_its_children() -> None:
    code = (
        "import os, sys; from asr_server import __main__; sys.argv[1:] = ['--version']\n"
        "try: __main__.main()\n"
        "finally: assert all(os.get_inheritable(number) for number in range(3))"
    )
    shell = ["sh", "-c", 'exec "$0" -c "$1" <&- >&-', sys.executable, code]
    assert subprocess.run(shell, check=False).returncode == 0


def test_on_windows_one_line_says_what_to_use_instead() -> None:
    code = "import sys; sys.platform = 'win32'; from asr_server.__main__ import main; main()"
    process = run_command(sys.executable, "-c", code)
    assert process.returncode == 1
    assert process.stderr == (
        "asr-server runs on Linux and macOS. On Windows, use WSL 2 or the container image.\n"
    )


def test_keys_and_memory_are_hidden_and_ctrl_c_is_as_before_once_the_command_begins() -> None:
    code = """
import ctypes, os, signal, sys
from asr_server import __main__, cli
def command():
    words = open("/proc/self/cmdline").read().rstrip("\\0").split("\\0")
    libc = ctypes.CDLL(None)
    print(words[-2:], libc.prctl(3, 0, 0, 0, 0), os.environ["MALLOC_ARENA_MAX"])
    print(signal.getsignal(signal.SIGINT) is before)
cli.main = command
for before in (signal.default_int_handler, signal.SIG_IGN):
    signal.signal(signal.SIGINT, before)
    __main__.main()
print(len(os.listdir("/proc/self/fd")) - 1)
"""
    environment = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"}
    command = [sys.executable, "-c", code, "--api-key", "s3cret"]
    output = subprocess.check_output(command, text=True, env=environment, timeout=60)
    state = "['--api-key', '***'] 0 1"
    assert output.splitlines() == [state, "True", state, "True", "3"], "no file is left open"
