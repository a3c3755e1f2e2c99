r"""Parses answers: a scalar, a collection without order, or a sequence in brackets.

Tuples, points and intervals are sequences: `(1,2)` is the same text for all three. Inequalities in
one variable are read as intervals, and `\pm` as a collection of two.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

from muster.tasks.math.spelling import parse_number, respell

T = TypeVar("T")

MAX_ITEMS = 64
"""Most items of a collection or sequence."""
MAX_DEPTH = 6
"""Deepest nesting of collections and sequences."""


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number, expression, equation or word."""

    text: str
    """The text in one spelling, without percent sign and unit."""
    number: Fraction | None = None
    """Its value if it is read exactly, without the percent sign."""
    is_percent: bool = False
    """Whether a percent sign follows."""
    unit: str = ""
    """The unit that follows, as text."""
    name: str = ""
    """The variable or function that it is assigned to."""
    is_word: bool = False
    """Whether it is text or a choice, which is compared as text only."""


@dataclass(frozen=True, slots=True)
class Collection:
    """Answers without order; repetitions do not count."""

    items: tuple[Answer, ...]
    """The answers."""
    is_union: bool = False
    """Whether it is the union of its items, which are intervals."""


@dataclass(frozen=True, slots=True)
class Sequence:
    """Answers in order, with their brackets."""

    brackets: str
    """Two characters."""
    items: tuple[Answer, ...]
    """The answers."""


Answer = Scalar | Collection | Sequence
"""An answer that has been read."""

