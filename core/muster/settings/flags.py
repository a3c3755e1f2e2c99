"""Shared parts of commands: common flags, help under titles, recipes.

The recipes that come with the software have names: they are in `configs/` of a checkout, and in
`presets` here in a wheel.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click

from muster.settings import joined
from muster.settings.profiles import choose, resolve

F = TypeVar("F", bound=Callable[..., Any])

FILE = click.Path(dir_okay=False, path_type=Path)
FOLDER = click.Path(file_okay=False, path_type=Path)
ORCHESTRATOR_HELP = "The run's orchestrator."
PASSWORD_HELP = "Password; else MUSTER_PASSWORD, else ask."
CONFIRMATIONS_HELP = "Blocks on top before it acts. [default: 0]"
RELAY_HELP = "Relay to use; repeatable."


def together(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Return one decorator that adds several options, in the order in which help lists them."""

    def add(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return add


chain_options = together(
    click.option(
        "--rpc",
        metavar="URL",
        multiple=True,
        callback=joined,
        help="RPC endpoint, repeatable; else MUSTER_RPC.",
    ),
    click.option("--deployments", type=FOLDER, help="Contracts' folder; else MUSTER_DEPLOYMENTS."),
    click.option(
        "--network",
        "network_name",
        metavar="NAME",
        expose_value=False,
        is_eager=True,
        callback=choose,
        help="Network profile; else MUSTER_NETWORK.",
    ),
)


def endpoint(options: Mapping[str, Any]) -> tuple[str, Path]:
    """Return the RPC endpoint and the folder of addresses of a command."""
    _, rpc, deployments = resolve(options["rpc"], options["deployments"])
    return rpc, deployments


ENGINES = ("transformers", "vllm")
"""Engines that run models: docs/engines.md."""
DTYPES = ("float32", "bfloat16")
"""Number formats that engines compute in."""


engine_choice = together(
    click.option(
        "--engine",
        type=click.Choice(ENGINES),
        help="What runs the model. [default: transformers]",
    ),
    click.option(
        "--dtype", type=click.Choice(DTYPES), help="Arithmetic of the model. [default: float32]"
    ),
    click.option("--threads", type=click.IntRange(1, 256), help="CPU threads. [default: 1]"),
    click.option("--device", help="Where the model computes. [default: cpu]"),
)


def orchestrator_option(command: F) -> F:
    """Add --orchestrator, whose default is the run's in the network's profile."""
    return click.option("--orchestrator", metavar="URL", help=ORCHESTRATOR_HELP)(
        _served(command, "orchestrator")
    )


def relay_option(command: F) -> F:
    """Add --relay, whose default is the run's relays in the network's profile."""
    return click.option("--relay", multiple=True, metavar="URL", help=RELAY_HELP)(
        _served(command, "relay")
    )


def _served(command: F, name: str) -> F:
    """Return the command with the run's services filled in if no flag sets them."""

    @wraps(command)
    def filled(*args: Any, **options: Any) -> Any:
        if not options[name] and (options.get("run") or options.get("run_id")):
            run = options.get("run") or options.get("run_id")
            place, *_ = resolve(options["rpc"], options["deployments"])
            served = place.served(run)
            options[name] = served.orchestrator if name == "orchestrator" else served.relays
        return command(*args, **options)

    return filled  # type: ignore[return-value]  # same signature


class SectionedCommand(click.Command):
    """A command whose help has its options under titles.

    `sections` has the parameters of each title; all others come last, under `Others`.
    """

    def __init__(self, *args: Any, sections: Mapping[str, Sequence[str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sections = sections

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, title by title."""
        records = {
            param.name: record
            for param in self.get_params(ctx)
            if (record := param.get_help_record(ctx)) is not None
        }
        for title, names in self.sections.items():
            with formatter.section(title):
                formatter.write_dl([records.pop(name) for name in names])
        if records:
            with formatter.section("Others"):
                formatter.write_dl(list(records.values()))


_PLACES = (Path(__file__).parent / "presets", Path(__file__).parents[3] / "configs")


def preset_names() -> list[str]:
    """Return the names of all presets, sorted."""
    return sorted({path.stem for place in _PLACES for path in place.glob("*.toml")})


def find_preset(name: str) -> Path | None:
    """Return the file of a preset; None when there is none of that name."""
    if name not in preset_names():
        return None
    return next(path for place in _PLACES if (path := place / f"{name}.toml").exists())


class RecipePath(click.Path):
    """A recipe on a command line: a file's path, or the name of a preset."""

    name = "recipe"

    def __init__(self) -> None:
        super().__init__(exists=True, dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path; fails with the presets' names when it is neither."""
        if Path(value).is_file():  # a folder may have a preset's name
            return super().convert(value, param, ctx)
        preset = find_preset(str(value))
        if preset is None:
            names = ", ".join(preset_names())
            self.fail(f"{str(value)!r} is no file, and no preset ({names})", param, ctx)
        return preset


RECIPE = RecipePath()
