"""Command groups that import a command when it is chosen, so that help needs neither torch nor a
chain.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import click


class Lazy(NamedTuple):
    """A command that is not imported yet."""

    target: str
    """`module:attribute` of a click command."""
    help: str
    """The line shown by the group's help."""


class LazyGroup(click.Group):
    """A group of lazy commands, in the order given."""

    def __init__(self, *args: Any, commands_: Mapping[str, Lazy], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lazy = commands_

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
        """Write the commands' lines."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.help) for name, command in self._lazy.items()])
