"""`make check`'s count of the lines of code, folder by folder.

A line of code holds a token that is neither a comment nor part of a docstring. A string that stands
alone as a statement counts as a docstring, as those of attributes do.

    python tools/count_lines.py            the product's figures, and the lab's and the tests' lines
    python tools/count_lines.py --folders  also a line for each package, largest first
"""

import ast
import io
import statistics
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("core", "client", "orchestrator", "trainer", "app")
"""Folders of the installed packages."""
LAB = ("lab",)
"""Folder of the studies, which are not installed."""
_NO_CODE = frozenset(
    {
        tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
        tokenize.ENCODING, tokenize.ENDMARKER,
    }
)  # fmt: skip


def code_lines(source: str) -> int:
    """Return how many lines of a module hold code."""
    lines = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - _docstring_lines(source))


def _docstring_lines(source: str) -> set[int]:
    lines = set[int]()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(ast.Constant(str())):
                lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def modules_of(folders: Iterable[str]) -> dict[Path, int]:
    """Return the lines of code of each module below some folders of the tree."""
    return {
        path.relative_to(ROOT): code_lines(path.read_text())
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
    }


def summary(product: dict[Path, int], others: dict[str, dict[Path, int]]) -> str:
    """Return the figures, one a line."""
    sizes = sorted(product.values())
    return "\n".join(
        [
            f"product_code_lines {sum(sizes)}",
            f"product_modules {len(sizes)}",
            f"product_median_lines {statistics.median(sizes):g}",
            f"product_p95_lines {sizes[int(0.95 * len(sizes))]}",
            *(f"{name}_code_lines {sum(found.values())}" for name, found in others.items()),
        ]
    )


def by_folder(modules: dict[Path, int]) -> str:
    """Return a line for each folder, the largest first."""
    lines, counts = Counter[Path](), Counter[Path]()
    for path, size in modules.items():
        lines[path.parent] += size
        counts[path.parent] += 1
    return "\n".join(
        f"{size:6} lines {counts[folder]:3} modules  {folder}"
        for folder, size in lines.most_common()
    )


def main(words: list[str]) -> None:
    """Print the figures."""
    lab = modules_of(LAB)
    product = {path: size for path, size in modules_of(PRODUCT).items() if path not in lab}
    if "--folders" in words:
        sys.stdout.write(f"{by_folder(product)}\n")
    sys.stdout.write(f"{summary(product, {'lab': lab, 'tests': modules_of(['tests'])})}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
