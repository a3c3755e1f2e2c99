"""`muster validator trap`: test validators with files whose right verdict is known.

For run owners and others with a staked worker to spare. A plan is committed to on chain, a trap
worker follows it, and the report proves what verdicts the validators gave.
"""

import asyncio
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

import click

from muster.chain import BatchView, Chain, ChainView, read_view
from muster.chain.reader import logs_between
from muster.chain.structs import Offence
from muster.client.cli.options import (
    FILE,
    begin_process,
    endpoint,
    key_options,
    looking_options,
    node_options,
    open_keystore,
    run_option,
    tell_what_is_sent,
)
from muster.client.cli.printing import SENT, print_facts, print_json, print_result, print_table
from muster.client.preflight import find_run
from muster.client.quantities import format_share, format_tokens
from muster.client.settings import WorkerSettings
from muster.lifecycle import run_until_stopped
from muster.lifecycle.files import write_durably
from muster.protocol.encoding import hex0x
from muster.protocol.errors import ConfigError, EncodingError, MusterError
from muster.protocol.ids import Address, Hash32, RunId, Step, to_address
from muster.protocol.messages import OutcomeRecord, Verdict
from muster.protocol.traps import MILLION, PLANS, Trap, TrapPlan

# The fate of traps: which were laid, which verdicts they got, and from whom. Pure.
#
# Everything follows from the revealed plan and the chain; the trap worker's journal only tells
# where no trap could be laid. The commitment is an `approve` of the token, which publishes a number
# and costs 46,000 gas. Any account may send it, so it does not reveal the trap worker.
#
# A trap finds validators that sign a wrong verdict, even if all of a run collude, and costs them
# stake. A single lazy validator among honest ones signs no verdict that is posted: proof of
# checking finds it, see `muster.client.validator.checking_proofs`.

Laid = Mapping[tuple[int, int], Mapping[str, Any]]
"""The trap worker's notes, by step and index."""


class TrapFate(StrEnum):
    """What became of a planned trap."""

    CAUGHT = "caught"
    """It was not accepted: the signers had checked it."""
    MISSED = "missed"
    """It was accepted: the signers had not checked it."""
    CHALLENGED = "challenged"
    """It was accepted, and a jury decides."""
    OVERTURNED = "overturned"
    """It was accepted, a jury overturned that, and the signers can be slashed."""
    HONEST = "honest"
    """No way to spoil a sample failed the checks here, so the file is no trap."""


@dataclass(frozen=True, slots=True)
class Found:
    """A planned slot with an outcome."""

    batch_id: int
    position: int
    """Its place there."""
    record: OutcomeRecord
    """The recorded outcome."""
    fate: TrapFate
    """The trap's result."""
    signers: tuple[Address, ...]
    """The validators that signed the outcome."""
    trap: Trap
    """The trap in the plan."""
    slashed: Mapping[Address, int] = field(default_factory=dict)
    """The stake in wei that signers lost for it."""

    @property
    def name(self) -> str:
        """The submission's name, as commands accept it."""
        return f"{self.batch_id}:{self.position}"


@dataclass(frozen=True, slots=True)
class PlanOnChain:
    """The place on chain of a plan's commitment."""

    block_number: int
    tx_hash: str
    by: Address
    """The account that sent it."""


def find_traps(view: ChainView, plan: TrapPlan, laid: Laid | None = None) -> list[Found]:
    """Return the planned slots that have outcomes, in the order of their batches."""
    account = view.workers.get(plan.worker)
    found = []
    for batch in sorted(view.batches.values(), key=lambda each: each.batch_id):
        if batch.run_id != plan.run_id or account is None:
            continue
        for position, record in enumerate(batch.records or ()):
            trap = plan.trap_at(record.step, record.index)
            if record.worker_id == account.worker_id and trap is not None:
                found.append(_found(view, batch, position, trap, laid))
    return found


