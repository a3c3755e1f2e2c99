"""`muster tasks`: what everybody does with task sets, and the filter, which runs a model."""

from __future__ import annotations

import click

from muster.devnet.lazy import Lazy, LazyGroup

COMMANDS = {
    "list": Lazy("muster.client.task_commands:tasks_list", "Verifiers and sets there are."),
    "import": Lazy("muster.client.task_import:tasks_import", "Make a set of rows or families."),
    "show": Lazy("muster.client.task_commands:tasks_show", "Show a set, a problem, its proof."),
    "check": Lazy("muster.client.task_check:tasks_check", "May a run rely on a set?"),
    "sample": Lazy("muster.client.task_commands:tasks_sample", "What a ticket would draw."),
    "filter": Lazy("muster.trainer.tasks_cli:tasks_filter", "Keep what a model half solves."),
    "filter-run": Lazy("muster.trainer.tasks_cli:tasks_filter_run", "The same, by a run's work."),
    "publish": Lazy("muster.client.task_import:tasks_publish", "Write what a run pins."),
}


@click.group(cls=LazyGroup, commands_=COMMANDS)
def tasks() -> None:
    """Prepare the problems of a run."""
