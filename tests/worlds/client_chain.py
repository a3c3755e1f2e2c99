"""A fake chain view, orchestrator and fetcher with everything that the clients' loops use."""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from muster.api import BatchContents, BatchEntry, HeartbeatAnswer, Lease, NoWork
from muster.chain import BatchStatus, BatchView, WorkerStatus
from muster.chain.view_parts import PostedRecords
from muster.client.chain_facts import MemberAtBlock
from muster.client.validator.context import ValidatorContext
from muster.protocol.checking import Checking
from muster.protocol.eip712 import address_of
from muster.protocol.encoding import file_hash, keccak
from muster.protocol.errors import ApiError, PolicyUnavailable
from muster.protocol.ids import Address, Hash32, PolicyVersion, RunId
from muster.protocol.merkle import batch_root
from muster.protocol.messages import OutcomeRecord, Submission, Ticket, pack_records
from muster.shardcast.fetcher import NamedVersions
from worlds.client_world import (
    BEACON,
    DOMAIN,
    NODE_KEY,
    NOW,
    ORCHESTRATOR_KEY,
    ROOT,
    RUN,
    VALIDATOR_KEY,
    VERSION,
    WORKER,
    sign_ticket,
)

WORKER_ID = 5
UNREACHABLE = ApiError("no answer", status=503, code="unreachable")


class Searched(SimpleNamespace):
    """A view that rebuilds its indexes at each access from the batches that a test put there."""

    @property
    def own_work(self) -> dict[Any, dict[Any, Any]]:
        found: dict[Any, dict[Any, Any]] = {}
        for batch in self.batches.values():
            if (direct := getattr(batch, "direct", None)) is not None:
                found.setdefault((batch.run_id, direct.worker), {})[batch.root] = batch
        return found

    @property
    def newest_batch(self) -> dict[Any, int]:
        return {batch.run_id: number for number, batch in self.batches.items()}


def make_view() -> Any:
    """Return a view with one run, one active worker and one published policy."""
    checkpoint = SimpleNamespace(
        version=VERSION, manifest_root=ROOT, beacon=BEACON, block_number=40, timestamp=NOW - 60
    )
    run = SimpleNamespace(
        run_id=RUN,
        config=SimpleNamespace(
            orchestrator=address_of(ORCHESTRATOR_KEY),
            terms=SimpleNamespace(price_per_unit=10, quorum=1),
        ),
        validators=[address_of(VALIDATOR_KEY)],
        seats={address_of(VALIDATOR_KEY): 1},
        checkpoints={VERSION: checkpoint},
        latest_version=VERSION,
        stream=[],
        closed_at=0,
        paused=False,
        terms=[SimpleNamespace(price_per_unit=10, quorum=1)],
        fraud_closes_at=lambda posted_at, window_s: posted_at + window_s,
        quorum_of=lambda batch: run.terms[batch.terms - 1].quorum,
    )
    members = {WORKER: make_account()}
    run.members = members
    view = Searched(
        workers=members, runs={RUN: run}, batches={}, payments=[], cases={}, block_number=50
    )

    def standing(_run_id: RunId, worker: Address, *, before: int) -> MemberAtBlock | None:
        account = members.get(worker)
        if account is None or before <= account.active_from:
            return None
        return MemberAtBlock(account.worker_id, account.node, account.status, account.active_from)

    view.standing = standing
    view.member = lambda _run_id, worker: members.get(worker)
    view.stake = lambda _run_id, owner: members[owner]
    return view


def make_account(**changes: object) -> Any:
    node = address_of(NODE_KEY)
    values: dict[str, object] = {
        "worker_id": WORKER_ID,
        "node": node,
        "status": WorkerStatus.ACTIVE,
        "active_from": 10,
        "active_wei": 100 * 10**18,
        "beacon_under": lambda checkpoint: checkpoint.beacon,
        "node_at": lambda _block: node,
        "status_at": lambda _block: WorkerStatus.ACTIVE,
    }
    return SimpleNamespace(**{**values, **changes})


def make_batch(
    batch_id: int, submissions: list[Submission], records: list[OutcomeRecord] | None = None
) -> BatchView:
    leaves = [submission.leaf() for submission in submissions]
    return BatchView(
        batch_id=batch_id,
        run_id=RUN,
        root=batch_root(leaves) if leaves else keccak(b"none"),
        units=sum(submission.units for submission in submissions),
        count=len(leaves),
        committed_at=NOW + 30,
        block_number=50 + batch_id,
        beacon=keccak(b"block %d" % batch_id),
        seated=(address_of(VALIDATOR_KEY),),
        orchestrator=address_of(ORCHESTRATOR_KEY),
        tx_hash="0x" + "22" * 32,
        records=None if records is None else PostedRecords(pack_records(records)),
        posted_at=NOW + 60,
        price_per_unit=10,
        terms=1,
        status=BatchStatus.COMMITTED if records is None else BatchStatus.JUDGED,
    )


