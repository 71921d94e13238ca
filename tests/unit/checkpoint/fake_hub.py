"""A hub of our own: the two endpoints of the Hugging Face hub that are asked, over HTTP, with its faults."""

import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

COMMIT = "c0ffee" + "0" * 34
BLOCK_BYTES = 1 << 16


@dataclass
class FakeHub:
    """Has one repository's files, whatever its name. Faults are set by the test."""

    folder: Path
    says: object = None  # instead of the listing
    url: str = ""
    status: int = 200  # of every answer
    error_code: str = ""
    silent: threading.Event | None = None  # answers nothing until it is set
    pause_s: float = 0.0  # before each block of a file
    cut_after: dict[str, list[int]] = field(default_factory=dict)  # bytes sent of a file, answer by answer
    damaged: set[str] = field(default_factory=set)  # files that are sent with other bytes than their sums say
    requests: list[str] = field(default_factory=list)  # path and, if there is one, the range asked for

    def listing(self) -> dict[str, object]:
        return {
            "id": "someone/pocket",
            "sha": COMMIT,
            "siblings": [self._described(path) for path in sorted(self.folder.iterdir())],
        }

    def _described(self, path: Path) -> dict[str, object]:
        content = path.read_bytes()
        about: dict[str, object] = {"rfilename": path.name, "size": len(content)}
        about["blobId"] = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        if path.suffix in (".safetensors", ".bin"):
            digest = hashlib.sha256(content).hexdigest()
            about["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 100}
        return about


@contextmanager
def running_hub(folder: Path) -> Iterator[FakeHub]:
    hub = FakeHub(folder)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            if hub.status != 200:
                self._send(hub.status, b"", None, {"X-Error-Code": hub.error_code})
                return
            content = (hub.folder / self.path.rpartition("/")[2]).read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", hashlib.sha256(content).hexdigest())
            self.end_headers()

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if not path.startswith("/api/models/") and "/resolve/" not in path:
                self.send_error(404)
                return
            first = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
            hub.requests.append(path + (f" from {first}" if first else ""))
            if hub.silent is not None:
                hub.silent.wait(60)
                return
            if hub.status != 200:
                self._send(hub.status, b"", None, {"X-Error-Code": hub.error_code} if hub.error_code else {})
            elif path.startswith("/api/models/"):
                self._send(200, json.dumps(hub.says or hub.listing()).encode())
            else:
                self._send_file(path.rpartition("/")[2], first)

        def _send_file(self, name: str, first: int) -> None:
            content = (hub.folder / name).read_bytes()
            if name in hub.damaged:
                content = bytes(len(content))
            last = hub.cut_after[name].pop(0) if hub.cut_after.get(name) else len(content)
            self._send(206 if first else 200, content[first:], last - first)

        def _send(
            self, status: int, body: bytes, num_sent: int | None = None, headers: dict[str, str] | None = None
        ) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.end_headers()
            for start in range(0, len(body) if num_sent is None else num_sent, BLOCK_BYTES):
                if hub.pause_s:
                    threading.Event().wait(hub.pause_s)
                self.wfile.write(body[start : min(start + BLOCK_BYTES, num_sent or len(body))])
            self.close_connection = num_sent is not None and num_sent < len(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        hub.url = f"http://127.0.0.1:{server.server_port}"
        yield hub
        if hub.silent is not None:
            hub.silent.set()
        server.shutdown()
