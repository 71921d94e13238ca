"""What a rank does in tests, by the name in the environment: it loads no engine."""

import json
import os
import socket
import sys
import time


def tell_spec(line: bytes, link: socket.socket) -> None:
    link.sendall(line)


def rank_2_fails(line: bytes, link: socket.socket) -> None:
    if json.loads(line)["rank"] == 2:
        sys.exit(3)


def never_ready(line: bytes, link: socket.socket) -> None:
    pass


def ready_and_silent(line: bytes, link: socket.socket) -> None:
    os.write(1, b"..+.")


def beats(line: bytes, link: socket.socket) -> None:
    os.write(1, b"+")
    for _ in range(10):
        os.write(1, b".")
        time.sleep(0.01)
    link.sendall(b"x")


if __name__ == "__main__":
    spec = sys.stdin.buffer.readline()
    globals()[os.environ["PYTHON_SHORT_RANK"]](spec, socket.socket(fileno=json.loads(spec)["link_fd"]))
    time.sleep(60)
