"""`muster audit`: who did what, and who was slashed why, rebuilt and re-checked from the chain.

No orchestrator is asked. Exits 1 when anything contradicts. `--json` prints one line:

    {"chain_id", "block",
     "runs": [{"run_id", "owner", "paused", "quorum", "validators", "price_wei", "funded_wei",
               "paid_wei", "batches", "judged", "submitted", "accepted", "rejected", "fraud",
               "units", "checkpoints": [{"version", "manifest_root", "beacon", "block", "tx"}]}],
     "workers": [{"address", "worker_id", "node", "status", "stake_wei", "unbonding_wei",
                  "slashed_wei", "submitted", "accepted", "rejected", "fraud", "units",
                  "paid_wei"}],
     "batches": n,
     "slashes": [{"worker", "amount_wei", "reason", "state", "run_id", "batch_id", "position",
                  "offence", "tx", "outcome_tx"}],
     "payments": [{"run_id", "worker", "slots", "units", "amount_wei", "tx"}],
     "checks": [{"name", "passed", "detail"}]}

Wei are decimal text; `rejected` includes incomplete work; with `--run`, figures are those of that
run while the checks cover the whole chain.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from muster.client.audit_verify import verify
from muster.client.options import chain_options, endpoint, json_option
from muster.protocol.errors import ConfigError
from muster.protocol.ids import Hash32, RunId

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from muster.chain import Chain, ChainView
    from muster.client.audit_checks import Observed
    from muster.client.audit_report import AuditReport


WIDTH = 160
"""Columns of the tables when nobody watches: wide enough for everything."""


@click.group(invoke_without_command=True)
@click.option("--run", type=int, help="Show this run only.")
@json_option
@chain_options
@click.pass_context
def audit(context: click.Context, /, run: int | None, as_json: bool, **options: Any) -> None:
    """Rebuild and check everything from the chain; `verify` re-runs one verdict from its evidence.

    \b
    Example:
      muster audit --run 1
    """
    import asyncio

    if context.invoked_subcommand is not None:
        return
    report = asyncio.run(read_report(*endpoint(options), None if run is None else RunId(run)))
    if as_json:
        click.echo(json.dumps(report.to_json()))
    else:
        print_report(report)
    if not report.passed:
        sys.exit(1)


audit.add_command(verify)


async def read_report(rpc: str, deployments: Path, run_id: RunId | None = None) -> AuditReport:
    """Return the audit of a chain; raises ChainError, or ConfigError when there is no such run."""
    from muster.chain import Chain, ChainView, EventReader, apply_poll
    from muster.client.audit_report import build_report

    async with await Chain.connect(rpc, deployments) as chain:
        view = ChainView()
        poll = await EventReader(chain).poll()
        apply_poll(view, poll)
        if run_id is not None and run_id not in view.runs:
            raise ConfigError(
                f"there is no run {run_id} on chain {chain.chain_id}",
                hint="leave out --run to see all runs",
            )
        block = poll.head.number if poll.head else 0
        observed = await observe(chain.at(block), view)
        return build_report(view, chain.deployment, block=block, run_id=run_id, observed=observed)


async def observe(chain: Chain, view: ChainView) -> Observed:
    """Return what the contracts say about what the events tell; `chain` is at the view's block."""
    from muster.client.audit_checks import Observed

    at = chain.deployment.contracts
    strange = [
        batch.batch_id
        for batch in view.batches.values()
        if undisputed(await chain.ledger.commitment_of(batch.batch_id))
        != batch.header().commitment()
    ]
    accounts = set(view.stakes).union(*(run.seats for run in view.runs.values()))
    return Observed(
        stakes={who: await chain.vault.account_of(who) for who in sorted(accounts)},
        vault_wei=await chain.token.balance_of(at["StakeVault"]),
        escrow_wei=await chain.token.balance_of(at["RewardEscrow"]),
        runs=await chain.runs.run_count(),
        batches=await chain.ledger.batch_count(),
        funds={run: await chain.escrow.funds_of(run) for run in view.runs},
        versions={run: await chain.runs.latest_version(run) for run in view.runs},
        strange=frozenset(strange),
    )


def undisputed(commitment: Hash32) -> Hash32:
    """Return a batch's stored hash without the bit that tells of challenges."""
    return Hash32(commitment[:-1] + bytes([commitment[-1] & 0xFE]))


def print_report(report: AuditReport) -> None:
    """Print a report as tables."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    console.print(f"chain {report.chain_id}, read up to block {report.block}")
    for table in _tables(report):
        if table.row_count:
            console.print(table)
    _print_checks(console, report)


def _tables(report: AuditReport) -> list[Table]:
    return [
        _table(
            "runs",
            ("run", "policy", "batches", "judged", "submitted", "accepted", "rejected", "fraud"),
            ("units", "funded", "paid"),
            [
                (
                    *(r.run_id, r.checkpoints[-1].version if r.checkpoints else "-", r.batches),
                    *(r.judged, r.submitted, r.accepted, r.rejected, r.fraud, r.units),
                    *(_tokens(r.funded_wei), _tokens(r.paid_wei)),
                )
                for r in report.runs
            ],
        ),
        _table(
            "workers",
            ("worker", "status", "stake", "judged", "accepted", "rejected", "fraud"),
            ("units", "paid"),
            [
                (
                    *(_short(w.address), w.status, _tokens(w.stake_wei), w.submitted, w.accepted),
                    *(w.rejected, w.fraud, w.units, _tokens(w.paid_wei)),
                )
                for w in report.workers
            ],
        ),
        _table(
            "slashes",
            ("worker", "tokens", "reason"),
            ("state", "batch", "transaction"),
            [
                (_short(s.worker), _tokens(s.amount_wei), s.reason, s.state, s.batch_id, s.tx)
                for s in report.slashes
            ],
        ),
        _table(
            "policies",
            ("run", "version", "block"),
            ("manifest root", "transaction"),
            [
                (r.run_id, c.version, c.block, _short(c.manifest_root), c.tx)
                for r in report.runs
                for c in r.checkpoints
            ],
        ),
        _table(
            "payments",
            ("worker", "run", "slots"),
            ("units", "tokens", "transaction"),
            [
                (_short(p.worker), p.run_id, p.slots, p.units, _tokens(p.amount_wei), p.tx)
                for p in report.payments
            ],
        ),
    ]


def _table(
    title: str, columns: tuple[str, ...], more: tuple[str, ...], rows: list[tuple[Any, ...]]
) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1))
    for column in (*columns, *more):
        # Whole transaction hashes are what an auditor copies: they fold where the rest is cut.
        is_hash = column == "transaction"
        table.add_column(column, no_wrap=not is_hash, overflow="fold" if is_hash else "ellipsis")
    for row in rows:
        table.add_row(*(str(value) for value in row))
    return table


def _short(text: str) -> str:
    return f"{text[:8]}…{text[-6:]}"


def _tokens(wei: str) -> str:
    return f"{int(wei) / 10**18:,.6g}"


def _print_checks(console: Console, report: AuditReport) -> None:
    for check in report.checks:
        mark = "[green]ok  [/green]" if check.passed else "[red]FAIL[/red]"
        console.print(f"{mark} {check.name}: {check.detail}", soft_wrap=True, highlight=False)
    failed = sum(not check.passed for check in report.checks)
    verdict = f"{failed} contradictions" if failed else "no contradiction"
    console.print(f"{verdict} in {len(report.checks)} checks")