_NAMED = """
    cm mm km m dm nm kg mg g lb lbs oz ton tonne ml mL cl dl L s ms min h hr Hz kHz MHz N J kJ W kW
    V A K C F ft in mi yd mph kph rad Pa kPa atm mol eV cal kcal ohm hertz watt volt amp ampere
    joule newton pascal kelvin radian meter metre centimeter centimetre millimeter millimetre
    decimeter kilometer kilometre mile feet foot inch yard gram kilogram milligram pound ounce
    liter litre milliliter millilitre gallon quart pint cup acre hectare second sec minute hour day
    week month year degree dollar cent euro rupee yuan peso unit percent point people person
    student way time pair piece item object block box bag ball bottle book card coin marble apple
    orange egg pen pencil ticket page word letter digit number integer solution triangle square
    side edge vertex vertices face diagonal line path route step move turn game match team player
    boy girl child children man men woman women friend worker member guest family car bus train
    trip animal cow horse sheep dog cat bird fish tree flower seat chair table room house floor
    stamp cookie candy candies cake slice shirt sock shoe subset element term factor divisor
    multiple permutation combination arrangement outcome pattern code color colour hat ribbon stick
    tile cube brick stone chicken rabbit duck jar can gift class classes school question problem
    mark vote
"""
_UNIT_NAMES = frozenset(_NAMED.split())
_ADJECTIVES = frozenset({"square", "sq", "sq.", "cubic", "cu", "cu.", "different", "distinct"})
_TEXT = r"\\text\{([^{}]*)\}"
_TEXT_UNIT = re.compile(rf"(.*[0-9a-zA-Z)}}%]) ?{_TEXT}(\^\{{?[0-9]\}}?)?", re.ASCII)
_BARE_UNIT = re.compile(
    r"(.*[0-9)}])( ?)([a-zA-Z](?:[a-zA-Z. ]*[a-zA-Z])?(?:/[a-zA-Z]+)?)(\^\{?[0-9]\}?)?", re.ASCII
)
_ASSIGNMENT = re.compile(
    r"((?:[a-zA-Z]|\\[a-z]+)(?:_(?:[0-9a-zA-Z]|\{[0-9a-zA-Z]+\}))?'?(?:\([a-z]\))?)=([^=<>]+)",
    re.ASCII,
)
_MEMBER = re.compile(r"[a-zA-Z]\\in ?(.+)", re.ASCII)
_RELATION = r"(<|>|\\le ?|\\ge ?)"
_CHAIN = re.compile(
    rf"([^<>=\\]+|[^<>=]*?[^<>=\\ ]){_RELATION}([a-zA-Z]){_RELATION}([^<>=]+)", re.ASCII
)
_BOUND = re.compile(rf"([a-zA-Z]){_RELATION}([^<>=]+)", re.ASCII)
_FLIPPED = re.compile(rf"([^<>=]*?[^<>=\\ ]){_RELATION}([a-zA-Z])", re.ASCII)
_WORD = re.compile(r"[a-zA-Z][a-zA-Z' -]{3,}|yes|no|Yes|No|NO|YES|DNE", re.ASCII)
_CHOICE = re.compile(r"\(([A-Z])\)|([A-Z])\)?", re.ASCII)
_LETTERS = re.compile(r"[a-zA-Z][a-zA-Z' -]*", re.ASCII)
_SEPARATOR = re.compile(r",? ?\\text\{,? ?(?:or|and),? ?\}|(?:,| )(?: )?(?:or|and) |;", re.ASCII)
_CLOCK = re.compile(r"0[0-9]*:.*|.*:0[0-9].*", re.ASCII)
_NO_RATIO = re.compile(r"[<>=|,;?]|\\(?:text|in|le|ge|ne|\{)(?![a-z])|(?<![a-zA-Z\\])[a-zA-Z]{2,}")
_INDEXED = re.compile(r"\\(?!pi_)[a-zA-Z]+(?=_)", re.ASCII)
_COMMAND = re.compile(r"\\[a-zA-Z]+", re.ASCII)
_BLANK = re.compile(r"(\\[a-zA-Z]+ (?=[a-zA-Z]))| ", re.ASCII)
_IDLE_BLANK = re.compile(r" ?([^0-9a-zA-Z. ]) ?", re.ASCII)
_BASE = re.compile(r"([0-9]+)_\{10\}", re.ASCII)
_FUNCTION_OF = re.compile(
    r"\\(?:log|ln|lg|a?r?c?(?:sin|cos|tan|cot|sec|csc)h?)(?:[_^](?:\{[^{}]*\}|[0-9a-zA-Z]))+"
    r"|\\begin\{[a-z]*\}|\\sqrt\[[0-9a-z]\]"
)
_UNFINISHED = re.compile(
    r"[0-9.] +[0-9.]"  # two numerals
    r"|[^\]0-9a-zA-Z\\{}()\[+*/^_=<>|.,!& -]"  # a sign that no expression has
    r"|(?<![a-zA-Z])_|_[^{0-9a-zA-Z]"  # an index of what is no variable: 12_3 is of base 3
    r"|[-+][-+]|^[*/^_=<>]|[-+*/^_=<>]$"  # an operator without an operand
    r"|[0-9]\{|[)}] ?[0-9.]|[a-zA-Z][0-9]"  # a numeral that goes on, or begins within a word
    r"|(?<!\\)\{\}"  # something that is not there
    r"|^,|,$|,,"  # a list with nothing in it
    r"|^\[.*\]$"  # brackets around one: a floor, a class, a list
)
_FLIP = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}


def read_answer(text: str) -> Answer | None:
    """Return the parsed answer; None if it is empty, has unknown signs, or is too long or deep a
    list.
    """
    spelled = respell(text)
    try:
        return _read(spelled, MAX_DEPTH) if spelled else None
    except _TooLarge:
        return None


class _TooLarge(Exception):
    """More items or levels than are read."""


def _read(text: str, depth: int) -> Answer:
    text = text.strip()
    if not depth:
        raise _TooLarge
    if "\\ldots" in text:
        return _verbatim(text)
    if match := _MEMBER.fullmatch(text):
        text = match[1]
    for reader in _READERS:
        if (answer := reader(text, depth - 1)) is not None:
            return answer
    return _scalar(text)


def _read_number(text: str, _depth: int) -> Answer | None:
    scalar = _scalar(text)  # the comma of 1,000 cm does not separate a list
    return None if scalar.number is None else scalar


def _read_set(text: str, depth: int) -> Answer | None:
    if text in ("\\emptyset", "\\{\\}"):
        return Collection(())
    is_set = text.startswith("\\{") and text.endswith("\\}") and text.find("\\}") == len(text) - 2
    if not is_set or "|" in text or ":" in text:
        return None
    return _collect(_split(text[2:-2], ","), depth)


