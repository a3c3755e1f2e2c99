"""The `muster` command: one lazy group over every component's commands.

Nothing is imported until its command is chosen, so `muster --help` needs neither torch nor a chain.
`muster run` and `muster tasks` take commands of several components, so they are put together here.
"""

import gc
import importlib
import re
import sys
import traceback
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any, NamedTuple, NoReturn

import click

from muster.client.cli.printing import SENT, printable
from muster.protocol.errors import (
    ApiError,
    ChainUnreachable,
    MusterError,
    NotYet,
    PolicyUnavailable,
    RpcError,
    StorageFailed,
    TransactionLost,
    install_hint,
    may_pass,
)


class Lazy(NamedTuple):
    """A command that is not imported yet."""

    target: str
    """`module:attribute` of a click command."""
    help: str
    """The line shown by the group's help."""


class LazyGroup(click.Group):
    """A group of lazy commands in the given order; help shows them under section titles, if any.

    `sections` maps titles to commands; every command is in one section.
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
        # click reads this to suggest a command for a mistyped one.
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
        """Write the commands' lines, with the same columns in all sections."""
        width = max(map(len, self._lazy))
        for title, names in self._sections.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), self._lazy[name].help) for name in names])


RUN_COMMANDS = {
    "list": Lazy("muster.client.cli.run:runs_list", "List the runs and what they pay."),
    "show": Lazy("muster.client.cli.run:runs_show", "Show everything the chain says about a run."),
    "base-model": Lazy("muster.trainer.cli:run_base_model", "Build the demo's base model."),
    "create": Lazy("muster.app.run_create:create", "Create, fund and publish a run."),
    "fund": Lazy("muster.client.cli.run:fund", "Pay tokens into a run."),
    "change": Lazy("muster.client.cli.run:change", "Announce, apply or drop new terms."),
    "rotate": Lazy("muster.client.cli.run:rotate", "Replace the trainer or the orchestrator."),
    "invite": Lazy("muster.client.cli.run:invite", "Invite an account to be a validator."),
    "dismiss": Lazy("muster.client.cli.run:dismiss", "Remove a validator."),
    "pause": Lazy("muster.client.cli.run:pause", "Pause submissions, or slashing."),
    "resume": Lazy("muster.client.cli.run:resume", "Accept submissions again."),
    "recover": Lazy(
        "muster.client.cli.run:recover", "Free the rewards of outcomes that were not accepted."
    ),
    "close": Lazy("muster.client.cli.run:close", "End a run, for good."),
    "reclaim": Lazy("muster.client.cli.run:reclaim", "Pay out the rest of a closed run's funds."),
}


@click.group(cls=LazyGroup, commands_=RUN_COMMANDS)
def run() -> None:
    """Look at runs; create, fund and end your own."""


TASKS_COMMANDS = {
    "list": Lazy("muster.client.cli.tasks:tasks_list", "List the verifiers and the problem sets."),
    "import": Lazy(
        "muster.client.cli.tasks:tasks_import", "Make a set from rows or task families."
    ),
    "show": Lazy("muster.client.cli.tasks:tasks_show", "Show a set, or a problem and its proof."),
    "check": Lazy("muster.client.cli.tasks:tasks_check", "Check whether a run may use a set."),
    "sample": Lazy(
        "muster.client.cli.tasks:tasks_sample", "Show the problems that a ticket draws."
    ),
    "filter": Lazy(
        "muster.trainer.cli:tasks_filter", "Keep problems that a model solves sometimes."
    ),
    "filter-run": Lazy(
        "muster.trainer.cli:tasks_filter_run", "Keep problems by the results of a run."
    ),
    "pack": Lazy(
        "muster.client.cli.tasks:tasks_pack", "Combine several sets into one, as its parts."
    ),
    "publish": Lazy(
        "muster.client.cli.tasks:tasks_publish", "Write the set's document, which a run pins."
    ),
}


@click.group(cls=LazyGroup, commands_=TASKS_COMMANDS)
def tasks() -> None:
    """Prepare the problems of a run."""


