"""`muster worker run | status | rejoin | submit-direct` and `muster rewards`: do work, see its
status, claim its pay.

`muster worker status` reads the chain. If an orchestrator is named, it also asks that for the
node's heartbeats and for work that is not on chain yet.
"""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from muster.chain import (
    Chain,
    ChainView,
    MemberView,
    Receipt,
    RunView,
    WorkerView,
    find_worker,
    loss_of,
    read_view,
)
from muster.client import rewards as earning
from muster.client.cli.options import (
    FILE,
    PASSWORD_HELP,
    account_of,
    acting_options,
    agree,
    begin_process,
    devices_option,
    endpoint,
    looking_options,
    node_options,
    open_keystore,
    orchestrator_option,
    run_option,
)
from muster.client.cli.printing import print_result
from muster.client.cli.run import lines_of, state_of, units_funded
from muster.client.cli.stake import rejoin
from muster.client.cli.submit_direct import submit_direct
from muster.client.preflight import find_run, money_for, require_gas
from muster.client.quantities import format_duration, format_tokens
from muster.client.rewards import Earnings, find_earnings
from muster.client.settings import WorkerSettings
from muster.client.stake import way_back
from muster.lifecycle import run_until_stopped
from muster.protocol.errors import ApiError, ConfigError
from muster.protocol.ids import Address, RunId
from muster.wallet import keystore_address


@click.command()
@click.argument("action", type=click.Choice(["show", "claim"]), default="show")
@click.option("--run", type=int, required=True, help="The run that pays.")
@click.option("--worker", metavar="ADDRESS", help="The worker's address. [default: the keystore's]")
@click.option("--keystore", type=FILE, help="Sends the claims and pays their gas; any account.")
@click.option("--password-file", type=FILE, help=PASSWORD_HELP)
@click.option("--dry-run", is_flag=True, help="Say what a claim pays and costs; send nothing.")
@acting_options
def rewards(action: str, keystore: Path | None, password_file: Path | None, **options: Any) -> None:
    """Show or claim what a worker has earned. Rewards are always paid to the worker.

    A claim says what it pays and costs, and asks once.

    \b
    Examples:
      muster rewards --run 1 --worker 0x...
      muster rewards claim --run 1 --keystore ~/.muster/worker.json
    """
    if action == "claim" and keystore is None:
        raise ConfigError(
            "a claim needs --keystore",
            hint="give --keystore FILE: any account that can pay gas will do",
        )
    payer = key = None
    if action == "claim" and keystore is not None:
        payer = keystore_address(keystore)
        key = None if options["dry_run"] else open_keystore(keystore, password_file).key
    worker = options["worker"]
    if worker is None:
        if keystore is None:
            raise ConfigError("no worker is named", hint="give --worker ADDRESS or --keystore FILE")
        worker = keystore_address(keystore)
    asyncio.run(_rewards(payer, key, worker, options))


async def _rewards(
    payer: Address | None, key: bytes | None, worker: str, options: dict[str, Any]
) -> None:
    async with await Chain.connect(*endpoint(options), key=key) as chain:
        view = await read_view(chain, ChainView())
        find_run(view, options["run"])
        account = find_worker(view, worker).address
        earnings = await find_earnings(chain, view, RunId(options["run"]), account)
        receipts = await _claim(chain, payer, earnings, options) if payer else []
    report = earning.describe_earnings(earnings, account, receipts)
    print_result(report, options["as_json"], earning.facts_of(report))


async def _claim(
    chain: Chain, payer: Address, earnings: Earnings, options: dict[str, Any]
) -> list[Receipt]:
    """Say what the claims pay and cost, ask, and send them; a dry run only says it."""
    rehearsed = await earning.claim(chain.rehearsed_by(payer), earnings)
    if not rehearsed:
        return []
    gas = sum(receipt.gas_used for receipt in rehearsed)
    money = await money_for(chain, gas, earning.size_of_all(earnings))
    pay = format_tokens(earnings.amount_wei(earnings.claimable))
    words = {
        "pays": f"{pay} tokens to the worker, for {len(earnings.claimable)} submissions",
        "gas": f"about {gas:,} for RewardEscrow.claim: {money} of the chain's coin",
    }
    click.echo("\n".join(lines_of(words)), err=True)
    if options["dry_run"]:
        click.echo("nothing was sent", err=True)
        return []
    await require_gas(chain, payer, "rewards claim", money)
    agree("Claim?", options)
    return await earning.claim(chain, earnings)


