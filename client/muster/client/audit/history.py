"""A chain's history, rebuilt from RPC endpoints or a dump, with checks of the source.

`read` returns the history for the commands of the audit. `ChainWatch` follows a chain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from muster.chain import BlockId, Chain, Deployment, Event, apply_poll
from muster.chain.abi import EventTable
from muster.client.audit.contradictions import Check, Contradiction, Kind, ProofLevel, summarise
from muster.client.audit.dump import DumpedBlock, DumpEnd, DumpReader, write_dump
from muster.client.audit.ledger import Ledger, of_run
from muster.client.audit.observed import Observed, Parameters, observe, parameters_of
from muster.client.audit.report import AuditReport, build_report, run_checks
from muster.client.audit.sources import (
    RawPoll,
    SourceReader,
    check_block,
    compare,
    compare_with_past,
    contract_addresses,
    prove,
)
from muster.client.audit.table import tabulate
from muster.client.quantities import format_tokens
from muster.protocol.eip712 import Domain
from muster.protocol.errors import ConfigError, EncodingError
from muster.protocol.ids import RunId

DEFAULT_FINALITY = 64
"""Depth below the head from which blocks count as final: two epochs of Ethereum."""


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
    blocks: Sequence[DumpedBlock] = ()
    """The raw blocks, if they were kept."""

    @property
    def domain(self) -> Domain:
        """The domain under which submissions and outcomes are signed."""
        return Domain(self.deployment.chain_id, self.deployment.contracts["ContributionLedger"])

    @property
    def parameters(self) -> Parameters:
        """The contracts' constructor parameters, as far as they are known."""
        return parameters_of(self.deployment, self.observed)

    def report(self, run_id: RunId | None = None) -> AuditReport:
        """Return the audit; raises ConfigError when there is no such run."""
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

    def save(self, path: Path) -> int:
        """Write a dump and return its number of blocks."""
        end = DumpEnd(self.head, self.observed)
        return write_dump(path, self.deployment, self.blocks, lambda: end)


async def read(wanted: HistorySource, *, keeps_blocks: bool = False) -> ChainHistory:
    """Return a history; raises ChainError, ConfigError, or EncodingError for a damaged dump."""
    if wanted.dump is not None:
        return read_dump(wanted.dump)
    return await _read_rpc(wanted, keeps_blocks=keeps_blocks)


