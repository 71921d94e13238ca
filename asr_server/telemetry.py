"""Logging: one line an event, with its process and request. Imports no torch."""

import itertools
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Final, Literal

from asr_server.core import ChunkId

LogFormat = Literal["text", "json"]

# The id of the request that this task or thread works for; empty: for none.
current_request_id: Final = ContextVar("current_request_id", default="")

logger = logging.getLogger(__name__)

FIGURES: Final = "figures"  # the attribute of a record whose values become values of its line as JSON
_SEPARATOR: Final = "#"  # never in a request's id, see `api.middleware.request_id_of`
_count = itertools.count(1)


def configure_logging(
    level: str, log_format: LogFormat = "text", process: str = "api", handler: logging.Handler | None = None
) -> None:
    handler = handler or logging.StreamHandler()
    handler.setFormatter(JsonFormatter(process) if log_format == "json" else TextFormatter(process))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # the 400 says it: one line a bad body
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # a line a request, with the URL's password


def announce(line: str) -> None:
    """Print a line that scripts wait for; log it where logs are JSON."""
    formatters = [handler.formatter for handler in logging.root.handlers]
    if any(isinstance(formatter, JsonFormatter) for formatter in formatters):
        logger.setLevel(logging.INFO)  # the root's level stops no record of a logger with its own
        logger.info("%s", line)
    else:
        print(line, flush=True)


def new_handle_id() -> str:
    return f"{current_request_id.get()}{_SEPARATOR}{next(_count)}"


@contextmanager
def working_for(id: ChunkId) -> Iterator[None]:
    """Mark the block's log lines with the chunk's request."""
    with logging_for(id.handle_id.rpartition(_SEPARATOR)[0]):
        yield


@contextmanager
def logging_for(request_id: str) -> Iterator[None]:
    token = current_request_id.set(request_id)
    try:
        yield
    finally:
        current_request_id.reset(token)


def _name_of(record: logging.LogRecord, process: str) -> str:
    thread = record.threadName or ""
    return thread if thread.startswith("replica ") else process


class TextFormatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(who)s %(name)s: %(message)s")
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        who = (_name_of(record, self._process), current_request_id.get())
        record.who = f"[{' '.join(filter(None, who))}]"
        return super().format(record)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # logging names it
        """Keep a message in one line, whatever names from clients hold."""
        record.message = printable(record.message.rstrip("\n"))
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return "\n".join(map(printable, super().formatException(ei).split("\n")))


def printable(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class JsonFormatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": _name_of(record, self._process),
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": current_request_id.get() or None,
            "exception": self.formatException(record.exc_info) if record.exc_info else None,
            **getattr(record, FIGURES, {}),
        }
        return json.dumps({key: value for key, value in entry.items() if value is not None})
