"""`muster completion`: makes a shell complete commands, flags and their values."""

from __future__ import annotations

import click

VARIABLE = "_MUSTER_COMPLETE"
"""What the shell sets when it asks for completions."""


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that makes SHELL complete muster's commands and flags.

    \b
    Examples:
      muster completion bash >> ~/.bashrc
      muster completion zsh >> ~/.zshrc
      muster completion fish > ~/.config/fish/completions/muster.fish
    """
    from click.shell_completion import get_completion_class

    from muster.devnet.cli import muster

    found = get_completion_class(shell)
    assert found is not None  # click knows all three
    click.echo(found(muster, {}, "muster", VARIABLE).source())