@click.group()
def worker() -> None:
    """Generate rollouts and be paid."""


@worker.command("run")
@node_options
@click.option("--worker", metavar="ADDRESS", help="The staking wallet this node works for.")
@devices_option
@click.option("--heartbeat-s", type=float, help="Seconds between signs of life. [default: 10]")
@click.option(
    "--plain", is_flag=True, default=None, help="Print log lines instead of the live view."
)
def worker_run(**options: Any) -> None:
    """Lease tickets, generate, sign and upload until stopped, with the node's key.

    A terminal shows a live view, anything else gets a line per event.

    \b
    Example:
      muster worker run --run 1 --keystore node.json --worker 0x... --state-dir worker \\
        --orchestrator http://orchestrator:8600
    """
    settings, node = begin_process(WorkerSettings, "worker", options)
    from muster.client.worker.live import make_watch
    from muster.client.worker.process import run_worker

    watch = make_watch(settings)
    run_until_stopped(lambda: run_worker(settings, node, watch=watch))


SILENT_S = 60
"""A node without a heartbeat for longer counts as stopped."""
SHOWN_REJECTIONS = 3
"""Number of latest submissions shown that were not accepted."""


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """A worker in a run at one time: what the chain says, and what its orchestrator says."""

    run: RunView
    worker: WorkerView
    member: MemberView
    """Its membership of the run."""
    earnings: Earnings
    """Its earnings in the run."""
    unit_cap: int
    """Units its stake covers in flight."""
    required_wei: int
    """Active stake a worker must hold."""
    in_flight: int
    """Units with outcomes that are not final, in this run."""
    block: int
    """The chain's height."""
    now: int
    """The chain's time."""
    beat: dict[str, Any] | None = None
    """Its heartbeat at the orchestrator; None if not asked, or if the worker is unknown there."""
    phase: str | None = None
    """The run's phase, from the orchestrator."""


async def take_snapshot(
    chain: Chain, view: ChainView, run: RunView, worker: WorkerView, orchestrator: str | None
) -> WorkerSnapshot:
    """Read chain and orchestrator; a missing orchestrator is reported, not fatal."""
    now = await chain.now()
    window_s = await chain.ledger.challenge_window()
    beat, phase = await _ask_status(orchestrator, worker.address)
    return WorkerSnapshot(
        run=run,
        worker=worker,
        member=require_member(run, worker),
        earnings=await find_earnings(chain, view, run.run_id, worker.address),
        unit_cap=await chain.ledger.unit_cap_of(run.run_id, worker.address),
        required_wei=await chain.workers.required_stake(),
        in_flight=_in_flight(view, run.run_id, worker, now, window_s),
        block=await chain.block_number(),
        now=now,
        beat=beat,
        phase=phase,
    )


async def _ask_status(
    orchestrator: str | None, worker: Address
) -> tuple[dict[str, Any] | None, str | None]:
    from muster.api import OrchestratorApi

    if orchestrator is None:
        return None, None
    async with OrchestratorApi(orchestrator) as api:
        try:
            status = await api.status()
        except ApiError as error:
            return None, f"not known: {error}"
    mine = [each.model_dump(mode="json") for each in status.workers if each.worker == worker]
    return mine[0] if mine else None, status.phase[:100]


def require_member(run: RunView, worker: WorkerView) -> MemberView:
    """Return a worker's membership of a run; raises ConfigError when it never joined the run."""
    member = run.members.get(worker.address)
    if member is None:
        joined = ", ".join(map(str, worker.memberships)) or "none"
        raise ConfigError(
            f"{worker.address} never joined run {run.run_id}; its runs: {joined}",
            hint=f"check --run, or join the run: muster stake --run {run.run_id}",
        )
    return member


