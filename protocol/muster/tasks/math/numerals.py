r"""Numbers that are read exactly, in plain Python: no rounding, no floating point.

`12`, `-3.50`, `1,000,000`, `\frac{3}{4}`, `3/4`, `1\frac{1}{2}`, `0.\overline{3}`,
`1.5\times10^{3}`, `2e-3`, `2^{10}`.
"""

from __future__ import annotations

import re
from fractions import Fraction

MAX_EXPONENT = 400
"""A power of more digits is no numeral; the symbolic engine has the rest."""
_INTEGER = re.compile(r"[+-]?[0-9]+", re.ASCII)
_DECIMAL = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+"
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
    """Return the number that the text spells, or None when it spells none that is read exactly."""
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
    """Return whole and part; with a part above 1 it is a sum for some, a product for others."""
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
