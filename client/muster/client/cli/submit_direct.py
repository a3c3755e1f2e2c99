"""`muster worker submit-direct`: the worker's steps against a silent run, by hand.

The worker's process takes these steps by itself, as far as its node has a bond and gas. The command
is for a worker whose process is stopped, or whose own wallet pays the bond.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from muster.client.cli.options import (
    FILE,
    FOLDER,
    PASSWORD_HELP,
    acting_options,
    agree,
    endpoint,
    key_options,
    open_keystore,
    orchestrator_option,
    relay_option,
)
from muster.client.cli.printing import print_json
from muster.protocol.errors import ConfigError
from muster.wallet import Wallet, keystore_address

if TYPE_CHECKING:
    from muster.chain import BatchView, Chain, ChainView
    from muster.client.worker.journal import SignedSubmission, SubmissionJournal
    from muster.client.worker.silence import SilenceDuty, SilenceStep
    from muster.protocol.ids import Address, RunId

MOST_STEPS = 3
"""Most steps in a row for one piece of work: take it out of a batch, call judges, void it."""
ROOM_TRIES = 8
"""How often work is offered to a room that refuses it: the room may not have read the chain yet."""
ROOM_PAUSE_S = 2.0
"""Pause before a file is offered to a room again: it may not have read the block yet."""


@click.command("submit-direct")
@key_options
@click.argument("submission", metavar="[SUBMISSION]", required=False)
@click.option("--state-dir", type=FOLDER, required=True, help="The worker's state folder.")
@click.option(
    "--run",
    type=click.IntRange(min=1),
    help="The run. [default: that of the work that waits for its outcome]",
)
@click.option("--payer", type=FILE, help="The worker's wallet, for bond and gas. [default: node]")
@click.option("--payer-password-file", type=FILE, help=PASSWORD_HELP)
@orchestrator_option
@relay_option
@click.option("--dry-run", is_flag=True, help="Say what it would do; send nothing.")
@acting_options
def submit_direct(
    keystore: Path,
    password_file: Path | None,
    payer: Path | None,
    payer_password_file: Path | None,
    **options: Any,
) -> None:
    """Get work judged that its run ignores; --keystore is the node's. Prints transactions.

    Commits work that the orchestrator did not commit, until a minute after the ticket's deadline.
    Takes work out of a batch that nobody judged, and calls jurors of the network: for all of it, or
    only for SUBMISSION (BATCH:POSITION). Each takes a bond, which comes back unless jurors find
    fault: the same command returns it, with --run once no work waits. A worker's process does all
    this by itself.

    \b
    Examples:
      muster worker submit-direct --state-dir worker --keystore node.json --dry-run
      muster worker submit-direct 12:3 --state-dir worker --keystore node.json \\
        --payer worker.json --relay http://relay:8700
    """
    options["node"] = keystore_address(keystore)
    node = sender = None
    if not options["dry_run"]:
        node = sender = open_keystore(keystore, password_file, "node")
        if payer is not None:
            sender = open_keystore(payer, payer_password_file or password_file)
    asyncio.run(_submit(node, sender, options))


@dataclass(frozen=True, slots=True)
class _NextStep:
    """The next step for one piece of work."""

    signed: SignedSubmission
    batch: BatchView | None
    step: SilenceStep | None
    place: str | None
    words: str

    def to_json(self) -> dict[str, Any]:
        ticket = self.signed.ticket
        return {
            "step": ticket.step,
            "index": ticket.index,
            "submission": self.place,
            "next": self.step,
            "because": self.words,
        }


async def _submit(node: Wallet | None, sender: Wallet | None, options: dict[str, Any]) -> None:
    from muster.client.disputes.unsettled import bond_payer

    async with _open_duty(node, sender, options) as (duty, read):
        plans = _named(await _plans(duty), options["submission"])
        for plan in plans:
            ticket = plan.signed.ticket
            click.echo(f"{ticket.step}:{ticket.index}  {plan.words}", err=True)
        held = [batch for batch in duty.bonds() if await bond_payer(duty.chain, batch)]
        for batch in held:
            over = "void" if batch.is_void else "judged"
            click.echo(f"batch {batch.batch_id} is {over}: its bond can come back", err=True)
        due = [plan for plan in plans if plan.step is not None]
        transactions: list[str] = []
        if options["dry_run"]:
            click.echo("nothing was sent", err=True)
        elif due or held:
            await _agree(duty, len(due) + len(held), options)
            for plan in due:
                transactions += await _carry_out(duty, read, plan)
            for batch in duty.bonds():
                receipt = await duty.return_bond(batch)
                transactions += [receipt.tx_hash] if receipt else []
        else:
            click.echo("no step is due now", err=True)
    if options["as_json"]:
        print_json({"work": [p.to_json() for p in plans], "transactions": transactions})
    else:
        click.echo("".join(f"{each}\n" for each in transactions), nl=False)


@asynccontextmanager
async def _open_duty(
    node: Wallet | None, sender: Wallet | None, options: dict[str, Any]
) -> AsyncIterator[tuple[SilenceDuty, Any]]:
    """Open the journal, the chain and the rooms; yields the duty, and what updates its view."""
    from muster.api import OrchestratorApi
    from muster.chain import Chain, ChainView, EventReader, apply_poll
    from muster.client.chain_facts import read_times
    from muster.client.preflight import find_run
    from muster.client.sources import Sources
    from muster.client.worker.context import NodeContext
    from muster.client.worker.silence import SilenceDuty

    async with AsyncExitStack() as stack:
        key = sender.key if sender else None
        chain = await stack.enter_async_context(await Chain.connect(*endpoint(options), key=key))
        journal = stack.enter_context(_open_journal(options["state_dir"]))
        view, reader = ChainView(), EventReader(chain)

        async def read() -> None:
            apply_poll(view, await reader.poll())

        await read()
        run = find_run(view, options["run"] or _run_of(journal, options["state_dir"]))
        api, asking, relays = None, None, list(options["relay"])
        if options["orchestrator"]:
            api = await stack.enter_async_context(OrchestratorApi(options["orchestrator"]))
            if not relays:
                asking = await stack.enter_async_context(Sources([options["orchestrator"]]))
                relays = await asking.relays_named_by(options["orchestrator"], run.run_id)

        async def open_rooms() -> Sources:
            # The client that was given the relays knows where their names came from.
            is_own = asking is None or await asking.is_inside(options["orchestrator"])
            return Sources(relays if is_own else (), named=relays)

        context = NodeContext(
            run_id=run.run_id,
            worker=_worker_of(view, options["node"]),
            key=node.key if node else b"",
            domain=chain.domain("ContributionLedger"),
            view=view,
            api=api,
            journal=journal,
            poll_s=1.0,
        )
        shown_at = [*relays, *([options["orchestrator"]] if options["orchestrator"] else [])]
        times = await read_times(chain)
        yield SilenceDuty(context, chain, open_rooms, times, lambda: shown_at), read


def _open_journal(folder: Path) -> SubmissionJournal:
    from muster.client.worker.journal import SubmissionJournal

    if not (folder / "submissions.jsonl").exists():
        raise ConfigError(
            f"no worker has signed anything in {folder}",
            hint="give the --state-dir of muster worker run",
        )
    try:
        return SubmissionJournal(folder)
    except ConfigError as error:
        raise ConfigError(
            f"a worker's process uses {folder}",
            hint="the process does this by itself if its node has the bond and gas; else "
            "stop the process first",
        ) from error


def _run_of(journal: SubmissionJournal, folder: Path) -> RunId:
    """Return the run of the submissions that a worker signed and nobody judged."""
    runs = {signed.submission.run_id for signed in journal.unfinished().values()}
    if len(runs) != 1:
        raise ConfigError(
            f"no submission in {folder} waits for its outcome",
            hint="muster explain says what became of a submission; --run N gets the bonds of "
            "judged work back",
        )
    return runs.pop()


def _named(plans: list[_NextStep], submission: str | None) -> list[_NextStep]:
    """Return the plans about the named submission; all without a name."""
    if submission is None:
        return plans
    named = [plan for plan in plans if plan.place == submission]
    if not named:
        places = ", ".join(plan.place for plan in plans if plan.place)
        raise ConfigError(
            f"{submission} is not a submission of this worker that waits for its outcome",
            hint=f"give one of: {places}"
            if places
            else "none of its submissions is in a batch yet: leave out BATCH:POSITION",
        )
    return named


def _worker_of(view: ChainView, node: Address) -> Address:
    worker = view.worker_by_node.get(node)
    if worker is None:
        raise ConfigError(
            f"{node} serves no worker",
            hint="give the node's keystore with --keystore, and the worker's with --payer",
        )
    return worker.address


async def _plans(duty: SilenceDuty) -> list[_NextStep]:
    plans = []
    at = await duty.chain.now()
    await duty.elsewhere.look()
    for signed in duty.context.unfinished.values():
        await duty.look_up(signed)
        # Unlike the process, the command does not wait until the orchestrator's time is over.
        batch, step = duty.next_of(signed, at, is_refused=True)
        words = _words(duty, signed, batch, step, at)
        plans.append(_NextStep(signed, batch, step, _place_of(duty, signed, batch), words))
    return plans


def _place_of(duty: SilenceDuty, signed: SignedSubmission, batch: BatchView | None) -> str | None:
    if batch is None:
        return None
    proven = duty.context.journal.proven(signed)
    position = proven.position if proven and batch.work is None else 0
    return f"{batch.batch_id}:{position}"


def _words(
    duty: SilenceDuty,
    signed: SignedSubmission,
    batch: BatchView | None,
    step: SilenceStep | None,
    at: float,
) -> str:
    """Return in words the next step for a piece of work, or why there is none."""
    from muster.client.quantities import format_time, format_tokens
    from muster.client.worker.silence import SilenceStep
    from muster.protocol.messages import COMMIT_GRACE_S

    bond = format_tokens(duty.times.court.bond)
    if step is SilenceStep.SUBMIT:
        until = format_time(signed.ticket.deadline + COMMIT_GRACE_S)
        return f"not committed: {step}, with a bond of {bond} tokens, until {until}"
    if step is not None:
        name = batch.batch_id if batch else "?"
        with_bond = f", with a bond of {bond} tokens" if step is SilenceStep.SPLIT else ""
        return f"batch {name} is unjudged: {step}{with_bond}"
    if batch is None:
        return "lost: it was not committed before the ticket's deadline, or the run takes no work"
    if batch.is_void:
        return f"batch {batch.batch_id} is void"
    if batch.records is not None:
        return f"batch {batch.batch_id} is judged: muster explain says how"
    due_at = batch.due_at(duty.times.outcome_deadline_s)
    if at < due_at:
        return f"batch {batch.batch_id} waits for its outcomes until {format_time(due_at)}"
    return f"batch {batch.batch_id} is with the network's jurors, or was: see muster dispute list"


async def _agree(duty: SilenceDuty, count: int, options: dict[str, Any]) -> None:
    from muster.client.preflight import gas_money, require_gas

    chain: Chain = duty.chain
    await require_gas(chain, chain.me, "worker submit-direct", await gas_money(chain, "show"))
    agree(f"Send transactions for {count} of them?", options)


async def _carry_out(duty: SilenceDuty, read: Any, plan: _NextStep) -> list[str]:
    """Take the steps for a piece of work that are possible now; return the transactions."""
    transactions: list[str] = []
    batch, step = plan.batch, plan.step
    for _ in range(MOST_STEPS):
        if step is None:
            break
        transactions.append(await duty.act(step, plan.signed, batch))
        await read()
        at = await duty.chain.now()
        batch, step = duty.next_of(plan.signed, at, is_refused=True)
    taken: set[str] = set()
    for _ in range(ROOM_TRIES):
        if await duty.deposits.deposit(plan.signed, taken):
            break
        await asyncio.sleep(ROOM_PAUSE_S)
    return transactions
