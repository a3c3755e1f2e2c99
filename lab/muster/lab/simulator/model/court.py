"""DisputeCourt and FaultCourt: claims, jurors' votes on rulings, fees and fines."""

from collections.abc import Sequence
from typing import Any

from muster.lab.simulator.model.ledger import Ledger
from muster.lab.simulator.model.words import (
    ABSENT_JUROR,
    BANNED,
    BENCH,
    DOUBLE_OUTCOME,
    DOUBLE_SUBMISSION,
    EXACT_FRAUD,
    FRAUD_OFFENCE,
    MISRECORD,
    NOBODY,
    PPM,
    WRONG_VERDICT,
    Fixed,
    Name,
    Place,
    need,
)
from muster.lab.simulator.model.work import (
    ACCEPTED,
    ANNOUNCEMENT_BLOCKS,
    FRAUD,
    JUDGED,
    MAX_CLAIMS,
    OPEN,
    OVERTURNED,
    UPHELD,
    Case,
    Draw,
    Header,
    Made,
    Proof,
    Statement,
    Submission,
    is_exact,
    is_same,
    is_seen,
    is_unavailable,
    is_verdict,
    kind_of,
)


class Court(Ledger):
    """DisputeCourt and FaultCourt."""

    def __init__(self, fixed: Fixed, now: int, block: int, rank: dict[str, int]) -> None:
        super().__init__(fixed, now, block, rank)
        self.announced: dict[Name, int] = {}
        """The block of an announcement."""

    # ------------------------------------------------------------ announce, claim, summon

    def announce(self, caller: str, announcement: Name) -> None:
        """`announcement` is ("announcement", claimant, leaf, ruling, salt)."""
        before = self.announced.get(announcement)
        if before is not None and self.block <= before + ANNOUNCEMENT_BLOCKS:
            return
        self.announced[announcement] = self.block
        self.emit("ClaimAnnounced", announcement=announcement, claimant=caller)

    def claim_ruling(
        self,
        caller: str,
        proof: Proof,
        work: Submission,
        signer: str,
        ruling: int,
        salt: int,
        held: bool = True,
    ) -> None:
        """`held` tells whether the work comes with the siblings of its place in the batch."""
        standing, header = self.standing(proof), proof.header
        leaf, recorded = standing.leaf, proof.record.ruling
        sensible = is_verdict(ruling) and not is_same(ruling, recorded)
        need(sensible, "CourtInvalidRuling", recorded, ruling)
        announcement = ("announcement", caller, leaf, ruling, salt)
        since = self.announced.get(announcement)
        known = since is not None and since < self.block <= since + ANNOUNCEMENT_BLOCKS
        need(known, "CourtNotAnnounced", announcement)
        assert since is not None
        is_held = self._need_evidence(proof, work, signer, held)
        if leaf not in self.cases:
            open_until = standing.closes_at
            need(self.now < open_until, "CourtWindowClosed", leaf, open_until)
            self._open(leaf, header, proof.position, work, recorded)
            self.cases[leaf].unproven = None if is_held else work
            self.batches[header.batch].disputed = True
        else:
            self._need_commit_phase(leaf, self._open_case(leaf))
        case = self.cases[leaf]
        need(is_held or not case.is_proven, "CourtUnproven", leaf)
        half = case.opened_at + self.fixed.commit_time // 2
        if is_held and not case.is_proven and self.now < half:
            case.is_proven, case.worker, case.tag = True, work.worker, work.tag
        own = caller == case.worker or self.serves(caller) == case.worker
        has_room = len(case.claims) < MAX_CLAIMS + own
        party = not self.may_be_drawn(caller, case.opened_at) and has_room
        need(party, "CourtMayNotClaim", leaf, caller)
        case.claims.append(Made(caller, ruling, since))
        siblings = ("siblings", header.root, proof.position if held else None)
        self._emit_claim(leaf, caller, ruling, ("committed", work, signer, siblings))
        self._pull("DisputeCourt", caller, self.fixed.bond)

    def _emit_claim(self, case: Name, caller: str, ruling: int, work: Name) -> None:
        self.emit(
            "Claimed",
            case_id=case,
            claimant=caller,
            ruling=ruling,
            work=work,
            sources=("sources",),
        )

    def _open(
        self, case: Name, header: Header, position: int, work: Submission, recorded: int
    ) -> None:
        places = len(self.bench)
        need(places > 0, "CourtNoJurors", case)
        number, draw_block = len(self.cases) + 1, self.block + self.fixed.draw_delay
        named = (recorded, self.now, number, header.run, work.worker, work.tag, draw_block, places)
        self.cases[case] = Case(*named)
        self.emit(
            "CaseOpened",
            case_id=case,
            batch_id=header.batch,
            run_id=header.run,
            number=number,
            position=position,
            worker=work.worker,
            recorded=recorded,
            draw_block=draw_block,
            places=places,
        )

    def summon(self, caller: str, header: Header, work: Submission) -> None:
        self._need_unjudged(header, work)
        own = caller == work.worker or self.serves(caller) == work.worker
        need(own, "CourtUnauthorized", caller)
        case: Name = ("summons", header.batch)
        need(case not in self.cases, "CourtCaseExists", case)
        self._open(case, header, 0, work, 0)
        self._emit_claim(case, caller, 0, ("committed", work, None, None))
        if header.batch not in self.bonds:
            self._take_bond(header.batch, caller)

    def _open_case(self, name: Name) -> Case:
        case = self.cases.get(name)
        status = case.status if case else 0
        need(status == OPEN, "CourtNoOpenCase", name, status)
        assert case is not None
        return case

    # ----------------------------------------------------------------- draw and vote

    def _drawable(self, case: Case) -> list[Place]:
        """Return the places of the opening; whoever is excluded stands in those given up since."""
        given_up = case.places - len(self.bench)
        return self.bench[: case.places] + [Place(case.worker, self.now)] * given_up

    def draw(self, name: Name, draw: Draw) -> None:
        case = self._open_case(name)
        need(not case.jury, "CourtJuryDrawn", name)
        ends_at = case.opened_at + self.fixed.commit_time // 2
        need(self.now < ends_at, "CourtPhaseOver", name, ends_at)
        need(self.block > case.draw_block, "CourtTooEarlyToDraw", name, case.draw_block)
        if self.block > case.draw_block + 256:
            case.draw_block = self.block + self.fixed.draw_delay
            self.emit("DrawPostponed", case_id=name, draw_block=case.draw_block)
            return
        run = self.runs[case.run]
        seated = {who for who, seat in run.seats.items() if seat.since <= case.opened_at}
        jury = draw(
            self._drawable(case),
            name,
            case.draw_block,
            case.opened_at,
            self.fixed.jury_size,
            seated | {case.worker, run.owner},
        )
        need(bool(jury), "CourtNoJurors", name)
        case.jury = tuple(jury)
        self.emit("JuryDrawn", case_id=name, jurors=case.jury)

    def _need_commit_phase(self, name: Name, case: Case) -> None:
        ends_at = case.opened_at + self.fixed.commit_time
        need(self.now < ends_at, "CourtPhaseOver", name, ends_at)

    def commit_vote(self, caller: str, name: Name, vote: Any) -> None:
        """`vote` is ("vote", case, juror, ruling, result, salt)."""
        case = self._open_case(name)
        self._need_commit_phase(name, case)
        half = case.opened_at + self.fixed.commit_time // 2
        settled = case.is_proven or not case.recorded or self.now >= half
        need(settled, "CourtPhaseOpen", name, half)
        drawn = caller in case.jury and caller not in case.commitments
        need(drawn, "CourtNotJuror", name, caller)
        case.commitments[caller] = vote
        self.emit("VoteCommitted", case_id=name, juror=caller, commitment=vote)

    def reveal_vote(self, caller: str, name: Name, vote: Any) -> None:
        """`vote` is what the caller claims to have committed."""
        case = self._open_case(name)
        commits_until = case.opened_at + self.fixed.commit_time
        begun = self.now >= commits_until or len(case.commitments) == len(case.jury)
        need(begun, "CourtPhaseOpen", name, commits_until)
        ends_at = commits_until + self.fixed.reveal_time
        need(self.now < ends_at, "CourtPhaseOver", name, ends_at)
        known = case.commitments.get(caller) == vote and caller not in case.revealed
        need(known, "CourtVoteMismatch", name, caller)
        ruling = vote[3]
        sensible = ruling == 0 or is_verdict(ruling)
        need(sensible, "CourtInvalidRuling", case.recorded, ruling)
        case.revealed[caller] = ruling
        result = ("result", vote[4])
        self.emit("VoteRevealed", case_id=name, juror=caller, ruling=ruling, result_hash=result)

    # ------------------------------------------------------------------------ settle

    def settle(self, proof: Proof) -> None:
        standing, header = self.standing(proof), proof.header
        leaf, record = standing.leaf, proof.record
        case, decided = self._close(leaf)
        ruling, votes, _ = case.leading()
        overturned = decided and is_seen(ruling) and not is_same(ruling, case.recorded)
        case.status = OVERTURNED if overturned else UPHELD
        pot = self._settle_claims(leaf, case, decided, overturned)
        self._pay_jurors(case, votes if decided else 0, pot)
        if overturned and record.verdict == FRAUD:
            exact = is_exact(record.ruling)
            offence = EXACT_FRAUD if exact else FRAUD_OFFENCE
            escrow = ("escrow", header.run, case.worker, offence, case.tag)
            if self._restore(escrow, header.batch, proof.position):
                self._acquit(header.run, case.worker, escrow, exact)
        self._emit_closed(leaf, case, ruling if overturned else case.recorded)

    def _emit_closed(self, name: Name, case: Case, ruling: int) -> None:
        self.emit(
            "CaseClosed",
            case_id=name,
            status=case.status,
            ruling=ruling,
            reporter=case.reporter,
            fee=case.fee,
        )

    def _close(self, name: Name) -> tuple[Case, bool]:
        """Return a case whose jury is done or out of time, and whether one ruling won."""
        case = self._open_case(name)
        ends_at = case.opened_at + self.fixed.jury_time
        all_spoke = bool(case.jury) and len(case.revealed) == len(case.jury)
        need(self.now >= ends_at or all_spoke, "CourtPhaseOpen", name, ends_at)
        _, votes, tied = case.leading()
        return case, votes > 0 and not tied

    def _settle_claims(self, name: Name, case: Case, decided: bool, overturned: bool) -> int:
        """Return the money from which jurors are paid."""
        bond, (ruling, votes, _) = self.fixed.bond, case.leading()
        right = [made for made in case.claims if overturned and is_same(made.ruling, ruling)]
        pot = bond * (len(case.claims) - len(right)) if decided else 0
        owed = 0
        if overturned and not pot:
            pot = owed = self.fixed.juror_fee * votes
            if not is_unavailable(case.recorded):
                owed -= self._paid_by_run(case)
        if right:
            case.reporter = min(right, key=lambda made: made.announced_in).claimant
        for made in case.claims:
            returned = bond if made in right or not decided else 0
            if right and made is right[0]:
                returned -= owed
            self.emit(
                "ClaimSettled",
                case_id=name,
                claimant=made.claimant,
                right=made in right,
                returned=returned,
            )
            if returned:
                self._move("DisputeCourt", made.claimant, returned)
        return pot

    def _paid_by_run(self, case: Case) -> int:
        funds = self._funds(case.run)
        paid = min(self.fixed.juror_fee * case.leading()[1], funds.available)
        funds.available -= paid
        self.emit("CourtPaid", run_id=case.run, amount=paid)
        self._move("RewardEscrow", "DisputeCourt", paid)
        return paid

    def _pay_jurors(self, case: Case, right: int, pot: int) -> None:
        case.fee = min(self.fixed.juror_fee, pot // right) if right else 0
        self._burn("DisputeCourt", pot - case.fee * right)

    def settle_summoned(self, header: Header, work: Submission) -> None:
        """`header` is the batch's present one wherever the jury saw the work."""
        name: Name = ("summons", header.batch)
        case, decided = self._close(name)
        ruling, votes, _ = case.leading()
        seen = decided and is_seen(ruling)
        accepted = seen and ruling >> 8 == ACCEPTED
        case.status = OVERTURNED if seen else UPHELD
        payer = self.bonds.pop(header.batch)
        lost = decided and not accepted
        pot = self.fixed.bond if lost else self.fixed.juror_fee * votes if accepted else 0
        owed = pot - self._paid_by_run(case) if accepted else 0
        self._pay_jurors(case, votes if decided else 0, pot)
        self._emit_closed(name, case, ruling if seen else 0)
        if seen:
            self._judge(header, work, ruling)
        if not lost:
            self._return_bond(header.batch, payer, self.fixed.bond - owed)

    # ------------------------------------------------------------- fees, fines, bonds

    def collect_fee(self, name: Name, juror: str) -> None:
        case = self._closed_case(name)
        right = case.fee > 0 and juror not in case.paid
        right = right and juror in case.revealed
        right = right and kind_of(case.revealed[juror]) == kind_of(case.leading()[0])
        need(right, "CourtNothingDue", name, juror)
        case.paid.add(juror)
        self.emit("FeeCollected", case_id=name, juror=juror, amount=case.fee)
        self._move("DisputeCourt", juror, case.fee)

    def prove(self, proof: Proof, work: Submission, signer: str, held: bool = True) -> None:
        """`held` tells whether the work comes with the siblings of its place in the batch."""
        leaf = self.standing(proof).leaf
        case = self._closed_case(leaf)
        same = case.unproven == work and self._need_evidence(proof, work, signer, held)
        need(same, "CourtUnproven", leaf)
        case.is_proven = True
        self.emit("CaseProven", case_id=leaf)

    def fine_signer(self, proof: Proof, validator: str) -> None:
        leaf, header = self.standing(proof).leaf, proof.header
        case = self.cases.get(leaf)
        wrong = case is not None and case.status == OVERTURNED
        wrong = wrong and case is not None and not case.spares_signers()
        wrong = wrong and bool(self.seat_bit(header.run, validator) & header.signers)
        need(wrong, "CourtNothingDue", leaf, validator)
        assert case is not None
        need(case.is_proven, "CourtUnproven", leaf)
        escrow = ("escrow", header.run, validator, WRONG_VERDICT, header.batch)
        amount = self._slash(escrow, self.fixed.wrong_verdict_ppm, case.reporter)
        self.emit("Fined", case_id=leaf, account=validator, amount=amount)

    def fine_absent_juror(self, name: Name, juror: str) -> None:
        case = self._closed_case(name)
        absent = juror in case.jury and juror not in case.revealed
        need(absent, "CourtNothingDue", name, juror)
        escrow = ("escrow", BENCH, juror, ABSENT_JUROR, case.number)
        amount = self._slash(escrow, self.fixed.absence_ppm)
        self.emit("Fined", case_id=name, account=juror, amount=amount)

    def _closed_case(self, name: Name) -> Case:
        case = self.cases.get(name)
        opened_at = case.opened_at if case else 0
        closed = case is not None and case.status > OPEN
        need(closed, "CourtPhaseOpen", name, opened_at + self.fixed.jury_time)
        assert case is not None
        return case

    def return_bond(self, header: Header) -> None:
        held = header.batch in self.bonds
        if held and not self.batches[header.batch].is_void:
            self._batch(header)
            held = header.status == JUDGED
        need(held, "CourtBondHeld", header.batch)
        self._return_bond(header.batch, self.bonds.pop(header.batch), self.fixed.bond)

    def _return_bond(self, batch: int, payer: str, amount: int) -> None:
        self.emit("BondReturned", batch_id=batch, payer=payer, amount=amount)
        self._move("DisputeCourt", payer, amount)

    # ----------------------------------------------------- faults that prove themselves

    def prove_double_outcome(self, header: Header, signed: Sequence[tuple[Statement, str]]) -> None:
        """`signed` are two statements and their signers."""
        self._batch(header)
        (first, validator), (second, other) = signed
        contrary = validator != NOBODY and validator == other
        contrary = contrary and first.batch == second.batch == header.batch
        contrary = contrary and first.root == second.root and first.records != second.records
        # A withheld statement does not contradict a judgement.
        contrary = contrary and bool(first.records) and bool(second.records)
        contrary = contrary and bool(self.seat_bit(header.run, validator))
        need(contrary, "FaultNoEquivocation", validator, other)
        escrow = ("escrow", header.run, validator, DOUBLE_OUTCOME, header.batch)
        amount = self._slash(escrow, PPM)
        self.emit(
            "DoubleOutcomeProven",
            run_id=header.run,
            validator=validator,
            escrow_id=escrow,
            batch_id=header.batch,
            amount=amount,
        )
        self._unseat_for_fault(header.run, validator)

    def prove_misrecord(
        self, proof: Proof, work: Submission, signer: str, validator: str, held: bool = True
    ) -> None:
        """`held` tells whether the work comes with the siblings of its place in the batch."""
        header, record = proof.header, proof.record
        self.standing(proof)
        wrong = self._need_evidence(proof, work, signer, held)
        wrong = wrong and bool(self.seat_bit(header.run, validator) & header.signers)
        named = record.number == 0 or self.by_number(record.number) == work.worker
        named = named and record[1:5] == work[2:6]
        named = named and record.rollouts == min(work.rollouts, 2**16 - 1)
        wrong = wrong and not (named and record.units <= work.units)
        need(wrong, "FaultNoMisrecord", header.batch, proof.position, validator)
        escrow = ("escrow", header.run, validator, MISRECORD, header.batch)
        amount = self._slash(escrow, PPM)
        self.emit(
            "MisrecordProven",
            run_id=header.run,
            validator=validator,
            escrow_id=escrow,
            batch_id=header.batch,
            position=proof.position,
            amount=amount,
        )
        self._unseat_for_fault(header.run, validator)

    def prove_double_submission(
        self, proof: Proof, signed: Sequence[tuple[Submission, str]], held: bool = True
    ) -> None:
        """The first of two submissions is the one that the outcome judges."""
        header = proof.header
        self.standing(proof)
        (first, signer), (second, other) = signed
        self._need_evidence(proof, first, signer, held)
        contrary = first[:4] == second[:4] and first != second
        time = header.committed_at
        contrary = contrary and self._answers(header, first.worker, signer, time)
        contrary = contrary and self._answers(header, second.worker, other, time)
        need(contrary, "FaultNoEquivocation", first.worker, other)
        member = self.members[header.run, first.worker]
        need(member.status != BANNED, "FaultAlreadyBanned", header.run, first.worker)
        tag = first.step << 32 | first.index
        escrow = ("escrow", header.run, first.worker, DOUBLE_SUBMISSION, tag)
        self._convict(header.run, first.worker, escrow, True)
        ppm = self.terms_at(header.run, header.terms).exact_ppm
        amount = self._slash(escrow, ppm)
        self.emit(
            "DoubleSubmissionProven",
            run_id=header.run,
            worker=first.worker,
            escrow_id=escrow,
            step=first.step,
            index=first.index,
            amount=amount,
        )
