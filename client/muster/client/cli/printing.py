"""What commands print: JSON for programs, aligned lines for logs, tables on a terminal.

stdout is for data. A table keeps its columns when it is piped, so that it can be cut and grepped.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click

WIDTH = 80
"""Columns that a text fits in when nobody says how many there are."""


def printable(text: str) -> str:
    """Return a text without control characters: strangers' words must not drive the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)


def print_json(value: Any) -> None:
    """Print one line of JSON."""
    click.echo(json.dumps(value))


def print_result(value: Any, as_json: bool, facts: Mapping[str, Any] | str | None = None) -> None:
    """Print the result of a command: as JSON, or for people the facts or the line that word it."""
    if as_json:
        print_json(value)
    elif isinstance(facts, str):
        click.echo(facts)
    else:
        print_facts(value if facts is None else facts)


def print_facts(facts: Mapping[str, Any]) -> None:
    """Print names and values, one a line; nothing for a value that is None or empty."""
    width = max((len(name) for name in facts), default=0)
    rows = []
    for name, value in facts.items():
        if value is None or value == "" or value == []:
            continue
        lines = value if isinstance(value, (list, tuple)) else [value]
        rows += [f"{'' if n else name:{width}}  {line}" for n, line in enumerate(lines)]
    # At once: a reader that has seen enough, such as grep -q, may go after the first line.
    click.echo(printable("\n".join(rows)))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under their columns' names."""
    if not sys.stdout.isatty():
        click.echo(printable("\n".join(plain_table(columns, rows))))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(printable, row))
    Console(markup=False, highlight=False).print(table)


def plain_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines of equal columns, the columns' names first."""
    table = [list(columns), *map(list, rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(columns))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]
