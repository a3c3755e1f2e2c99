"""`muster network` and `muster join`: names for networks, in the user's own config.toml.

That file never holds a key. `muster join` takes a network's profile from an invitation to a run. An
orchestrator is a stranger, so the command checks its answer before it writes anything: the form is
valid, the chain has the contracts and the run, the run's orchestrator signed the answer, and an
internet host names none in the user's own network. It shows the answer, and asks. In an existing
profile it only adds the run. The relays it only shows: processes ask the orchestrator for them, and
resolve their names. It sends nothing about the user.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from muster.chain import Chain, Deployment
from muster.chain.deployment import load_deployment, parse_deployment, save_deployment
from muster.chain.rpc import mask_url
from muster.client.cli.options import endpoint, json_option, looking_options, yes_option
from muster.client.cli.printing import print_facts, print_json, print_result, print_table
from muster.protocol.errors import (
    ApiError,
    ConfigError,
    ContractRevert,
    EncodingError,
    SignatureError,
)
from muster.protocol.ids import Address, RunId
from muster.settings import joined, urls_of
from muster.settings.profiles import (
    DEVNET,
    NetworkProfile,
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

if TYPE_CHECKING:
    from muster.api.network_document import NetworkPage


@click.group()
def network() -> None:
    """Name networks, and choose the one that commands mean."""


@network.command()
@click.argument("name")
@click.option(
    "--run", type=click.IntRange(min=1), help="The run that --orchestrator and --relay serve."
)
@click.option("--orchestrator", metavar="URL", help="The run's orchestrator.")
@click.option("--relay", multiple=True, metavar="URL", help="Relay to use; repeatable.")
@looking_options
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
            f"there is a network {name!r} already",
            hint=f"choose another name, or remove the old network: muster network remove {name}",
        )
    if (orchestrator or relay) and run is None:
        raise ConfigError(
            "--orchestrator and --relay belong to a run, and --run is missing",
            hint="give the run with --run N",
        )
    rpc, deployments = endpoint(options)
    runs = {} if run is None else {str(run): Served(orchestrator=orchestrator, relays=relay)}
    profile = NetworkProfile(
        chain_id=asyncio.run(_chain_id(rpc, deployments)),
        rpc=tuple(rpc.split(",")),
        deployments=_lasting(deployments),
        runs=runs,
    )
    current = known.current or name
    file = write_profiles(Profiles(current=current, networks={**known.networks, name: profile}))
    described = describe(name, profile, is_current=current == name)
    print_result(described, as_json, f"{name} is chain {profile.chain_id}, in {file}")


async def _chain_id(rpc: str, deployments: Path) -> int:
    """Return the id of a chain that has the contracts; raises ChainError or ConfigError if not."""
    async with await Chain.connect(rpc, deployments) as chain:
        return chain.chain_id


def _lasting(folder: Path) -> Path:
    """Return a path that is valid from every folder: absolute, or unchanged if it starts with ~."""
    return folder if str(folder).startswith("~") else folder.absolute()


@network.command("list")
@json_option
def list_(as_json: bool) -> None:
    """List the named networks; a star marks the one that commands use.

    \b
    Example:
      muster network list
    """
    known = read_profiles()
    found = dict(known.networks)
    if (devnet := running_devnet()) is not None:
        found[DEVNET] = devnet
    chosen = _current()
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


def _current() -> str | None:
    """Return the name of the network that commands mean; None also when that one is not there."""
    try:
        return resolve(None, None)[0].name
    except ConfigError:
        return None


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
    print_result({"current": name}, as_json, f"{name} is the current network, in {file}")


@network.command()
@click.argument("name", required=False)
@json_option
def show(name: str | None, as_json: bool) -> None:
    """Show a network: NAME, or else the one that commands mean here.

    \b
    Example:
      muster network show main
    """
    if name is None:
        chosen = resolve(None, None)[0]
        name, profile = chosen.name, chosen.profile
    elif name == DEVNET:
        profile = running_devnet()
    else:
        profile = known_profile(read_profiles(), name)
    if name is None or profile is None:
        raise ConfigError(
            "no devnet runs on this machine"
            if name
            else f"no network is current: commands mean {mask_url(resolve(None, None)[1])}",
            hint="`muster network list` shows what has a name, `muster network add` gives one",
        )
    facts = describe(name, profile, is_current=name == _current())
    services = [
        f"{run}: {', '.join(filter(None, [served['orchestrator'], *served['relays']]))}"
        for run, served in facts["runs"].items()
    ]
    words = {"current": "yes" if facts["current"] else "no", "runs": None, "run": services}
    print_result(facts, as_json, facts | words)


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
    print_result({"removed": name}, as_json, f"{name} is forgotten")


def joined_folder(name: str) -> Path:
    """Return the folder in which `muster join` writes the addresses of a network's contracts."""
    folder = config_folder()
    if folder is None:
        raise ConfigError("neither HOME nor XDG_CONFIG_HOME is set", hint="set one of them")
    return folder / "networks" / name


