"""The examination from first line to verdict. Questions that depend on a failed one are skipped."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from muster.client.cli.options import (
    FILE,
    FOLDER,
    HOME,
    devices_option,
    endpoint,
    engine_choice,
    looking_options,
    orchestrator_option,
    relay_option,
    room_options,
)
from muster.client.cli.printing import print_json, printable
from muster.client.cli.stake import shown_recipe
from muster.client.doctor import Line, State, failed, is_fit, skipped, to_json
from muster.protocol.errors import ConfigError, MusterError, install_hint
from muster.protocol.ids import Address, to_address

if TYPE_CHECKING:
    from muster.api import OrchestratorApi
    from muster.chain import Chain, RunView
    from muster.inference.engine import Room
    from muster.inference.loading import Dtype, EngineLoader

MARKS = {State.OK: "ok", State.WARN: "warn", State.FAIL: "FAIL", State.SKIP: "-"}
COLOURS = {State.OK: "green", State.WARN: "yellow", State.FAIL: "red", State.SKIP: "bright_black"}


def _default_room() -> Room:
    # Imported late: it imports numpy, which --help does not need.
    from muster.inference.engine import ROOM

    return ROOM


@dataclass(frozen=True, slots=True)
class Examination:
    """Options of an examination."""

    run: int
    """The run to be fit for."""
    rpc: str
    """RPC endpoint of the chain."""
    deployments: Path
    """Folder with the contracts' addresses."""
    orchestrator: str | None = None
    """URL of the run's orchestrator."""
    relays: tuple[str, ...] = ()
    """Relays to use instead of those the orchestrator names."""
    worker: Address | None = None
    """The staking wallet, if there is one."""
    keystore: Path | None = None
    """The node's keystore, which is not opened."""
    state_dir: Path = HOME / "doctor"
    """Folder of policies; a worker finds them there if it uses the same folder."""
    engine: str = "transformers"
    """Engine that runs the model."""
    dtype: Dtype = "float32"
    """Number format of the model."""
    device: str = "cpu"
    """Where the model computes."""
    devices: tuple[str, ...] = ()
    """Devices of several engines side by side; empty for `device` only."""
    threads: int = 1
    """CPU threads of the model."""
    tensor_parallel: int = 1
    """Number of GPUs for one model."""
    room: Room = field(default_factory=_default_room)
    """Memory limits of the engine."""
    proves: bool = True
    """Whether rollouts are generated and checked."""


async def examine(asked: Examination, load: EngineLoader | None = None) -> AsyncIterator[Line]:
    """Yield the lines of an examination as they become known.

    `load` makes the engines instead of the named kind.
    """
    from muster.chain import Chain
    from muster.client.doctor.machine import examine_machine

    gpu = next((name for name in asked.devices if name != "cpu"), asked.device)
    for line in examine_machine(asked.state_dir, gpu, asked.threads, asked.engine):
        yield line
    async with AsyncExitStack() as stack:
        try:
            chain = await stack.enter_async_context(
                await Chain.connect(asked.rpc, asked.deployments)
            )
        except MusterError as error:
            yield failed("chain", "connection", error)
            return
        try:
            async for line in _examine_chain(asked, chain, load, stack):
                yield line
        except MusterError as error:
            # Errors that no part handles itself, such as an RPC endpoint that went away.
            yield failed("chain", "answers", error)


async def _examine_chain(
    asked: Examination,
    chain: Chain,
    load: EngineLoader | None,
    stack: AsyncExitStack,
) -> AsyncIterator[Line]:
    from muster.api import OrchestratorApi
    from muster.chain import ChainView, read_view
    from muster.client.doctor.network import (
        examine_chain,
        examine_node,
        examine_node_money,
        examine_run,
        examine_worker,
    )
    from muster.client.preflight import find_run
    from muster.wallet import keystore_address

    yield await examine_chain(chain)
    view = await read_view(chain, ChainView())
    try:
        run = find_run(view, asked.run)
    except ConfigError as error:
        yield failed("run", "state", error)
        return
    for line in examine_run(run):
        yield line
    if asked.worker is None:
        yield skipped("worker", "account", "--worker ADDRESS asks about its stake in the run")
    else:
        units = await _ticket_units(asked, run)
        async for line in examine_worker(chain, run.run_id, asked.worker, units):
            yield line
    if asked.keystore is not None:
        yield await examine_node(chain, asked.keystore, asked.worker)
        yield await examine_node_money(chain, keystore_address(asked.keystore))
    if asked.orchestrator is None:
        why = "--orchestrator URL asks about the network and runs the self-proof"
        yield skipped("network", "orchestrator", why)
        return
    api = await stack.enter_async_context(OrchestratorApi(asked.orchestrator))
    async for line in _examine_network(asked, chain, run, api, load):
        yield line


