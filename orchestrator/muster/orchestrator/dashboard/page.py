"""Renders pages: no build step, no external resource, readable without JavaScript."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from muster.chain import STATE_WORDS, SlashState
from muster.orchestrator.dashboard import wording
from muster.orchestrator.dashboard.chart import draw
from muster.orchestrator.dashboard.figures import Panel
from muster.protocol.errors import EncodingError
from muster.protocol.jury import Ruling
from muster.protocol.messages import Reason
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
"""Only the dashboard's own files run, nothing inline: a worker's words are never markup."""


@dataclass(frozen=True, slots=True)
class Asset:
    """A file of the dashboard."""

    body: bytes
    """Its content."""
    packed: bytes
    """The same, as gzip."""
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


def _asset_url(name: str) -> str:
    return f"/static/{name}?v={ASSETS[name].version}"


def _chart_json(panel: Panel) -> str:
    """Return what the script draws: steps, and per series its label, style and values."""
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
    """Return a table each cell of which names its column, for screens too narrow for columns.

    Rows have as many cells as the head; what a cell shows is escaped, so a tag in it is ours.
    """
    heads = cycle(_HEAD.findall(table))
    return Markup(_CELL.sub(lambda m: f'<td data-label="{next(heads)}"{m[1]}>{m[2] or ""}', table))


def _ruled(number: int) -> str:
    """Return the verdict of a ruling as recorded, claimed or voted."""
    try:
        ruling = Ruling.of(number)
    except EncodingError:
        return f"ruling {number}"
    return "unjudged" if ruling is None else ruling.verdict.name.lower()


def _meaning(reason: Reason) -> str:
    return words_of(reason).meaning


_ENVIRONMENT = Environment(
    loader=FileSystemLoader(_FOLDER / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.filters |= {
    "shorten": wording.shorten,
    "tokens": wording.tokens,
    "count": wording.count,
    "compact": wording.compact,
    "duration": wording.duration,
    "visible": wording.visible,
    "titled": wording.titled,
    "meaning": _meaning,
    "ruled": _ruled,
    "stake_is": lambda state: STATE_WORDS[SlashState(state)],
    "where": lambda loss: loss.where(wording.tokens),
    "labelled": _labelled,
}
_ENVIRONMENT.globals |= {
    "asset": _asset_url,
    "ago": wording.ago,
    "percent": wording.percent,
    "draw": draw,
    "chart_json": _chart_json,
    "words_of": words_of,
}


def render(template: str, **values: Any) -> str:
    """Return a page."""
    return _ENVIRONMENT.get_template(template).render(values)