def _found(
    view: ChainView, batch: BatchView, position: int, trap: Trap, laid: Laid | None
) -> Found:
    record = (batch.records or ())[position]
    signers = tuple(sorted(batch.signed_by(view.runs[batch.run_id].seats)))
    note = (laid or {}).get((record.step, record.index))
    is_honest = note is not None and note["kind"] is None
    return Found(
        batch_id=batch.batch_id,
        position=position,
        record=record,
        fate=TrapFate.HONEST if is_honest else _fate(view, batch, position),
        signers=signers,
        trap=trap,
        slashed=_slashed(view, batch, signers),
    )


def _slashed(view: ChainView, batch: BatchView, signers: Iterable[Address]) -> dict[Address, int]:
    """Return the stake that signers lost for a wrong verdict in a batch."""
    return {
        slash.owner: slash.amount_wei
        for slash in view.slashes
        if slash.offence is Offence.WRONG_VERDICT
        and (slash.run_id, slash.tag) == (batch.run_id, batch.batch_id)
        and slash.owner in signers
    }


def _fate(view: ChainView, batch: BatchView, position: int) -> TrapFate:
    record = (batch.records or ())[position]
    if record.verdict is not Verdict.ACCEPTED:
        return TrapFate.CAUGHT
    case = view.cases.get(record.leaf(batch.batch_id, position))
    if case is None or (case.closed and not case.overturned):
        return TrapFate.MISSED
    return TrapFate.OVERTURNED if case.overturned else TrapFate.CHALLENGED


def score(found: list[Found]) -> dict[Address, dict[str, int]]:
    """Return for each validator the number of traps with a right and with a wrong outcome."""
    right: Counter[Address] = Counter()
    wrong: Counter[Address] = Counter()
    for each in found:
        if each.fate is not TrapFate.HONEST:
            (right if each.fate is TrapFate.CAUGHT else wrong).update(each.signers)
    return {who: {"caught": right[who], "missed": wrong[who]} for who in sorted({*right, *wrong})}


def to_challenge(found: list[Found]) -> list[Found]:
    """Return the traps that were accepted and that nobody has challenged."""
    return [each for each in found if each.fate is TrapFate.MISSED]


# The commitment


async def anchor_plan(chain: Chain, plan: TrapPlan) -> str:
    """Put a plan's commitment on chain and return the transaction's hash.

    The approval is for an address without a key, so it can never move tokens.
    """
    commitment = int.from_bytes(plan.commitment(), "big")
    return (await chain.token.approve(PLANS, commitment)).tx_hash


async def find_anchor(chain: Chain, plan: TrapPlan) -> PlanOnChain | None:
    """Return the first place where a plan's commitment is on chain; None when it is not."""
    wanted = int.from_bytes(plan.commitment(), "big")
    query = {
        "address": chain.deployment.contracts["MusterToken"],
        "topics": [hex0x(APPROVAL), None, "0x" + PLANS[2:].lower().rjust(64, "0")],
    }
    first, last = chain.deployment.deploy_block, await chain.block_number()
    async for log in logs_between(chain.rpc, query, first, last):
        if int(log["data"], 16) == wanted:
            by = to_address("0x" + log["topics"][1][-40:])
            return PlanOnChain(int(log["blockNumber"], 16), log["transactionHash"], by)
    return None


def require_before(anchor: PlanOnChain | None, view: ChainView, found: list[Found]) -> PlanOnChain:
    """Return the anchor; raises ConfigError unless it is older than every trap's batch."""
    if anchor is None:
        raise ConfigError(
            "the plan's commitment is not on chain, so the plan proves nothing",
            hint="check --plan and --rpc; muster validator trap plan writes the commitment "
            "on chain",
        )
    early = [f for f in found if view.batches[f.batch_id].work_block <= anchor.block_number]
    if early:
        raise ConfigError(
            f"submission {early[0].name} was committed before the plan, in block "
            f"{view.batches[early[0].batch_id].work_block}",
            hint=f"the plan is in block {anchor.block_number}: it proves nothing about that file",
        )
    return anchor