async def _ticket_units(asked: Examination, run: RunView) -> int | None:
    """Return the most units of a ticket of the run; None when no orchestrator shows its recipe."""
    from muster.api import OrchestratorApi

    if asked.orchestrator is None:
        return None
    async with OrchestratorApi(asked.orchestrator) as api:
        recipe = await shown_recipe(api, run.config.recipe_hash)
    return recipe.sampling.max_units if recipe else None


async def _examine_network(
    asked: Examination,
    chain: Chain,
    run: RunView,
    api: OrchestratorApi,
    load: EngineLoader | None,
) -> AsyncIterator[Line]:
    from muster.client.doctor import network
    from muster.client.doctor.machine import examine_room
    from muster.settings import urls_of

    assert asked.orchestrator is not None
    line, named = await network.examine_orchestrator(api, run, chain.domain("ContributionLedger"))
    yield line
    if line.state is State.FAIL:
        return
    relays, connects_to = asked.relays or named, None if asked.relays else api.connects_to
    ours = [*urls_of(asked.rpc), asked.orchestrator]
    yield await network.examine_ports(ours, relays, connects_to)
    yield await network.examine_clock(asked.orchestrator)
    if run.latest_version is None:
        yield skipped("network", "relays", "there is no policy to fetch yet")
        return
    learnt = network.Relays()
    async for line in network.examine_relays(relays, run, learnt, connects_to):
        yield line
    if learnt.manifest is not None:
        yield examine_room(asked.state_dir, learnt.manifest.total_bytes)
    bandwidth = network.examine_bandwidth(run, learnt)
    yield bandwidth
    if bandwidth.state is State.FAIL:
        return
    if not asked.proves:
        yield skipped("proof", "self-proof", "--no-proof")
        return
    async for line in _examine_proof(asked, run, api, relays, load):
        yield line


async def _examine_proof(
    asked: Examination,
    run: RunView,
    api: OrchestratorApi,
    relays: tuple[str, ...],
    load: EngineLoader | None,
) -> AsyncIterator[Line]:
    from muster.client.preflight import engine_name
    from muster.client.run_documents import TASK_SETS, read_rules
    from muster.client.tickets import longest_sample
    from muster.protocol.recipe import PromptRecipe
    from muster.shardcast import Fetcher

    try:
        rules = await read_rules(api, run.config, asked.state_dir / TASK_SETS)
        yield Line("proof", "documents", State.OK, _documents(rules))
        for line in _examine_requirements(rules, engine_name(asked)):
            yield line
        async with Fetcher(
            relays,
            asked.state_dir / "policies",
            attempts=3,
            connects_to=None if asked.relays else api.connects_to,
        ) as fetcher:
            assert run.latest_version is not None
            root = run.checkpoints[run.latest_version].manifest_root
            folder = await fetcher.fetch(run.run_id, run.latest_version, root)
        if rules.recipe.prompt != PromptRecipe():
            yield await asyncio.to_thread(examine_prompt, rules, folder)
        if asked.room.context is None:
            longest = longest_sample(rules.recipe, rules.task_set)
            asked = replace(asked, room=replace(asked.room, context=longest))
        for device, engines in Counter(asked.devices or (asked.device,)).items():
            there = replace(asked, device=device)
            async for line in _examine_device(there, engines, run, rules, folder, load):
                yield replace(line, name=f"{line.name} {device}") if asked.devices else line
    except ModuleNotFoundError as error:
        advice = install_hint("model")
        yield Line("proof", "self-proof", State.FAIL, f"{error.name} is not installed", advice)
    except (MusterError, RuntimeError, OSError) as error:
        # torch raises RuntimeError when a GPU runs out of memory or a driver fails.
        yield failed("proof", "self-proof", error)


