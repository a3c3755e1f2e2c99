"""A chain's history, rebuilt from RPC endpoints or a dump, with checks of the source."""

from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from muster.chain import BlockId, Chain, Deployment, RunView
from muster.chain.abi import EventTable
from muster.client.audit.contradictions import Check, Contradiction, ProofLevel, summarise
from muster.client.audit.dump import DumpedBlock, DumpEnd, DumpReader, writing_dump
from muster.client.audit.endpoints import (
    check_block,
    compare,
    compare_with_past,
    contract_addresses,
    prove,
    read_source,
)
from muster.client.audit.ledger import Ledger, of_run
from muster.client.audit.observed import Observed, observe
from muster.client.audit.report import AuditReport, build_report
from muster.protocol.eip712 import Domain
from muster.protocol.errors import ConfigError, EncodingError
from muster.protocol.ids import PolicyVersion, RunId


@dataclass(frozen=True, slots=True)
class HistorySource:
    """The source of a history, and how much of it is proven."""

    rpcs: tuple[str, ...] = ()
    """RPC endpoints: the first is read, the others are compared with it."""
    deployments: Path | Deployment = Path()
    """The contracts' addresses, or the folder that holds them."""
    dump: Path | None = None
    """A dump to read instead."""
    proof: ProofLevel = ProofLevel.BLOCKS
    """What endpoints must prove."""
    since: Path | None = None
    """A dump of an earlier look that the chain must not contradict."""
    run_id: RunId | None = None
    """The only run that the contracts are asked about; None for all."""


@dataclass(frozen=True, slots=True)
class ChainHistory:
    """A chain as rebuilt from its events."""

    ledger: Ledger
    """The ledger rebuilt from the events."""
    deployment: Deployment
    """The contracts."""
    head: BlockId
    """The block up to which it was read."""
    observed: Observed
    """The contracts' state at that block."""
    about_source: Sequence[Check] = ()
    """Checks of the source."""
    dumped: int = 0
    """Number of blocks that were written to a dump."""
    run_id: RunId | None = None
    """The only run that the contracts were asked about; None for all."""

    @property
    def domain(self) -> Domain:
        """The domain under which submissions and outcomes are signed."""
        return Domain(self.deployment.chain_id, self.deployment.contracts["ContributionLedger"])

    def report(self, run_id: RunId | None = None) -> AuditReport:
        """Return the audit; raises ConfigError when there is no such run."""
        run_id = self.run_id if run_id is None else run_id
        self.require_run(run_id)
        return build_report(
            self.ledger,
            self.deployment,
            self.observed,
            block=self.head.number,
            run_id=run_id,
            about_source=self.about_source,
        )

    def require_run(self, run_id: RunId | None) -> None:
        """Raise ConfigError when there is no such run."""
        if run_id is not None and run_id not in self.ledger.runs:
            raise ConfigError(
                f"there is no run {run_id} on chain {self.deployment.chain_id}",
                hint="run muster audit without --run to see all runs",
            )

    def version_of(
        self, run_id: RunId, version: PolicyVersion | None
    ) -> tuple[RunView, PolicyVersion]:
        """Return a run and a version, by default the newest; raises ConfigError for none."""
        self.require_run(run_id)
        run = self.ledger.runs[run_id]
        wanted = run.latest_version if version is None else version
        if wanted is None or wanted not in run.checkpoints:
            raise ConfigError(
                f"run {run_id} has no version {'yet' if wanted is None else wanted}",
                hint="its trainer publishes version 0 first"
                if run.latest_version is None
                else f"give --version up to {run.latest_version}, its newest",
            )
        return run, wanted


async def read(wanted: HistorySource, *, dump_to: Path | None = None) -> ChainHistory:
    """Return a history, and write the dump of a chain to a file. Raises ChainError, ConfigError,
    or EncodingError for a damaged dump.
    """
    if wanted.dump is not None:
        return read_dump(wanted.dump)
    return await _read_rpc(wanted, dump_to)


async def _read_rpc(wanted: HistorySource, dump_to: Path | None) -> ChainHistory:
    async with AsyncExitStack() as stack:
        chains = [
            await stack.enter_async_context(await Chain.connect(rpc, wanted.deployments))
            for rpc in wanted.rpcs
        ]
        chain, others = chains[0], chains[1:]
        is_proven = wanted.proof is not ProofLevel.NONE
        keeps_logs = dump_to is not None or is_proven or bool(others)
        ledger = Ledger()
        heard = await read_source(chain, ledger, keeps_logs=keeps_logs)
        head = heard.head
        is_one = wanted.run_id in ledger.runs
        asked = of_run(ledger, wanted.run_id) if wanted.run_id and is_one else ledger
        # Before anything that takes long: an endpoint keeps the states of few blocks.
        observed = await observe(chain, asked, block=head.number)
        about = [await compare(heard, chain.rpc, other) for other in others]
        dump = (
            None
            if dump_to is None
            else stack.enter_context(writing_dump(dump_to, chain.deployment))
        )
        if is_proven:
            about.insert(0, await prove(chain, heard, wanted.proof, dump))
        if dump is not None:
            for block in heard.blocks.values():
                dump.add(block)
            dump.end(DumpEnd(head, observed))
        if wanted.since is not None:
            past = DumpReader(wanted.since).blocks()
            describe = partial(_events_in, table=EventTable(chain.deployment.contracts))
            about.append(await compare_with_past(chain.rpc, past, wanted.since.name, describe))
        return ChainHistory(
            ledger=ledger,
            deployment=chain.deployment,
            head=head,
            observed=observed,
            about_source=about,
            dumped=dump.blocks if dump else 0,
            run_id=wanted.run_id if is_one else None,
        )


def read_dump(path: Path) -> ChainHistory:
    """Return the history of a dump; its blocks are proven if it holds headers and receipts."""
    reader, ledger = DumpReader(path), Ledger()
    table = EventTable(
        {name: at for name, at in reader.deployment.contracts.items() if name != "MusterToken"}
    )
    addresses = contract_addresses(reader.deployment)
    found: list[Contradiction] = []
    count = Counter[bool]()
    for block in reader.blocks():
        is_provable = block.header is not None and block.receipts is not None
        count[is_provable] += 1
        if block.header is not None and block.receipts is not None:
            found += check_block(block, block.header, block.receipts, addresses)
        for log in block.logs:
            if (event := table.decode(log, block.timestamp)) is not None:
                ledger.apply(event)
    if reader.end is None:
        raise EncodingError(f"{path} has no end")
    what = f"{count[True]} blocks proven, {count[False]} as the dump has them"
    proven = summarise("the dump proves its events by block hashes", found, what)
    return ChainHistory(ledger, reader.deployment, reader.end.head, reader.end.observed, [proven])


def _events_in(block: DumpedBlock, table: EventTable) -> str:
    """Return the events of a dumped block, each with the batch or version that it is about."""
    events = [table.decode(log, block.timestamp) for log in block.logs]
    return ", ".join(f"{e.name}{_about(e.args)}" for e in events if e is not None) or "nothing"


def _about(args: dict[str, Any]) -> str:
    for name in ("batch_id", "version", "worker", "owner"):
        if name in args:
            return f" ({name.replace('_id', '')} {args[name]})"
    return ""
