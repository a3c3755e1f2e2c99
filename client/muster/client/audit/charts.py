"""Charts as inline SVG: no script, no external resource, colours from the page's style. Pure.

Every chart has its figures as text too: a title per bar, which browsers show and readers read out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT, MARGIN = 640, 200, 26


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar, stacked of parts."""

    label: str
    """What it is of, below it."""
    parts: tuple[tuple[str, float], ...]
    """Class and height of each part, from below."""
    title: str
    """What it says in words."""


def bar_chart(name: str, bars: Sequence[Bar], *, unit: str) -> str:
    """Return a chart of stacked bars, the highest of which fills it; empty without bars."""
    if not bars:
        return ""
    most = max(sum(height for _, height in bar.parts) for bar in bars) or 1.0
    slot = WIDTH / len(bars)
    shapes = "".join(_bar(bar, place * slot, slot, most) for place, bar in enumerate(bars))
    first, last = escape(bars[0].label), escape(bars[-1].label)
    base = HEIGHT - MARGIN
    return (
        f'<figure><figcaption>{escape(name)}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'role="img" aria-label="{escape(name)}">{shapes}'
        f'<line x1="0" y1="{base}" x2="{WIDTH}" y2="{base}"/>'
        f'<text x="0" y="{HEIGHT - 8}">{first}</text>'
        f'<text x="{WIDTH}" y="{HEIGHT - 8}" text-anchor="end">{last}</text>'
        f'<text x="0" y="10">{escape(f"{most:,.6g} {unit}")}</text></svg></figure>'
    )


def _bar(bar: Bar, left: float, slot: float, most: float) -> str:
    room = HEIGHT - 2 * MARGIN
    shapes, base = "", float(HEIGHT - MARGIN)
    for kind, height in bar.parts:
        tall = room * height / most
        base -= tall
        shapes += (
            f'<rect class="{escape(kind)}" x="{left + 0.1 * slot:.2f}" y="{base:.2f}" '
            f'width="{0.8 * slot:.2f}" height="{tall:.2f}"/>'
        )
    return f"<g><title>{escape(bar.title)}</title>{shapes}</g>"