def _read_list(text: str, depth: int) -> Answer | None:
    parts = _split(text, "\\cup")
    if len(parts) > 1:
        return _collect(parts, depth, is_union=True)
    parts = _SEPARATOR.split(text) if _is_flat(text, _SEPARATOR) else [text]
    if len(parts) == 1:
        parts = _split(text, ", ")
    if len(parts) == 1:
        parts = _split(text, ",")
    return _collect(parts, depth) if len(parts) > 1 and all(map(str.strip, parts)) else None


def _read_brackets(text: str, depth: int) -> Answer | None:
    if len(text) < 2 or text[0] not in "([" or text[-1] not in ")]" or not _is_one(text):
        return None
    parts = _split(text[1:-1], ",")
    if len(parts) > 1:
        items = tuple(_read(part, depth) for part in _few(parts))
        return Sequence(text[0] + text[-1], items)
    # Parentheses around one answer have no meaning; brackets may be a floor, a list, a class.
    return _read(parts[0], depth) if text[0] + text[-1] == "()" and parts[0] else None


def _read_relation(text: str, depth: int) -> Answer | None:
    r"""Return the interval that `a<x\le b`, `x<a` or `a<x` means."""
    if match := _CHAIN.fullmatch(text):
        low, first, _, second, high = match.groups()
        first, second = first.strip(), second.strip()
        if first[0] in ">" or first == "\\ge":
            low, first, second, high = high, _FLIP[second], _FLIP[first], low
        if first in _FLIP and second in ("<", "\\le") and first in ("<", "\\le"):
            return _interval(low, first == "\\le", high, second == "\\le", depth)
        return None
    if match := _BOUND.fullmatch(text):
        return _ray(match[2].strip(), match[3], depth)
    if match := _FLIPPED.fullmatch(text):
        return _ray(_FLIP[match[2].strip()], match[1], depth)
    return None


def _ray(relation: str, bound: str, depth: int) -> Answer:
    if relation in ("<", "\\le"):
        return _interval("-\\infty", False, bound, relation == "\\le", depth)
    return _interval(bound, relation == "\\ge", "\\infty", False, depth)


def _interval(low: str, has_low: bool, high: str, has_high: bool, depth: int) -> Answer:
    brackets = ("[" if has_low else "(") + ("]" if has_high else ")")
    return Sequence(brackets, (_read(low, depth), _read(high, depth)))


def _read_signs(text: str, depth: int) -> Answer | None:
    if text.count("\\pm") != 1:
        return None  # it is unclear whether several of them are one choice
    upper = text.replace("\\pm", "+").replace("\\mp", "-")
    lower = text.replace("\\pm", "-").replace("\\mp", "+")
    return Collection(tuple(_read(_without_plus(part), depth) for part in (upper, lower)))


def _read_ratio(text: str, _depth: int) -> Answer | None:
    """Return a ratio of two numbers as a fraction, a longer ratio as its parts."""
    parts = _split(text, ":")
    if len(parts) < 2 or not all(parts) or _CLOCK.fullmatch(text):
        return None
    if any(_NO_RATIO.search(part) for part in parts):
        return None
    numbers = [number for part in parts if (number := parse_number(part))]
    if len(numbers) < len(parts):
        return _scalar(f"\\frac{{{parts[0]}}}{{{parts[1]}}}") if len(parts) == 2 else None
    first, *others = numbers
    if len(parts) == 2:
        return Scalar(text, first / others[0])
    return Sequence("::", tuple(Scalar(str(n / first), n / first) for n in others))


def _without_plus(text: str) -> str:
    return re.sub(r"(^|=)\+ ?", r"\1", text).replace("- ", "-").replace("+ ", "+")


def _collect(parts: list[str], depth: int, *, is_union: bool = False) -> Collection:
    items: list[Answer] = []
    for part in _few(parts):
        item = _read(part, depth)
        # "1, 2 or 3" is one list.
        items += item.items if isinstance(item, Collection) and "\\{" not in part else [item]
    bounds = [item for item in items if isinstance(item, Sequence)]
    are_relations = len(bounds) == len(items) and all(re.search(r"[<>]|\\[lg]e", p) for p in parts)
    return Collection(tuple(_few(items)), is_union or are_relations)


def _few(items: list[T]) -> list[T]:
    if len(items) > MAX_ITEMS:
        raise _TooLarge
    return items