def _in_flight(view: ChainView, run_id: RunId, worker: WorkerView, now: int, window_s: int) -> int:
    return sum(
        record.units
        for batch in view.batches.values()
        if batch.run_id == run_id and batch.records is not None
        if now < (batch.posted_at or 0) + window_s
        for record in batch.records or ()
        if record.worker_id == worker.worker_id
    )


def why_no_work(snapshot: WorkerSnapshot) -> Iterator[str]:
    """Yield every reason why the worker gets no ticket now, with a remedy; none if it may."""
    yield from _reasons_of_worker(snapshot)
    yield from _reasons_of_run(snapshot)
    is_active = snapshot.member.status == "Active"
    if is_active and snapshot.in_flight >= snapshot.unit_cap:
        yield (
            f"{snapshot.in_flight:,} units are in flight and the stake covers "
            f"{snapshot.unit_cap:,}: add stake, or wait until outcomes are final"
        )
    seen_at = snapshot.beat.get("seen_at") if snapshot.beat else None
    if snapshot.beat is not None and not isinstance(seen_at, (int, float)):
        yield "the orchestrator never heard of its node: start it with muster worker run"
    elif isinstance(seen_at, (int, float)) and time.time() - seen_at > SILENT_S:
        silent = format_duration(time.time() - seen_at)
        yield f"its node has been silent for {silent}: check that muster worker run is up"


def _reasons_of_worker(snapshot: WorkerSnapshot) -> Iterator[str]:
    worker = snapshot.member
    status, run = worker.status.lower(), snapshot.run.run_id
    if status in ("jailed", "exiting"):
        lacking_wei = snapshot.required_wei - worker.active_wei
        yield f"it is {way_back(run, worker.status, worker.jailed_until, lacking_wei)}"
    elif status == "banned":
        yield "it is banned for fraud, until a jury overturns the verdict: muster dispute open"
    elif snapshot.block < worker.active_from:
        yield f"it is active from block {worker.active_from}, the chain is at {snapshot.block}"


def _reasons_of_run(snapshot: WorkerSnapshot) -> Iterator[str]:
    run = snapshot.run
    state = state_of(run)
    if state not in ("open", "unfunded"):
        yield f"the run is {state}" if state != "no policy yet" else "the run has no policy yet"
    if units_funded(run) == 0:
        yield "the run cannot pay at the moment: its owner must fund it"
    if snapshot.phase in ("finished", "waiting for funds", "paused"):
        yield f"the orchestrator says: {snapshot.phase}"


def describe(snapshot: WorkerSnapshot, view: ChainView) -> dict[str, Any]:
    """Return a worker's status as JSON values; amounts in wei as text."""
    worker, earnings = snapshot.member, snapshot.earnings
    loss = loss_of(view, snapshot.run.run_id, worker.address)
    counts, refused = _outcomes(snapshot, view)
    return {
        "worker": worker.address,
        "run": snapshot.run.run_id,
        "status": worker.status.lower(),
        "node": worker.node,
        "active_from_block": worker.active_from,
        "stake": {
            "active_wei": str(worker.active_wei),
            "unbonding_wei": str(worker.unbonding_wei),
            "slashed_wei": str(worker.slashed_wei),
            "required_wei": str(snapshot.required_wei),
        },
        "loss": None if loss is None else loss.to_json(format_tokens),
        "units": {"in_flight": snapshot.in_flight, "cap": snapshot.unit_cap},
        "outcomes": counts,
        "not_accepted": refused,
        "earned_wei": str(
            sum(
                earnings.amount_wei(part)
                for part in (earnings.claimable, earnings.pending, earnings.paid)
            )
        ),
        "claimable_wei": str(earnings.amount_wei(earnings.claimable)),
        "pending_wei": str(earnings.amount_wei(earnings.pending)),
        "paid_wei": str(earnings.amount_wei(earnings.paid)),
        "other_runs": {
            str(run_id): other.status.lower()
            for run_id, other in snapshot.worker.memberships.items()
            if run_id != snapshot.run.run_id
        },
        "heartbeat": None
        if snapshot.beat is None
        else {name: snapshot.beat.get(name) for name in ("seen_at", "state", "policy_version")},
        "phase": snapshot.phase,
        "no_work_because": list(why_no_work(snapshot)),
    }


