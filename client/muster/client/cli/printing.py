"""Printing of the commands: JSON for programs, aligned lines for logs, tables on a terminal.

stdout is for data. A piped table keeps its columns, so that `cut` and `grep` work on it.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click

WIDTH = 80
"""Default width in columns, if the terminal does not give one."""
SENT: list[str] = []
"""Hashes of the transactions that this command sent and would send again; no journal has them."""


def printable(text: str) -> str:
    """Return a text without control characters: a stranger's text must not control the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)


def say_sent(tx_hash: str) -> None:
    """Print a transaction that was sent."""
    click.echo(f"sent {tx_hash}, waiting", err=True)


def tell_sent(tx_hash: str) -> None:
    """Print a transaction that was sent, and keep it for the end of the command."""
    SENT.append(tx_hash)
    say_sent(tx_hash)


def print_json(value: Any) -> None:
    """Print one line of JSON."""
    click.echo(json.dumps(value))


def print_result(value: Any, as_json: bool, facts: Mapping[str, Any] | str | None = None) -> None:
    """Print the result of a command: as JSON, or for people as facts or as one line."""
    if as_json:
        print_json(value)
    elif isinstance(facts, str):
        click.echo(printable(facts))
    else:
        print_facts(value if facts is None else facts)


def print_facts(facts: Mapping[str, Any]) -> None:
    """Print one name and value per line; values that are None or empty are skipped. Further lines
    of a value stand below its first one, so that no value looks like another fact.
    """
    width = max((len(name) for name in facts), default=0)
    rows = []
    for name, value in facts.items():
        if value is None or value == "" or value == []:
            continue
        values = value if isinstance(value, (list, tuple)) else [value]
        lines = [line for each in values for line in str(each).split("\n")]
        rows += [f"{'' if n else name:{width}}  {line}" for n, line in enumerate(lines)]
    # In one write: a reader such as grep -q may close the pipe after the first line.
    click.echo(printable("\n".join(rows)))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under a header."""
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
    """Return a header and rows as lines with aligned columns; a cell is one line."""
    table = [[cell.replace("\n", " ") for cell in row] for row in (columns, *rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(columns))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]
