"""How values are written for people: the templates' filters. Pure."""

from __future__ import annotations

import unicodedata
from datetime import UTC, datetime

from markupsafe import Markup

_SHOWN = frozenset("\n\t")
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories of what cannot be seen, or changes what is seen around it."""


def shorten(text: str) -> str:
    """Return an address or hash in the form `0x12345678…cdef`."""
    return text if len(text) <= 16 else f"{text[:8]}…{text[-4:]}"


def tokens(wei: str | int) -> str:
    """Return an amount of wei in tokens, rounded down to at most four decimals, but not to 0."""
    sign, size = ("-" if int(wei) < 0 else ""), abs(int(wei))
    if 0 < size < 10**14:
        return f"{sign}<0.0001"
    whole, part = divmod(size, 10**18)
    decimals = f"{part:018d}"[:4].rstrip("0")
    return f"{sign}{whole:,}.{decimals}" if decimals else f"{sign}{whole:,}"


def count(number: int) -> str:
    """Return a whole number with separators."""
    return f"{number:,}"


def compact(number: float) -> str:
    """Return a count in at most four characters and a unit: 950, 12.3k, 4.56M."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= limit:
            scale = 1e3 if unit == "k" else limit
            return f"{number / scale:.3g}{unit}"
    return f"{number:,.0f}"


def percent(part: float, whole: float) -> str:
    """Return a share; a dash of nothing."""
    if not whole:
        return "–"
    share = 100 * part / whole
    return f"{share:.0f} %" if share in (0, 100) else f"{share:.1f} %"


def duration(seconds: float) -> str:
    """Return a span of time in its largest unit."""
    seconds = max(0, int(seconds))
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


def ago(at: float | None, now: float) -> Markup:
    """Return how long a time is past or away, with the time itself in its title."""
    if at is None:
        return Markup('<span class="soft">never</span>')
    words = f"{duration(now - at)} ago" if at <= now else f"in {duration(at - now)}"
    stamp = _utc(at)
    return Markup('<time datetime="{}" title="{}">{}</time>').format(
        stamp.strftime("%Y-%m-%dT%H:%M:%SZ"), stamp.strftime("%Y-%m-%d %H:%M:%S UTC"), words
    )


def _utc(at: float) -> datetime:
    # Times of peers' tickets are uint64: what no calendar reaches is shown as its end.
    return datetime.fromtimestamp(min(max(at, 0), 253_402_300_799), UTC)


def visible(text: object) -> Markup:
    """Return a stranger's text with everything that hides, or reorders what is around, shown."""
    parts: list[Markup] = []
    plain: list[str] = []
    for character in str(text):
        if character in _SHOWN or unicodedata.category(character) not in _HIDDEN:
            plain.append(character)
            continue
        parts.append(Markup.escape("".join(plain)))
        parts.append(Markup('<span class="hidden-char">U+{:04X}</span>').format(ord(character)))
        plain.clear()
    return Markup("").join([*parts, Markup.escape("".join(plain))])


def titled(name: str) -> str:
    """Return an enumeration's name as words: `TOPLOC_MISMATCH` is Toploc mismatch."""
    return name.replace("_", " ").capitalize()
