"""A bare uvicorn that answers /health: what the machine itself costs. `python -m tests.unit.api.bare_health`"""  # noqa: E501

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

HEADERS = [(b"content-type", b"application/json"), (b"content-length", b"15")]


async def answer(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
    await send({"type": "http.response.body", "body": b'{"status":"ok"}'})


@contextmanager
def bare_uvicorn() -> Iterator[str]:
    """Yield the URL of such a server in a process of its own."""
    command = [sys.executable, "-m", "tests.unit.api.bare_health"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def main() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    config = uvicorn.Config(answer, lifespan="off", log_config=None, loop="uvloop", http="httptools")
    uvicorn.Server(config).run([listener])


if __name__ == "__main__":
    main()
