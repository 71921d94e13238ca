"""Times GET requests to several servers in turns, in a process of its own.

python -m tests.unit.api.prober SECONDS URL... Prints the 99th percentile of each in milliseconds, as JSON.
"""

from __future__ import annotations

import json
import ssl
import sys
import time
from http.client import HTTPConnection, HTTPSConnection
from urllib.parse import urlsplit

PAUSE_S = 0.02


def main(duration_s: float, urls: list[str]) -> None:
    connections = {url: connection_to(url) for url in urls}
    times_s: dict[str, list[float]] = {url: [] for url in urls}
    end = time.monotonic() + duration_s
    while time.monotonic() < end:
        for url, connection in connections.items():
            times_s[url].append(time_of_request_s(connection, urlsplit(url).path))
            time.sleep(PAUSE_S)
    print(json.dumps([1000 * sorted(times_s[url])[len(times_s[url]) * 99 // 100] for url in urls]))


def connection_to(url: str) -> HTTPConnection:
    address = urlsplit(url)
    if address.scheme == "http":
        return HTTPConnection(address.netloc, timeout=30)
    return HTTPSConnection(address.netloc, timeout=30, context=ssl._create_unverified_context())


def time_of_request_s(connection: HTTPConnection, path: str) -> float:
    """A connection that was closed for others is opened again, at the cost of the same request."""
    started_at = time.perf_counter()
    try:
        connection.request("GET", path)
        reply = connection.getresponse()
    except OSError:
        connection.close()
        connection.request("GET", path)
        reply = connection.getresponse()
    assert reply.read()
    assert reply.status == 200
    return time.perf_counter() - started_at


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