PACKAGE = "muster-rl"
LAB = "muster.lab"
"""Package of the studies; it is in a checkout, but not in a wheel."""
_OF_EXTRA = re.compile(r"([\w.-]+).*extra == ['\"]([\w-]+)['\"]")
_DISTRIBUTIONS = {"pynvml": "nvidia-ml-py"}
"""Modules whose distribution has another name."""
_EXTRAS_OF_EXTRAS = ("demo", "dev")
REFUSED, LATER, CRASHED, STOPPED = 1, 3, 70, 130
"""Exit codes, see docs/reference/exit-codes.md; wrong usage is click's 2."""
_LATER = (ChainUnreachable, NotYet, PolicyUnavailable, RpcError, StorageFailed)
_PR_SET_DUMPABLE = 4
COMPLETION_VARIABLE = "_MUSTER_COMPLETE"
"""Environment variable that the shell sets to request completions."""
COLLECT_AFTER = (5_000, 10, 10)
"""Thresholds of Python's garbage collector. With the default of 700 objects, collection takes a
fifth of the time of importing torch and transformers.
"""


COMMANDS = {
    "demo": Lazy("muster.app.demo.story:demo", "See the whole network learn and catch a cheater."),
    "devnet": Lazy("muster.app.devnet:devnet", "Start a local chain with the contracts."),
    "init": Lazy("muster.client.cli.keys:init", "Create the keys of a worker and its node."),
    "doctor": Lazy(
        "muster.client.doctor.command:doctor", "Check whether this machine is fit for a run."
    ),
    "join": Lazy(
        "muster.client.cli.network:join", "Save a run's network as its orchestrator describes it."
    ),
    "network": Lazy("muster.client.cli.network:network", "Name networks, and choose one."),
    "wallet": Lazy("muster.client.cli.keys:wallet", "Create and show encrypted keystores."),
    "stake": Lazy("muster.client.cli.stake:stake", "Stake for a run, and become its worker."),
    "unstake": Lazy("muster.client.cli.stake:unstake", "Take stake back, or leave."),
    "node": Lazy("muster.client.cli.keys:node", "Replace a worker's hot key."),
    "worker": Lazy("muster.client.cli.worker:worker", "Generate rollouts and be paid."),
    "explain": Lazy("muster.client.cli.explain:explain", "Show what happened to a submission."),
    "rewards": Lazy("muster.client.cli.worker:rewards", "Show and claim what a worker has earned."),
    "validator": Lazy("muster.client.cli.judges:validator", "Check rollouts and sign verdicts."),
    "juror": Lazy("muster.client.cli.judges:juror", "Judge disputes of the whole network."),
    "dispute": Lazy("muster.client.cli.dispute:dispute", "Dispute outcomes before jurors."),
    "model": Lazy("muster.client.cli.model:model", "Fetch the model that a run trains."),
    "data": Lazy("muster.client.cli.data:data", "Make data sets of verified rollouts."),
    "relay": Lazy("muster.client.relay:relay", "Mirror policy weights for others."),
    "shardcast": Lazy(
        "muster.client.cli.shardcast:shardcast", "Broadcast large files, verified chunk by chunk."
    ),
    "calibrate": Lazy(
        "muster.client.calibration:calibrate", "Measure a model's validation limits."
    ),
    "tasks": Lazy("muster.app.cli:tasks", "Import, check and publish problems."),
    "economics": Lazy(
        "muster.lab.economics.command:economics", "Compute what cheating earns in a run."
    ),
    "contracts": Lazy(
        "muster.client.cli.contracts:contracts", "Deploy a network's contracts, verify them."
    ),
    "run": Lazy("muster.app.cli:run", "Look at runs; create, fund and end your own."),
    "trainer": Lazy("muster.trainer.cli:trainer", "Train the policy and publish it."),
    "evaluate": Lazy("muster.trainer.cli:evaluate", "Measure a run's versions beside training."),
    "orchestrator": Lazy("muster.orchestrator.cli:orchestrator", "Lease work and record outcomes."),
    "simulate": Lazy(
        "muster.lab.simulator.command:simulate", "Simulate a network in virtual time."
    ),
    "audit": Lazy(
        "muster.client.audit.command:audit", "Rebuild and check everything from the chain."
    ),
    "redteam": Lazy("muster.lab.redteam.command:redteam", "Attack this software's defences."),
    "completion": Lazy("muster.app.cli:completion", "Make the shell complete words."),
}
SECTIONS = {
    "Contribute": [
        *("join", "init", "doctor", "stake", "worker", "rewards", "unstake", "node", "wallet"),
        "network",
    ],
    "Look and check": ["run", "explain", "audit", "dispute", "model", "data", "evaluate"],
    "Serve": ["validator", "juror", "relay", "orchestrator", "trainer", "contracts"],
    "Prepare": ["tasks", "calibrate"],
    "Develop": ["demo", "devnet", "shardcast", "completion"],
    "Study, from a checkout": ["economics", "simulate", "redteam"],
}
"""The commands by topic."""


