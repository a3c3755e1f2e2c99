"""Mutation testing of the Python that everybody's money and proofs depend on.

    python tools/mutate.py --sample 200            mutants drawn by --seed, one after the other
    python tools/mutate.py --sample 200 --list     the mutants, without running them

One mutant is one changed expression or a dropped `raise`. It is tested in a copy of the tree, with
the tests that execute its line, and is killed by the first one that fails. The drill covers the
formats, the proofs, the chain client and the validator's checks. It prints the survivors; among
them are mutants that change nothing, for which no test can fail.
"""

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import coverage

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "muster/protocol": ("tests/unit/protocol", "tests/conformance"),
    "muster/toploc": ("tests/unit/toploc", "tests/conformance"),
    "muster/chain": ("tests/unit/chain", "tests/conformance"),
    "muster/client/validator": ("tests/unit/client",),
}
"""Each drilled package with the tests that should notice its mutants."""
OPERATORS: dict[type[ast.AST], Any] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Div: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
"""The replacement of each operator."""
TESTS_TIMEOUT_S = 300.0
"""Timeout of a mutant's tests: a mutant that exceeds it counts as killed."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one module."""

    module: Path
    """The module, relative to the root."""
    line: int
    """First line of the change, from 1."""
    start: int
    """Offset of the first replaced byte."""
    end: int
    """Offset after the last replaced byte."""
    text: str
    """The replacement."""

    def of(self, source: bytes) -> bytes:
        """Return the changed module."""
        return source[: self.start] + self.text.encode() + source[self.end :]

    def describe(self, source: bytes) -> str:
        """Return the place, the old and the new text on one line."""
        before = " ".join(source[self.start : self.end].decode().split())
        return f"{self.module}:{self.line}: {before}  ->  {self.text}"


# The mutants


def mutants_of(module: Path, source: bytes) -> Iterator[Mutant]:
    """Yield every mutant of a module."""
    offsets = [0]
    for line in source.splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))

    def place(node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = offsets[node.lineno - 1] + node.col_offset
        return start, offsets[node.end_lineno - 1] + node.end_col_offset

    for node in _behaviour(ast.parse(source)):
        text = _changed(node)
        if text is not None and isinstance(node, ast.expr | ast.stmt):
            yield Mutant(module, node.lineno, *place(node), text)


def _behaviour(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that determine a module's behaviour: no annotations, decorators or texts."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):
                yield child
                yield from _behaviour(child)


def _changed(node: ast.AST) -> str | None:
    """Return a node's changed text; None for a node without a mutant."""
    match node:
        case ast.Compare(ops=[first, *rest]) if type(first) in OPERATORS:
            changed: ast.AST = ast.Compare(
                node.left, [OPERATORS[type(first)](), *rest], node.comparators
            )
        case ast.BinOp(left, operator, right) if type(operator) in OPERATORS:
            changed = ast.BinOp(left, OPERATORS[type(operator)](), right)
        case ast.BoolOp(operator, values):
            changed = ast.BoolOp(OPERATORS[type(operator)](), values)
        case ast.UnaryOp(ast.Not(), operand):
            changed = operand
        case ast.Constant(bool() as value):
            changed = ast.Constant(not value)
        case ast.Constant(int() as value):
            changed = ast.Constant(value + 1)
        case ast.Raise():
            return "pass"
        case _:
            return None
    return f"({ast.unparse(changed)})"


# The tests that execute a line


def tests_by_line(copy: Path, package: str) -> dict[tuple[str, int], set[str]]:
    """Return the tests that execute each line of a package, by module and line."""
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "-p", "no:cacheprovider"),
        *("--cov=muster", "--cov-context=test", "--cov-report=", *_present(copy, package)),
    ]
    done = subprocess.run(command, cwd=copy, env=_environment(copy), capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"the tests of {package} fail without any mutant:\n{done.stdout[-2000:]}")
    data = coverage.CoverageData(str(copy / ".coverage"))
    data.read()
    found: dict[tuple[str, int], set[str]] = defaultdict(set)
    for name in data.measured_files():
        if f"/{package}/" in name:
            module = str(Path(name).relative_to(copy))
            for line, contexts in data.contexts_by_lineno(name).items():
                found[module, line] |= {each.rpartition("|")[0] for each in contexts if each}
    return found