APPROVAL = Hash32(bytes.fromhex("8c5be1e5ebec7d5bd14f71427d1e84f3dd0314c0f7b2291e5b200ac8c7c3b925"))
"""Keccak-256 of `Approval(address,address,uint256)` (ERC-20)."""


COLUMNS = ("submission", "step:index", "kind", "verdict", "fate", "signed by")


@click.group()
def trap() -> None:
    """Try validators with hidden traps."""


@trap.command("plan")
@key_options
@run_option
@click.option("--worker", metavar="ADDRESS", required=True, help="The staked trap worker.")
@click.option("--rate", type=click.FloatRange(0, 1), default=0.05, help="Share.")
@click.option("--first-step", type=int, default=0, help="First step.")
@click.option("--last-step", type=int, required=True, help="Last step.")
@click.option("--out", type=FILE, required=True, help="Where the secret plan goes.")
@looking_options
def trap_plan(keystore: Path, password_file: Path | None, out: Path, **options: Any) -> None:
    """Draw up a plan, commit to it on chain, and write it to a file; keep that secret.

    Do not send it from the trap worker's account: that would reveal the worker.

    \b
    Example:
      muster validator trap plan --run 1 --worker 0x... --rate 0.05 --last-step 500 \\
        --keystore owner.json --out plan.json
    """
    if out.exists():
        raise ConfigError(
            f"{out} exists already, and a plan on chain is worth nothing without its secret",
            hint="choose another --out; nothing was sent",
        )
    plan = TrapPlan(
        run_id=RunId(options["run"]),
        worker=to_address(options["worker"]),
        first_step=Step(options["first_step"]),
        last_step=Step(options["last_step"]),
        rate_ppm=round(options["rate"] * MILLION),
        secret=Hash32(os.urandom(32)),
    )
    key = open_keystore(keystore, password_file)
    if key.address == plan.worker:
        raise ConfigError(
            "the trap worker's own account would tell everybody which files to look at",
            hint="commit from another account",
        )
    transaction = asyncio.run(_commit(key.key, plan, out, options))
    report = {"commitment": f"0x{plan.commitment().hex()}", "transaction": transaction}
    words = {"plan": f"{out}: keep it secret until its traps are judged"}
    print_result(report, options["as_json"], report | words)


async def _commit(key: bytes, plan: TrapPlan, out: Path, options: dict[str, Any]) -> str:
    """Write the plan and commit to it; no file stays where nothing was sent."""
    tell_what_is_sent(is_repeatable=False)
    async with await Chain.connect(*endpoint(options), key=key) as chain:
        write_durably(out, json.dumps(plan.to_json(), indent=1).encode() + b"\n")
        out.chmod(0o600)
        try:
            return await anchor_plan(chain, plan)
        except MusterError:
            if not SENT:
                out.unlink()
            raise


@trap.command("run")
@node_options
@click.option("--worker", metavar="ADDRESS", help="The staking wallet this node works for.")
@click.option("--heartbeat-s", type=float, help="Seconds between signs of life. [default: 10]")
@click.option("--plan", "plan_file", type=FILE, required=True, help="The secret plan.")
def trap_run(plan_file: Path, **options: Any) -> None:
    """Run the trap worker: `muster worker run`, but for one sample in the planned files.

    The right verdict on these is Rejected, which costs the worker the file's pay and no stake.

    \b
    Example:
      muster validator trap run --plan plan.json --run 1 --keystore node.json --worker 0x... \\
        --state-dir trap --orchestrator http://orchestrator:8600
    """
    from muster.client.worker.process import run_worker
    from muster.client.worker.trapping import TrapJournal, TrapWorker

    plan = read_plan(plan_file)
    settings, node = begin_process(WorkerSettings, "worker", options)
    settings = settings.model_copy(update={"tickets_per_engine": 1})
    with TrapJournal(settings.state_dir) as traps:
        make_loop = partial(TrapWorker, plan=plan, traps=traps)
        run_until_stopped(lambda: run_worker(settings, node, loop_class=make_loop))


