"""Renders the status as HTML: no build step, no external resource, readable without JavaScript."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from muster.orchestrator.dashboard.chart import draw
from muster.orchestrator.services.status import Status

_FOLDER = Path(__file__).parent / "templates"
_STYLE = (_FOLDER / "page.css").read_text()
_SCRIPT = (_FOLDER / "page.js").read_text()


def _hash_source(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        f"style-src {_hash_source(_STYLE)}",
        f"script-src {_hash_source(_SCRIPT)}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
"""Only the page's own style and script run; a worker's words are never markup."""


def shorten(text: str) -> str:
    """Return an address or hash in the form `0x12345678…cdef`."""
    return text if len(text) <= 16 else f"{text[:8]}…{text[-4:]}"


def tokens(wei: str) -> str:
    """Return an amount of wei in tokens, rounded down to at most four decimals."""
    whole, part = divmod(int(wei), 10**18)
    decimals = f"{part:018d}"[:4].rstrip("0")
    return f"{whole:,}.{decimals}" if decimals else f"{whole:,}"


def ago(seconds: float | None) -> str:
    """Return how long something is past, in its largest unit."""
    if seconds is None:
        return "never"
    seconds = max(0, int(seconds))
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size} {unit} ago"
    return f"{seconds} s ago"


_ENVIRONMENT = Environment(
    loader=FileSystemLoader(_FOLDER),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.filters |= {"shorten": shorten, "tokens": tokens, "ago": ago}


def render(status: Status, *, now: float) -> str:
    """Return the page."""
    return _ENVIRONMENT.get_template("page.html").render(
        status=status,
        now=now,
        chart=draw(status.reward, status.eval_reward),
        style=Markup(_STYLE),
        script=Markup(_SCRIPT),
    )