def _outcomes(
    snapshot: WorkerSnapshot, view: ChainView
) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """Return the number of outcomes of each verdict, and the latest that are not Accepted."""
    counts = {"accepted": 0, "incomplete": 0, "rejected": 0, "fraud": 0}
    refused = []
    for batch in view.batches.values():
        if batch.run_id != snapshot.run.run_id:
            continue
        for position, record in enumerate(batch.records or ()):
            if record.worker_id != snapshot.worker.worker_id:
                continue
            verdict = record.verdict.name.lower()
            counts[verdict] += 1
            if verdict != "accepted":
                place = f"{batch.batch_id}:{position}"
                refused.append(
                    {"submission": place, "verdict": verdict, "reason": record.reason.name}
                )
    return counts, refused[: -SHOWN_REJECTIONS - 1 : -1]


def facts_of(found: dict[str, Any]) -> dict[str, Any]:
    """Return a described worker as names and lines for people."""
    stake, units, beat = found["stake"], found["units"], found["heartbeat"]
    unbonding = int(stake["unbonding_wei"])
    return {
        "worker": f"{found['worker']}, {found['status']} in run {found['run']}",
        "node": found["node"],
        "stake": f"{format_tokens(int(stake['active_wei']))} tokens, "
        f"{format_tokens(int(stake['required_wei']))} required"
        + (f", {format_tokens(unbonding)} unbonding" if unbonding else ""),
        "slashed": found["loss"]["words"] if found["loss"] else None,
        "in flight": f"{units['in_flight']:,} of {units['cap']:,} units that the stake covers",
        "outcomes": ", ".join(f"{count} {name}" for name, count in found["outcomes"].items()),
        "refused": [
            f"{each['verdict']} {each['reason']}: muster explain {each['submission']}"
            for each in found["not_accepted"]
        ],
        "earned": f"{format_tokens(int(found['earned_wei']))} tokens: "
        f"{format_tokens(int(found['paid_wei']))} paid, "
        f"{format_tokens(int(found['claimable_wei']))} claimable, "
        f"{format_tokens(int(found['pending_wei']))} not final yet",
        "other runs": ", ".join(f"{run} {how}" for run, how in found["other_runs"].items()) or None,
        "heartbeat": _heartbeat(beat) if beat else None,
        "work": found["no_work_because"] or "no known reason against new tickets",
    }


def _heartbeat(beat: dict[str, Any]) -> str:
    if not isinstance(beat["seen_at"], (int, float)):
        return "never"
    ago = format_duration(max(time.time() - beat["seen_at"], 0))
    return f"{ago} ago, {beat['state']}, policy {beat['policy_version']}"


# Command


@worker.command("status")
@run_option
@click.option("--worker", metavar="ADDRESS", help="The staking wallet, or its node.")
@click.option("--keystore", type=FILE, help="The worker's or its node's; it is not opened.")
@orchestrator_option
@looking_options
def status(worker: str | None, keystore: Path | None, as_json: bool, **options: Any) -> None:
    """Show how a worker stands, what it earned, and why there is no work. Needs no password.

    \b
    Examples:
      muster worker status --run 1 --keystore ~/.muster/node.json
      muster worker status --run 1 --worker 0x... --orchestrator http://orchestrator:8600
    """
    found = asyncio.run(_status(account_of(worker, keystore, "worker"), options))
    print_result(found, as_json, facts_of(found))


async def _status(worker: str, options: dict[str, Any]) -> dict[str, Any]:
    async with await Chain.connect(*endpoint(options)) as chain:
        view = await read_view(chain, ChainView())
        run = find_run(view, RunId(options["run"]))
        found = find_worker(view, worker)
        return describe(await take_snapshot(chain, view, run, found, options["orchestrator"]), view)


worker.add_command(rejoin)
worker.add_command(submit_direct)
