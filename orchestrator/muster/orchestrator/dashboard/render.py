"""Renders pages: no build step, no external resource, readable without JavaScript."""

import gzip
import hashlib
import json
import re
import unicodedata
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import cycle
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from muster.chain import STATE_WORDS, SlashState
from muster.orchestrator.dashboard.figures import Panel, draw
from muster.protocol.errors import EncodingError
from muster.protocol.jury import Ruling
from muster.protocol.reasons import words_of

_FOLDER = Path(__file__).parent
_KINDS = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8"}

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "style-src 'self'",
        "script-src 'self'",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'self'",
        "frame-ancestors 'none'",
    )
)
"""Only the dashboard's own files run, no inline script: text of a worker is never markup."""


@dataclass(frozen=True, slots=True)
class Asset:
    """A file of the dashboard."""

    body: bytes
    """Its content."""
    packed: bytes
    """The content, compressed with gzip."""
    kind: str
    """Its media type."""
    version: str
    """Changes with its content."""


def _load() -> dict[str, Asset]:
    found = {}
    for path in sorted((_FOLDER / "static").rglob("*")):
        if path.suffix in _KINDS:
            body = path.read_bytes()
            version = hashlib.sha256(body).hexdigest()[:12]
            name = path.relative_to(_FOLDER / "static").as_posix()
            found[name] = Asset(body, gzip.compress(body, mtime=0), _KINDS[path.suffix], version)
    return found


ASSETS = _load()
"""By name under `/static/`."""


def _chart_json(panel: Panel) -> str:
    """Return a chart's data for the script: steps, and per series its label, style and values."""
    steps = sorted(
        {p.step for series in panel.series for p in series.points}
        | {step for series in panel.series for step in series.gaps}
    )
    series = []
    for each in panel.series:
        by_step = {p.step: p for p in each.points}
        entry: dict[str, Any] = {
            "label": each.label,
            "dots": each.is_dots,
            "has_gaps": bool(each.gaps),
            "values": [by_step[s].value if s in by_step else None for s in steps],
        }
        if any(p.low != p.high for p in each.points):
            entry["low"] = [by_step[s].low if s in by_step else None for s in steps]
            entry["high"] = [by_step[s].high if s in by_step else None for s in steps]
        series.append(entry)
    return json.dumps(
        {
            "steps": steps,
            "series": series,
            "floor": panel.floor,
            "ceiling": panel.ceiling,
            "decimals": panel.decimals,
        },
        separators=(",", ":"),
    )


_HEAD = re.compile(r'<th scope="col"[^>]*>(.*?)</th>')
_CELL = re.compile(r"<td\b([^>]*)>\s*(</td>)?")


def _labelled(table: str) -> Markup:
    """Return the table with its column's name on each cell, for screens too narrow for columns.

    Rows have as many cells as the head. Cell contents are escaped, so every tag in them is ours.
    """
    heads = cycle(_HEAD.findall(table))
    return Markup(_CELL.sub(lambda m: f'<td data-label="{next(heads)}"{m[1]}>{m[2] or ""}', table))


def _ruled(number: int) -> str:
    """Return the name of a ruling's verdict."""
    try:
        ruling = Ruling.of(number)
    except EncodingError:
        return f"ruling {number}"
    return "unjudged" if ruling is None else ruling.verdict.name.lower()


_SHOWN = frozenset("\n\t")
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories of characters that are invisible or change the display of others."""


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
    """Return a share in percent; a dash when the whole is 0."""
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
    """Return the distance of a time from now, with the exact time as tooltip."""
    if at is None:
        return Markup('<span class="soft">never</span>')
    words = f"{duration(now - at)} ago" if at <= now else f"in {duration(at - now)}"
    stamp = _utc(at)
    return Markup('<time datetime="{}" title="{}">{}</time>').format(
        stamp.strftime("%Y-%m-%dT%H:%M:%SZ"), stamp.strftime("%Y-%m-%d %H:%M:%S UTC"), words
    )


def _utc(at: float) -> datetime:
    # Times in peers' tickets are uint64; one beyond the calendar is shown as its last day.
    return datetime.fromtimestamp(min(max(at, 0), 253_402_300_799), UTC)


def visible(text: object) -> Markup:
    """Return a stranger's text with invisible and reordering characters made visible."""
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


_ENVIRONMENT = Environment(
    loader=FileSystemLoader(_FOLDER / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.filters |= {
    "shorten": shorten,
    "tokens": tokens,
    "count": count,
    "compact": compact,
    "duration": duration,
    "visible": visible,
    "titled": titled,
    "meaning": lambda reason: words_of(reason).meaning,
    "ruled": _ruled,
    "stake_is": lambda state: STATE_WORDS[SlashState(state)],
    "where": lambda loss: loss.where(tokens),
    "labelled": _labelled,
}
_ENVIRONMENT.globals |= {
    "asset": lambda name: f"/static/{name}?v={ASSETS[name].version}",
    "ago": ago,
    "percent": percent,
    "draw": draw,
    "chart_json": _chart_json,
    "words_of": words_of,
}


def render(template: str, **values: Any) -> str:
    """Return a page."""
    return _ENVIRONMENT.get_template(template).render(values)
