"""Proof of checking, the validator's side: commit with the outcomes, show later, compare.

  commit    sign the hash of its own fingerprints, before its outcomes are sent
  show      reveal the fingerprints, once the outcomes are on chain
  compare   check others' fingerprints against its own recomputation, and report the result

A validator writes its recomputation to disk before it signs anything, so it can resume after a
kill. A wrong verdict costs stake once somebody has claimed it and a jury agrees; this program
claims nothing. A right verdict without a recomputation costs none, since no contract can tell:
signed reports of it are shown to the run's owner, who decides about seats.

This detects a lone validator that accepts without recomputing, in the first batches that an honest
one recomputes too. If all called validators skip the work, nobody compares: traps detect them, see
`muster.client.cli.trap`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muster.api import BatchChecking
from muster.chain import BatchView
from muster.client.outage import serve_forever
from muster.lifecycle.files import write_durably
from muster.protocol.checking import (
    Checking,
    CheckReport,
    fingerprints_hash,
    pack_fingerprints,
    unpack_fingerprints,
)
from muster.protocol.eip712 import Domain, address_of, signer_of
from muster.protocol.encoding import hex0x, keccak
from muster.protocol.errors import ApiError, EncodingError
from muster.protocol.ids import Address, BatchName, to_address, to_hash32
from muster.protocol.messages import OutcomeRecord, Verdict
from muster.toploc.projections import FINGERPRINT_BYTES, failed_blocks

if TYPE_CHECKING:
    from muster.client.validator.context import ValidatorContext

logger = logging.getLogger(__name__)

_REFUSALS = frozenset({404, 405, 409, 422})
"""HTTP statuses that mean fingerprints are not accepted: too late, or not supported."""
_NOT_YET = frozenset({"batch_unknown", "checking_early"})
"""Error codes of an orchestrator that has read less of the chain than this validator."""
LONGEST_PAUSE_S = 60.0
"""Longest pause in seconds between two polls of a batch whose signers show nothing."""
RECENT_BATCHES = 256
"""Number of newest stored batches that are polled, so that a restart does not poll all."""
KEPT_BATCHES = 1000
"""Number of newest batches whose fingerprints are kept."""
PATIENCE_S = 600.0
"""Seconds after a batch's outcomes during which others' fingerprints are awaited."""
TOLERATED = 0.1
"""Share of a submission's blocks that may differ; honest machines differ in none."""

Fingerprints = Mapping[Address, bytes]
"""Fingerprints of one submission by validator; empty when it was judged without a prefill."""


@dataclass(frozen=True, slots=True)
class Checked:
    """This validator's recomputation of a batch."""

    name: BatchName
    found: tuple[Fingerprints, ...]
    """Fingerprints by position."""

    def of(self, validator: Address) -> list[bytes]:
        """Return a validator's fingerprints of every submission."""
        return [each.get(validator, b"") for each in self.found]


class CheckingStore:
    """Stores recomputations, one document per batch, the newest `KEPT_BATCHES`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def record(self, checked: Checked) -> None:
        """Remember a batch, durably."""
        document = {
            "root": hex0x(checked.name.root),
            "found": [{who: hex0x(of) for who, of in each.items()} for each in checked.found],
        }
        write_durably(self._path(checked.name.batch_id), json.dumps(document).encode())
        old = sorted(self._folder.glob("*.json"), key=lambda path: int(path.stem))
        for path in old[:-KEPT_BATCHES]:
            path.unlink(missing_ok=True)

    def find(self, name: BatchName) -> Checked | None:
        """Return the recomputation of a batch; None when there is none for this root."""
        try:
            document = json.loads(self._path(name.batch_id).read_bytes())
            recorded = to_hash32(document["root"])
            found = tuple(
                {to_address(who): bytes.fromhex(of[2:]) for who, of in each.items()}
                for each in document["found"]
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return Checked(name, found) if name.root == recorded else None

    def batches(self) -> list[int]:
        """Return the batches that are remembered, ascending."""
        return sorted(int(path.stem) for path in self._folder.glob("*.json"))

    def _path(self, batch_id: int) -> Path:
        return self._folder / f"{batch_id}.json"


# Comparing: pure


@dataclass(frozen=True, slots=True)
class Comparison:
    """Result of comparing another validator's fingerprints of a batch."""

    compared: int
    """Submissions that both had to recompute."""
    failed: tuple[int, ...]
    """Positions of submissions whose fingerprints come from no recomputation."""

    @property
    def has_checked(self) -> bool:
        """Whether no submission failed."""
        return not self.failed