@click.group(
    cls=LazyGroup,
    commands_=COMMANDS,
    sections=SECTIONS,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@click.version_option(package_name=PACKAGE)
def muster() -> None:
    """Train language models on strangers' computers; only verified work changes the model.

    \b
    Start here:
      muster demo            the whole network on this machine, in two minutes
      muster init            keys, to contribute a computer to a run
      muster audit           what happened, rebuilt from the chain alone

    Exit codes: 0 done, 1 refused or unfit, 2 wrong usage, 3 not now: try the same command later,
    130 stopped.
    """


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

    found = get_completion_class(shell)
    assert found is not None  # click knows all three
    click.echo(found(muster, {}, "muster", COMPLETION_VARIABLE).source())


def exit_code(error: MusterError) -> int:
    """Return 3 for an error after which a later retry may succeed by itself, else 1."""
    if isinstance(error, ApiError):
        return LATER if error.is_passing else REFUSED
    if isinstance(error, TransactionLost):
        # A repeated command would pay twice where nothing remembers the first transaction.
        return LATER if error.is_remembered else REFUSED
    return LATER if isinstance(error, _LATER) else REFUSED


def main(command: click.Command | None = None) -> None:
    """Run a command line; a MusterError becomes `error:` and `hint:` lines and an exit code.

    What ends after a transaction was sent says so: code 3 would make scripts pay again.
    """
    _hide_memory()
    SENT.clear()
    # Objects that existed at the fork are permanent; the collector need not scan them.
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)
    try:
        (command or muster).main(standalone_mode=False)
    except MusterError as error:
        _fail(str(error), error.hint, exit_code(error))
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        _say(_sent_hint())
        sys.exit(STOPPED)
    except ModuleNotFoundError as error:
        if error.name == LAB:
            _fail(
                "the lab is not in the package", "clone the repository and run this command there"
            )
        if error.name is None or error.name.split(".")[0] == "muster":
            _crash()
        _fail(f"{error.name} is not installed", install_hint(extra_of(error.name)))
    except OSError as error:
        shown = f"{error.strerror or error}: {error.filename or ''}".rstrip(": ")
        _fail(shown, _os_hint(error), LATER if may_pass(error) else REFUSED)
    except Exception:
        _crash()


def _hide_memory() -> None:
    """Hide this process's memory and environment, with passwords and keys, from other processes of
    its user: those that it starts read what strangers made. Only on Linux.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def extra_of(module: str) -> str:
    """Return the extra of this package that installs a module; `demo` if no extra names it."""
    name = _DISTRIBUTIONS.get(module, module).split(".")[0].replace("_", "-")
    for requirement in metadata.requires(PACKAGE) or ():
        found = _OF_EXTRA.match(requirement)
        if found is None or found[2] in _EXTRAS_OF_EXTRAS:
            continue
        if found[1].lower().replace("_", "-") == name:
            return found[2]
    return "demo"


def _crash() -> NoReturn:
    """End with the traceback of what is no message of ours: out of memory, or a defect."""
    traceback.print_exc()
    _say(_sent_hint())
    sys.exit(REFUSED if SENT else CRASHED)


def _fail(message: str, hint: str | None, code: int = REFUSED) -> None:
    click.echo(f"error: {printable(message)}", err=True)
    _say(_sent_hint() or hint)
    sys.exit(REFUSED if SENT else code)


def _say(hint: str | None) -> None:
    if hint:
        click.echo(f"hint: {printable(hint)}", err=True)


def _sent_hint() -> str | None:
    """Return what to do about the transactions that the command has sent; None without any."""
    if not SENT:
        return None
    return (
        f"look for {' and '.join(SENT)} on chain before you run the command again, which would "
        "send another one"
    )


def _os_hint(error: OSError) -> str | None:
    import errno

    return {
        errno.ENOSPC: "the disk is full: free some space, then run the same command again",
        errno.EADDRINUSE: "another program uses that port: stop it, or choose another with --port",
        errno.EACCES: "check who owns the path and its permissions",
    }.get(error.errno or 0)
