"""What the machine has, for who reads its results elsewhere: python -m benchmarks.gpu_machine"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("torch", "triton", "transformers", "tokenizers", "onnxruntime", "fastapi", "uvicorn", "pyzmq")
GPU = (
    "name",
    "memory.total",
    "memory.used",
    "driver_version",
    "clocks.max.sm",
    "power.limit",
    "compute_mode",
)


def main() -> None:
    print("python", platform.python_version(), platform.platform(), f"{len(os.sched_getaffinity(0))} cores")
    print("packages", ", ".join(f"{name} {_version(name)}" for name in PACKAGES))
    print("C compiler, for Triton's launchers:", shutil.which("gcc") or shutil.which("clang") or "none")
    print(_run("nvidia-smi", f"--query-gpu={','.join(GPU)}", "--format=csv"))
    memory = Path("/proc/meminfo").read_text().splitlines()[:3]
    print("memory", ", ".join(" ".join(line.split()) for line in memory), "| disk", _run("df", "-h", "/tmp"))
    _device()


def _device() -> None:
    """Last, because a driver may fail or hang here."""
    for name in ("fastapi", "onnxruntime", "scipy", "transformers", "zmq"):  # every case reads them again
        import_module(name)
    import torch

    torch.zeros(1, device="cuda")
    properties = torch.cuda.get_device_properties(0)
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    print(f"CUDA {torch.version.cuda}, cuDNN {cudnn}, {properties}")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _run(*command: str) -> str:
    try:
        ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]}: {error}"
    return (ran.stdout + ran.stderr).strip()


if __name__ == "__main__":
    main()
