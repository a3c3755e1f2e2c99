r"""Turns the many spellings of LaTeX and Unicode into one; other modules interpret it.

Beyond ASCII only signs of a fixed list are read. A look-alike (a full-width digit, a Cyrillic
letter) is not among them, so it equals nothing.
"""

import re
from fractions import Fraction

_SIGNS = {
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "π": r"\pi ",
    "∞": r"\infty ", "°": r"^\circ ", "²": "^2", "³": "^3", "≤": r"\le ", "≥": r"\ge ",
    "≠": r"\ne ",
    "±": r"\pm ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "θ": r"\theta ",
    "α": r"\alpha ", "β": r"\beta ", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
    "\u00a0": " ", "\u2009": " ", "\u202f": " ", "√": r"\sqrt ", "…": r"\ldots ",
}  # fmt: skip
_TRANSLATION = str.maketrans(_SIGNS)

_REWRITES = tuple(
    (re.compile(pattern, re.ASCII), into)
    for pattern, into in (
        (
            r"\\(?:left|right|bigl|bigr|Bigl|Bigr|big|Big|displaystyle|textstyle|limits)(?![a-zA-Z])",
            " ",
        ),
        (r"\\[!,;: ]|\\q?quad(?![a-zA-Z])|~|\\\(|\\\)|\\\[|\\\]|(?<!\\)\$", " "),
        # Blanks between a command and its braces, and between the braces.
        (r"(\\[a-zA-Z]+|[_^}])\s+(?=\{)", r"\1"),
        (r"\\(?:[cdv]?dots[bcimo]?|ldots|dots[a-z])(?![a-zA-Z])|\.{2,}", r"\\ldots "),
        (r"\\(?:colon|ratio)(?![a-zA-Z])", ":"),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\(leq|leqslant)(?![a-zA-Z])", r"\\le"),
        (r"\\(geq|geqslant)(?![a-zA-Z])", r"\\ge"),
        (r"\\neq(?![a-zA-Z])", r"\\ne"),
        (r"\\lt(?![a-zA-Z])", "<"),
        (r"\\gt(?![a-zA-Z])", ">"),
        (r"<=", r"\\le "),
        (r">=", r"\\ge "),
        (r"\\lbrace(?![a-zA-Z])", r"\\{"),
        (r"\\rbrace(?![a-zA-Z])", r"\\}"),
        (r"\\varnothing(?![a-zA-Z])", r"\\emptyset"),
        (r"\\(?:text(?:bf|it|rm)|math(?:rm|bf|it)|mbox|operatorname|boldsymbol)\{", r"\\text{"),
        (r"\\%", "%"),
        (r"\^\{\\circ\s*\}|\^\\circ(?![a-zA-Z])|\\degree(?![a-zA-Z])", r"\\text{degree}"),
        (r"\\begin\{[bvV]?matrix\}", r"\\begin{pmatrix}"),
        (r"\\end\{[bvV]?matrix\}", r"\\end{pmatrix}"),
        (r"\\frac\s*([0-9])\s*([0-9])", r"\\frac{\1}{\2}"),
        (r"\\frac\s*\{([^{}]*)\}\s*([0-9])", r"\\frac{\1}{\2}"),
        (r"\\frac\s*([0-9])\s*\{", r"\\frac{\1}{"),
        (r"\\sqrt\s*([0-9]+|[a-z])", r"\\sqrt{\1}"),
        (r"_([0-9a-zA-Z])(?![0-9])", r"_{\1}"),
        (r"(?<=[0-9])\{,\}(?=[0-9]{3}(?![0-9]))", ","),
        # A currency sign before or after a number, but not within one.
        (r"(?<![0-9a-zA-Z.}])\\\$(?=[ 0-9.])|(?<=[0-9]) ?\\\$(?! ?[0-9a-zA-Z.{\\])", " "),
        # Groups of three: 1 000 000.
        (
            r"(?<![0-9.,])([1-9][0-9]{0,2}) ([0-9]{3})(?: ([0-9]{3}))?(?: ([0-9]{3}))?(?![0-9])",
            r"\1\2\3\4",
        ),
        (r"\s+", " "),
        (r" ?([-+*/^()\[\]=<>|:]) ?", r"\1"),
        (r" (?=[,}\\])|(?<=\{) ", ""),
        (r"(\\[a-zA-Z]+) (?![a-zA-Z])", r"\1"),
    )
)


