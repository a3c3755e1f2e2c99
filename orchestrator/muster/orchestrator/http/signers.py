"""Signed requests: each is valid once, and its signer needs a role.

A nonce is marked as used in memory at once, and on disk before the request is answered; between
replicas the database decides. Nonces are kept longer than their requests are valid, see
`muster.api.signing`. Roles come from the chain: nodes of active workers, validators, the trainer.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Sequence

from sqlalchemy import bindparam, delete, select, tuple_

from muster.api.signing import NONCE_LIFE_S, SignedHeaders
from muster.chain import MemberView
from muster.orchestrator.db import Database
from muster.orchestrator.db.group import GroupCommit
from muster.orchestrator.db.query import Query, Statement, new_row
from muster.orchestrator.db.tables import nonces
from muster.orchestrator.http.errors import TooMany, refuse
from muster.orchestrator.projection import Projection
from muster.protocol.errors import ApiError
from muster.protocol.ids import Address

_SIGNER, _SEEN_AT = nonces.c.signer, nonces.c.seen_at
_KEEP = Query(new_row(nonces).on_conflict_do_nothing().returning(_SIGNER))
_ALL = Query(select(_SIGNER, nonces.c.nonce, _SEEN_AT).order_by(_SEEN_AT))()
_OLD = nonces.alias()
_DELETE = Query(
    delete(nonces)
    .where(
        tuple_(_SIGNER, nonces.c.nonce).in_(
            select(_OLD.c.signer, _OLD.c.nonce)
            .where(_OLD.c.seen_at < bindparam("before"))
            .limit(bindparam("limit"))
        )
    )
    .returning(_SIGNER)
)

_SPAN_S = 60
"""Nonces are grouped by spans of this many seconds, and forgotten a span at a time."""
_PURGED_ROWS = 2_000
"""Rows deleted at a time; the writes of requests wait meanwhile."""


class NonceStore:
    """The nonces of the last NONCE_LIFE_S seconds."""

    def __init__(
        self,
        database: Database,
        group: GroupCommit,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._database = database
        self._group = group
        self._clock = clock
        self.valid_from = 0
        """Wall clock; requests signed earlier are refused, because their nonces may be lost."""
        # 100 bytes per nonce: most of a busy process's memory.
        self._spans: deque[tuple[int, dict[bytes, int]]] = deque()

    async def load(self) -> None:
        """Load the nonces that are still needed, and delete the others."""
        await self.purge()
        [rows] = await self._database.search(_ALL)
        for signer, nonce, seen_at in rows:
            self._remember(_key(signer, nonce), seen_at)

    def take(self, headers: SignedHeaders) -> None:
        """Mark a verified request's nonce as used, before anything else is done.

        Refuses a nonce that this signer used before, and requests older than the database, whose
        nonces are unknown. Call it only for signers with a role: strangers must not fill the
        memory.
        """
        now, key = int(self._clock()), _key(headers.address, headers.nonce)
        if headers.issued_at < self.valid_from:
            raise refuse("nonce_reused", "the request is older than this orchestrator's database")
        self._forget(now - NONCE_LIFE_S)
        if self._was_seen(key, now - NONCE_LIFE_S):
            raise _reused()
        if self._group.is_full:
            raise refuse("overloaded", "too many requests are waiting for the disk")
        if rest_s := self._group.rest_s(headers.address):
            raise TooMany(rest_s)
        self._remember(key, now)

    async def keep(self, headers: SignedHeaders, *writes: Statement) -> None:
        """Store a used nonce, and the caller's rows in the same transaction."""
        signer = headers.address
        row = _KEEP(signer=signer, nonce=headers.nonce, seen_at=int(self._clock()))
        if not await self._group.add(row, *writes, caller=signer):
            # Another replica has seen the nonce.
            raise _reused()

    async def purge(self) -> None:
        """Delete expired rows, a few at a time."""
        oldest = int(self._clock()) - NONCE_LIFE_S
        deleted = _PURGED_ROWS
        while deleted == _PURGED_ROWS:
            async with self._database.transaction(is_exclusive=False) as asked:
                [rows] = await asked.ask(_DELETE(before=oldest, limit=_PURGED_ROWS))
            deleted = len(rows)

    def _was_seen(self, key: bytes, oldest: int) -> bool:
        return any(span.get(key, -1) >= oldest for _, span in self._spans)

    def _remember(self, key: bytes, seen_at: int) -> None:
        if not self._spans or seen_at >= self._spans[-1][0] + _SPAN_S:
            self._spans.append((seen_at, {}))
        self._spans[-1][1][key] = seen_at

    def _forget(self, before: int) -> None:
        while self._spans and self._spans[0][0] + _SPAN_S <= before:
            self._spans.popleft()


def _key(signer: str, nonce: bytes) -> bytes:
    return hashlib.blake2b(signer.encode() + nonce, digest_size=16).digest()


def _reused() -> ApiError:
    return refuse("nonce_reused", "this request was received before", "sign a new request")


_HINTS = {
    "jailed": "wait until the jail time ends, restore the stake, then run muster worker rejoin",
    "banned": "a fraud verdict excluded this worker from this run for ever; see `muster audit`",
    "exiting": "this worker is leaving the run",
}


class Identities:
    """The current roles on chain."""

    def __init__(self, projection: Projection, *, evaluators: Sequence[Address] = ()) -> None:
        """`evaluators` may report evaluations besides the run's owner and trainer."""
        self._projection = projection
        self._evaluators = evaluators

    def active_worker(self, node: Address) -> MemberView:
        """Return the worker of a node; refuses unknown nodes and inactive workers."""
        run = self._projection.run
        named = self._projection.view.worker_by_node.get(node)
        worker = None if named is None else run.members.get(named.address)
        if worker is None:
            raise refuse(
                "worker_not_active",
                f"{node} is not the node of a worker of run {run.run_id}",
                f"join the run first: muster stake --run {run.run_id}",
            )
        status = worker.status.lower()
        if status != "active":
            raise refuse(
                "worker_not_active", f"worker {worker.address} is {status}", _HINTS.get(status)
            )
        return worker

    def require_validator(self, signer: Address) -> None:
        """Refuse anyone but the run's current validators."""
        if signer not in self._projection.run.validators:
            raise refuse("not_a_validator", f"{signer} is not a validator of this run")

    def require_trainer(self, signer: Address) -> None:
        """Refuse anyone but the run's trainer."""
        if signer != self._projection.run.config.trainer:
            raise refuse("not_the_trainer", f"{signer} is not the trainer of this run")

    def require_evaluator(self, signer: Address) -> None:
        """Refuse anyone but the run's owner, its trainer and the evaluators that are named."""
        run = self._projection.run
        if signer not in (run.owner, run.config.trainer, *self._evaluators):
            raise refuse(
                "not_an_evaluator",
                f"{signer} is not owner, trainer or evaluator of run {run.run_id}",
                "add the account: muster orchestrator run --evaluator ADDRESS",
            )

    def require_reader(self, signer: Address) -> None:
        """Refuse anyone but validators, the trainer and jurors of the run's open cases: workers
        must not see others' files.
        """
        run = self._projection.run
        if signer not in run.validators and signer != run.config.trainer and not self._sits(signer):
            raise refuse(
                "not_a_reader", "only validators, the trainer and drawn jurors may fetch files"
            )

    def _sits(self, signer: Address) -> bool:
        cases = self._projection.view.cases.values()
        of_run = (c for c in cases if c.run_id == self._projection.run_id and not c.closed)
        return any(signer in case.jurors for case in of_run)
