"""Chooses the paths of results, such that no two inputs share one and no input is written over.

Used by `folder.py`. Only compares names: whether a result exists already is not its business.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from asr_server.offline.inputs import Input


def result_paths(inputs: Sequence[Input], folder: Path, endings: Sequence[str]) -> list[list[Path]]:
    """For each input the paths of its results, one for each ending.

    `talk.wav` gives `talk.srt`. Beside a `talk.mp3` it gives `talk.wav.srt`; beside a `talk.wav` of another
    folder it keeps its own folder. Disks that ignore case are thought of.
    """
    levels = [0] * len(inputs)
    taken = {_key(input.source) for input in inputs if isinstance(input.source, Path)}
    while True:
        names = [input.result_names[level] for input, level in zip(inputs, levels, strict=True)]
        paths = [[folder / f"{name}{ending}" for ending in endings] for name in names]
        counts = Counter(_key(path) for group in paths for path in group)
        crowded = [
            index
            for index, group in enumerate(paths)
            if levels[index] + 1 < len(inputs[index].result_names) and _clashes(group, counts, taken)
        ]
        if not crowded:
            return paths
        for index in crowded:
            levels[index] += 1


def _clashes(paths: Iterable[Path], counts: Counter[str], taken: set[str]) -> bool:
    return any(counts[_key(path)] > 1 or _key(path) in taken for path in paths)


def _key(path: Path) -> str:
    return os.path.abspath(path).casefold()
