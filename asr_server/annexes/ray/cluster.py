"""Start a Ray cluster of this machine alone for as long as the server runs.

`local_cluster` starts a process that owns the cluster and ends it when its standard input closes; after a
SIGKILL, Ray would leave processes. Calls block.
"""

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from setproctitle import setproctitle

from asr_server.config import naming
from asr_server.process import child_environment

# Samples do not go through Ray's shared store of objects: nearly the least that Ray takes.
OBJECT_STORE_BYTES: Final = 80 << 20
STOP_LIMIT_S: Final = 20.0
ANSWER_LIMIT_S: Final = 8.0
# Nothing of such a cluster listens on other addresses than 127.0.0.1, and its processes share a token.
ENVIRONMENT: Final = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token"}
# Where `ray start` leaves its address.
_CURRENT_CLUSTER: Final = Path("/tmp/ray/ray_current_cluster")  # nosec B108 # its owner is checked
_MAX_ADDRESS: Final = 300  # characters
_FRAME_HEADER_BYTES: Final = 9  # length, type, flags and stream: RFC 9113, section 4.1
_SETTINGS_FRAME: Final = b"\x04"  # both ends of HTTP/2 begin with this type
_HTTP2_GREETING: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + _SETTINGS_FRAME + bytes(5)
_SIGN: Final = "the cluster's address: "
_FAILURE: Final = "the cluster did not start: "


def address_to_join(address: str) -> str:
    """Return the cluster's address for this setting, or an empty text to start one. Raises OSError.

    Asks without Ray, which reads its environment when imported.
    """
    if address == "local":
        return ""
    return address if address != "auto" else os.environ.get("RAY_ADDRESS") or _current_cluster()


def _current_cluster() -> str:
    try:
        with open(os.open(_CURRENT_CLUSTER, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)) as file:
            owner, address = os.fstat(file.fileno()).st_uid, file.read(_MAX_ADDRESS).strip()
    except FileNotFoundError:
        return ""
    if owner not in (0, os.geteuid()):
        setting = naming("ray_address")
        raise OSError(f"{_CURRENT_CLUSTER} is another user's: name the cluster, or local, by {setting}")
    return address


def check_answers(address: str) -> None:
    """Raise OSError unless something speaks gRPC there. Ray would try for a minute."""
    host, _, port = address.rpartition(":")
    if not port.isdigit() or "/" in host:
        return
    try:
        with socket.create_connection((host.strip("[]"), int(port)), ANSWER_LIMIT_S) as connection:
            if os.environ.get("RAY_USE_TLS", "0") == "0":
                connection.sendall(_HTTP2_GREETING)
                if connection.recv(_FRAME_HEADER_BYTES)[3:4] != _SETTINGS_FRAME:
                    raise OSError("what listens there is not Ray")
    except OSError as error:
        reason = f"cannot connect to {address}: {error.strerror or error}"
        raise OSError(error.errno or 0, reason) from error


@contextmanager
def cluster_address(address: str) -> Iterator[str]:
    """Give the named cluster's address, or start a cluster for the block. Raises OSError."""
    if joined := address_to_join(address):
        check_answers(joined)
        yield joined
        return
    os.environ |= ENVIRONMENT  # read when Ray is imported
    with local_cluster() as own:
        yield own


@contextmanager
def local_cluster() -> Iterator[str]:
    """Start a cluster for the block, and give its address: takes seconds. Raises OSError."""
    process = subprocess.Popen(  # nosec B603 # our own module, without a shell
        [sys.executable, "-m", "asr_server.annexes.ray.cluster"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=child_environment() | ENVIRONMENT,
        start_new_session=True,  # Ctrl-C is the server's business
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield _address_from(process.stdout)
    finally:
        process.stdin.close()
        try:
            process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def _address_from(output: Iterable[str]) -> str:
    reason = "its process ended"
    for line in output:
        if line.startswith(_SIGN):
            return line.removeprefix(_SIGN).strip()
        if line.startswith(_FAILURE):
            reason = line.removeprefix(_FAILURE).strip()
    raise OSError(f"no Ray cluster could be started on this machine: {reason}")


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # and not ignored, as the cluster's processes would inherit it
    setproctitle("asr-server ray cluster")
    import ray

    try:
        context: Any = ray.init(
            address="local",
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except Exception as error:  # whatever keeps Ray from it: the server says it in one line
        print(_FAILURE + " ".join(str(error).split()), flush=True)
        sys.exit(1)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # Ray has put its own there
    print(_SIGN + context.address_info["address"], flush=True)
    os.read(sys.stdin.fileno(), 1)
    ray.shutdown()
    shutil.rmtree(context.address_info["session_dir"], ignore_errors=True)


if __name__ == "__main__":
    main()
