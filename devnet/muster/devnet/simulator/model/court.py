"""DisputeCourt: an outcome is challenged, jurors vote, the verdict stands or falls."""

from __future__ import annotations

from typing import Any

from muster.devnet.simulator.model.ledger import Ledger
from muster.devnet.simulator.model.words import HELD, Name, need
from muster.devnet.simulator.model.work import (
    ACCEPTED,
    FRAUD,
    OPEN,
    OVERTURNED,
    REVEALED,
    UPHELD,
    Case,
    Draw,
    Proof,
    Standing,
)


class Court(Ledger):
    """DisputeCourt."""

    def challenge(self, caller: str, proof: Proof, claimed: int) -> None:
        standing = self.standing(proof)
        leaf, recorded = standing.leaf, standing.record.verdict
        open_until = standing.closes_at
        need(self.now < open_until, "CourtWindowClosed", leaf, open_until)
        sensible = claimed != recorded and ACCEPTED <= claimed <= FRAUD
        need(sensible, "CourtInvalidClaim", recorded, claimed)
        need(leaf not in self.cases, "CourtCaseExists", leaf)
        header = proof.header
        draw_block = self.block + self.fixed.draw_delay
        self.cases[leaf] = Case(
            caller, header.batch, recorded, claimed, header.run, self.now, draw_block
        )
        self.batches[header.batch].disputed = True
        self.emit(
            "CaseOpened",
            leaf=leaf,
            batch_id=header.batch,
            challenger=caller,
            position=proof.position,
            recorded_verdict=recorded,
            claimed_verdict=claimed,
            draw_block=draw_block,
        )
        self._count_case(self.by_number(standing.record.number), 1)
        self._pull("DisputeCourt", caller, self.fixed.challenge_bond)

    def _open_case(self, leaf: Name) -> Case:
        case = self.cases.get(leaf)
        status = case.status if case else 0
        need(status == OPEN, "CourtNoOpenCase", leaf, status)
        assert case is not None
        return case

    def draw_jury(self, proof: Proof, draw: Draw) -> None:
        standing = self.standing(proof)
        leaf, case = standing.leaf, self._open_case(standing.leaf)
        need(not case.jury, "CourtJuryDrawn", leaf)
        ends_at = case.opened_at + self.fixed.commit_time // 2
        need(self.now < ends_at, "CourtPhaseOver", leaf, ends_at)
        need(self.block > case.draw_block, "CourtTooEarlyToDraw", leaf, case.draw_block)
        if self.block > case.draw_block + 256:
            case.draw_block = self.block + self.fixed.draw_delay
            self.emit("DrawPostponed", leaf=leaf, draw_block=case.draw_block)
            return
        run = self.runs[case.run]
        parties = {case.challenger, self.by_number(standing.record.number)}
        weights = [
            0
            if account in parties or run.seats[account].bit & proof.header.signers
            else self.stakes[account].active
            for account in run.validators
        ]
        places = draw(weights, self.fixed.jury_size, leaf, case.draw_block)
        need(bool(places), "CourtNoJurors", leaf)
        case.jury = tuple(run.validators[place] for place in places)
        seats = sum(run.seats[juror].bit for juror in case.jury)
        self.emit("JuryDrawn", leaf=leaf, seats=seats, jurors=case.jury)

    def commit_vote(self, caller: str, leaf: Name, vote: Any) -> None:
        """`vote` is ("vote", leaf, juror, overturn, result, salt)."""
        case = self._open_case(leaf)
        ends_at = case.opened_at + self.fixed.commit_time
        need(self.now < ends_at, "CourtPhaseOver", leaf, ends_at)
        need(caller in case.jury, "CourtNotJuror", leaf, caller)
        need(caller not in case.commitments, "CourtVoteMismatch", leaf, caller)
        case.commitments[caller] = vote
        self.emit("VoteCommitted", leaf=leaf, juror=caller, commitment=vote)

    def reveal_vote(self, caller: str, leaf: Name, vote: Any) -> None:
        """`vote` as the caller says it committed it."""
        case = self._open_case(leaf)
        commits_until = case.opened_at + self.fixed.commit_time
        begun = self.now >= commits_until or case.committed == len(case.jury)
        need(begun, "CourtPhaseOpen", leaf, commits_until)
        ends_at = commits_until + self.fixed.reveal_time
        need(self.now < ends_at, "CourtPhaseOver", leaf, ends_at)
        need(case.commitments.get(caller) == vote, "CourtVoteMismatch", leaf, caller)
        case.commitments[caller] = REVEALED
        overturn = bool(vote[3])
        case.overturn += overturn
        case.uphold += not overturn
        self.emit(
            "VoteRevealed",
            leaf=leaf,
            juror=caller,
            overturn=overturn,
            result_hash=("result", vote[4]),
        )

    def close_case(self, proof: Proof) -> None:
        standing = self.standing(proof)
        leaf, case = standing.leaf, self._open_case(standing.leaf)
        ends_at = case.opened_at + self.fixed.jury_time
        revealed = case.overturn + case.uphold
        all_spoke = bool(case.jury) and revealed == len(case.jury)
        need(self.now >= ends_at or all_spoke, "CourtPhaseOpen", leaf, ends_at)
        overturned = case.overturn > case.uphold
        case.status = OVERTURNED if overturned else UPHELD
        bond = self.fixed.challenge_bond if case.overturn >= case.uphold else 0
        self.emit(
            "CaseClosed",
            leaf=leaf,
            overturned=overturned,
            verdict=case.claimed if overturned else case.recorded,
            bond_returned=bond,
        )
        worker = self.by_number(standing.record.number)
        self._count_case(worker, -1)
        if overturned:
            self._enforce(standing, worker, case.claimed)
        if bond:
            self._move("DisputeCourt", case.challenger, bond)
        else:
            self._burn("DisputeCourt", self.fixed.challenge_bond)

    def _enforce(self, standing: Standing, worker: str, verdict: int) -> None:
        escrow = self.escrows.get(standing.offence)
        if verdict == FRAUD:
            self._hold(worker, self.now + self.fixed.challenge_window + self.fixed.slash_pause)
        elif escrow and escrow.status == HELD:
            self._restore(standing.offence)
            self._acquit(worker, standing.offence, self._is_exact(standing.record))