async def _examine_device(
    asked: Examination,
    engines: int,
    run: RunView,
    rules: Any,
    folder: Path,
    load: EngineLoader | None,
) -> AsyncIterator[Line]:
    """Yield whether this number of engines fits on a device, and whether its results are
    accepted."""
    from muster.client.doctor.machine import examine_context, examine_fit, memory_needed
    from muster.client.validator.soundness import REFERENCE_S
    from muster.lifecycle import available_memory_bytes

    needed = engines * memory_needed(folder, asked.dtype)
    fits = examine_fit(needed, asked.device, asked.tensor_parallel)
    yield fits
    if fits.state is State.FAIL:
        return
    yield examine_context(folder, asked, needed)
    sampling = rules.recipe.sampling
    figure = (
        f"{sampling.submission_samples} samples of up to {sampling.max_new_tokens:,} tokens are "
        f"generated and judged now; a slower reference then has {REFERENCE_S:g} s"
    )
    yield Line("proof", "ticket", State.OK, figure)
    room = available_memory_bytes() - (needed if asked.device == "cpu" else 0)
    yield await asyncio.to_thread(_prove, asked, run, rules, folder, load, room)


def _examine_requirements(rules: Any, engine: str) -> Iterator[Line]:
    """Yield whether a worker would start with this software."""
    from muster.client.hardware import measure, shortcomings
    from muster.client.preflight import (
        installed_version,
        require_covered,
        require_pinned_engine,
        require_software,
    )
    from muster.client.run_documents import require_calibrated

    version = installed_version()
    asked: list[tuple[str, str, Callable[[], None]]] = [
        ("version", f"muster-rl {version}", partial(require_software, rules.recipe, version)),
        ("calibrated", engine, partial(require_covered, rules.calibration, engine)),
        ("limits", "hold for the run's submissions", partial(require_calibrated, rules)),
        ("pinned", "engine versions as pinned", require_pinned_engine),
    ]
    for name, figure, require in asked:
        try:
            require()
        except MusterError as error:
            yield failed("software", name, error)
        else:
            yield Line("software", name, State.OK, figure)
    if lacking := shortcomings(measure(), rules.recipe.hardware):
        yield Line("machine", "for this run", State.FAIL, "; ".join(lacking), "use another machine")
    else:
        yield Line("machine", "for this run", State.OK, "has what the run asks for")


def examine_prompt(rules: Any, folder: Path) -> Line:
    """Return whether the policy's chat template writes what the recipe pins."""
    from muster.inference.framing import pin_prompt

    prompt = rules.recipe.prompt
    try:
        if prompt.form == "chat" and not prompt.template_hash:
            raise ConfigError("the recipe pins no chat template", hint="tell the run's owner")
        pin_prompt(rules.recipe, folder)
    except MusterError as error:
        return failed("proof", "prompt", error)
    template = (
        f", as template {prompt.template_hash[:10]} writes it" if prompt.template_hash else ""
    )
    return Line("proof", "prompt", State.OK, f"{prompt.form}{template}")


def _documents(rules: Any) -> str:
    model, sampling = rules.calibration.model, rules.recipe.sampling
    return (
        f"recipe {rules.recipe.name!r}, {len(rules.task_set)} problems, calibrated for "
        f"{model.name} on {model.engine}; a submission is {sampling.problems_per_submission} x "
        f"{sampling.samples_per_problem} samples of up to {sampling.max_new_tokens} tokens"
    )


def _prove(
    asked: Examination,
    run: RunView,
    rules: Any,
    folder: Path,
    load: EngineLoader | None,
    room_bytes: int,
) -> Line:
    from muster.client.doctor.machine import make_engines
    from muster.client.quantities import format_duration
    from muster.client.validator.soundness import fictitious_ticket, prove
    from muster.inference import loading

    is_reference = asked.engine == "transformers"
    own = loading.load_as(asked.engine, asked.threads, asked.room, asked.tensor_parallel)
    engine, reference, how = make_engines(
        load or own,
        asked.dtype,
        asked.device,
        room_bytes=room_bytes,
        folder=folder,
        load_reference=None if is_reference else loading.load_transformers(asked.threads),
    )
    assert run.latest_version is not None
    for each in {id(engine): engine, id(reference): reference}.values():
        each.load_policy(folder, run.latest_version)
    found = prove(fictitious_ticket(run, asked.worker), rules, engine, reference)
    statistics = "; ".join(map(str, found.statistics))
    if finding := found.finding:
        figure = (
            f"a validator would answer {finding.verdict.name} {finding.reason.name}: "
            f"{finding.detail}. {statistics}"
        )
        advice = (
            "do not stake: its work would be rejected or slashed. Try --dtype float32, --device "
            "cpu; else this machine's arithmetic is outside what the run was calibrated for"
        )
        return Line("proof", "self-proof", State.FAIL, figure, advice)
    rate = found.units / max(found.generate_s, 1e-9)
    wanted = rules.recipe.hardware.min_units_per_s
    part = f"{found.referred} of {found.samples} samples"
    figure = (
        f"accepted: {found.samples} samples, {found.units} units in "
        f"{format_duration(found.generate_s)} ({rate:,.0f} units/s), checked in "
        f"{format_duration(found.check_s)}, {how} ({part}); strain {found.strain:.2f} of 1. "
        f"{statistics}"
    )
    if rate < wanted:
        advice = f"the run asks for {wanted:,g} units/s: a faster machine, or more --threads"
        return Line("proof", "self-proof", State.FAIL, figure, advice)
    return Line("proof", "self-proof", State.OK, figure)


