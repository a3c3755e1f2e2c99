r"""Exact equality of two answers; it leaves the undecided pairs to the symbolic engine.

Equality is symmetric and three-valued: pairs of expressions that are not decided here are unknown,
and the result is unknown only if it depends on them.
"""

import re
from collections.abc import Callable, Iterable, Iterator

from muster.tasks.math.answers import Answer, Collection, Scalar, Sequence, is_named_unit

Known = dict[tuple[str, str], bool]
"""The symbolic engine's results for pairs of texts."""
_MAY_BE_TIME = re.compile(r"(?:1?[0-9]|2[0-4]):[1-5][0-9]", re.ASCII)
"""A ratio that may be a time of day: 5:12 is not 10:24."""
Unknown = set[tuple[str, str]]
"""Pairs of texts for the symbolic engine."""


def compare(gold: Answer, answer: Answer, known: Known, unknown: Unknown) -> bool | None:
    """Return whether two answers are equal; None while that depends on pairs in `unknown`."""
    if isinstance(gold, Scalar) and isinstance(answer, Scalar):
        return _compare_scalars(gold, answer, known, unknown)
    if isinstance(gold, Sequence) and isinstance(answer, Sequence):
        if gold.brackets != answer.brackets or len(gold.items) != len(answer.items):
            return False
        pairs = zip(gold.items, answer.items, strict=True)
        return _all(compare(g, a, known, unknown) for g, a in pairs)
    if isinstance(gold, Collection) or isinstance(answer, Collection):
        return _compare_collections(_collection(gold), _collection(answer), known, unknown)
    return False


def _collection(answer: Answer) -> Collection:
    if isinstance(answer, Collection):
        return answer
    return Collection((answer,), is_union=isinstance(answer, Sequence))


def _compare_collections(
    gold: Collection, answer: Collection, known: Known, unknown: Unknown
) -> bool | None:
    """Return whether each item of either collection equals some item of the other."""
    if gold.is_union != answer.is_union or bool(gold.items) != bool(answer.items):
        return False
    if _has_different_names(gold) != _has_different_names(answer):
        return False

    def has_equal(item: Answer, others: Iterable[Answer], flip: bool) -> bool | None:
        pairs = ((other, item) if flip else (item, other) for other in others)
        return _any(compare(g, a, known, unknown) for g, a in pairs)

    def all_have() -> Iterator[bool | None]:
        yield from (has_equal(item, answer.items, False) for item in gold.items)
        yield from (has_equal(item, gold.items, True) for item in answer.items)

    return _all(all_have())


def _has_different_names(collection: Collection) -> bool:
    """Return whether it assigns values to several variables, as `x=1, y=2` does."""
    return len({_base(i.name) for i in collection.items if isinstance(i, Scalar) and i.name}) > 1


def _base(name: str) -> str:
    return name.partition("_")[0]


def _compare_scalars(gold: Scalar, answer: Scalar, known: Known, unknown: Unknown) -> bool | None:
    if gold.unit != answer.unit and not _may_be_left_out(gold.unit, answer.unit):
        return False
    if gold.is_word or answer.is_word:
        return _compare_words(gold, answer)
    if _is_equation(gold, answer) or _is_equation(answer, gold):
        return _compare_equations(gold, answer, known, unknown)
    if gold.number is not None and answer.number is not None:
        return _compare_numbers(gold, answer)
    if gold.is_percent != answer.is_percent:
        return False
    return gold.text == answer.text or _look_up(gold.text, answer.text, known, unknown)


def _may_be_left_out(one: str, other: str) -> bool:
    return not (one and other) and is_named_unit(one or other)


def _is_equation(one: Scalar, other: Scalar) -> bool:
    """Return whether it is an equation, not the assignment of a value to a variable."""
    return "=" in one.text or bool(one.name and other.name and _base(one.name) != _base(other.name))


def _compare_numbers(gold: Scalar, answer: Scalar) -> bool:
    """Compare numbers. A percent sign that only one has is read both ways: 50% is 50 and 1/2."""
    if _MAY_BE_TIME.fullmatch(gold.text) and _MAY_BE_TIME.fullmatch(answer.text):
        return gold.text == answer.text
    if gold.number == answer.number:
        return True
    if gold.is_percent == answer.is_percent or gold.number is None or answer.number is None:
        return False
    percent, plain = (gold.number, answer.number)
    if answer.is_percent:
        percent, plain = plain, percent
    return percent / 100 == plain


def _compare_words(gold: Scalar, answer: Scalar) -> bool:
    is_bare = not (gold.name or answer.name) and gold.unit == answer.unit
    return is_bare and gold.text == answer.text


def _compare_equations(gold: Scalar, answer: Scalar, known: Known, unknown: Unknown) -> bool | None:
    if gold.number is not None and answer.number is not None:
        return False
    if _whole(gold) == _whole(answer):
        return True
    return _look_up(_whole(gold), _whole(answer), known, unknown)


def _whole(scalar: Scalar) -> str:
    return f"{scalar.name}={scalar.text}" if scalar.name else scalar.text


def _look_up(gold: str, answer: str, known: Known, unknown: Unknown) -> bool | None:
    if ("=" in gold) != ("=" in answer) or any(sign in gold + answer for sign in ":;?"):
        return False
    found = known.get((gold, answer))
    if found is None:
        unknown.add((gold, answer))
    return found


def _all(values: Iterable[bool | None]) -> bool | None:
    return _fold(values, lambda value: value is False, decides=False)


def _any(values: Iterable[bool | None]) -> bool | None:
    return _fold(values, lambda value: value is True, decides=True)


def _fold(
    values: Iterable[bool | None], is_decided: Callable[[bool | None], bool], *, decides: bool
) -> bool | None:
    is_unknown = False
    for value in values:
        if is_decided(value):
            return decides
        is_unknown |= value is None
    return None if is_unknown else not decides
