"""Every command of `muster`, by its words."""

import click

from muster.app.cli import muster


def commands_of(group: click.Group = muster, prefix: str = "") -> dict[str, click.Command]:
    found: dict[str, click.Command] = {}
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            found |= commands_of(command, f"{prefix}{name} ")
        if not isinstance(command, click.Group) or command.invoke_without_command:
            found[prefix + name] = command
    return found


COMMANDS = commands_of()
