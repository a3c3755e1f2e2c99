"""The flag set of every command is frozen: scripts and guides depend on it.

A change that is meant goes into flags.json too (`python tests/unit/devnet/test_devnet_flags.py`
writes it), and into the changelog.
"""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest

from muster.devnet.cli import muster

FILE = Path(__file__).parent / "flags.json"
FROZEN: dict[str, list[str]] = json.loads(FILE.read_text())
SCREEN_LINES = 40
"""A help text that fits a terminal of 80 x 40."""
OTHERS = ("run ", "trainer ", "orchestrator ")
"""Commands of run owners, whose help is longer."""


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
CONTRIBUTORS = [name for name in COMMANDS if not name.startswith(OTHERS)]


def flags_of(command: click.Command) -> list[str]:
    words = []
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            words += [*parameter.opts, *parameter.secondary_opts]
        else:
            words.append((parameter.name or "").upper())
    return sorted(words)


def test_no_command_came_or_went_unnoticed() -> None:
    assert sorted(COMMANDS) == sorted(FROZEN)


@pytest.mark.parametrize("name", sorted(FROZEN))
def test_flags_are_the_frozen_ones(name: str) -> None:
    assert flags_of(COMMANDS[name]) == FROZEN[name]


@pytest.mark.parametrize("name", CONTRIBUTORS)
def test_help_is_one_screen_with_an_example_and_explains_every_flag(name: str) -> None:
    command = COMMANDS[name]
    text = command.get_help(click.Context(command, info_name=f"muster {name}"))
    assert text.count("\n") < SCREEN_LINES
    assert f"muster {name}" in text.split("Options:")[0].split("Example")[1]
    assert all(p.help for p in command.params if isinstance(p, click.Option))


@pytest.mark.parametrize(
    "name", [n for n in CONTRIBUTORS if not n.endswith((" run", "relay", " chat"))]
)
def test_what_prints_data_prints_json_too(name: str) -> None:
    prints_no_data = ("devnet", "calibrate", "completion", "shardcast")
    assert name.startswith(prints_no_data) or "--json" in flags_of(COMMANDS[name])


@pytest.mark.parametrize("name", CONTRIBUTORS)
def test_examples_use_flags_that_exist(name: str) -> None:
    text = COMMANDS[name].get_help(click.Context(COMMANDS[name], info_name=f"muster {name}"))
    examples = text.split("Options:")[0].split("Example")[1].replace("\\\n", " ")
    for line in examples.splitlines():
        if line.strip().startswith(f"muster {name}"):
            used = {word for word in line.split("|")[0].split() if word.startswith("--")}
            assert used <= set(flags_of(COMMANDS[name])), line


if __name__ == "__main__":
    rows = [f"  {json.dumps(n)}: {json.dumps(flags_of(COMMANDS[n]))}" for n in sorted(COMMANDS)]
    FILE.write_text("{\n" + ",\n".join(rows) + "\n}\n")
