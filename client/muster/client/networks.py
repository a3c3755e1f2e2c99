"""`muster network`: names for networks, in the user's own config.toml. No key is ever in it."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import click

from muster.client.options import chain_options, endpoint, json_option
from muster.client.printing import print_facts, print_json, print_table
from muster.protocol.errors import ConfigError
from muster.settings.network import (
    DEVNET,
    Profile,
    Profiles,
    Served,
    config_folder,
    known_profile,
    read_profiles,
    require_name,
    resolve,
    running_devnet,
    write_profiles,
)


@click.group()
def network() -> None:
    """Name networks, and choose the one that commands mean."""


@network.command()
@click.argument("name")
@click.option("--run", type=click.IntRange(min=1), help="The run that these serve:")
@click.option("--orchestrator", metavar="URL", help="The run's orchestrator.")
@click.option("--relay", multiple=True, metavar="URL", help="Relay to use; repeatable.")
@json_option
@chain_options
def add(
    name: str,
    run: int | None,
    orchestrator: str | None,
    relay: tuple[str, ...],
    as_json: bool,
    **options: Any,
) -> None:
    """Name a network, after asking its endpoint for chain and contracts.

    The first network becomes the current one. `muster join URL` does all of it for a run whose
    orchestrator tells where its network is.

    \b
    Example:
      muster network add main --rpc https://rpc.example.org --deployments ./deployments
    """
    require_name(name)
    known = read_profiles()
    if name in known.networks:
        raise ConfigError(
            f"there is a network {name!r} already", hint=f"muster network remove {name}"
        )
    if (orchestrator or relay) and run is None:
        raise ConfigError("whose --orchestrator and --relay?", hint="name the run with --run")
    rpc, deployments = endpoint(options)
    runs = {} if run is None else {str(run): Served(orchestrator=orchestrator, relays=relay)}
    profile = Profile(
        chain_id=asyncio.run(_chain_id(rpc, deployments)),
        rpc=tuple(rpc.split(",")),
        deployments=_lasting(deployments),
        runs=runs,
    )
    current = known.current or name
    file = write_profiles(Profiles(current=current, networks={**known.networks, name: profile}))
    if as_json:
        print_json(describe(name, profile, is_current=current == name))
    else:
        click.echo(f"{name} is chain {profile.chain_id}, in {file}")


async def _chain_id(rpc: str, deployments: Path) -> int:
    """Return the number of the chain, which has the contracts; raises ChainError, ConfigError."""
    from muster.chain import Chain

    async with await Chain.connect(rpc, deployments) as chain:
        return chain.chain_id


def _lasting(folder: Path) -> Path:
    """Return a folder as it is seen from everywhere; one at home as it was written."""
    return folder if str(folder).startswith("~") else folder.absolute()


@network.command("list")
@json_option
def list_(as_json: bool) -> None:
    """List the networks that have a name; a star is at the one that commands mean.

    \b
    Example:
      muster network list
    """
    known = read_profiles()
    found = dict(known.networks)
    if (devnet := running_devnet()) is not None:
        found[DEVNET] = devnet
    chosen = resolve(None, None)[0].name
    rows = [describe(name, found[name], is_current=name == chosen) for name in found]
    if as_json:
        print_json(rows)
    elif rows:
        print_table(
            ["", "network", "chain", "endpoint", "runs"],
            [
                [
                    "*" if row["current"] else "",
                    row["network"],
                    str(row["chain_id"]),
                    row["rpc"][0] + (" …" if len(row["rpc"]) > 1 else ""),
                    ", ".join(row["runs"]),
                ]
                for row in rows
            ],
        )
    else:
        click.echo("none: `muster network add`, `muster join` or `muster devnet`", err=True)


@network.command()
@click.argument("name")
@json_option
def use(name: str, as_json: bool) -> None:
    """Make a network the current one: what commands mean unless told otherwise.

    \b
    Example:
      muster network use main
    """
    known = read_profiles()
    if name != DEVNET:
        known_profile(known, name)
    file = write_profiles(Profiles(current=name, networks=known.networks))
    if as_json:
        print_json({"current": name})
    else:
        click.echo(f"{name} is the current network, in {file}")


@network.command()
@click.argument("name", required=False)
@json_option
def show(name: str | None, as_json: bool) -> None:
    """Show a network: NAME, or else the one that commands mean here.

    \b
    Example:
      muster network show main
    """
    from muster.chain.rpc import mask_url

    known, chosen = read_profiles(), resolve(None, None)[0]
    if name is None:
        name, profile = chosen.name, chosen.profile
    elif name == DEVNET:
        profile = running_devnet()
    else:
        profile = known_profile(known, name)
    if name is None or profile is None:
        raise ConfigError(
            "no devnet runs on this machine"
            if name
            else f"no network is current: commands mean {mask_url(resolve(None, None)[1])}",
            hint="`muster network list` shows what has a name, `muster network add` gives one",
        )
    facts = describe(name, profile, is_current=name == chosen.name)
    if as_json:
        print_json(facts)
        return
    services = [
        f"{run}: {', '.join(filter(None, [served['orchestrator'], *served['relays']]))}"
        for run, served in facts.pop("runs").items()
    ]
    print_facts({**facts, "current": "yes" if facts["current"] else "no", "run": services})


@network.command()
@click.argument("name")
@json_option
def remove(name: str, as_json: bool) -> None:
    """Forget a network. The folder of its contracts stays, unless `muster join` wrote it.

    \b
    Example:
      muster network remove main
    """
    known = read_profiles()
    profile = known_profile(known, name)
    left = {other: known.networks[other] for other in known.networks if other != name}
    write_profiles(
        Profiles(current=None if known.current == name else known.current, networks=left)
    )
    if profile.deployments == joined_folder(name):
        shutil.rmtree(profile.deployments, ignore_errors=True)
    if as_json:
        print_json({"removed": name})
    else:
        click.echo(f"{name} is forgotten")


def joined_folder(name: str) -> Path:
    """Return where `muster join` puts the addresses of a network's contracts."""
    folder = config_folder()
    if folder is None:
        raise ConfigError("neither HOME nor XDG_CONFIG_HOME is set", hint="set one of them")
    return folder / "networks" / name


def describe(name: str, profile: Profile, *, is_current: bool) -> dict[str, Any]:
    """Return what is shown of a network; secrets of endpoints are not."""
    from muster.chain.rpc import mask_url

    return {
        "network": name,
        "current": is_current,
        "chain_id": profile.chain_id,
        "rpc": [mask_url(url) for url in profile.rpc],
        "deployments": str(profile.deployments),
        "runs": {run: served.model_dump() for run, served in profile.runs.items()},
    }
