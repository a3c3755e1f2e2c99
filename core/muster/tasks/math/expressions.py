r"""Whether expressions are equal; runs in the engine's processes only, where it may be killed.

math-verify parses. Expressions are equal when their values agree to 200 digits, which unequal short
expressions never do by chance. Expressions with variables are evaluated at fixed points; points
where either is not a real number are skipped. Expressions without values (relations, sets,
matrices) are compared by math-verify itself.
"""

import re
from collections.abc import Callable
from functools import wraps
from typing import Any

from math_verify import LatexExtractionConfig, grader, parse, parser, verify
from sympy import Abs, Expr, Float, I, Integer, Rational, Symbol, log, nan, oo, zoo
from sympy.core.relational import Relational

DIGITS = 200
"""Digits to which values must agree; numerals have up to 64, so two unequal fractions never do."""
_TINY = Float(10, DIGITS) ** -DIGITS
_SMALL = Float(10, DIGITS) ** -(DIGITS // 2)
_POINTS = (Rational(7393, 5147), Rational(2903, 10007), Rational(-6211, 4391))
_DECIMAL = re.compile(r"([0-9]*)\.([0-9]+)|([0-9]+)\.", re.ASCII)
_IMAGINARY = re.compile(r"(?<![a-zA-Z\\])i(?![a-zA-Z])", re.ASCII)
_NO_LETTERS = re.compile(
    r"\\text\{[^{}]*\}|\\[a-zA-Z]+(?:\{[bvV]?matrix\})?|\{pmatrix\}"
    r"|(?:arc)?(?:sin|cos|tan)|log|ln|exp|sqrt|pi|max|min|gcd|lcm"
)
_VARIABLE = re.compile("[a-df-hj-zA-Z]")
_GREEK = re.compile(
    r"\\(?:alpha|beta|gamma|delta|theta|lambda|mu|(?:var)?phi|omega|sigma|tau|rho|(?:var)?epsilon"
    r"|Delta|Omega|Phi|nabla)(?![a-zA-Z])"
)
_SHORTAGES: list[BaseException] = []
"""Wants of memory in this process, which math-verify takes for a property of the text."""


def _noting(work: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of math-verify that notes wants of memory before it hides them."""

    @wraps(work)
    def noted(*given: Any, **named: Any) -> Any:
        try:
            return work(*given, **named)
        except (MemoryError, RecursionError) as error:
            _SHORTAGES.append(error)
            raise

    return noted


parser.extract_target_from_pred = _noting(parser.extract_target_from_pred)
parser.latex2sympy = _noting(parser.latex2sympy)
grader.sympy_expr_eq = _noting(grader.sympy_expr_eq)
_CONFIG = LatexExtractionConfig(try_extract_without_anchor=False, boxed_match_priority=0)


def are_equal(gold: str, answer: str) -> bool | None:
    """Return whether two expressions are equal; None when the gold one cannot be parsed."""
    parsed_gold, parsed_answer = _parse(gold), _parse(answer)
    if parsed_gold is None:
        return None
    if parsed_answer is None or _is_infinite(parsed_gold) or _is_infinite(parsed_answer):
        return False
    return _is_same(parsed_gold, parsed_answer) and _variables(gold) == _variables(answer)


def _is_same(gold: Any, answer: Any) -> bool:
    if isinstance(gold, Expr) and isinstance(answer, Expr):
        by_value = _agree(gold, answer)
        if by_value is not None:
            return by_value
    # math-verify depends on the form of its first operand, but equality must be symmetric.
    return _verify(gold, answer) or _verify(answer, gold)


def _variables(text: str) -> set[str]:
    """Return the variables that occur. A parser that multiplies letters makes zero times any word
    zero, and one that reads units drops letters.
    """
    return set(_GREEK.findall(text)) | set(_VARIABLE.findall(_NO_LETTERS.sub(" ", text)))


def _is_infinite(parsed: Any) -> bool:
    """Return whether it is or contains an infinite value, whose arithmetic decides no equality."""
    if parsed.has(oo, -oo, zoo, nan):
        return True
    if not isinstance(parsed, Expr) or parsed.free_symbols:
        return False
    value = parsed.doit().evalf(20)
    return value.is_finite is False or bool(value.has(oo, -oo, zoo, nan))


def _verify(one: Any, other: Any) -> bool:
    if isinstance(one, Relational) != isinstance(other, Relational):
        return False
    return bool(verify(one, other, timeout_seconds=None, float_rounding=12))


def _parse(text: str) -> Any:
    found = parse(
        "\\boxed{" + _engine_spelling(text) + "}",
        extraction_config=[_CONFIG],
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=None,
    )
    if not found or isinstance(found[0], str):
        return None
    parsed = found[0]
    imaginary = [s for s in getattr(parsed, "free_symbols", ()) if s.name == "i"]
    return parsed.subs(dict.fromkeys(imaginary, I)) if imaginary else parsed


def _engine_spelling(text: str) -> str:
    """Return the text with decimals as fractions, degrees in radians, and i standing alone."""
    text = _DECIMAL.sub(_exact, text.replace("\\text{degree}", "\\cdot\\frac{\\pi}{180}"))
    return _IMAGINARY.sub(" i ", text)


def _exact(match: re.Match[str]) -> str:
    whole, rest = match[1] or match[3] or "", match[2] or ""
    return f"{{\\frac{{{int(whole + rest)}}}{{{10 ** len(rest)}}}}}"


def _agree(gold: Expr, answer: Expr) -> bool | None:
    """Return whether values agree; None if they do not decide it."""
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=lambda s: s.name)
    if not symbols:
        return _agree_at(gold, answer, {})
    found = [_agree_at(gold, answer, _point(symbols, shift)) for shift in range(len(_POINTS))]
    if False in found:
        return False
    return True if found.count(True) > 1 else None


def _point(symbols: list[Symbol], shift: int) -> dict[Symbol, Expr]:
    return {
        symbol: _POINTS[shift] + Integer(i) / 13 if shift < 2 else _POINTS[2] - Integer(i) / 13
        for i, symbol in enumerate(symbols)
    }


def _agree_at(gold: Expr, answer: Expr, point: dict[Symbol, Expr]) -> bool | None:
    exact = [expression.subs(point).doit() for expression in (gold, answer)]
    if all(value.is_Rational for value in exact):
        return bool(exact[0] == exact[1])
    size = max((_size(value) for value in exact), default=None, key=lambda s: s or 0)
    one, other = (_value(value, DIGITS + 20 + _digits(size)) for value in exact)
    if one is None or other is None or size is None:
        return None
    if point and not (one.is_real and other.is_real):
        return None
    if size < _SMALL:
        return None
    return bool(Abs(one - other) <= _TINY * min(size, 1))


def _digits(size: Any) -> int:
    """Return the number of digits before the point; differences are measured after it."""
    return max(0, int(log(size, 10).evalf())) if size else 0


def _size(value: Expr) -> Any:
    rough = _value(value, 20)
    return None if rough is None else Abs(rough).evalf(20)


def _value(exact: Expr, digits: int) -> Expr | None:
    value = exact.evalf(digits)
    return value if value.is_number and value.is_finite else None


# Called by the engine's process

_WARM_UP = (
    ("x+\\frac{1}{2}", "\\frac{1+2x}{2}"),
    ("2\\sqrt{2}", "\\sqrt{8}"),
    ("\\frac{\\sqrt{3}}{2}", "\\sin(\\frac{\\pi}{3})"),
    ("e^{2x}+\\ln(3)", "\\log_{2}(5)-\\cos(x^{2})"),
    ("y=2x+1", "2x+1=y"),
    ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{pmatrix}1&2\\\\3&5\\end{pmatrix}"),
    ("3 i+\\binom{5}{2}", "5!|x|"),
)


def warm_up() -> None:
    """Load what comparisons need."""
    for gold, answer in _WARM_UP:
        are_equal(gold, answer)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return for each pair of texts whether they are equal; raises what took too much memory."""
    equal = [are_equal(gold, answer) for gold, answer in request["pairs"]]
    for error in _SHORTAGES:
        raise error
    return {"equal": equal}
