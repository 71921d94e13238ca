"""What a rank does in tests, by the name in the environment: it loads no engine."""

import json
import os
import sys
import time
from multiprocessing.connection import Connection


def tell_spec(line: bytes, link: Connection) -> None:
    link.send_bytes(line)


def rank_2_fails(line: bytes, link: Connection) -> None:
    if json.loads(line)["rank"] == 2:
        sys.exit(3)


if __name__ == "__main__":
    spec = sys.stdin.buffer.readline()
    globals()[os.environ["PYTHON_SHORT_RANK"]](spec, Connection(json.loads(spec)["link_fd"]))
    time.sleep(60)
