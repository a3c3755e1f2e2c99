"""Follows a chain and says what happens, and what cannot be, as it appears.

Every poll: read and prove the new blocks, take them in, check the new batches and all of the money,
say what was not said before. A reorganisation is said too; one that takes back blocks which counted
as final is a contradiction.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from muster.chain import Chain, Event
from muster.client.audit.contradictions import Contradiction, Kind
from muster.client.audit.ledger import Ledger, PackedRecords
from muster.client.audit.observed import observe
from muster.client.audit.report import run_checks
from muster.client.audit.sources import Ear, Proof, prove
from muster.client.audit.table import tabulate
from muster.client.quantities import format_tokens
from muster.protocol.errors import EncodingError
from muster.protocol.ids import RunId

DEFAULT_FINALITY = 64
"""Blocks below the head that count as final: two epochs of Ethereum."""


@dataclass(frozen=True, slots=True)
class Line:
    """One thing that happened."""

    what: str
    """outcome, slash, claim, policy or rewritten."""
    block: int
    """The block."""
    text: str
    """In words."""
    tx: str | None = None
    """The transaction."""

    def __str__(self) -> str:
        return f"block {self.block} {self.what} {self.text}" + (f" {self.tx}" if self.tx else "")


@dataclass(slots=True)
class Seen:
    """What one look at the chain brought."""

    lines: list[Line] = field(default_factory=list)
    """What happened, in chain order."""
    contradictions: list[Contradiction] = field(default_factory=list)
    """What cannot be and was not said before."""


class Watch:
    """A ledger that grows with the chain."""

    def __init__(
        self,
        chain: Chain,
        *,
        run_id: RunId | None = None,
        proof: Proof = Proof.BLOCKS,
        finality: int = DEFAULT_FINALITY,
    ) -> None:
        """`finality` is how many blocks may be taken back without contradiction."""
        self._chain, self._run_id, self._finality = chain, run_id, finality
        # Every header since the deployment at every look would be too much.
        self._is_proven = proof is not Proof.NONE
        self._ear = Ear(chain, keeps_logs=self._is_proven)
        self.ledger = Ledger(keeps_events=True)
        self._head = 0
        self._checked: set[int] = set()
        self._said: set[tuple[str, str, str]] = set()

    async def look(self) -> Seen:
        """Return what is new; raises ChainError while the endpoint is away."""
        seen, heard = Seen(), await self._ear.poll()
        poll = heard.poll
        found: list[Contradiction] = []
        if poll.rewound_to is not None:
            found += self._rewind(poll.rewound_to, seen)
        if self._is_proven and heard.blocks:
            found += (await prove(self._chain, heard, Proof.BLOCKS)).contradictions
        for event in poll.events:
            self.ledger.apply(event)
            seen.lines += self._lines(event)
        self._head = poll.head.number
        if poll.events or poll.rewound_to is not None:
            found += await self._check(poll.head.number)
        seen.contradictions = [each for each in found if self._is_news(each)]
        return seen

    async def _check(self, block: int) -> list[Contradiction]:
        judged = {batch_id for batch_id in self.ledger.posted if batch_id not in self._checked}
        self._checked |= judged
        observed = await observe(self._chain, self.ledger, block=block, only=judged)
        checks = run_checks(
            self.ledger,
            self._chain.deployment,
            observed,
            fresh=tabulate(self.ledger, only=judged),
        )
        return [found for check in checks for found in check.contradictions]

    def _rewind(self, to: int, seen: Seen) -> list[Contradiction]:
        gone = [event for event in self.ledger.kept_events() if event.block_number > to]
        words = ", ".join(dict.fromkeys(event.name for event in gone)) or "no event of ours"
        what = f"blocks {to + 1} to {self._head} were replaced; gone with them: {words}"
        seen.lines.append(Line("rewritten", to, what))
        self.ledger.rewind(to)
        self._checked &= set(self.ledger.posted)
        # What was said of blocks that are gone may be true of their successors.
        self._said.clear()
        if self._head - to <= self._finality:
            return []
        return [Contradiction(Kind.HISTORY_REWRITTEN, what, block=to + 1)]

    def _is_news(self, found: Contradiction) -> bool:
        key = (str(found.kind), found.detail, found.place)
        if key in self._said:
            return False
        self._said.add(key)
        return True

    def _lines(self, event: Event) -> Iterator[Line]:
        """Yield what an event tells, for the run that is watched."""
        run_id = event.args.get("run_id")
        if run_id is None and "batch_id" in event.args:
            batch = self.ledger.batches.get(event.args["batch_id"])
            run_id = batch.run_id if batch else None
        if self._run_id is not None and run_id not in (None, self._run_id):
            return
        for what, text in self._words(event):
            yield Line(what, event.block_number, text, event.tx_hash)

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

    def _outcomes(self, args: dict[str, object]) -> Iterator[str]:
        try:
            records = PackedRecords(bytes(args["records"]))  # type: ignore[call-overload]
        except EncodingError:
            return
        for position, record in enumerate(records):
            worker = self.ledger.worker_by_id.get(record.worker_id)
            who = worker.address if worker else f"worker {record.worker_id}"
            verdict = f"{record.verdict.name.lower()} {record.reason.name}"
            yield f"{args['batch_id']}:{position} {who} {verdict} {record.units} units"
