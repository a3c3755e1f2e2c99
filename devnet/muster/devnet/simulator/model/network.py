"""FaultCourt and RewardEscrow: all that follows from judged work. `Network` is the whole."""

from __future__ import annotations

from collections.abc import Sequence

from muster.devnet.simulator.model.court import Court
from muster.devnet.simulator.model.words import ACTIVE, NO_OFFENCE, NOBODY, PPM, Fixed, Name, need
from muster.devnet.simulator.model.work import (
    ACCEPTED,
    FRAUD,
    OPEN,
    OVERTURNED,
    REVEALED,
    Batch,
    Claim,
    Header,
    Proof,
    Record,
    Statement,
    Submission,
    Work,
)

WRONG_VERDICT, ABSENT_JUROR, MISSED_DEADLINE, DOUBLE_OUTCOME = range(4)


class Network(Court):
    """FaultCourt and RewardEscrow, and with them all eight contracts."""

    def __init__(self, fixed: Fixed, now: int, block: int, rank: dict[str, int]) -> None:
        super().__init__(fixed, now, block, rank)
        self.paid: set[tuple[int, str, int, int]] = set()

    # --------------------------------------------------------------------- faults

    def _reporter(self, caller: str, run: int) -> str:
        return NOBODY if self.is_validator(run, caller) else caller

    def _punish(self, validator: str, fault: int, subject: Name, ppm: int, reporter: str) -> None:
        offence = ("fault", fault, subject, validator)
        amount = self._slash(validator, ppm, offence, reporter)
        self.emit(
            "ValidatorPunished",
            validator=validator,
            offence=offence,
            fault=fault,
            subject=subject,
            amount=amount,
        )
        self._release(offence)

    def slash_signer(self, proof: Proof, validator: str) -> None:
        leaf = self.standing(proof).leaf
        case = self.cases.get(leaf)
        status = case.status if case else 0
        need(status == OVERTURNED, "FaultCaseUndecided", leaf, status)
        assert case is not None
        signed = self.seat_bit(case.run, validator) & proof.header.signers
        need(bool(signed), "FaultNotCommitted", validator)
        ppm = self.fixed.wrong_verdict_ppm
        self._punish(validator, WRONG_VERDICT, leaf, ppm, case.challenger)

    def slash_absent_juror(self, caller: str, leaf: Name, juror: str) -> None:
        case = self.cases.get(leaf)
        status = case.status if case else 0
        need(status > OPEN, "FaultCaseUndecided", leaf, status)
        assert case is not None
        absent = juror in case.jury and case.commitments.get(juror) != REVEALED
        need(absent, "FaultNotCommitted", juror)
        reporter = self._reporter(caller, case.run)
        self._punish(juror, ABSENT_JUROR, leaf, self.fixed.absence_ppm, reporter)

    def slash_overdue(self, caller: str, header: Header, validator: str) -> None:
        self._batch(header)
        need(not header.posted_at, "LedgerOutcomesPosted", header.batch)
        self._need_overdue(header)
        due = self._due(header)
        idle = self.was_seated(header.run, validator, header.committed_at, due)
        need(idle, "FaultNotCommitted", validator)
        reporter = self._reporter(caller, header.run)
        subject = ("number", header.batch)
        self._punish(validator, MISSED_DEADLINE, subject, self.fixed.absence_ppm, reporter)

    def prove_double_outcome(
        self, caller: str, header: Header, signed: Sequence[tuple[Statement, str]]
    ) -> None:
        """`signed` are two statements and their signers."""
        self._batch(header)
        (first, validator), (second, other) = signed
        contrary = validator != NOBODY and validator == other
        contrary = contrary and first.batch == second.batch == header.batch
        contrary = contrary and first.root == second.root and first.records != second.records
        need(contrary, "FaultNoEquivocation", validator, other)
        need(bool(self.seat_bit(header.run, validator)), "FaultNotCommitted", validator)
        reporter = self._reporter(caller, header.run)
        self._punish(validator, DOUBLE_OUTCOME, ("number", header.batch), PPM, reporter)
        if self.is_validator(header.run, validator):
            self._unseat(header.run, validator)

    def prove_double_submission(
        self, caller: str, signed: Sequence[tuple[Submission, str]]
    ) -> None:
        (first, signer), (second, other) = signed
        number = self.number_of(first.worker)
        contrary = all(self.was_node(node, first.worker, number) for node in (signer, other))
        contrary = contrary and first[:4] == second[:4] and first != second
        need(contrary, "FaultNoEquivocation", signer, other)
        offence = ("double", *first[:4])
        run = self._run(first.run)
        reporter = self._reporter(caller, first.run)
        amount = self._slash(first.worker, run.terms.exact_ppm, offence, reporter)
        self._convict(first.worker, offence, True)
        self.emit(
            "DoubleSubmissionProven",
            worker=first.worker,
            offence=offence,
            run_id=first.run,
            step=first.step,
            index=first.index,
            amount=amount,
        )
        self._release(offence)

    def prove_overcommit(self, works: Sequence[Work]) -> None:
        need(bool(works), "FaultWithinCap", NOBODY, 0, 0)
        worker = works[0].submission.worker
        last: tuple[int, ...] = (-1,)
        for work in works:
            claimed = work.submission
            slot = (claimed.run, claimed.step, claimed.index)
            ordered = claimed.worker == worker and slot > last
            need(ordered, "FaultOutOfOrder", claimed.worker, *slot)
            last = slot
            self._in_flight_until(work)
        units = sum(work.submission.units for work in works)
        cap = self.unit_cap(worker)
        need(units > cap, "FaultWithinCap", worker, units, cap)
        self.emit("OvercommitProven", worker=worker, units_in_flight=units, cap=cap)
        status = self.status_of(worker)
        need(status == ACTIVE, "RegistryWrongStatus", worker, status)
        self._jail(worker, NO_OFFENCE)

    def hold_stake(self, work: Work) -> None:
        until = self._in_flight_until(work) + self.fixed.jury_time + self.fixed.slash_pause
        self._hold(work.submission.worker, until)

    def _in_flight_until(self, work: Work) -> int:
        proof = work.proof
        self._batch(proof.header)
        leaf, closes_at = self._prove(proof)
        pending = not self._is_final(leaf, closes_at)
        need(pending, "LedgerFinal", proof.header.batch, proof.position)
        self._check_evidence(proof, work.submission, work.signer)
        return closes_at

    # ---------------------------------------------------------------------- money

    def fund(self, caller: str, number: int, amount: int) -> None:
        need(amount > 0, "EscrowEmpty")
        need(not self._run(number).closed_at, "EscrowRunClosed", number)
        self._funds(number).available += amount
        self.emit("RunFunded", run_id=number, from_=caller, amount=amount)
        self._pull("RewardEscrow", caller, amount)

    def claim(self, claims: Sequence[Claim]) -> None:
        run, number, worker = self._subject(claims)
        slots = units = amount = 0
        for claim in claims:
            more = self._settle(claim, run, number, worker)
            slots += len(claim.positions)
            units += more
            amount += more * claim.header.price
        self._unreserve(run, amount)
        self.emit(
            "RewardClaimed", run_id=run, worker=worker, slots=slots, units=units, amount=amount
        )
        self._move("RewardEscrow", worker, amount)

    def _subject(self, claims: Sequence[Claim]) -> tuple[int, int, str]:
        """Return the run, worker number and worker that a call is about."""
        need(bool(claims) and bool(claims[0].records), "EscrowEmpty")
        number = claims[0].records[0].number
        return claims[0].header.run, number, self.by_number(number)

    def _settle(self, claim: Claim, run: int, number: int, worker: str) -> int:
        batch, leaves = self._final_leaves(claim, run, worker)
        units = 0
        for position, record, leaf in zip(claim.positions, claim.records, leaves, strict=True):
            need(record.number == number, "EscrowMixedClaim", claim.header.batch, position)
            verdict = self._verdict(batch, position, leaf, record)
            accepted = verdict == ACCEPTED
            need(accepted, "EscrowNotAccepted", claim.header.batch, position, verdict)
            slot = (run, worker, record.step, record.index)
            need(slot not in self.paid, "EscrowSlotPaid", *slot)
            self.paid.add(slot)
            units += record.units
        if not claim.header.posted_at:
            total, most = batch.overdue_units + units, claim.header.units
            need(total <= most, "EscrowUnitsExceeded", claim.header.batch, total, most)
            batch.overdue_units = total
        return units

    def _final_leaves(self, claim: Claim, run: int, worker: str) -> tuple[Batch, list[Name]]:
        header = claim.header
        batch = self._batch(header)
        need(header.run == run, "EscrowMixedClaim", header.batch, 0)
        final_at = (header.posted_at or self._due(header)) + self.fixed.challenge_window
        need(self.now >= final_at, "EscrowNotFinal", header.batch, final_at)
        whole = len(claim.records) == len(claim.positions)
        ordered = list(claim.positions) == sorted({*claim.positions})
        inside = all(0 <= position < header.count for position in claim.positions)
        sound = whole and ordered and inside and bool(claim.positions) and claim.intact
        sound = sound and all(
            self._is_there(batch, position, record, worker)
            for position, record in zip(claim.positions, claim.records, strict=True)
        )
        need(sound, "EscrowInvalidProof", header.batch)
        return batch, [
            ("outcome", header.batch, position, record)
            if header.posted_at
            else ("overdue", header.batch, self._claimed_by(record, run, worker))
            for position, record in zip(claim.positions, claim.records, strict=True)
        ]

    def _is_there(self, batch: Batch, position: int, record: Record, worker: str) -> bool:
        if batch.records:
            return batch.records[position] == record
        return batch.submissions[position] == self._claimed_by(record, batch.header.run, worker)

    def _verdict(self, batch: Batch, position: int, leaf: Name, record: Record) -> int:
        need(not self._is_open(leaf), "EscrowDisputed", batch.header.batch, position)
        return self._effective(leaf, record.verdict) if batch.disputed else record.verdict

    def recover(self, claims: Sequence[Claim]) -> None:
        run, _, worker = self._subject(claims)
        slots = amount = 0
        for claim in claims:
            amount += self._recover(claim, run, worker) * claim.header.price
            slots += len(claim.positions)
        self._unreserve(run, amount)
        self._funds(run).available += amount
        self.emit("RewardRecovered", run_id=run, slots=slots, amount=amount)

    def _recover(self, claim: Claim, run: int, worker: str) -> int:
        header = claim.header
        need(bool(header.posted_at), "EscrowAccepted", header.batch, 0)
        batch, leaves = self._final_leaves(claim, run, worker)
        for position, record, leaf in zip(claim.positions, claim.records, leaves, strict=True):
            verdict = self._verdict(batch, position, leaf, record)
            need(verdict != ACCEPTED, "EscrowAccepted", header.batch, position)
            if verdict == FRAUD:
                final_at = self.fraud_closes_at(run, header.posted_at)
                need(self.now >= final_at, "EscrowNotFinal", header.batch, final_at)
            fresh = position not in batch.recovered
            need(fresh, "EscrowRecovered", header.batch, position)
            batch.recovered.add(position)
        return sum(record.units for record in claim.records)

    def reclaim(self, number: int) -> None:
        run = self._run(number)
        need(run.closed_at > 0, "EscrowNotReclaimable", number, 2**256 - 1)
        funds, claims_end = self._funds(number), run.closed_at + self.fixed.claim_period
        amount, funds.available = funds.available, 0
        if self.now >= claims_end:
            amount += funds.reserved
            funds.reserved = 0
        need(amount > 0, "EscrowNotReclaimable", number, claims_end)
        self.emit("RunReclaimed", run_id=number, owner=run.owner, amount=amount)
        self._move("RewardEscrow", run.owner, amount)

    # ----------------------------------------------------------------------- time

    def deadlines(self) -> list[int]:
        """Return the times still to come at which what is allowed changes."""
        fixed = self.fixed
        times = {account.withdrawable_at for account in self.stakes.values()}
        times |= {account.withdrawable_at + fixed.unbonding for account in self.stakes.values()}
        times |= {account.held_until for account in self.stakes.values()}
        times |= {worker.jailed_until for worker in self.workers.values()}
        times |= {run.effective_at for run in self.runs.values()}
        for run in self.runs.values():
            until = run.slash_paused_until
            times |= {until, until + fixed.slash_cooldown, until + fixed.challenge_window}
        times |= {run.closed_at + fixed.claim_period for run in self.runs.values()}
        times |= {until for _, until in self.direct.values()}
        for batch in self.batches.values():
            due = self._due(batch.header)
            judged = batch.header.posted_at or due
            times |= {due, judged + fixed.challenge_window}
        for case in self.cases.values():
            phases = (fixed.commit_time // 2, fixed.commit_time, fixed.jury_time)
            times |= {case.opened_at + phase for phase in phases}
        return sorted(time for time in times if time > self.now)
