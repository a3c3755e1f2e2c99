"""Command groups that import a command when it is chosen, so that help needs neither torch nor a
chain.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import click


class Lazy(NamedTuple):
    """A command that is not imported yet."""

    target: str
    """`module:attribute` of a click command."""
    help: str
    """The line shown by the group's help."""


class LazyGroup(click.Group):
    """A group of lazy commands, in the order given; help shows them under titles if there are any.

    `sections` names, by title, the commands under it; every command is under one.
    """

    def __init__(
        self,
        *args: Any,
        commands_: Mapping[str, Lazy],
        sections: Mapping[str, Sequence[str]] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._lazy = commands_
        # Where click looks for what a mistyped command may have meant.
        self.commands = {name: click.Command(name) for name in commands_}
        self._sections = sections or {"Commands": list(commands_)}

    def list_commands(self, _ctx: click.Context) -> list[str]:
        """Return the commands' names."""
        return list(self._lazy)

    def get_command(self, _ctx: click.Context, name: str) -> click.Command | None:
        """Return a command, imported now."""
        if name not in self._lazy:
            return None
        module, attribute = self._lazy[name].target.split(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands' lines, all titles' in equal columns."""
        width = max(map(len, self._lazy))
        for title, names in self._sections.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), self._lazy[name].help) for name in names])