def describe(name: str, profile: NetworkProfile, *, is_current: bool) -> dict[str, Any]:
    """Return a network's public facts as JSON values; secrets in endpoints are masked."""
    return {
        "network": name,
        "current": is_current,
        "chain_id": profile.chain_id,
        "rpc": [mask_url(url) for url in profile.rpc],
        "deployments": str(profile.deployments),
        "runs": {run: served.model_dump() for run, served in profile.runs.items()},
    }


DEADLINE_S = 30.0
"""Deadline of the orchestrator's answer."""
NEXT = (
    "muster doctor --run {run}",
    "muster init",
    "muster doctor --run {run} --no-proof "
    '--worker "$(muster wallet show ~/.muster/worker.json)" --keystore ~/.muster/node.json '
    " # says which tokens and coins to send to both accounts",
    "muster stake --keystore ~/.muster/worker.json --node ~/.muster/node.json --run {run}",
    "muster worker run --run {run} --keystore ~/.muster/node.json "
    '--worker "$(muster wallet show ~/.muster/worker.json)" '
    "--state-dir ~/.muster/run-{run}",
)
"""The next steps of a newcomer, as shell lines."""


@dataclass(frozen=True, slots=True)
class Invitation:
    """An orchestrator's answer, checked with the chain."""

    page: NetworkPage
    """The answer."""
    deployment: Deployment
    """The contracts that it names."""
    rpcs: tuple[str, ...]
    """The endpoints used for the check, which go into the profile."""
    signer: Address
    """The run's orchestrator on chain, which signed the answer."""
    named_by: str
    """Who named the endpoints; empty for the run itself."""


@click.command()
@click.argument("url")
@click.option("--name", help="The profile's name. [default: the host's]")
@click.option(
    "--rpc",
    metavar="URL",
    multiple=True,
    callback=joined,
    help="Your own endpoint of the chain, instead of those that the run names.",
)
@yes_option
@json_option
def join(url: str, name: str | None, rpc: str | None, yes: bool, as_json: bool) -> None:
    """Learn a run's network from its orchestrator's URL, and make it the current one.

    The chain must have the run and its contracts, and the run's orchestrator must have signed. A
    network that you have already is asked at its own endpoint. But an endpoint that the run names
    can invent a chain. Before you stake anything, give your own endpoint with --rpc, and compare
    the contracts with addresses that you trust.

    \b
    Example:
      muster join https://orchestrator.example.org --rpc https://my-node.example.org
    """
    if name is not None:
        require_name(name)
    known = read_profiles()
    invited = asyncio.run(read_invitation(url, rpc, known, name))
    chosen, profile = plan(known, invited, url, name)
    facts = _facts(chosen, invited, profile)
    if not as_json:
        print_facts(facts)
    for note in _notes(known, chosen, invited):
        click.echo(f"note: {note}", err=True)
    if not yes:
        click.confirm("Keep this network, and use it from now on?", abort=True, err=True)
    _keep(known, chosen, profile, invited)
    following = [line.format(run=invited.page.run_id) for line in NEXT]
    if as_json:
        print_json({**facts, "next": following})
    else:
        click.echo("\n".join([f"{chosen} is the current network. Next:", *following]), err=True)


async def read_invitation(
    url: str, rpc: str | None, known: Profiles, name: str | None
) -> Invitation:
    """Return the answer of the orchestrator at a URL, checked with the chain: at `rpc`, else at the
    endpoints of the profile of that name or of one with the same chain and contracts, else at those
    that the answer names.

    Raises ConfigError or ApiError when the answer must not be believed, ChainError when the chain
    lacks the contracts that the answer names.
    """
    from muster.api import OrchestratorApi
    from muster.api.network_document import read_network, url_fault

    if fault := url_fault(url):
        raise ConfigError(f"{url[:80]} {fault}", hint="it looks like https://host:8600")
    try:
        async with asyncio.timeout(DEADLINE_S), OrchestratorApi(url) as api:
            signed = await api.network()
    except TimeoutError as error:
        raise ApiError(
            f"{urlsplit(url).hostname} did not answer within {DEADLINE_S:g} s",
            status=503,
            code="unreachable",
            hint="check that `muster orchestrator run` is up and that the URL is right",
        ) from error
    page = read_network(signed)
    _require_public(page, url)
    deployment = _deployment(page)
    same = _same_in(known, page.chain_id, deployment)
    own = name if name in same else next(iter(same), None)
    if rpc:
        rpcs, named_by = tuple(urls_of(rpc)), "you"
    elif own is not None:
        rpcs, named_by = known.networks[own].rpc, f"your network {own}"
    else:
        rpcs, named_by = page.rpc, ""
    if not rpcs:
        raise ConfigError(
            "the run names no RPC endpoint", hint="give an endpoint of the chain with --rpc URL"
        )

    from muster.api.network_document import signer_of

    async with await Chain.connect(rpcs, deployment) as chain:
        try:
            config = await chain.runs.config_of(RunId(page.run_id))
        except ContractRevert as error:
            raise ConfigError(
                f"chain {page.chain_id} has no run {page.run_id}",
                hint="ask the person who gave you the URL",
            ) from error
        domain = chain.domain("ContributionLedger")
    try:
        signer = signer_of(signed, page, domain)
    except SignatureError as error:
        raise ConfigError(
            f"the signature of the network's document is invalid: {error}",
            hint="ask the person who gave you the URL",
        ) from error
    if signer != config.orchestrator:
        raise ConfigError(
            f"{signer} signed, the orchestrator of run {page.run_id} is {config.orchestrator}",
            hint="this is not the run's orchestrator: do not join",
        )
    return Invitation(page, deployment, rpcs, signer, named_by)


