"""`muster model`: fetch the model that a run trains, check it, talk to it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from muster.client.cli.options import (
    FOLDER,
    HOME,
    chain_options,
    endpoint,
    looking_options,
    orchestrator_option,
    relay_option,
)
from muster.client.cli.printing import print_json, print_result
from muster.protocol.encoding import hex0x
from muster.protocol.errors import ConfigError, StorageError
from muster.protocol.ids import PolicyVersion, RunId
from muster.settings import urls_of

if TYPE_CHECKING:
    from muster.client.audit.history import ChainHistory
    from muster.client.chat import Live
    from muster.shardcast.http_client import ConnectsTo


@click.group()
def model() -> None:
    """Fetch the model that a run trains, and talk to it."""


@model.command("fetch")
@click.option("--run", type=click.IntRange(min=1), required=True, help="The run.")
@click.option("--version", type=click.IntRange(min=0), help="Policy version. [default: newest]")
@click.option("--out", type=FOLDER, required=True, help="Receives the model; must be empty.")
@relay_option
@orchestrator_option
@looking_options
def fetch(run: int, version: int | None, out: Path, as_json: bool, **options: Any) -> None:
    """Fetch a policy version as a model folder, checked against the chain.

    Hugging Face's libraries load the folder; README.md in it says what trained the model, and how
    anybody checks that. Relays need not be trusted.

    \b
    Examples:
      muster model fetch --run 1 --orchestrator http://host:8600 --out ./model
      muster model fetch --run 1 --version 12 --relay http://relay:8700 --out ./model
    """
    from muster.client.cli.shardcast import progress_bar
    from muster.client.model import WantedVersion, fetch_model, require_free

    require_free(out)
    run_id = RunId(run)
    wanted = None if version is None else PolicyVersion(version)

    async def bring() -> Any:
        history = await _read(options)
        history.version_of(run_id, wanted)
        wish = WantedVersion(run_id, wanted, *await relays_of(run_id, options), out)
        with progress_bar() as progress:
            return await fetch_model(wish, history, progress)

    manifest = asyncio.run(bring())
    facts = {
        "model": str(out),
        "run": int(manifest.run_id),
        "version": int(manifest.version),
        "root": hex0x(manifest.root()),
        "bytes": manifest.total_bytes,
    }
    print_result(facts, as_json, {**facts, "next": f"muster model chat {out}"})


@model.command("verify")
@click.argument("folder", type=FOLDER)
@looking_options
def verify(folder: Path, as_json: bool, **options: Any) -> None:
    """Check a fetched model folder against the chain again; exits with 1 when it differs.

    \b
    Example:
      muster model verify ./model
    """
    from muster.client.model import faults_of, manifest_in

    manifest = manifest_in(folder)
    history = asyncio.run(_read(options))
    faults = faults_of(folder, history.ledger.runs.get(manifest.run_id))
    name = f"run {manifest.run_id} version {manifest.version}"
    if as_json:
        print_json({"run": manifest.run_id, "version": manifest.version, "faults": faults})
    if faults:
        raise StorageError(
            f"{folder} is not {name}: {'; '.join(faults)}", hint="fetch the model again"
        )
    if not as_json:
        click.echo(f"{folder} is {name}, as published on chain {history.deployment.chain_id}")


@model.command("chat")
@click.argument("words", nargs=-1, metavar="[FOLDER] [PROMPTS]...")
@click.option("--run", type=click.IntRange(min=1), help="Talk to a run's newest version instead.")
@relay_option
@orchestrator_option
@click.option("--state-dir", type=FOLDER, help="Folder of versions. [default: ~/.muster/models]")
@click.option("--max-tokens", type=click.IntRange(1, 1 << 20), default=512, help="Most tokens.")
@click.option(
    "--temperature", type=click.FloatRange(0, 10), default=0.0, help="0 for the most likely answer."
)
@click.option("--sources", is_flag=True, help="Say after each answer what trained the model.")
@click.option("--device", default="cpu", help="Where the model computes.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    help="Arithmetic of the model.",
)
@chain_options
def chat(words: tuple[str, ...], **options: Any) -> None:
    """Talk to a model folder, or to what a run is training; PROMPTS are answered one by one.

    Without prompts it reads lines: /sources says what trained the model, /exit ends. With --run
    a newer version is taken before each answer.

    \b
    Examples:
      muster model chat ./model
      muster model chat ./model "4181=" --sources
      muster model chat --run 1 --orchestrator http://host:8600
    """
    from muster.client.chat import AnswerSettings, talk

    if options["run"] is None and not words:
        raise ConfigError(
            "no model to chat with",
            hint="give a model folder, or --run N with --orchestrator or --relay",
        )
    manners = AnswerSettings(
        options["max_tokens"],
        options["temperature"],
        options["device"],
        options["dtype"],
        sources=options["sources"],
    )
    if options["run"] is None:
        talk(Path(words[0]), words[1:], manners)
    else:
        talk(_live(options), words, manners)


def _live(options: dict[str, Any]) -> Live:
    """Return the object that loads the newest version of a run on request."""
    from muster.client.chat import Live

    run_id = RunId(options["run"])
    state_dir = (options["state_dir"] or HOME / "models").expanduser()
    relays, connects_to = asyncio.run(relays_of(run_id, options))
    return Live(run_id, relays, connects_to, state_dir, *endpoint(options))


async def relays_of(
    run_id: RunId, options: dict[str, Any]
) -> tuple[tuple[str, ...], ConnectsTo | None]:
    """Return the relays of a run's versions, from the flags or else from its orchestrator, and what
    to connect to for their hosts: those that an orchestrator names may be private only if it is.
    """
    if options["relay"]:
        return tuple(options["relay"]), None
    if not options["orchestrator"]:
        raise ConfigError(
            "no relay to fetch the model from",
            hint="give --orchestrator URL, which names the relays, or --relay URL",
        )
    from muster.api import OrchestratorApi

    async with OrchestratorApi(options["orchestrator"]) as api:
        relays = (await api.run_info(run_id)).policy_sources
    if not relays:
        raise ConfigError(
            f"{options['orchestrator']} names no relay of run {run_id}", hint="give --relay URL"
        )
    return relays, api.connects_to


async def _read(options: dict[str, Any]) -> ChainHistory:
    from muster.client.audit.history import HistorySource, read

    rpc, deployments = endpoint(options)
    return await read(HistorySource(tuple(urls_of(rpc)), deployments))
