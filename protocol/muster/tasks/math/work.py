"""What the engine's process does for math: compare expressions by math-verify."""

from __future__ import annotations

from typing import Any

from muster.tasks.math.expressions import are_equal

_WARM_UP = (
    ("x+\\frac{1}{2}", "\\frac{1+2x}{2}"),
    ("2\\sqrt{2}", "\\sqrt{8}"),
    ("\\frac{\\sqrt{3}}{2}", "\\sin(\\frac{\\pi}{3})"),
    ("e^{2x}+\\ln(3)", "\\log_{2}(5)-\\cos(x^{2})"),
    ("y=2x+1", "2x+1=y"),
    ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{pmatrix}1&2\\\\3&5\\end{pmatrix}"),
    ("3 i+\\binom{5}{2}", "5!|x|"),
    ("-\\infty", "\\infty"),
)


def warm_up() -> None:
    """Load what comparisons need."""
    for gold, answer in _WARM_UP:
        are_equal(gold, answer)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return for each pair of texts whether they are equal."""
    return {"equal": [are_equal(gold, answer) for gold, answer in request["pairs"]]}
