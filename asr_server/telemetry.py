"""Logging: one line an event, with the process that wrote it."""

from __future__ import annotations

import logging


def configure_logging(level: str, process: str = "api") -> None:
    logging.basicConfig(
        level=level.upper(),
        format=f"%(asctime)s %(levelname)-7s [{process}] %(name)s: %(message)s",
        force=True,
    )
