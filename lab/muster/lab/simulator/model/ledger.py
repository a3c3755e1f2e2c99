"""ContributionLedger: work is committed, judged, stands, is slashed or is void."""

from collections.abc import Sequence

from muster.lab.simulator.model.parties import Parties
from muster.lab.simulator.model.words import (
    EXACT_FRAUD,
    FRAUD_OFFENCE,
    NOBODY,
    PPM,
    Fixed,
    Name,
    need,
)
from muster.lab.simulator.model.work import (
    ACCEPTED,
    COMMITTED,
    FRAUD,
    JUDGED,
    MAX_COUNT,
    OPEN,
    OVERTURNED,
    TICKET_GRACE,
    WITHHELD,
    Batch,
    Case,
    Funds,
    Header,
    Leased,
    Proof,
    Record,
    Standing,
    Statement,
    Submission,
    is_exact,
)

EVER = 2**256 - 1


class Ledger(Parties):
    """ContributionLedger, and the reservations of RewardEscrow."""

    def __init__(self, fixed: Fixed, now: int, block: int, rank: dict[str, int]) -> None:
        """`rank` orders accounts as their addresses are ordered."""
        super().__init__(fixed, now, block)
        self.rank = rank
        self.batches: dict[int, Batch] = {}
        self.direct: dict[tuple[int, str], tuple[int, int]] = {}
        """Units that a worker submitted directly to a run, and when all are final."""
        self.used: set[tuple[int, str, int, int]] = set()
        self.cases: dict[Name, Case] = {}
        self.bonds: dict[int, str] = {}
        """Payer of each batch's bond."""
        self.funds: dict[int, Funds] = {}

    # -------------------------------------------------------------------- commit

    def commit(
        self, caller: str, run_number: int, submissions: tuple[Submission, ...], units: int
    ) -> None:
        """`units` is declared by the orchestrator. Without submissions the batch is empty."""
        run = self._run(run_number)
        need(caller == run.orchestrator, "LedgerUnauthorized", caller)
        need(run.is_open, "LedgerPaused", run_number)
        count, root = len(submissions), ("submissions", submissions)
        need(0 < count <= MAX_COUNT and units > 0, "LedgerInvalidBatch", root, count)
        self._commit(run_number, submissions, units)

    def _commit(self, run: int, submissions: tuple[Submission, ...], units: int) -> int:
        root, count = ("submissions", submissions), len(submissions)
        price, terms = self.terms_of(run).price, len(self.runs[run].all_terms)
        batch = self._store(Header(0, run, root, count, units, price, terms, self.now), submissions)
        self._reserve(run, units * price)
        return batch

    def _store(self, header: Header, submissions: tuple[Submission, ...]) -> int:
        """Give a batch the next number."""
        header = header._replace(batch=len(self.batches) + 1)
        self.batches[header.batch] = Batch(header, submissions)
        self.emit(
            "BatchCommitted",
            batch_id=header.batch,
            run_id=header.run,
            root=header.root,
            count=header.count,
            units=header.units,
            price_per_unit=header.price,
            terms=header.terms,
            committed_at=header.committed_at,
        )
        return header.batch

    # -------------------------------------------------------- submit direct, split off

    def submit_direct(self, caller: str, work: Leased) -> None:
        claimed = work.submission
        run = self._run(claimed.run)
        need(run.is_open, "LedgerPaused", claimed.run)
        self._check_own_work(caller, work)
        self._check_ticket(work, run.orchestrator)
        works = self.serves(work.signer) == claimed.worker
        works = works and self.is_active(claimed.run, claimed.worker)
        need(works, "LedgerInvalidSubmission", claimed.worker, work.signer)
        self._use_slot(claimed)
        self._cover(claimed.run, claimed.worker, claimed.units)
        batch = self._commit(claimed.run, (claimed,), claimed.units)
        self.emit(
            "DirectlySubmitted",
            batch_id=batch,
            worker=claimed.worker,
            work=("leased", work),
            sources=("sources",),
        )
        self._take_bond(batch, caller)

    def split_off(
        self, caller: str, header: Header, work: Leased, position: int, intact: bool
    ) -> None:
        """`position` is the submission's place according to the proof."""
        batch, claimed = self._batch(header), work.submission
        self._need_appeal(header)
        need(not self._is_summoned(header.batch), "LedgerInCourt", header.batch)
        self._check_own_work(caller, work)
        there = intact and position < len(batch.submissions)
        there = there and batch.submissions[position] == claimed
        there = there and claimed.run == header.run and claimed.units <= header.units
        there = there and self._answers(header, claimed.worker, work.signer, header.committed_at)
        need(there, "LedgerInvalidSubmission", claimed.worker, work.signer)
        self._use_slot(claimed)
        batch.header = header._replace(units=header.units - claimed.units)
        root = ("submissions", (claimed,))
        own = self._store(header._replace(root=root, count=1, units=claimed.units), (claimed,))
        self.emit(
            "BatchSplit",
            batch_id=own,
            from_batch_id=header.batch,
            worker=claimed.worker,
            work=("leased", work),
            sources=("sources",),
        )
        self._take_bond(own, caller)

    def _check_own_work(self, caller: str, work: Leased) -> None:
        claimed, signer = work.submission, work.signer
        # A missing signature recovers the zero address, which calls nobody.
        need(caller in (claimed.worker, signer), "LedgerUnauthorized", caller)
        sound = signer != NOBODY and self._fits(claimed)
        need(sound, "LedgerInvalidSubmission", claimed.worker, signer)

    @staticmethod
    def _fits(claimed: Submission) -> bool:
        """Return whether a record can hold it."""
        return 0 < claimed.units < 2**32 and claimed.rollouts < 2**16

    def _check_ticket(self, work: Leased, orchestrator: str) -> None:
        ticket = work.ticket
        fits = work.issuer == orchestrator and ticket[:5] == work.submission[:5]
        fits = fits and self.now <= ticket.deadline + TICKET_GRACE
        need(fits, "LedgerInvalidTicket", work.issuer, ticket.deadline)

    def _use_slot(self, claimed: Submission) -> None:
        slot = claimed[:4]
        need(slot not in self.used, "LedgerSlotUsed", *slot)
        self.used.add(slot)

    def unit_cap(self, run: int, worker: str) -> int:
        return self.stakes[run, worker].active // self.fixed.stake_per_unit

    def _cover(self, run: int, worker: str, units: int) -> None:
        before, until = self.direct.get((run, worker), (0, 0))
        in_flight = units + (before if self.now < until else 0)
        cap = self.unit_cap(run, worker)
        need(in_flight <= cap, "LedgerUnitCap", worker, in_flight, cap)
        self.direct[run, worker] = in_flight, self.now + self.fixed.judgement_time

    # -------------------------------------------------------------- post outcomes

    def post(self, header: Header, records: tuple[Record, ...], signers: Sequence[str]) -> None:
        """Empty records mean that the batch is withheld."""
        batch = self._batch(header)
        need(header.status == COMMITTED, "LedgerOutcomesPosted", header.batch)
        due = self._due(header)
        need(self.now < due, "LedgerWrongTime", header.batch, header.committed_at, due)
        self._check_signers(header, signers)
        seats = sum(self.seat_bit(header.run, signer) for signer in signers)
        posted = header._replace(posted_at=self.now, signers=seats)
        signatures = tuple(signers), Statement(header.batch, header.root, records)
        if not records:
            batch.header = posted._replace(status=WITHHELD)
            self.emit(
                "BatchWithheld",
                batch_id=header.batch,
                posted_at=self.now,
                signers=seats,
                signatures=("signatures", *signatures),
            )
            return
        sizes = len(records) * 56, header.count * 56
        need(sizes[0] == sizes[1], "LedgerRecordCount", *sizes)
        for place, record in enumerate(records):
            verdict = record.verdict
            need(ACCEPTED <= verdict <= FRAUD, "LedgerInvalidVerdict", place, verdict)
        units = sum(record.units for record in records)
        need(units <= header.units, "LedgerUnitsExceeded", header.batch, units, header.units)
        self._record(batch, posted, records, ("signatures", *signatures))

    def _record(
        self, batch: Batch, posted: Header, records: tuple[Record, ...], signatures: Name
    ) -> None:
        root = ("outcomes", posted.batch, records)
        batch.header = posted._replace(outcomes=root, status=JUDGED)
        batch.records = records
        self.emit(
            "OutcomesPosted",
            batch_id=posted.batch,
            run_id=posted.run,
            outcomes_root=root,
            posted_at=self.now,
            signers=posted.signers,
            records=("records", records),
            signatures=signatures,
        )
        rest = posted.units - sum(record.units for record in records)
        if rest:
            self._free(posted.run, rest * posted.price)

    def _check_signers(self, header: Header, signers: Sequence[str]) -> None:
        last = 0
        for signer in signers:
            need(self.rank[signer] > last, "LedgerInvalidSigner", signer)
            last = self.rank[signer]
        for signer in signers:
            need(self.is_validator(header.run, signer), "LedgerInvalidSigner", signer)
        quorum = self.terms_at(header.run, header.terms).quorum
        need(len(signers) >= quorum, "LedgerQuorumNotMet", len(signers), quorum)

    def show(
        self, header: Header, stated: Statement, signer: str, records: tuple[Record, ...]
    ) -> None:
        """`stated` is of this batch; `records` are shown with it, or none."""
        self._batch(header)
        need(self.is_validator(header.run, signer), "LedgerInvalidSigner", signer)
        whole = not records or records == stated.records
        need(whole, "LedgerRecordCount", len(records) * 56, header.count * 56)
        self.emit(
            "OutcomesShown",
            batch_id=header.batch,
            validator=signer,
            batch_root=header.root,
            records_hash=("recordshash", stated.records),
            records=("records", records),
            signature=("signatures", (signer,), stated),
        )

    # ------------------------------------------------------------ judges of the network

    def void(self, header: Header) -> None:
        batch = self._batch(header)
        need(header.status != JUDGED, "LedgerOutcomesPosted", header.batch)
        since = self._due(header) + self.fixed.challenge_window
        need(self.now >= since, "LedgerWrongTime", header.batch, since, EVER)
        need(not self._is_summoned(header.batch), "LedgerInCourt", header.batch)
        batch.is_void = True
        self.emit("BatchVoided", batch_id=header.batch, run_id=header.run)
        self._free(header.run, header.units * header.price)

    def _need_unjudged(self, header: Header, claimed: Submission) -> None:
        self._batch(header)
        self._need_appeal(header)
        self._need_only(header, claimed)

    def _need_only(self, header: Header, claimed: Submission) -> None:
        only = header.root == ("submissions", (claimed,)) and claimed.units <= header.units
        need(only and self._fits(claimed), "LedgerInvalidSubmission", claimed.worker, NOBODY)

    def _judge(self, header: Header, claimed: Submission, ruling: int) -> None:
        """Record what judges of the network decided."""
        batch = self._batch(header)
        self._need_only(header, claimed)
        number = self.number_of(claimed.worker)
        record = Record(number, *claimed[2:], verdict=ruling >> 8, reason=ruling & 255)
        posted = header._replace(posted_at=self.now, signers=0)
        self._record(batch, posted, (record,), ("nothing",))

    def _due(self, header: Header) -> int:
        if header.status == WITHHELD:
            return header.posted_at
        return header.committed_at + self.fixed.outcome_deadline

    def _need_appeal(self, header: Header) -> None:
        need(header.status != JUDGED, "LedgerOutcomesPosted", header.batch)
        due = self._due(header)
        until = due + self.fixed.challenge_window
        need(due <= self.now < until, "LedgerWrongTime", header.batch, due, until)

    # ------------------------------------------------------------------ standing

    def _batch(self, header: Header) -> Batch:
        batch = self.batches.get(header.batch)
        present = batch is not None and batch.header == header and not batch.is_void
        need(present, "LedgerBatchMismatch", header.batch)
        assert batch is not None
        return batch

    def standing(self, proof: Proof) -> Standing:
        header, record = proof.header, proof.record
        batch = self._batch(header)
        need(header.status == JUDGED, "LedgerNotJudged", header.batch)
        there = proof.intact and proof.path == proof.position < len(batch.records)
        there = there and batch.records[proof.path] == record
        need(there, "LedgerInvalidProof", header.batch, proof.position)
        leaf = ("outcome", header.batch, proof.position, record)
        ruling = self._ruling(leaf, record)
        closes_at = header.posted_at + self.fixed.challenge_window
        if ruling >> 8 == FRAUD:
            closes_at = self.fraud_closes_at(header.run, header.posted_at)
        final = self.now >= closes_at and not self._is_open(leaf)
        return Standing(record, leaf, ruling >> 8, ruling & 255, closes_at, final)

    def _is_open(self, case: Name) -> bool:
        return case in self.cases and self.cases[case].status == OPEN

    def _is_summoned(self, batch: int) -> bool:
        return self._is_open(("summons", batch))

    def _ruling(self, leaf: Name, record: Record) -> int:
        """Return the ruling that stands."""
        case = self.cases.get(leaf)
        overturned = case is not None and case.status == OVERTURNED
        return case.leading()[0] if case and overturned else record.ruling

    # --------------------------------------------------------------------- fraud

    def execute_fraud(self, proof: Proof, work: Submission, signer: str, held: bool = True) -> None:
        """`held` tells whether the work comes with the siblings of its place in the batch."""
        standing, header = self.standing(proof), proof.header
        self._need_fraud(proof, standing)
        is_held, is_named = self._evidence(proof, work, signer, held)
        is_about = self.cases[standing.leaf].is_proven if self._is_ruled(standing) else is_named
        sound = is_held and is_about
        sound = sound and self._answers(header, work.worker, signer, header.committed_at)
        need(sound, "LedgerInvalidSubmission", work.worker, signer)
        paused_until = self.runs[header.run].slash_paused_until
        need(self.now >= paused_until, "LedgerSlashingPaused", header.run, paused_until)
        escrow = self._escrow_of(header.run, work.worker, work.tag, standing)
        exact = escrow[3] == EXACT_FRAUD
        priors = self._convict(header.run, work.worker, escrow, exact)
        terms = self.terms_at(header.run, header.terms)
        ppm = terms.exact_ppm if exact else min(terms.fraud_ppm * 2**priors, PPM)
        amount = self._hold(escrow, ppm, header.batch, proof.position)
        self.emit(
            "FraudExecuted",
            batch_id=header.batch,
            worker=work.worker,
            escrow_id=escrow,
            leaf=standing.leaf,
            position=proof.position,
            amount=amount,
        )

    @staticmethod
    def _escrow_of(run: int, worker: str, tag: int, standing: Standing) -> Name:
        exact = is_exact(standing.verdict << 8 | standing.reason)
        return ("escrow", run, worker, EXACT_FRAUD if exact else FRAUD_OFFENCE, tag)

    @staticmethod
    def _is_ruled(standing: Standing) -> bool:
        """Return whether a jury's ruling stands in place of the recorded one."""
        return (standing.verdict << 8 | standing.reason) != standing.record.ruling

    @staticmethod
    def _need_fraud(proof: Proof, standing: Standing) -> None:
        place = proof.header.batch, proof.position
        need(standing.verdict == FRAUD, "LedgerNotFraud", *place, standing.verdict)

    def _need_evidence(self, proof: Proof, work: Submission, signer: str, held: bool) -> bool:
        """Return whether the batch holds the work at the outcome's place, signed by any key of its
        worker's; else the record must name it, and the worker's node at the commitment must have
        signed it.
        """
        is_held, is_named = self._evidence(proof, work, signer, held)
        time = 0 if is_held else proof.header.committed_at
        sound = (is_held or is_named) and self._answers(proof.header, work.worker, signer, time)
        need(sound, "LedgerInvalidSubmission", work.worker, signer)
        return is_held

    def _evidence(
        self, proof: Proof, work: Submission, signer: str, held: bool
    ) -> tuple[bool, bool]:
        """Return whether the batch holds the work at the outcome's place, and whether the record
        names it.
        """
        judged, header = proof.record, proof.header
        need(work.run == header.run, "LedgerInvalidSubmission", work.worker, signer)
        works = self.batches[header.batch].submissions
        there = proof.position < len(works) and works[proof.position] == work
        is_named = work[2:6] == judged[1:5] and self.by_number(judged.number) == work.worker
        return there and (held or len(works) == 1), is_named

    def _answers(self, header: Header, worker: str, signer: str, time: int) -> bool:
        return self.answers_for(header.run, worker, signer, time)

    def finalise_fraud(self, proof: Proof) -> None:
        standing, header = self.standing(proof), proof.header
        self._need_fraud(proof, standing)
        need(standing.is_final, "LedgerNotFinal", header.batch, proof.position)
        found = proof.record.verdict == FRAUD
        reporter = NOBODY if found else self.cases[standing.leaf].reporter
        worker, tag = self.by_number(proof.record.number), proof.record.tag
        if self._is_ruled(standing):
            worker, tag = self.cases[standing.leaf].worker, self.cases[standing.leaf].tag
        escrow = self._escrow_of(header.run, worker, tag, standing)
        self._release(escrow, header.batch, proof.position, reporter)
        self.emit("FraudFinalised", batch_id=header.batch, escrow_id=escrow, leaf=standing.leaf)

    # ---------------------------------------------------------------------- money

    def _take_bond(self, batch: int, payer: str) -> None:
        self.bonds[batch] = payer
        self.emit("BondTaken", batch_id=batch, payer=payer, amount=self.fixed.bond)
        self._pull("DisputeCourt", payer, self.fixed.bond)

    def _funds(self, number: int) -> Funds:
        return self.funds.setdefault(number, Funds())

    def _reserve(self, number: int, amount: int) -> None:
        funds = self._funds(number)
        need(amount <= funds.available, "EscrowUnderfunded", number, amount, funds.available)
        funds.available -= amount
        funds.reserved += amount
        self.emit("RewardReserved", run_id=number, amount=amount)

    def _free(self, number: int, amount: int) -> None:
        funds = self._funds(number)
        freed = min(amount, funds.reserved)
        funds.reserved -= freed
        funds.available += freed
        self.emit("RewardFreed", run_id=number, amount=freed)

    def _unreserve(self, number: int, amount: int) -> None:
        funds = self._funds(number)
        need(amount <= funds.reserved, "EscrowUnderfunded", number, amount, funds.reserved)
        funds.reserved -= amount