def respell(text: str) -> str | None:
    """Return the text in its one spelling; None when it has a sign that is not in the list."""
    text = text.translate(_TRANSLATION)
    if not text.isascii() or "\x00" in text:
        return None
    for pattern, into in _REWRITES:
        text = pattern.sub(into, text)
    text = text.strip()
    return text[:-1].strip() if text[-1:] in (".", ";") else text


# Numbers that are read exactly, in plain Python: no rounding, no floating point. `12`, `-3.50`,
# `1,000,000`, `\frac{3}{4}`, `3/4`, `1\frac{1}{2}`, `0.\overline{3}`, `1.5\times10^{3}`, `2e-3`,
# `2^{10}`.

MAX_EXPONENT = 400
"""Most digits of a power that is read as a number; larger ones go to the symbolic engine."""
_INTEGER = re.compile(r"[+-]?[0-9]+", re.ASCII)
_DECIMAL = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+"
_NUMBER = re.compile(rf"([+-]?)({_DECIMAL})", re.ASCII)
_FRACTION = re.compile(
    rf"([+-]?)(?:([0-9]+)[ ]?)?\\frac\{{([+-]?)({_DECIMAL})\}}\{{({_DECIMAL})\}}", re.ASCII
)
_SLASHED = re.compile(rf"([+-]?)(?:([0-9]+)[ ])?({_DECIMAL})/({_DECIMAL})", re.ASCII)
_REPEATING = re.compile(r"([+-]?)([0-9]*)\.([0-9]*)\\overline\{([0-9]+)\}", re.ASCII)
_SCIENTIFIC = re.compile(
    rf"([+-]?)({_DECIMAL})(?:[eE]|[ ]?\\(?:times|cdot)[ ]?10\^)\{{?([+-]?[0-9]{{1,4}})\}}?",
    re.ASCII,
)
_POWER = re.compile(r"([+-]?)([0-9]{1,6})\^\{?(-?[0-9]{1,4})\}?", re.ASCII)


def parse_number(text: str) -> Fraction | None:
    """Return the number that the text spells; None if it is not a number that is read exactly."""
    if _INTEGER.fullmatch(text):
        return Fraction(int(text))
    for pattern, read in _READERS:
        if match := pattern.fullmatch(text):
            try:
                return read(match)
            except ZeroDivisionError:
                return None
    return None


def _decimal(text: str) -> Fraction:
    whole, _, rest = text.replace(",", "").partition(".")
    return Fraction(int(whole + rest or "0"), 10 ** len(rest))


def _signed(sign: str, value: Fraction) -> Fraction:
    return -value if sign == "-" else value


def _number(match: re.Match[str]) -> Fraction:
    return _signed(match[1], _decimal(match[2]))


def _fraction(match: re.Match[str]) -> Fraction | None:
    if match[2] and match[3]:
        return None  # 1 -1/2 is a difference
    part = _signed(match[3], _decimal(match[4]) / _decimal(match[5]))
    return _mixed(match[1], match[2], part)


def _slashed(match: re.Match[str]) -> Fraction | None:
    return _mixed(match[1], match[2], _decimal(match[3]) / _decimal(match[4]))


def _mixed(sign: str, whole: str | None, part: Fraction) -> Fraction | None:
    """Return whole plus part; None for a part above 1, which some read as a product."""
    if whole and part >= 1:
        return None
    return _signed(sign, int(whole or 0) + part)


def _repeating(match: re.Match[str]) -> Fraction:
    sign, whole, once, again = match.groups()
    shift = 10 ** len(once)
    cycle = Fraction(int(again), 10 ** len(again) - 1)
    return _signed(sign, int(whole or 0) + (int(once or 0) + cycle) / shift)


def _scientific(match: re.Match[str]) -> Fraction | None:
    exponent = int(match[3])
    if abs(exponent) > MAX_EXPONENT:
        return None
    return _signed(match[1], _decimal(match[2]) * Fraction(10) ** exponent)


def _power(match: re.Match[str]) -> Fraction | None:
    base, exponent = int(match[2]), int(match[3])
    if abs(exponent) * len(match[2]) > MAX_EXPONENT:
        return None
    return _signed(match[1], Fraction(base) ** exponent)


_READERS = (
    (_NUMBER, _number),
    (_FRACTION, _fraction),
    (_SLASHED, _slashed),
    (_SCIENTIFIC, _scientific),
    (_POWER, _power),
    (_REPEATING, _repeating),
)