def compare(
    claimed: Sequence[bytes], expected: Sequence[bytes], records: Sequence[OutcomeRecord]
) -> Comparison:
    """Compare a validator's fingerprints with a recomputation of the same submissions.

    Only submissions that were prefilled here and accepted there count: acceptance needs a prefill.
    Others may have failed a check before it. Never raises: fingerprints are strangers' bytes.
    """
    places = [
        place
        for place, (mine, record) in enumerate(zip(expected, records, strict=True))
        if mine and record.verdict is Verdict.ACCEPTED
    ]
    failed = [place for place in places if not is_checked(claimed[place], expected[place])]
    return Comparison(len(places), tuple(failed))


def is_checked(claimed: bytes, expected: bytes) -> bool:
    """Return whether fingerprints come from the same hidden states as those recomputed."""
    blocks = len(expected) // FINGERPRINT_BYTES
    return failed_blocks(claimed, expected) <= TOLERATED * blocks


def shown_fingerprints(
    checking: BatchChecking, validator: Address, batch: BatchView, domain: Domain
) -> list[bytes] | None:
    """Return a validator's fingerprints of a batch if they match its signed commitment with the
    outcomes on chain; else None.
    """
    for each in checking.commitments:
        if each.validator != validator or each.fingerprints is None:
            continue
        message = Checking(batch.batch_id, batch.root, each.records_hash, each.fingerprints_hash)
        try:
            parts = unpack_fingerprints(each.fingerprints, batch.count)
        except EncodingError:
            return None
        signer = signer_of(domain, message, each.signature)
        is_bound = fingerprints_hash(parts) == each.fingerprints_hash
        is_its_own = signer == validator and each.records_hash == batch.records_hash
        return parts if is_bound and is_its_own else None
    return None


class Proof(StrEnum):
    """Result of a validator's proof of checking for one submission."""

    CHECKED = "recomputed it"
    """Its fingerprints come from the same hidden states."""
    UNCHECKED = "signed without recomputing it"
    """Its fingerprints come from no recomputation."""
    NONE = "showed no proof"
    """It did not commit in time, or never showed its fingerprints."""


def who_checked(
    checking: BatchChecking,
    batch: BatchView,
    position: int,
    recomputed: Fingerprints,
    domain: Domain,
) -> dict[Address, Proof]:
    """Return the result of each validator's proof for one submission of a batch.

    `recomputed` has the expected fingerprints by validator. Never raises.
    """
    found = {}
    for validator, expected in recomputed.items():
        shown = shown_fingerprints(checking, validator, batch, domain)
        if shown is None:
            found[validator] = Proof.NONE
        else:
            is_same = is_checked(shown[position], expected)
            found[validator] = Proof.CHECKED if is_same else Proof.UNCHECKED
    return found


# The duty