def make_context(**changes: Any) -> ValidatorContext:
    """Return a validator's context with the parts that a test gives."""
    values = {each.name: None for each in fields(ValidatorContext) if each.default is MISSING}
    said = {"run_id": RUN, "key": VALIDATOR_KEY, "domain": DOMAIN, "poll_s": 0.01}
    said["fetcher"] = FakeFetcher()
    return ValidatorContext(**{**values, **said, **changes})


@dataclass
class FakeOrchestrator:
    """Gives out what a test put into it, and records what it receives."""

    tickets: deque[Ticket] = field(default_factory=deque)
    signatures: dict[Ticket, bytes] = field(default_factory=dict)
    uploads: list[tuple[Submission, bytes, bytes]] = field(default_factory=list)
    errors: dict[str, deque[ApiError]] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    batches: dict[int, list[BatchEntry]] = field(default_factory=dict)
    files: dict[Hash32, bytes] = field(default_factory=dict)
    outcomes: list[tuple[int, bytes, bytes]] = field(default_factory=list)
    commitments: list[Checking] = field(default_factory=list)
    calls_told: dict[int, int] = field(default_factory=dict)
    versions: list[PolicyVersion | None] = field(default_factory=list)

    def fail(self, call: str, *errors: ApiError) -> None:
        """Make the next calls of one kind raise."""
        self.errors.setdefault(call, deque()).extend(errors)

    def _called(self, call: str) -> None:
        self.calls[call] += 1
        if self.errors.get(call):
            raise self.errors[call].popleft()

    async def lease(
        self,
        _run_id: RunId,
        holding: Sequence[Ticket] = (),
        *,
        version: PolicyVersion | None = None,
    ) -> Lease | NoWork:
        self._called("lease")
        self.versions.append(version)
        ticket = next((each for each in self.tickets if each not in holding), None)
        if ticket is None:
            return NoWork(retry_after_s=0.01)
        signature = self.signatures.get(ticket, sign_ticket(ticket))
        return Lease(ticket=ticket, signature=signature)

    async def submit(self, submission: Submission, signature: bytes, body: bytes) -> Hash32:
        self._called("submit")
        self.uploads.append((submission, signature, body))
        filled = [each for each in self.tickets if each.index == submission.index]
        if filled:
            self.tickets.remove(filled[0])
        return submission.file_hash

    async def heartbeat(self, _run_id: RunId, **_said: object) -> HeartbeatAnswer:
        self._called("heartbeat")
        return HeartbeatAnswer(status="active", policy_version=VERSION)

    async def batch(self, batch_id: int) -> BatchContents:
        self._called("batch")
        entries = self.batches[batch_id]
        root = batch_root([entry.submission.leaf() for entry in entries])
        return BatchContents(batch_id=batch_id, root=root, count=len(entries), submissions=entries)

    async def file(self, name: Hash32) -> bytes:
        self._called("file")
        if name not in self.files:
            raise ApiError("no such file", status=404, code="not_found")
        return self.files[name]

    async def called(self, *, after: int = 0) -> dict[int, int]:
        self._called("called")
        return {i: n for i, n in self.calls_told.items() if i > after}

    async def post_outcomes(self, batch_id: int, records: bytes, signature: bytes) -> None:
        self._called("post_outcomes")
        self.outcomes.append((batch_id, records, signature))

    async def post_checking(self, message: Checking, _signature: bytes) -> None:
        self._called("post_checking")
        self.commitments.append(message)

    def commit(self, batch_id: int, entries: list[BatchEntry], *data: bytes) -> Any:
        """Add a batch with its files and return it as the chain shows it."""
        self.batches[batch_id] = entries
        self.files |= {file_hash(d): d for d in data}
        return make_batch(batch_id, [entry.submission for entry in entries])


@dataclass
class FakeFetcher:
    """Delivers every policy at once, or fails as a test says."""

    fetched: list[tuple[PolicyVersion, Hash32]] = field(default_factory=list)
    failures: int = 0
    named: NamedVersions = lambda _: ()

    async def fetch(self, _run_id: RunId, version: PolicyVersion, root: Hash32) -> Path:
        if self.failures:
            self.failures -= 1
            raise PolicyUnavailable("no relay delivers it")
        if (version, root) not in self.fetched:
            self.fetched.append((version, root))
        return Path(f"v{version}")
