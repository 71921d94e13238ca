"""Break the code at random, one place at a time, and see whether the tests notice.

    python -m tools.mutants --seed 1 --each 10

Each mutant changes one comparison, condition, sum, number, flag or call in a copy of the checkout. The quick
tests that mirror its module run first (`tests/FOLDER/test_MODULE*.py`, `tests/FOLDER/MODULE/`), then, without
`--quick`, the folder's others, slow ones too. What survives is printed as a diff: a test is missing there, or
the mutant means the same (look). At the end there is a line a folder.

`--json` keeps each mutant with the test that noticed it. `--after` takes such a file of a run with `--quick`
and gives its survivors to the folder's others.
"""

import argparse
import ast
import difflib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from rich.progress import track

ROOT: Final = Path(__file__).parents[1]
PACKAGE: Final = "asr_server"
QUICK: Final = "not trial and not slow"
ALL: Final = "not trial"
SWAPS: Final[dict[type[ast.AST], type[ast.AST]]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
Change = Callable[[Any], None]


def changes(node: ast.AST) -> Iterator[Change]:
    """Yield the ways to break a node."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
        yield lambda found: setattr(found, "ops", [SWAPS[type(node.ops[0])](), *node.ops[1:]])
    if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in SWAPS:
        yield lambda found: setattr(found, "op", SWAPS[type(node.op)]())
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        yield lambda found: setattr(found, "test", ast.UnaryOp(ast.Not(), node.test))
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield lambda found: setattr(found, "value", not found.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield lambda found: setattr(found, "value", found.value + 1)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await):
        yield lambda found: setattr(found, "value", ast.Constant(None))


def nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield what runs: neither annotations nor a class's own flags."""
    yield tree
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns") or (isinstance(tree, ast.ClassDef) and name == "keywords"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from nodes(child)


def mutated(source: str, index: int, kind: int) -> str:
    tree = ast.parse(source)
    node = list(nodes(tree))[index]
    list(changes(node))[kind](node)
    return ast.unparse(ast.fix_missing_locations(tree))


class Mutant(NamedTuple):
    module: Path  # from the checkout's root
    source: str
    text: str

    @property
    def folder(self) -> Path:
        return self.module.parent

    @property
    def diff(self) -> str:
        before, after, name = self.source.splitlines(), self.text.splitlines(), str(self.module)
        return "\n".join(difflib.unified_diff(before, after, name, name, lineterm="", n=1))


def chosen(seed: int, each: int, only: str) -> Iterator[Mutant]:
    """Yield `each` mutants a folder: the same ones whichever folders are asked for."""
    for folder in sorted({path.parent for path in (ROOT / PACKAGE).rglob("*.py")}):
        name = str(folder.relative_to(ROOT))
        if only in ("", name):
            yield from of_folder(folder, random.Random(f"{seed} {name}"), each)


def of_folder(folder: Path, rng: random.Random, each: int) -> Iterator[Mutant]:
    sources = {path: path.read_text() for path in sorted(folder.glob("*.py"))}
    places = [
        (path, index, kind)
        for path, source in sources.items()
        for index, node in enumerate(nodes(ast.parse(source)))
        for kind, _ in enumerate(changes(node))
    ]
    for path, index, kind in rng.sample(places, min(each, len(places))):
        plain = ast.unparse(ast.parse(sources[path]))
        yield Mutant(path.relative_to(ROOT), plain, mutated(sources[path], index, kind))


def mirrored(module: Path, checkout: Path) -> tuple[str, ...]:
    """Return the test files that mirror a module."""
    found = [
        path for folder in folders_of(module, checkout) for path in folder.glob(f"test_{module.stem}*.py")
    ]
    return tuple(str(path) for path in sorted(found))


def of_whole_folder(module: Path, checkout: Path) -> tuple[str, ...]:
    return tuple(
        str(path) for folder in folders_of(module, checkout) for path in sorted(folder.glob("test_*.py"))
    )


def folders_of(module: Path, checkout: Path) -> list[Path]:
    package = module.relative_to(PACKAGE).parent
    return [checkout / "tests" / kind / package for kind in ("unit", "system")]


def first_failure(checkout: Path, tests: tuple[str, ...], marks: str, limit_s: float | None) -> str | None:
    """Return which of these tests fails first, "hangs" past the limit, or None."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", marks, *tests]
    environment = os.environ | {"PYTHONPATH": str(checkout)}  # for servers that tests start elsewhere
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=checkout, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return "hangs"
        output.seek(0)
        lines = re.findall(r"^(?:FAILED|ERROR) .*", output.read(), re.MULTILINE)
    return None if code in (0, 5) else next(iter(lines), "ends pytest")  # 5: no test was selected


@cache
def limit_s(checkout: Path, tests: tuple[str, ...], marks: str) -> float:
    """Return how long these tests may take: three times as long as of the unbroken code, and a minute."""
    start_s = time.monotonic()
    if failure := first_failure(checkout, tests, marks, None):
        raise SystemExit(f"a test fails without any mutant: {failure}")
    return 60 + 3 * (time.monotonic() - start_s)


def noticed_by(mutant: Mutant, checkout: Path, tests: tuple[str, ...], marks: str) -> str | None:
    if not tests:
        return None
    limit = limit_s(checkout, tests, marks)
    place = checkout / mutant.module
    original = place.read_text()
    place.write_text(mutant.text)
    try:
        return first_failure(checkout, tests, marks, limit)
    finally:
        place.write_text(original)


def fate(mutant: Mutant, checkout: Path, quick: bool, survived_quick: bool) -> tuple[str, str | None]:
    """Return which tests notice it, and the first of them that does."""
    if not survived_quick and (by := noticed_by(mutant, checkout, mirrored(mutant.module, checkout), QUICK)):
        return "quick", by
    if quick:
        return "survived", None
    by = noticed_by(mutant, checkout, of_whole_folder(mutant.module, checkout), ALL)
    return ("folder" if by else "survived"), by


def table(fates: list[dict[str, str | None]]) -> Iterator[str]:
    for folder in dict.fromkeys(each["folder"] for each in fates):
        outcomes = Counter(each["fate"] for each in fates if each["folder"] == folder)
        yield f"| {folder} | {outcomes.total()} | {', '.join(f'{n} {how}' for how, n in outcomes.items())} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--each", type=int, default=10, help="mutants a folder")
    parser.add_argument("--only", default="", help="one folder, as asr_server/api")
    parser.add_argument("--quick", action="store_true", help="the mirrored quick tests alone")
    parser.add_argument("--json", type=Path, help="write each mutant and what noticed it here")
    parser.add_argument("--after", type=Path, help="the --json of a --quick run of the same mutants")
    options = parser.parse_args()
    earlier = {each["diff"]: each for each in json.loads(options.after.read_text())} if options.after else {}
    fates: list[dict[str, str | None]] = []
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder) / "checkout"
        ignored = shutil.ignore_patterns(".git", ".venv", ".cache", "node_modules", "*_cache", "__pycache__")
        shutil.copytree(ROOT, checkout, ignore=ignored)
        for mutant in track(list(chosen(options.seed, options.each, options.only)), "mutants"):
            known = earlier.get(mutant.diff)
            if known and known["fate"] != "survived":
                fates.append(known)
            else:
                how, by = fate(mutant, checkout, options.quick, known is not None)
                fates.append({"folder": str(mutant.folder), "fate": how, "by": by, "diff": mutant.diff})
                if how == "survived":
                    print(mutant.diff, flush=True)
            if options.json:
                options.json.write_text(json.dumps(fates, indent=1))
    print("\n".join(table(fates)))


if __name__ == "__main__":
    main()