class CheckingDuty:
    """Commits, shows and compares for one validator of one run."""

    def __init__(
        self,
        context: ValidatorContext,
        store: CheckingStore,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`store` has the recomputations; `now` is the wall clock, for deadlines of others."""
        self.context = context
        self.store = store
        self.me = address_of(context.key)
        self._now = now
        self._committed = set[BatchName]()
        self._shown = set[BatchName]()
        self._looks: dict[BatchName, tuple[float, float]] = {}
        self._done = set[BatchName]()

    async def record(self, checked: Checked) -> None:
        """Store the recomputation of a batch, before its outcomes are signed."""
        await asyncio.to_thread(self.store.record, checked)

    async def commit(self, name: BatchName, records: bytes) -> None:
        """Commit to the fingerprints of a batch, once; a refusal never delays its outcomes."""
        checked = await asyncio.to_thread(self.store.find, name)
        if checked is None or name in self._committed:
            return
        hashed = fingerprints_hash(checked.of(self.me))
        message = Checking(*name, keccak(records), hashed)
        signature = self.context.sign(message)
        try:
            await self.context.api.post_checking(message, signature)
        except ApiError as error:
            if error.status not in _REFUSALS:
                raise
            fields = {"batch_id": name.batch_id, "error": str(error)}
            logger.info("fingerprints refused", extra=fields)
            if error.code in _NOT_YET:
                return  # retried when the outcomes are handed over again
        self._committed.add(name)

    async def run(self) -> None:
        """Show and compare until cancelled."""
        await serve_forever(self.serve, max(self.context.poll_s, 0.2))

    async def serve(self) -> None:
        """Show due fingerprints, and compare those of others."""
        remembered = await asyncio.to_thread(self.store.batches)
        for batch_id in remembered[-RECENT_BATCHES:]:
            batch = self.context.view.batches.get(batch_id)
            if batch is None or batch.records is None:
                continue
            name = batch.name
            due_at, pause = self._looks.get(name, (0.0, self.context.poll_s))
            if name in self._done or self._now() < due_at:
                continue
            self._looks[name] = (self._now() + pause, min(2 * pause, LONGEST_PAUSE_S))
            checked = await asyncio.to_thread(self.store.find, name)
            if checked is None or len(checked.found) != batch.count:
                self._done.add(name)
                continue
            await self._show(checked)
            await self._compare(batch, checked)

    async def _show(self, checked: Checked) -> None:
        name = checked.name
        if name in self._shown:
            return
        packed = pack_fingerprints(checked.of(self.me))
        try:
            await self.context.api.post_fingerprints(name.batch_id, packed)
        except ApiError as error:
            if error.status not in _REFUSALS or error.code in _NOT_YET:
                raise
            # No commitment in time, for example after judging late: there is nothing to show.
            fields = {"batch_id": name.batch_id, "error": str(error)}
            logger.debug("fingerprints not wanted", extra=fields)
        self._shown.add(name)

    async def _compare(self, batch: BatchView, checked: Checked) -> None:
        """Compare others' fingerprints of a batch, until all its signers showed theirs or time is
        over."""
        checking = await self.context.api.checking(batch.batch_id)
        said = {each.validator for each in checking.reports if each.reporter == self.me}
        for each in checking.commitments:
            if each.validator == self.me or each.validator in said:
                continue
            shown = shown_fingerprints(checking, each.validator, batch, self.context.domain)
            if shown is not None:
                await self._report(batch, each.validator, shown, checked.of(each.validator))
                said.add(each.validator)
        is_over = self._now() - (batch.posted_at or 0) > PATIENCE_S
        if is_over or set(batch.signed_by(self.context.run.seats)) <= said | {self.me}:
            self._done.add(batch.name)

    async def _report(
        self, batch: BatchView, who: Address, shown: list[bytes], expected: list[bytes]
    ) -> None:
        found = compare(shown, expected, batch.records or ())
        report = CheckReport(
            batch.batch_id,
            batch.root,
            who,
            fingerprints_hash(shown),
            found.compared,
            len(found.failed),
        )
        if not found.has_checked:
            fields: dict[str, Any] = {"batch_id": batch.batch_id, "validator": who}
            logger.warning(
                "a validator signed what it did not check",
                extra={**fields, "positions": list(found.failed)},
            )
        signature = self.context.sign(report)
        await self.context.api.post_check_report(report, signature)
