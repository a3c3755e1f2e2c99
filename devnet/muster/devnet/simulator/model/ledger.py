"""ContributionLedger: work is committed, judged, stands or is slashed."""

from __future__ import annotations

from collections.abc import Sequence

from muster.devnet.simulator.model.parties import Parties
from muster.devnet.simulator.model.words import NOBODY, PPM, Fixed, Name, need
from muster.devnet.simulator.model.work import (
    ACCEPTED,
    FRAUD,
    MAX_COUNT,
    OPEN,
    OVERTURNED,
    Batch,
    Case,
    Funds,
    Header,
    Proof,
    Record,
    Standing,
    Statement,
    Submission,
)


class Ledger(Parties):
    """ContributionLedger, and what RewardEscrow sets aside."""

    def __init__(self, fixed: Fixed, now: int, block: int, rank: dict[str, int]) -> None:
        """`rank` orders accounts as their addresses are ordered."""
        super().__init__(fixed, now, block)
        self.rank = rank
        self.batches: dict[int, Batch] = {}
        self.direct: dict[str, tuple[int, int]] = {}
        """Units a worker submitted itself, and when all are final."""
        self.used: set[tuple[int, str, int, int]] = set()
        self.cases: dict[Name, Case] = {}
        self.funds: dict[int, Funds] = {}

    # -------------------------------------------------------------------- commit

    def commit(
        self, caller: str, run_number: int, submissions: tuple[Submission, ...], units: int
    ) -> None:
        """`units` is what the orchestrator declares. No submissions stand for an empty batch."""
        run = self._run(run_number)
        need(caller == run.orchestrator, "LedgerUnauthorized", caller)
        need(run.is_open, "LedgerPaused", run_number)
        count = len(submissions)
        need(0 < count <= MAX_COUNT, "LedgerInvalidBatch", ("submissions", submissions), count)
        self._commit(run_number, submissions, units)

    def _commit(self, run: int, submissions: tuple[Submission, ...], units: int) -> int:
        batch, root = len(self.batches) + 1, ("submissions", submissions)
        price = self.runs[run].terms.price
        header = Header(batch, run, root, len(submissions), units, price, self.now, 0, 0)
        self.batches[batch] = Batch(header, submissions)
        self.emit(
            "BatchCommitted",
            batch_id=batch,
            run_id=run,
            root=root,
            count=len(submissions),
            units=units,
            price_per_unit=price,
            committed_at=self.now,
        )
        self._reserve(run, units * price)
        return batch

    def submit_direct(self, caller: str, work: Submission, signer: str) -> None:
        run = self._run(work.run)
        need(run.is_open, "LedgerPaused", work.run)
        fits = work.units < 2**32 and work.rollouts < 2**16
        fair = signer != NOBODY and self.serves(signer) == work.worker
        fair = fair and self.is_active(work.worker) and fits
        need(fair, "LedgerInvalidSubmission", work.worker, signer)
        need(caller in (work.worker, signer), "LedgerUnauthorized", caller)
        slot = (work.run, work.worker, work.step, work.index)
        need(slot not in self.used, "LedgerSlotUsed", *slot)
        self.used.add(slot)
        self._cover(work.worker, work.units)
        batch = self._commit(work.run, (work,), work.units)
        self.emit(
            "DirectlySubmitted",
            batch_id=batch,
            worker=work.worker,
            submission=work,
            node_signature=("signed", signer, work),
        )

    def _cover(self, worker: str, units: int) -> None:
        before, until = self.direct.get(worker, (0, 0))
        in_flight = units + (before if self.now < until else 0)
        cap = self.unit_cap(worker)
        need(in_flight <= cap, "LedgerUnitCap", worker, in_flight, cap)
        until = self.now + self.fixed.judgement_time
        self.direct[worker] = (in_flight, until)
        self._hold(worker, until)

    def unit_cap(self, worker: str) -> int:
        return self.stakes[worker].active // self.fixed.stake_per_unit

    # -------------------------------------------------------------- post outcomes

    def post(self, header: Header, records: tuple[Record, ...], signers: Sequence[str]) -> None:
        batch = self._batch(header)
        need(not header.posted_at, "LedgerOutcomesPosted", header.batch)
        due = self._due(header)
        need(self.now < due, "LedgerOutcomesOverdue", header.batch, due)
        sizes = len(records) * 56, header.count * 56
        need(sizes[0] == sizes[1], "LedgerRecordCount", *sizes)
        self._check_signers(header.run, signers)
        for place, record in enumerate(records):
            verdict = record.verdict
            need(ACCEPTED <= verdict <= FRAUD, "LedgerInvalidVerdict", place, verdict)
        units = sum(record.units for record in records)
        need(units <= header.units, "LedgerUnitsExceeded", header.batch, units, header.units)
        seats = sum(self.seat_bit(header.run, signer) for signer in signers)
        root = ("outcomes", header.batch, records)
        batch.header = header._replace(root=root, posted_at=self.now, signers=seats)
        batch.records = records
        self.emit(
            "OutcomesPosted",
            batch_id=header.batch,
            run_id=header.run,
            outcomes_root=root,
            posted_at=self.now,
            signers=seats,
            records=("records", records),
            signatures=(
                "signatures",
                tuple(signers),
                Statement(header.batch, header.root, records),
            ),
        )

    def _check_signers(self, run: int, signers: Sequence[str]) -> None:
        last = 0
        for signer in signers:
            need(self.rank[signer] > last, "LedgerInvalidSigner", signer)
            last = self.rank[signer]
        for signer in signers:
            need(self.is_validator(run, signer), "LedgerInvalidSigner", signer)
        quorum = self.runs[run].terms.quorum
        need(len(signers) >= quorum, "LedgerQuorumNotMet", len(signers), quorum)

    # ------------------------------------------------------------------ standing

    def _batch(self, header: Header) -> Batch:
        batch = self.batches.get(header.batch)
        present = batch is not None and batch.header == header
        need(present, "LedgerBatchMismatch", header.batch)
        assert batch is not None
        return batch

    def _due(self, header: Header) -> int:
        return header.committed_at + self.fixed.outcome_deadline

    def _need_overdue(self, header: Header) -> None:
        due = self._due(header)
        need(self.now >= due, "LedgerOutcomesPending", header.batch, due)

    def as_claimed(self, work: Submission) -> Record:
        """Return the record of a submission that stands because nobody judged it in time."""
        number = self.number_of(work.worker)
        return Record(number, *work[2:], verdict=ACCEPTED, reason=0)

    def _claimed_by(self, record: Record, run: int, worker: str) -> Submission | None:
        """Return what a worker must have submitted for its record to stand as claimed."""
        if (record.verdict, record.reason) != (ACCEPTED, 0):
            return None
        return Submission(run, worker, *record[1:7])

    def _prove(self, proof: Proof) -> tuple[Name, int]:
        """Return an outcome's name and when its window closes."""
        header, batch = proof.header, self.batches[proof.header.batch]
        window = self.fixed.challenge_window
        leaf: Name
        if header.posted_at:
            there = proof.path == proof.position < len(batch.records)
            there = there and batch.records[proof.path] == proof.record
            leaf = ("outcome", header.batch, proof.position, proof.record)
            closes_at = header.posted_at + window
        else:
            worker = self.by_number(proof.record.number)
            claimed = self._claimed_by(proof.record, header.run, worker)
            there = claimed is not None and proof.path < len(batch.submissions)
            there = there and batch.submissions[proof.path] == claimed
            leaf = ("overdue", header.batch, claimed)
            closes_at = self._due(header) + window
        need(there and proof.intact, "LedgerInvalidProof", header.batch, proof.position)
        return leaf, closes_at

    def standing(self, proof: Proof) -> Standing:
        batch = self._batch(proof.header)
        if not proof.header.posted_at:
            self._need_overdue(proof.header)
        leaf, closes_at = self._prove(proof)
        record = proof.record
        verdict = self._effective(leaf, record.verdict) if batch.disputed else record.verdict
        if verdict == FRAUD:
            opened = closes_at - self.fixed.challenge_window
            closes_at = self.fraud_closes_at(proof.header.run, opened)
        final = self._is_final(leaf, closes_at)
        offence = self.offence(proof.header.run, record)
        return Standing(record, leaf, offence, verdict, closes_at, final)

    @staticmethod
    def offence(run: int, record: Record) -> Name:
        return ("offence", run, record.number, record.step, record.index, record.file)

    def _is_open(self, leaf: Name) -> bool:
        return leaf in self.cases and self.cases[leaf].status == OPEN

    def _is_final(self, leaf: Name, closes_at: int) -> bool:
        return self.now >= closes_at and not self._is_open(leaf)

    def _effective(self, leaf: Name, recorded: int) -> int:
        case = self.cases.get(leaf)
        return case.claimed if case and case.status == OVERTURNED else recorded

    # --------------------------------------------------------------------- fraud

    def execute_fraud(self, proof: Proof, work: Submission, signer: str) -> None:
        standing = self.standing(proof)
        self._need_fraud(proof, standing)
        self._check_evidence(proof, work, signer)
        paused_until = self.runs[proof.header.run].slash_paused_until
        free = self.now >= paused_until
        need(free, "LedgerSlashingPaused", proof.header.run, paused_until)
        found, exact = standing.record.verdict == FRAUD, self._is_exact(standing.record)
        priors = self._convict(work.worker, standing.offence, exact)
        terms = self.runs[proof.header.run].terms
        ppm = terms.exact_ppm if exact else min(terms.fraud_ppm * 2**priors, PPM)
        reporter = NOBODY if found else self.cases[standing.leaf].challenger
        amount = self._slash(work.worker, ppm, standing.offence, reporter)
        self.emit(
            "FraudExecuted",
            batch_id=proof.header.batch,
            worker=work.worker,
            offence=standing.offence,
            leaf=standing.leaf,
            position=proof.position,
            amount=amount,
        )

    @staticmethod
    def _is_exact(record: Record) -> bool:
        """Return whether validators found what one look proves."""
        return record.verdict == FRAUD and 30 <= record.reason <= 59

    @staticmethod
    def _need_fraud(proof: Proof, standing: Standing) -> None:
        place = proof.header.batch, proof.position
        need(standing.verdict == FRAUD, "LedgerNotFraud", *place, standing.verdict)

    def _check_evidence(self, proof: Proof, work: Submission, signer: str) -> None:
        judged = proof.record
        same = work.run == proof.header.run and work[2:6] == judged[1:5]
        same = same and self.was_node(signer, work.worker, judged.number)
        need(same, "LedgerInvalidSubmission", work.worker, signer)

    def finalise_fraud(self, proof: Proof) -> None:
        standing = self.standing(proof)
        self._need_fraud(proof, standing)
        need(standing.is_final, "LedgerNotFinal", proof.header.batch, proof.position)
        self.emit(
            "FraudFinalised",
            batch_id=proof.header.batch,
            offence=standing.offence,
            leaf=standing.leaf,
        )
        self._release(standing.offence)

    # ---------------------------------------------------------------------- money

    def _funds(self, number: int) -> Funds:
        return self.funds.setdefault(number, Funds())

    def _reserve(self, number: int, amount: int) -> None:
        funds = self._funds(number)
        need(amount <= funds.available, "EscrowUnderfunded", number, amount, funds.available)
        funds.available -= amount
        funds.reserved += amount
        self.emit("RewardReserved", run_id=number, amount=amount)

    def _unreserve(self, number: int, amount: int) -> None:
        funds = self._funds(number)
        need(amount <= funds.reserved, "EscrowUnderfunded", number, amount, funds.reserved)
        funds.reserved -= amount
