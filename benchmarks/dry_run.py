"""Many benchmarks in one process: python -m benchmarks.dry_run FILE WORKER

Each line of the file is a module, whose `main` is called, and its arguments: the cases of `gpu.sh --dry-run`,
most of whose time would be imports. Two workers, 0 and 1, share the lines, one from the first on and one from
the last: what the first cases leave behind, such as checkpoints, the others find. Each keeps to one core, as
the threads of a product wait for each other where two processes share cores.
"""

from __future__ import annotations

import importlib
import os
import shlex
import sys
import time
import traceback
from pathlib import Path


def run(module: str, *arguments: str) -> None:
    """Prints what came of it in one line, for `gpu.sh` to look for."""
    started, cpu_started = time.monotonic(), sum(os.times()[:4])
    status: object = 0
    try:
        main = importlib.import_module(module).main
        sys.argv = [str(sys.modules[module].__file__), *arguments]
        main()
    except SystemExit as ended:
        status = ended.code or 0
    except Exception:
        traceback.print_exc()
        status = 1
    wall_s, cpu_s = time.monotonic() - started, sum(os.times()[:4]) - cpu_started
    what = f"{wall_s:.1f} s ({cpu_s:.1f} s of a core): {module} {shlex.join(arguments)}"
    print(f"== {'failed' if status else 'ended'} after {what}", flush=True)


def claim(path: Path) -> bool:
    """Whether no other worker was first."""
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def main() -> None:
    path, worker = Path(sys.argv[1]), int(sys.argv[2])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[worker % len(cores)]})
    lines = list(enumerate(path.read_text().splitlines()))
    for number, line in reversed(lines) if worker else lines:
        if claim(path.with_name(f"claimed-{number}")):
            run(*shlex.split(line))


if __name__ == "__main__":
    main()