async def _read_rpc(wanted: HistorySource, *, keeps_blocks: bool) -> ChainHistory:
    async with AsyncExitStack() as stack:
        chains = [
            await stack.enter_async_context(await Chain.connect(rpc, wanted.deployments))
            for rpc in wanted.rpcs
        ]
        chain, others = chains[0], chains[1:]
        is_proven = wanted.proof is not ProofLevel.NONE
        keeps_logs = keeps_blocks or is_proven or bool(others)
        heard = await SourceReader(chain, keeps_logs=keeps_logs).poll()
        about = [await prove(chain, heard, wanted.proof)] if is_proven else []
        about += [await compare(heard, chain.rpc, other) for other in others]
        if wanted.since is not None:
            past = DumpReader(wanted.since).blocks()
            describe = partial(_events_in, table=EventTable(chain.deployment.contracts))
            about.append(await compare_with_past(chain.rpc, past, wanted.since.name, describe))
        ledger, head = Ledger(), heard.poll.head
        apply_poll(ledger, heard.poll)
        return ChainHistory(
            ledger=ledger,
            deployment=chain.deployment,
            head=head,
            observed=await observe(chain, ledger, block=head.number),
            about_source=about,
            blocks=tuple(heard.blocks.values()) if keeps_blocks else (),
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


# Followed


@dataclass(frozen=True, slots=True)
class WatchLine:
    """One event, in words."""

    what: str
    """outcome, slash, claim, policy or rewritten."""
    block: int
    text: str
    """In words."""
    tx: str | None = None
    """The transaction."""

    def __str__(self) -> str:
        return f"block {self.block} {self.what} {self.text}" + (f" {self.tx}" if self.tx else "")


@dataclass(slots=True)
class Seen:
    """News from one look at the chain."""

    lines: list[WatchLine] = field(default_factory=list)
    """What happened, in chain order."""
    contradictions: list[Contradiction] = field(default_factory=list)
    """Contradictions that no earlier look reported."""


class ChainWatch:
    """A ledger that grows with the chain and reports events and contradictions as they appear.

    Every look reads, proves and applies the new blocks, checks the new batches and all of the
    money, and reports what no earlier look reported. It also reports a reorganisation, which is a
    contradiction when it removes blocks that counted as final.
    """

    def __init__(
        self,
        chain: Chain,
        *,
        run_id: RunId | None = None,
        proof: ProofLevel = ProofLevel.BLOCKS,
        finality: int = DEFAULT_FINALITY,
    ) -> None:
        """`finality` is the number of blocks that a reorganisation may remove."""
        self._chain, self._run_id, self._finality = chain, run_id, finality
        # Blocks only: every header since the deployment would be too much at every look.
        self._reader = SourceReader(chain, keeps_logs=proof is not ProofLevel.NONE)
        self.ledger = Ledger(keeps_events=True)
        self._head = 0
        # What was read and is not applied yet, and what no look has returned yet.
        self._events: list[Event] = []
        self._blocks: dict[int, DumpedBlock] = {}
        self._seen = Seen()
        self._checked: set[int] = set()
        self._is_checked = True
        self._said: set[tuple[str, str, str]] = set()

    async def look(self) -> Seen:
        """Return what is new; raises ChainError while the endpoint does not answer.

        Nothing is lost then: the next look goes on with what was read and was not proven, applied
        or checked.
        """
        heard = await self._reader.poll()
        if heard.poll.rewound_to is not None:
            self._rewind(heard.poll.rewound_to)
        self._head = heard.poll.head.number
        self._events += heard.poll.events
        self._blocks |= heard.blocks
        if self._blocks:
            unproven = RawPoll(heard.poll, dict(self._blocks))
            self._add((await prove(self._chain, unproven, ProofLevel.BLOCKS)).contradictions)
        for event in self._events:
            self.ledger.apply(event)
            self._seen.lines += self._lines(event)
            self._is_checked = False
        self._events, self._blocks = [], {}
        if not self._is_checked:
            await self._check(self._head)
        seen, self._seen = self._seen, Seen()
        return seen

    async def _check(self, block: int) -> None:
        judged = {batch_id for batch_id in self.ledger.posted if batch_id not in self._checked}
        observed = await observe(self._chain, self.ledger, block=block, only=judged)
        # The run may not exist yet.
        is_one = self._run_id in self.ledger.runs
        view = of_run(self.ledger, self._run_id) if is_one and self._run_id else self.ledger
        checks = run_checks(
            view,
            self._chain.deployment,
            observed,
            whole=self.ledger,
            fresh=tabulate(view, only=judged),
        )
        self._checked |= judged
        self._is_checked = True
        for check in checks:
            self._add(check.contradictions)

    def _rewind(self, to: int) -> None:
        """Forget the blocks after one."""
        known = [*self.ledger.kept_events(), *self._events]
        gone = [event.name for event in known if event.block_number > to]
        words = ", ".join(dict.fromkeys(gone)) or "no event of ours"
        what = f"blocks {to + 1} to {self._head} were replaced; gone with them: {words}"
        self._seen.lines.append(WatchLine("rewritten", to, what))
        self.ledger.rewind(to)
        self._events = [event for event in self._events if event.block_number <= to]
        self._blocks = {number: block for number, block in self._blocks.items() if number <= to}
        self._checked &= set(self.ledger.posted)
        self._is_checked = False
        # A contradiction of a removed block may appear again in its successor.
        self._said.clear()
        if self._head - to > self._finality:
            self._add([Contradiction(Kind.HISTORY_REWRITTEN, what, block=to + 1)])

    def _add(self, found: Iterable[Contradiction]) -> None:
        self._seen.contradictions += [each for each in found if self._is_news(each)]

    def _is_news(self, found: Contradiction) -> bool:
        key = (str(found.kind), found.detail, found.place)
        if key in self._said:
            return False
        self._said.add(key)
        return True

    def _lines(self, event: Event) -> Iterator[WatchLine]:
        """Yield the lines of an event of the watched run."""
        run_id = event.args.get("run_id")
        if run_id is None and "batch_id" in event.args:
            batch = self.ledger.batches.get(event.args["batch_id"])
            run_id = batch.run_id if batch else None
        if self._run_id is not None and run_id not in (None, self._run_id):
            return
        for what, text in self._words(event):
            yield WatchLine(what, event.block_number, text, event.tx_hash)

    def _words(self, event: Event) -> Iterator[tuple[str, str]]:
        args = event.args
        if event.name == "OutcomesPosted":
            yield from (("outcome", text) for text in self._outcomes(args))
        elif event.name == "Slashed":
            wei = args["from_active"] + args["from_unbonding"]
            yield (
                "slash",
                f"{args['owner']} {format_tokens(wei)} tokens of run {args['run_id']}, "
                f"{args['verdict'].offence.name.lower()}",
            )
        elif event.name == "RewardClaimed":
            units = f"{args['slots']} slots, {args['units']} units"
            yield "claim", f"{args['worker']} {format_tokens(args['amount'])} tokens for {units}"
        elif event.name == "CheckpointPublished":
            root = f"root 0x{args['manifest_root'].hex()}"
            yield "policy", f"run {args['run_id']} version {args['version']}, {root}"

    def _outcomes(self, args: dict[str, Any]) -> Iterator[str]:
        # The view leaves out records that the ledger contract cannot have accepted.
        batch = self.ledger.batches.get(args["batch_id"])
        for position, record in enumerate((batch and batch.records) or ()):
            worker = self.ledger.worker_by_id.get(record.worker_id)
            who = worker.address if worker else f"worker {record.worker_id}"
            verdict = f"{record.verdict.name.lower()} {record.reason.name}"
            yield f"{args['batch_id']}:{position} {who} {verdict} {record.units} units"
