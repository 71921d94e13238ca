"""What every figure needs beside it: the machine, the command, the spread."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """The processor, its cores, and how busy it was before we began."""
    import torch

    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": round(os.getloadavg()[0], 2),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def command() -> str:
    """The command line, as someone else would type it."""
    module = Path(sys.argv[0]).stem
    return " ".join(["python", "-m", f"benchmarks.{module}", *sys.argv[1:]])


def spread(values: Sequence[float], digits: int = 2) -> str:
    """`median (least to most)`."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def write_json(path: Path | None, figures: Any) -> None:
    if path is not None:
        report = {"command": command(), "machine": machine(), "figures": figures}
        path.write_text(json.dumps(report, indent=1) + "\n")


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    flags = next((line for line in lines if line.startswith("flags")), "")
    name = names[0] if names else platform.processor()
    return name + (", avx512_bf16" if "avx512_bf16" in flags else "")
