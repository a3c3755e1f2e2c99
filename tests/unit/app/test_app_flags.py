"""The flag set of every command is frozen: scripts and guides depend on it.

An intended change goes into flags.json too (`python tests/unit/app/test_app_flags.py` writes it),
and into the changelog.
"""

import json
import re
from pathlib import Path

import click
import pytest
from command_tree import COMMANDS

FILE = Path(__file__).parent / "flags.json"
FROZEN: dict[str, list[str]] = json.loads(FILE.read_text())
SCREEN_LINES = 40
"""A help text that fits a terminal of 80 x 40."""
OTHERS = ("run ", "trainer ", "orchestrator ")
"""Commands of run owners, whose help is longer."""

DIFFER = {
    "what it chooses, counts or writes is the command's own": """
        --all --amount --count --documents --engine --files --honest --keep --model --name --out
        --passes --price --recipe --root --run --sample --seed --signer --state-dir --store
        --task-set --version --wait --worker --calibration --eval-set --node --plan --validator""",
    "whose key it is, and whether it is opened": "--keystore",
    "an owner names accounts, who takes part names URLs": "--orchestrator --trainer",
    "a server names its mirrors, others whom they ask": "--relay --origin --token-file",
    "some write the addresses that others read": "--deployments",
    "`join` is told an endpoint by a stranger, and asks for one's own": "--rpc",
    "a devnet's is the chain's": "--port",
    "the trainer tries its settings; the red team keeps a journal": "--dry-run --json",
    "an orchestrator sets it, an audit is told of it": "--call-timeout-s",
    "a relay goes on serving, others working": "--keep-going",
    "services poll the chain, nodes look at it": "--poll-s",
}
"""Flags that have different help texts, by the reason."""


CONTRIBUTORS = [name for name in COMMANDS if not name.startswith(OTHERS)]


def flags_of(command: click.Command) -> list[str]:
    words = []
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            words += [*parameter.opts, *parameter.secondary_opts]
        else:
            words.append((parameter.name or "").upper())
    return sorted(words)


def wordings() -> dict[str, set[tuple[str, str]]]:
    """Return the help texts of every flag, and the kinds of its value."""
    found: dict[str, set[tuple[str, str]]] = {}
    for command in COMMANDS.values():
        for option in command.params:
            if isinstance(option, click.Option):
                given = "" if option.is_flag else option.make_metavar(click.Context(command))
                kind = re.sub(r"PATH|DIRECTORY|DIR$", "FILE", given.removesuffix(" RANGE"))
                text = re.sub(r" \[.*\]$", "", option.help or "")
                for flag in option.opts:
                    found.setdefault(flag, set()).add((text, kind))
    return found


def test_the_same_flag_is_worded_once() -> None:
    several = {flag for flag, words in wordings().items() if len(words) > 1}
    assert several == set(" ".join(DIFFER.values()).split())


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
