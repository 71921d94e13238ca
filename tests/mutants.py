"""Break the code at random, one place at a time, and see whether the tests notice.

    python -m tests.mutants --seed 1 --each 10

Each mutant changes one comparison, condition, sum, number, flag or call in a copy of the checkout. The quick
tests that mirror its module run first (`tests/FOLDER/test_MODULE*.py`, `tests/FOLDER/MODULE/`), then, without
`--quick`, the folder's others, slow ones too. What survives is printed as a diff: a test is missing there, or
the mutant means the same (look). At the end there is a line a folder.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from rich.progress import track

ROOT: Final = Path(__file__).parents[1]
PACKAGE: Final = "asr_server"
LIMIT_S: Final = 900  # for the tests of one mutant; one that hangs them is noticed
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


def chosen(seed: int, each: int) -> Iterator[tuple[Path, str, str]]:
    """Yield (module, its source, a mutant), `each` of them from each folder."""
    rng = random.Random(seed)
    for folder in sorted({path.parent for path in (ROOT / PACKAGE).rglob("*.py")}):
        sources = {path: path.read_text() for path in sorted(folder.glob("*.py"))}
        places = [
            (path, index, kind)
            for path, source in sources.items()
            for index, node in enumerate(nodes(ast.parse(source)))
            for kind, _ in enumerate(changes(node))
        ]
        for path, index, kind in rng.sample(places, min(each, len(places))):
            yield path, ast.unparse(ast.parse(sources[path])), mutated(sources[path], index, kind)


def tests_of(module: Path, checkout: Path) -> tuple[list[str], list[str]]:
    """Return the tests that mirror a module, and the others of its folder."""
    folder = checkout / "tests" / module.relative_to(ROOT / PACKAGE).parent
    mirrored = sorted([*folder.glob(f"test_{module.stem}*.py"), *folder.glob(f"{module.stem}/test_*.py")])
    others = [path for path in sorted(folder.glob("test_*.py")) if path not in mirrored]
    return [str(path) for path in mirrored], [str(path) for path in others]


def notice(checkout: Path, tests: list[str], marks: str) -> bool:
    """Return whether any of these tests fails, or hangs."""
    if not tests:
        return False
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", marks, *tests]
    try:
        done = subprocess.run(command, cwd=checkout, capture_output=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return True
    return done.returncode not in (0, 5)  # 5: none was selected


def fate(module: Path, mutant: str, checkout: Path, quick: bool) -> str:
    place = checkout / module.relative_to(ROOT)
    original = place.read_text()
    place.write_text(mutant)
    try:
        mirrored, others = tests_of(module, checkout)
        if notice(checkout, mirrored, "not trial and not slow"):
            return "quick"
        if quick:
            return "survived"
        return "folder" if notice(checkout, [*mirrored, *others], "not trial") else "survived"
    finally:
        place.write_text(original)


def diff(module: Path, source: str, mutant: str) -> str:
    name = str(module.relative_to(ROOT))
    return "\n".join(
        difflib.unified_diff(source.splitlines(), mutant.splitlines(), name, name, lineterm="", n=1)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--each", type=int, default=10, help="mutants a folder")
    parser.add_argument("--only", default="", help="modules with this in their path")
    parser.add_argument("--quick", action="store_true", help="the mirrored quick tests alone")
    parser.add_argument("--json", type=Path, help="write the survivors here")
    options = parser.parse_args()
    found = [each for each in chosen(options.seed, options.each) if options.only in str(each[0])]
    fates: dict[str, Counter[str]] = {}
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder) / "checkout"
        ignored = shutil.ignore_patterns(".git", ".venv", ".cache", "node_modules", "*_cache", "__pycache__")
        shutil.copytree(ROOT, checkout, ignore=ignored)
        for module, source, mutant in track(found, "mutants"):
            outcome = fate(module, mutant, checkout, options.quick)
            fates.setdefault(str(module.parent.relative_to(ROOT)), Counter())[outcome] += 1
            if outcome == "survived":
                survivors.append(diff(module, source, mutant))
                print(survivors[-1], flush=True)
    for name, outcomes in fates.items():
        print(f"| {name} | {outcomes.total()} | {', '.join(f'{n} {how}' for how, n in outcomes.items())} |")
    if options.json:
        options.json.write_text(json.dumps({"fates": fates, "survivors": survivors}, indent=1))


if __name__ == "__main__":
    main()
