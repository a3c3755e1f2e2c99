"""Command groups that import a command when it is chosen: help needs neither torch nor a chain.

The groups here take commands of several components: `muster run` and `muster tasks`.
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


RUN_COMMANDS = {
    "list": Lazy("muster.client.cli.run:runs_list", "Which runs there are, what they pay."),
    "show": Lazy("muster.client.cli.run:runs_show", "Everything the chain says about a run."),
    "base-model": Lazy("muster.trainer.cli:run_base_model", "Build the demo's base model."),
    "create": Lazy("muster.app.run_create:create", "Create, fund and publish a run."),
    "fund": Lazy("muster.client.cli.run:fund", "Pay tokens into a run."),
    "change": Lazy("muster.client.cli.run:change", "Announce, apply or drop other terms."),
    "rotate": Lazy("muster.client.cli.run:rotate", "Replace trainer or orchestrator."),
    "invite": Lazy("muster.client.cli.run:invite", "Let an account take a validator's seat."),
    "dismiss": Lazy("muster.client.cli.run:dismiss", "Take a validator's seat."),
    "pause": Lazy("muster.client.cli.run:pause", "Stop submissions, or slashing."),
    "resume": Lazy("muster.client.cli.run:resume", "Take submissions again."),
    "recover": Lazy("muster.client.cli.run:recover", "Free what nobody earned."),
    "close": Lazy("muster.client.cli.run:close", "End a run, for good."),
    "reclaim": Lazy("muster.client.cli.run:reclaim", "Pay out what is left of a closed run."),
}


@click.group(cls=LazyGroup, commands_=RUN_COMMANDS)
def run() -> None:
    """Look at runs, create your own, and lead it to its end."""


TASKS_COMMANDS = {
    "list": Lazy("muster.client.cli.tasks:tasks_list", "Verifiers and sets there are."),
    "import": Lazy("muster.client.cli.tasks:tasks_import", "Make a set of rows or families."),
    "show": Lazy("muster.client.cli.tasks:tasks_show", "Show a set, a problem, its proof."),
    "check": Lazy("muster.client.cli.tasks:tasks_check", "May a run rely on a set?"),
    "sample": Lazy("muster.client.cli.tasks:tasks_sample", "What a ticket would draw."),
    "filter": Lazy("muster.trainer.cli:tasks_filter", "Keep what a model half solves."),
    "filter-run": Lazy("muster.trainer.cli:tasks_filter_run", "The same, by a run's work."),
    "publish": Lazy("muster.client.cli.tasks:tasks_publish", "Write what a run pins."),
}


@click.group(cls=LazyGroup, commands_=TASKS_COMMANDS)
def tasks() -> None:
    """Prepare the problems of a run."""