@trap.command("report")
@click.option("--plan", "plan_file", type=FILE, required=True, help="The plan, revealed.")
@click.option("--journal", type=FILE, help="The trap worker's STATE/traps.jsonl.")
@looking_options
def trap_report(plan_file: Path, journal: Path | None, **options: Any) -> None:
    """Report how validators judged a plan's traps, and prove that the plan came first.

    Anybody who has the plan can repeat it. An accepted trap is a wrong verdict: the report says how
    to challenge it. Without the journal, a planned file may be an honest one: re-run it.

    \b
    Example:
      muster validator trap report --plan plan.json --journal trap/traps.jsonl
    """
    plan, laid = read_plan(plan_file), read_laid(journal)
    anchor, found = asyncio.run(_report(plan, laid, options))
    if options["as_json"]:
        print_json(report_json(plan, anchor, found))
    else:
        print_report(plan, anchor, found)


async def _report(
    plan: TrapPlan, laid: dict[tuple[int, int], Any] | None, options: dict[str, Any]
) -> tuple[PlanOnChain, list[Found]]:
    async with await Chain.connect(*endpoint(options)) as chain:
        view = await read_view(chain, ChainView())
        find_run(view, plan.run_id)
        found = find_traps(view, plan, laid)
        return require_before(await find_anchor(chain, plan), view, found), found


def read_plan(path: Path) -> TrapPlan:
    """Return a plan; raises ConfigError when the file holds none."""
    try:
        return TrapPlan.from_json(json.loads(path.read_bytes()))
    except (OSError, ValueError, EncodingError) as error:
        raise ConfigError(
            f"cannot read the plan {path}: {error}", hint="muster validator trap plan writes one"
        ) from error


def read_laid(path: Path | None) -> dict[tuple[int, int], Any] | None:
    """Return a trap worker's notes by slot; raises ConfigError when they cannot be read."""
    if path is None:
        return None
    try:
        entries = [json.loads(line) for line in path.read_text().splitlines()]
        return {(int(each["step"]), int(each["index"])): each for each in entries}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"cannot read the journal {path}: {error}") from error


def report_json(plan: TrapPlan, anchor: PlanOnChain, found: list[Found]) -> dict[str, Any]:
    """Return a report as JSON values."""
    return {
        "commitment": f"0x{plan.commitment().hex()}",
        "committed": {"block": anchor.block_number, "transaction": anchor.tx_hash},
        "traps": [
            {
                "submission": each.name,
                "step": each.record.step,
                "index": each.record.index,
                "kind": each.trap.kind,
                "verdict": each.record.verdict.name.lower(),
                "fate": each.fate,
                "signers": list(each.signers),
                "slashed_wei": {who: str(wei) for who, wei in each.slashed.items()},
            }
            for each in found
        ],
        "validators": score(found),
    }


def print_report(plan: TrapPlan, anchor: PlanOnChain, found: list[Found]) -> None:
    """Print a report for people, with the next steps after wrong verdicts."""
    print_facts(
        {
            "plan": f"worker {plan.worker}, steps {plan.first_step} to {plan.last_step}, "
            f"{format_share(plan.rate_ppm)} of its files",
            "committed": f"block {anchor.block_number}, {anchor.tx_hash}: before every file below",
        }
    )
    rows = [
        [
            each.name,
            f"{each.record.step}:{each.record.index}",
            each.trap.kind,
            each.record.verdict.name.lower(),
            each.fate,
            ", ".join(who[:10] for who in each.signers),
        ]
        for each in found
    ]
    print_table(COLUMNS, rows)
    for who, counts in score(found).items():
        click.echo(f"{who}  caught {counts['caught']}, missed {counts['missed']}")
    for each in found:
        for who, wei in each.slashed.items():
            click.echo(f"{who}  slashed {format_tokens(wei)} tokens for accepting {each.name}")
    for each in to_challenge(found):
        click.echo(
            f"challenge it: muster dispute open {each.name} --ruling rejected --keystore FILE "
            "--wait"
        )
