"""RewardEscrow: who is paid for judged work. `Network` is all of the contracts."""

from collections.abc import Sequence

from muster.lab.simulator.model.court import Court
from muster.lab.simulator.model.words import Fixed, Name, need
from muster.lab.simulator.model.work import (
    ACCEPTED,
    FRAUD,
    JUDGED,
    Batch,
    Claim,
    Record,
)


class Network(Court):
    """RewardEscrow, and with it all nine contracts."""

    def __init__(self, fixed: Fixed, now: int, block: int, rank: dict[str, int]) -> None:
        super().__init__(fixed, now, block, rank)
        self.paid: set[tuple[int, str, int, int]] = set()

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
            new_slots, new_units = self._settle(claim, run, number, worker)
            slots += new_slots
            units += new_units
            amount += new_units * claim.header.price
        need(slots > 0, "EscrowAllPaid", run, worker)
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

    def _settle(self, claim: Claim, run: int, number: int, worker: str) -> tuple[int, int]:
        batch, leaves = self._final_leaves(claim, run)
        slots = units = 0
        for position, record, leaf in zip(claim.positions, claim.records, leaves, strict=True):
            need(record.number == number, "EscrowMixedClaim", claim.header.batch, position)
            verdict = self._verdict(batch, position, leaf, record)
            accepted = verdict == ACCEPTED
            need(accepted, "EscrowNotAccepted", claim.header.batch, position, verdict)
            slot = (run, worker, record.step, record.index)
            if slot not in self.paid:
                self.paid.add(slot)
                slots += 1
                units += record.units
        return slots, units

    def _final_leaves(self, claim: Claim, run: int) -> tuple[Batch, list[Name]]:
        header = claim.header
        batch = self._batch(header)
        need(header.run == run, "EscrowMixedClaim", header.batch, 0)
        need(header.status == JUDGED, "EscrowNotJudged", header.batch)
        final_at = header.posted_at + self.fixed.challenge_window
        need(self.now >= final_at, "EscrowNotFinal", header.batch, final_at)
        whole = len(claim.records) == len(claim.positions)
        ordered = list(claim.positions) == sorted({*claim.positions})
        inside = all(0 <= position < header.count for position in claim.positions)
        sound = whole and ordered and inside and bool(claim.positions) and claim.intact
        sound = sound and all(
            batch.records[position] == record
            for position, record in zip(claim.positions, claim.records, strict=True)
        )
        need(sound, "EscrowInvalidProof", header.batch)
        return batch, [
            ("outcome", header.batch, position, record)
            for position, record in zip(claim.positions, claim.records, strict=True)
        ]

    def _verdict(self, batch: Batch, position: int, leaf: Name, record: Record) -> int:
        need(not self._is_open(leaf), "EscrowDisputed", batch.header.batch, position)
        return self._ruling(leaf, record) >> 8 if batch.disputed else record.verdict

    def recover(self, claims: Sequence[Claim]) -> None:
        run, _, _ = self._subject(claims)
        slots = amount = 0
        for claim in claims:
            amount += self._recover(claim, run) * claim.header.price
            slots += len(claim.positions)
        self._unreserve(run, amount)
        self._funds(run).available += amount
        self.emit("RewardRecovered", run_id=run, slots=slots, amount=amount)

    def _recover(self, claim: Claim, run: int) -> int:
        header = claim.header
        batch, leaves = self._final_leaves(claim, run)
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
        """Return the future times at which the set of allowed calls changes."""
        fixed = self.fixed
        times = {account.withdrawable_at for account in self.stakes.values()}
        times |= {member.jailed_until for member in self.members.values()}
        times |= {left + fixed.commit_time for left in self.left_bench.values()}
        for run in self.runs.values():
            until = run.slash_paused_until
            times |= {until, until + fixed.slash_cooldown, until + fixed.challenge_window}
            times |= {run.effective_at, run.closed_at + fixed.claim_period}
        times |= {until for _, until in self.direct.values()}
        for batch in self.batches.values():
            due = self._due(batch.header)
            times |= {due, due + fixed.challenge_window}
            times.add(batch.header.posted_at + fixed.challenge_window)
        for case in self.cases.values():
            phases = (fixed.commit_time // 2, fixed.commit_time, fixed.jury_time)
            times |= {case.opened_at + phase for phase in phases}
        return sorted(time for time in times if time > self.now)