def _split(text: str, separator: str) -> list[str]:
    """Return the parts between separators that are outside all brackets."""
    if separator not in text:
        return [text]
    parts, depth, start, i = [], 0, 0, 0
    while i < len(text):
        if not depth and text.startswith(separator, i):
            parts.append(text[start:i])
            i = start = i + len(separator)
            continue
        depth += (text[i] in "([{") - (text[i] in ")]}")
        i += 1
    return [*parts, text[start:]]


def _is_flat(text: str, pattern: re.Pattern[str]) -> bool:
    """Return whether every match is outside all brackets."""
    return all(_depth_at(text, match.start()) == 0 for match in pattern.finditer(text))


def _depth_at(text: str, end: int) -> int:
    return sum(text.count(c, 0, end) for c in "([{") - sum(text.count(c, 0, end) for c in ")]}")


def _is_one(text: str) -> bool:
    """Return whether the last character closes the first bracket."""
    depth = 0
    for i, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if not depth:
            return i == len(text) - 1
    return False


_READERS = (
    _read_number,
    _read_set,
    _read_list,
    _read_brackets,
    _read_relation,
    _read_signs,
    _read_ratio,
)
"""Readers, tried in order; a text that none of them reads is a scalar."""


def _scalar(text: str) -> Scalar:
    if match := re.fullmatch(_TEXT, text):
        return _word(match[1].strip())
    if _WORD.fullmatch(text) or _CHOICE.fullmatch(text):
        return _word(text)
    whole, name = text, ""
    if match := _ASSIGNMENT.fullmatch(text):
        name, text = match[1], match[2]
    text, unit = _without_unit(text)
    is_percent = text.endswith("%")
    text = (text[:-1] if is_percent else text).strip()
    if match := _BASE.fullmatch(text):
        text = match[1]
    number = parse_number(text)
    if number is None and _is_verbatim(text):
        return _verbatim(whole)
    return Scalar(_BLANK.sub(r"\1", text), number, is_percent, unit, name)


def _verbatim(text: str) -> Scalar:
    """Return a scalar that equals only its own text."""
    return Scalar(_IDLE_BLANK.sub(r"\1", text).removeprefix("+"), is_word=True)


def _is_verbatim(text: str) -> bool:
    r"""Return whether it is not one finished expression, or has no value that could be equal.

    Infinity has no arithmetic: `\infty+1` equals only `\infty+1`.
    """
    if "\\infty" in text:
        return True
    bare = _FUNCTION_OF.sub("", text.replace("\\text{degree}", ""))
    if "\\text" in bare or "\\prime" in bare or ("&" in bare and "pmatrix" not in bare):
        return True
    return bool(_UNFINISHED.search(_COMMAND.sub("|", _INDEXED.sub("x", bare))))


def _word(text: str) -> Scalar:
    if (number := parse_number(text)) is not None:
        return Scalar(text, number)
    if match := _CHOICE.fullmatch(text):
        return Scalar(match[1] or match[2], is_word=True)
    return Scalar(" ".join(text.casefold().split()), is_word=bool(_LETTERS.fullmatch(text)))


def _without_unit(text: str) -> tuple[str, str]:
    if match := _TEXT_UNIT.fullmatch(text):
        number, unit, power = match.groups()
    elif match := _BARE_UNIT.fullmatch(text):
        number, blank, unit, power = match.groups()
        # 5m may be five times m; an unlisted word may be a product too.
        if not is_named_unit(unit) or (len(unit) == 1 and not blank):
            return text, ""
    else:
        return text, ""
    power = re.sub(r"[^0-9]", "", power or "")
    unit = " ".join(map(_singular, unit.strip().removesuffix(".").split()))
    return (number.strip() + "%", "") if unit == "percent" else (number.strip(), unit + power)


def is_named_unit(unit: str) -> bool:
    """Return whether a unit may be left out: any other word may change the answer."""
    parts = re.split(r" ?/ ?| per | an? ", unit.strip())
    return all(part and all(map(_is_of_unit, part.split())) for part in parts)


def _is_of_unit(word: str) -> bool:
    return word in _ADJECTIVES or _singular(word.rstrip("^23")) in _UNIT_NAMES


def _singular(word: str) -> str:
    forms = (word, word.removesuffix("s"), word.removesuffix("es"))
    return next((form for form in forms if form in _UNIT_NAMES), word)