def _deployment(page: NetworkPage) -> Deployment:
    parts = page.model_dump(include={"chain_id", "deploy_block", "contracts"})
    try:
        return parse_deployment(json.dumps(parts))
    except (ConfigError, EncodingError) as error:
        raise ConfigError(
            f"the network's contracts are malformed: {error}",
            hint="ask the person who gave you the URL",
        ) from error


def _require_public(page: NetworkPage, url: str) -> None:
    """Raise ConfigError for an internet host that names one in the machine's own network."""
    from muster.api.network_document import is_private

    if is_private(url):
        return
    for named in (*page.rpc, *filter(None, [page.orchestrator]), *page.relays):
        if is_private(named):
            raise ConfigError(
                f"{urlsplit(url).hostname} names {named}, which is in your own network",
                hint="do not join, unless you know why; `muster network add` takes any endpoint",
            )


def plan(
    known: Profiles, invited: Invitation, url: str, name: str | None
) -> tuple[str, NetworkProfile]:
    """Return the profile and its name; raises ConfigError if an existing entry would change.

    If a profile has the same chain and contracts, the run is added to it; otherwise the profile is
    a new one.
    """
    page = invited.page
    # No relays: those in a profile are the user's own, which may be in a private network.
    served = Served(orchestrator=page.orchestrator or url)
    same = _same_in(known, page.chain_id, invited.deployment)
    named = name or next(iter(same), None)
    named = named or (urlsplit(url).hostname or "").replace(":", "-")
    require_name(named)
    old = known.networks.get(named)
    if old is None:
        profile = NetworkProfile(
            chain_id=page.chain_id,
            rpc=invited.rpcs,
            deployments=joined_folder(named),
            runs={str(page.run_id): served},
        )
        return named, profile
    hint = (
        f"choose another name with --name, or remove the old network: muster network remove {named}"
    )
    if named not in same:
        raise ConfigError(f"the network {named!r} has another chain or contracts", hint=hint)
    before = old.runs.get(str(page.run_id), served)
    if before.orchestrator != served.orchestrator:
        raise ConfigError(
            f"the network {named!r} has run {page.run_id} at {before.orchestrator} already, "
            f"not at {served.orchestrator}",
            hint=hint,
        )
    return named, old.model_copy(update={"runs": {**old.runs, str(page.run_id): before}})


def _same_in(known: Profiles, chain_id: int, deployment: Deployment) -> list[str]:
    """Return the names of the profiles with this chain and these contracts."""
    same = []
    for name, profile in known.networks.items():
        with suppress(ConfigError):
            found = load_deployment(profile.deployments, profile.chain_id)
            if profile.chain_id == chain_id and found.contracts == deployment.contracts:
                same.append(name)
    return same


def _facts(name: str, invited: Invitation, profile: NetworkProfile) -> dict[str, Any]:
    page = invited.page
    served = profile.runs[str(page.run_id)]
    return {
        "network": name,
        "chain": page.chain_id,
        "endpoint": [mask_url(rpc) for rpc in invited.rpcs],
        "named by": invited.named_by or "the run: ask your own with --rpc before you stake",
        "run": page.run_id,
        "orchestrator": served.orchestrator,
        "relays": list(page.relays),
        "signed by": f"{invited.signer}, the run's orchestrator on chain",
        "contracts": [f"{n} {address}" for n, address in invited.deployment.contracts.items()],
    }


def _notes(known: Profiles, name: str, invited: Invitation) -> list[str]:
    """Return warnings about what the user should check."""
    same = _same_in(known, invited.page.chain_id, invited.deployment)
    others = [
        other
        for other, profile in known.networks.items()
        if other not in (name, *same) and profile.chain_id == invited.page.chain_id
    ]
    return [f"on chain {invited.page.chain_id}, {o!r} has other contracts" for o in others]


def _keep(known: Profiles, name: str, profile: NetworkProfile, invited: Invitation) -> None:
    if name not in known.networks:
        save_deployment(profile.deployments, invited.deployment)
    write_profiles(Profiles(current=name, networks={**known.networks, name: profile}))