def tests_of(mutant: Mutant, lines: Mapping[tuple[str, int], set[str]]) -> set[str]:
    """Return the tests that execute a mutant; for a line run at import, all tests of its module."""
    module = str(mutant.module)
    own = lines.get((module, mutant.line))
    if own is None or own:
        return own or set()
    return set[str]().union(*(tests for (name, _), tests in lines.items() if name == module))


def _present(copy: Path, package: str) -> list[str]:
    return [folder for folder in PACKAGES[package] if (copy / folder).exists()]


def _environment(copy: Path) -> dict[str, str]:
    parts = [str(path.parent) for path in copy.glob("*/muster")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(parts),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }


# The drill


def copy_tree(folder: Path) -> Path:
    """Copy the files that the tests need; installed packages are shared."""
    copy = folder / "tree"
    left_out = shutil.ignore_patterns(
        ".venv", ".envs", ".git", "node_modules", "runs", "out", "cache", ".*_cache", ".hypothesis"
    )
    shutil.copytree(ROOT, copy, ignore=left_out)
    (copy / "node_modules").symlink_to(ROOT / "node_modules")
    return copy


def is_killed(copy: Path, mutant: Mutant, tests: set[str]) -> bool:
    """Return whether a test that executes the mutant's line fails."""
    path = copy / mutant.module
    source = path.read_bytes()
    path.write_bytes(mutant.of(source))
    chosen = copy / "chosen.txt"
    chosen.write_text("\n".join(sorted(tests)))
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"),
        *("-p", "no:cov", f"@{chosen}"),
    ]
    try:
        done = subprocess.run(
            command, cwd=copy, env=_environment(copy), capture_output=True, timeout=TESTS_TIMEOUT_S
        )
        return done.returncode != 0
    except subprocess.TimeoutExpired:
        return True
    finally:
        path.write_bytes(source)


def draw(count: int, seed: int) -> list[Mutant]:
    """Return random mutants of all drilled packages, each with the same probability."""
    found = [
        mutant
        for package in PACKAGES
        for path in sorted(ROOT.glob(f"*/{package}/**/*.py"))
        for mutant in mutants_of(path.relative_to(ROOT), path.read_bytes())
    ]
    return random.Random(seed).sample(found, min(count, len(found)))


def main() -> None:
    """Draw mutants, test each, print the survivors and the share that was killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    mutants = draw(options.sample, options.seed)
    if options.list:
        for mutant in mutants:
            print(mutant.describe((ROOT / mutant.module).read_bytes()))  # noqa: T201
        return
    with tempfile.TemporaryDirectory() as folder:
        killed = drill(copy_tree(Path(folder)), mutants)
    print(f"{killed} of {len(mutants)} mutants killed ({killed / len(mutants):.1%})")  # noqa: T201


def drill(copy: Path, mutants: list[Mutant]) -> int:
    """Return the number of killed mutants, and print the others."""
    lines: dict[tuple[str, int], set[str]] = {}
    for package in PACKAGES:
        if any(f"/{package}/" in str(mutant.module) for mutant in mutants):
            lines |= tests_by_line(copy, package)
    killed = 0
    for number, mutant in enumerate(mutants, 1):
        tests = tests_of(mutant, lines)
        if tests and is_killed(copy, mutant, tests):
            killed += 1
            continue
        kind = "survived" if tests else "no test"
        text = mutant.describe((copy / mutant.module).read_bytes())
        print(f"{number}/{len(mutants)} {kind}: {text}", flush=True)  # noqa: T201
    return killed


if __name__ == "__main__":
    main()