# Command


@click.command()
@click.option("--run", type=click.IntRange(min=1), required=True, help="The run to be fit for.")
@orchestrator_option
@relay_option
@click.option("--worker", metavar="ADDRESS", help="Your staking wallet, if you have one.")
@click.option("--keystore", type=FILE, help="Your node's keystore; it is not opened.")
@click.option("--state-dir", type=FOLDER, help=f"Folder of policies. [default: {HOME}/doctor]")
@click.option("--no-proof", is_flag=True, help="Generate nothing: the quick part only.")
@engine_choice
@room_options
@devices_option
@looking_options
def doctor(**options: Any) -> None:
    """Examine this machine for a run, and prove it with rollouts that no one pays or slashes.

    Needs no key. Prints every question with its figure and what to do, then fit or unfit.
    Exit code 0: fit, 1: unfit.

    \b
    Examples:
      muster doctor --run 1 --orchestrator http://orchestrator:8600
      muster doctor --run 1 --orchestrator URL --worker 0x... --keystore ~/.muster/node.json
      muster doctor --run 1 --orchestrator URL --engine vllm --device cuda --dtype bfloat16
    """
    lines = asyncio.run(_collect(_asked(options), not options["as_json"]))
    if options["as_json"]:
        print_json(to_json(lines))
    else:
        _print_verdict(lines)
    if not is_fit(lines):
        sys.exit(1)


def _asked(options: dict[str, Any]) -> Examination:
    from muster.client.settings import devices_of, places_of
    from muster.inference.engine import Room

    rpc, deployments = endpoint(options)
    engine = ("engine", "dtype", "device", "threads", "tensor_parallel")
    room = ("context", "memory_share", "max_rows", "batch_tokens")
    named = {name: options[name] for name in engine if options[name]}
    if options["devices"]:
        named["devices"] = places_of(
            devices_of(options["devices"]), options["tensor_parallel"] or 1
        )
    named["room"] = Room(**{name: options[name] for name in room if options[name]})
    return Examination(
        run=options["run"],
        rpc=rpc,
        deployments=deployments,
        orchestrator=options["orchestrator"],
        relays=tuple(options["relay"]),
        worker=to_address(options["worker"]) if options["worker"] else None,
        keystore=options["keystore"],
        state_dir=(options["state_dir"] or HOME / "doctor").expanduser(),
        proves=not options["no_proof"],
        **named,
    )


async def _collect(asked: Examination, shows: bool) -> list[Line]:
    lines = []
    async for line in examine(asked):
        lines.append(line)
        if shows:
            _print_line(line)
    return lines


def _print_line(line: Line) -> None:
    mark = click.style(f"{MARKS[line.state]:4}", fg=COLOURS[line.state])
    click.echo(f"{mark}  {f'{line.section} {line.name}':20}  {printable(line.figure)}")
    if line.advice:
        click.echo(f"{'':28}-> {printable(line.advice)}")


def _print_verdict(lines: list[Line]) -> None:
    bad = [line for line in lines if line.state is State.FAIL]
    if bad:
        why = ", ".join(f"{line.section} {line.name}" for line in bad)
        click.echo(click.style(f"unfit: {why}", fg="red", bold=True))
        return
    proven = any(line.name == "self-proof" and line.state is State.OK for line in lines)
    if proven:
        click.echo(click.style("fit", fg="green", bold=True))
    else:
        click.echo(click.style("fit, as far as it was examined: no self-proof", fg="yellow"))
