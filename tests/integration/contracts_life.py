"""Random lives of a network: what Hypothesis draws, as calls that chain and model both take.

Everything is drawn: who does what, to whom, with which flaw, and when. Most choices are sound, so
that lives get somewhere; one in eight is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

from contracts_duel import NODES, VALIDATORS, WALLET, WORKERS, Calls
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from muster.devnet.simulator.model.network import Network
from muster.devnet.simulator.model.words import NOBODY, Fixed, Name, Run, Terms
from muster.devnet.simulator.model.work import (
    ACCEPTED,
    FRAUD,
    INCOMPLETE,
    OPEN,
    REJECTED,
    Batch,
    Claim,
    Proof,
    Record,
    Statement,
    Submission,
    Work,
)

T = TypeVar("T")

FIXED = Fixed()
EVER = 2**32
"""A deadline that never passes."""
TERMS = Terms(price=7, fraud_ppm=100_003, exact_ppm=500_009, quorum=2)


class Dice:
    """Choices within a rule; what is simplest comes first and is what failures shrink to."""

    def __init__(self, data: st.DataObject) -> None:
        self._data = data

    def pick(self, choices: Sequence[T]) -> T:
        return self._data.draw(st.sampled_from(choices))

    def rarely(self) -> bool:
        """Return true once in eight times."""
        return self.pick((False,) * 7 + (True,))


class Life(RuleBasedStateMachine):
    """One life of a network; starts with five validators, two workers and a funded run."""

    begin: ClassVar[Callable[[], Calls]]

    def __init__(self) -> None:
        super().__init__()
        self.duel = type(self).begin()
        self.votes: dict[tuple[Name, str], Name] = {}

    @property
    def model(self) -> Network:
        return self.duel.model

    # ----------------------------------------------------------------------- time

    @rule(data=st.data())
    def wait(self, data: st.DataObject) -> None:
        """The next call comes just before, at or after something falls due, or blocks later."""
        choice = Dice(data)
        deadlines = self.model.deadlines()
        if not deadlines or choice.rarely():
            self.duel.mine(choice.pick((1, 2, 3, 1, 2, 3, 258)))
            return
        self.duel.next_time = choice.pick(deadlines) + choice.pick((0, -1, 1))

    @rule(data=st.data())
    def manage(self, data: st.DataObject) -> None:
        """What is not about work: stakes, keys, runs."""
        choice = Dice(data)
        kinds = (self.deposit, self.unbond_or_withdraw, self.register, self.change_worker)
        choice.pick(
            (
                *kinds,
                self.fund,
                self.govern,
                self.anybody_governs,
                self.publish,
                self.create_run,
                self.pause_slashing,
            )
        )(choice)

    # ---------------------------------------------------------------------- stake

    def deposit(self, choice: Dice) -> None:
        owner = choice.pick((*WORKERS, *VALIDATORS))
        amount = choice.pick((FIXED.required_stake, 1, 2003, 0, WALLET + 1))
        if choice.pick((False, True)):
            self.duel.deposit(choice.pick((owner, "challenger", "stranger")), owner, amount)
        else:
            self.duel.deposit_with_permit(owner, amount, signed=not choice.rarely())

    def unbond_or_withdraw(self, choice: Dice) -> None:
        owner = choice.pick((*WORKERS, *VALIDATORS))
        if choice.pick((False, True)):
            self.duel.simple(owner, "withdraw")
            return
        active = self.model.stakes[owner].active
        self.duel.simple(
            owner, "request_unbond", choice.pick((active // 3, 1, active, active + 1, 0))
        )

    # -------------------------------------------------------------------- workers

    def register(self, choice: Dice) -> None:
        worker = choice.pick(("carol", "alice", "challenger"))
        stake = choice.pick((FIXED.required_stake, 1500, 1008, 0))
        deadline = self.model.now if choice.rarely() else EVER
        node, permit = choice.pick(NODES), choice.pick((True, False))
        self.duel.register(worker, stake, node, deadline, not choice.rarely(), permit)

    def change_worker(self, choice: Dice) -> None:
        worker = choice.pick(WORKERS)
        does = choice.pick(("unjail", "rejoin", "exit", "jail", "rotate", "rotate"))
        if does == "jail":
            self.duel.simple("stranger", "jail_for_low_stake", worker)
        elif does == "rotate":
            deadline = self.model.now if choice.rarely() else EVER
            self.duel.rotate_node(worker, choice.pick(NODES), deadline, not choice.rarely())
        else:
            self.duel.simple(worker, does)

    # ----------------------------------------------------------------------- runs

    def run(self, choice: Dice) -> int:
        return 99 if choice.rarely() else choice.pick(sorted(self.model.runs))

    def create_run(self, choice: Dice) -> None:
        validators = list(choice.pick((VALIDATORS[:3], VALIDATORS[2:], ("v1", "v1"), ())))
        quorum = choice.pick((1, 2, 0, 9))
        terms = choice.pick(
            (TERMS, Terms(0, 1, 2, 2), Terms(1, 2, 1, 2), Terms(1, 2, 10**6 + 1, 2))
        )
        trainer = NOBODY if choice.rarely() else "trainer"
        run = Run("", trainer, "orchestrator", terms._replace(quorum=quorum), validators)
        self.duel.create_run(choice.pick(("owner", "challenger")), run)

    def fund(self, choice: Dice) -> None:
        caller = choice.pick(("owner", "stranger"))
        self.duel.fund(caller, self.run(choice), choice.pick((5000, 1, 0, WALLET + 1)))

    def govern(self, choice: Dice) -> None:
        """What a run's owner does, or tries to do to another's."""
        run = self.run(choice)
        owner = "stranger" if choice.rarely() else "owner"
        does = choice.pick(("propose", "seat", "rotate", "pause", "cancel", "key", "close"))
        if does == "propose":
            self.propose(choice, owner, run)
        elif does == "seat":
            self.duel.simple(owner, "seat_validator", run, choice.pick(VALIDATORS))
        elif does == "rotate":
            two = choice.pick(VALIDATORS), choice.pick(VALIDATORS)
            self.duel.simple(owner, "rotate_validator", run, *two)
        elif does == "key":
            self.rotate_key(choice, owner, run)
        elif does == "pause":
            self.duel.simple(owner, "pause", run, choice.pick((False, True)))
        elif does == "cancel":
            self.duel.simple(owner, "cancel_change", run)
        elif choice.rarely():
            self.duel.simple(owner, "close_run", run)

    def propose(self, choice: Dice, owner: str, run: int) -> None:
        price = choice.pick((14, 3, 7, 15, 2, 1))
        shares = choice.pick(((200_000, 600_000), (5, 4), (0, 10**6)))
        self.duel.propose(owner, run, Terms(price, *shares, choice.pick((1, 2, 3, 0))))

    def rotate_key(self, choice: Dice, owner: str, run: int) -> None:
        role = choice.pick(("trainer", "orchestrator"))
        old, new = choice.pick(("trainer", "orchestrator")), choice.pick((role, "owner", NOBODY))
        self.duel.rotate_key(owner, run, role, old, new)

    def anybody_governs(self, choice: Dice) -> None:
        run = self.run(choice)
        does = choice.pick(("apply_change", "reclaim", "unseat_validator", "record_beacon"))
        extra: dict[str, Any] = {
            "unseat_validator": (choice.pick(VALIDATORS),),
            "record_beacon": (choice.pick((0, 1, 2)),),
        }
        self.duel.simple("stranger", does, run, *extra.get(does, ()))

    def pause_slashing(self, choice: Dice) -> None:
        caller = choice.pick(("v0", "orchestrator", "owner", "v5", "trainer", "stranger"))
        reason, why = choice.pick((60, 0, 255)), "" if choice.rarely() else "evidence"
        self.duel.pause_slashing(caller, self.run(choice), choice.pick((0, 1, 2)), reason, why)

    def publish(self, choice: Dice) -> None:
        caller = "stranger" if choice.rarely() else "trainer"
        self.duel.publish(caller, self.run(choice), choice.pick((0, 1, 2, 5)), "manifest")

    # ----------------------------------------------------------------------- work

    def submission(self, choice: Dice, run: int) -> Submission:
        worker, step, index = choice.pick(WORKERS[:2]), 1, choice.pick((0, 1, 2))
        file, units = choice.pick((0, 0, 1)), choice.pick((100, 10, 220))
        return Submission(run, worker, step, index, 0, file, 8, units)

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        choice = Dice(data)
        run = self.run(choice)
        caller = "stranger" if choice.rarely() else "orchestrator"
        works = tuple(self.submission(choice, run) for _ in range(choice.pick((2, 1, 3, 4, 0))))
        units = sum(work.units for work in works)
        units = choice.pick((units, units, units, max(units - 10, 0), 10**6))
        self.duel.commit(caller, run, works, units)

    @rule(data=st.data())
    def submit_direct(self, data: st.DataObject) -> None:
        choice = Dice(data)
        work = self.submission(choice, self.run(choice))
        signer = self.signer(choice, work)
        caller = choice.pick((work.worker, signer, "stranger"))
        self.duel.submit_direct("stranger" if caller == NOBODY else caller, work, signer)

    def signer(self, choice: Dice, work: Submission) -> str:
        """Return mostly the worker's node."""
        if choice.rarely():
            return choice.pick((*NODES, NOBODY))
        worker = self.model.workers.get(work.worker)
        return worker.node if worker else NODES[0]

    def batch(self, choice: Dice, *, posted: bool | None = None) -> Batch:
        """Return mostly a batch of a kind, the newest first."""
        batches = list(self.model.batches.values())[::-1]
        kind = [b for b in batches if posted is None or bool(b.header.posted_at) is posted]
        return choice.pick(batches if choice.rarely() or not kind else kind)

    @precondition(lambda self: self.model.batches)
    @rule(data=st.data())
    def post(self, data: st.DataObject) -> None:
        choice = Dice(data)
        batch = self.batch(choice, posted=False)
        records = tuple(self.judged(choice, work) for work in batch.submissions)
        if choice.rarely():
            records = choice.pick(
                (
                    records[1:],
                    (records[0]._replace(verdict=5), *records[1:]),
                    (records[0]._replace(units=10**6), *records[1:]),
                    (records[0]._replace(number=77), *records[1:]),
                )
            )
        self.duel.post(batch.header, records, self.signers(choice, batch.header.run))

    def judged(self, choice: Dice, work: Submission) -> Record:
        verdict, reason = choice.pick(
            ((ACCEPTED, 0), (FRAUD, 31), (FRAUD, 60), (REJECTED, 13), (INCOMPLETE, 23))
        )
        return self.model.as_claimed(work)._replace(verdict=verdict, reason=reason)

    def signers(self, choice: Dice, run: int) -> list[str]:
        seated = sorted(self.model.runs[run].validators, key=self.model.rank.__getitem__)
        signers = choice.pick((seated[:2], seated[-2:], seated[:3], seated))
        if choice.rarely():
            signers = choice.pick((signers[:1], signers[::-1], ["stranger"], [], signers[:1] * 2))
        return signers

    @rule(data=st.data())
    def finish_batch(self, data: st.DataObject) -> None:
        """A batch without delays: committed, judged, its frauds executed, one outcome disputed."""
        choice = Dice(data)
        run = self.model.runs[1]
        works = tuple(self.submission(choice, 1) for _ in range(choice.pick((2, 3, 1))))
        if not self.duel.commit(run.orchestrator, 1, works, sum(work.units for work in works)):
            return
        batch = self.model.batches[len(self.model.batches)]
        records = tuple(self.judged(choice, work) for work in works)
        seated = sorted(run.validators, key=self.model.rank.__getitem__)
        if not self.duel.post(batch.header, records, seated[: choice.pick((2, 3))]):
            return
        proofs = [Proof(batch.header, i, record, i, True) for i, record in enumerate(records)]
        for proof, work in zip(proofs, works, strict=True):
            if proof.record.verdict == FRAUD:
                self.duel.execute_fraud(proof, work, self.model.workers[work.worker].node)
        disputed = choice.pick(proofs)
        claimed = ACCEPTED if disputed.record.verdict == FRAUD else FRAUD
        self.duel.challenge("challenger", disputed, claimed)

    # ----------------------------------------------------------------- judged work

    def proof(self, choice: Dice, batch: Batch) -> Proof:
        """Return mostly a sound proof."""
        position = choice.pick(range(len(batch.submissions)))
        record = (
            batch.records[position]
            if batch.records
            else self.model.as_claimed(batch.submissions[position])
        )
        proof = Proof(batch.header, position, record, position, True)
        if not choice.rarely():
            return proof
        committed = batch.header._replace(
            root=("submissions", batch.submissions), posted_at=0, signers=0
        )
        return choice.pick(
            (
                proof._replace(intact=False),
                proof._replace(header=committed),
                proof._replace(header=batch.header._replace(batch=99)),
                proof._replace(record=record._replace(units=record.units + 1)),
                proof._replace(position=position + 1),
                proof._replace(record=record._replace(verdict=FRAUD)),
            )
        )

    def evidence(self, choice: Dice, proof: Proof) -> tuple[Submission, str]:
        """Return mostly the submission that a proof is about, and who signed it."""
        works = self.model.batches.get(proof.header.batch, next(iter(self.model.batches.values())))
        work = works.submissions[proof.path % len(works.submissions)]
        if choice.rarely():
            work = choice.pick(
                (work._replace(units=1), work._replace(index=9), work._replace(worker="carol"))
            )
        return work, self.signer(choice, work)

    @precondition(lambda self: self.model.batches)
    @rule(data=st.data())
    def execute_fraud(self, data: st.DataObject) -> None:
        choice = Dice(data)
        frauds = [
            b for b in self.model.batches.values() if any(r.verdict == FRAUD for r in b.records)
        ]
        batch = choice.pick(frauds[::-1]) if frauds else self.batch(choice)
        proof = self.proof(choice, batch)
        self.duel.execute_fraud(proof, *self.evidence(choice, proof))

    @precondition(lambda self: self.model.batches)
    @rule(data=st.data())
    def finalise_fraud(self, data: st.DataObject) -> None:
        choice = Dice(data)
        frauds = [
            b for b in self.model.batches.values() if any(r.verdict == FRAUD for r in b.records)
        ]
        batch = choice.pick(frauds[::-1]) if frauds else self.batch(choice)
        self.duel.finalise_fraud(self.proof(choice, batch))

    # -------------------------------------------------------------------- disputes

    @precondition(lambda self: self.model.batches)
    @rule(data=st.data())
    def challenge(self, data: st.DataObject) -> None:
        choice = Dice(data)
        proof = self.proof(choice, self.batch(choice, posted=True))
        caller = choice.pick(("challenger", "v4", "alice", "stranger"))
        self.duel.challenge(caller, proof, choice.pick((FRAUD, ACCEPTED, REJECTED, 0, 5)))

    def case(self, choice: Dice) -> tuple[Name, Proof]:
        """Return mostly an open case, and the outcome it is about."""
        cases = list(self.model.cases.items())[::-1]
        open_ones = [case for case in cases if case[1].status == OPEN]
        leaf, _ = choice.pick(cases if choice.rarely() or not open_ones else open_ones)
        return leaf, self.about(leaf)

    def about(self, leaf: Name) -> Proof:
        tag, number, *rest = leaf
        batch = self.model.batches[number]
        if tag == "outcome":
            position, record = rest
        else:
            position = batch.submissions.index(rest[0])
            record = self.model.as_claimed(rest[0])
        return Proof(batch.header, position, record, position, True)

    @precondition(lambda self: self.model.cases)
    @rule(data=st.data())
    def draw_jury(self, data: st.DataObject) -> None:
        self.duel.draw_jury(self.case(Dice(data))[1])

    @precondition(lambda self: self.model.cases)
    @rule(data=st.data())
    def commit_vote(self, data: st.DataObject) -> None:
        choice = Dice(data)
        leaf, _ = self.case(choice)
        jury = self.model.cases[leaf].jury
        juror = choice.pick(VALIDATORS if choice.rarely() or not jury else jury)
        self.vote(choice, leaf, juror)

    def vote(self, choice: Dice, leaf: Name, juror: str) -> None:
        vote: Name = ("vote", leaf, juror, choice.pick((True, False)), 1, choice.pick((1, 2)))
        if self.duel.commit_vote(juror, leaf, vote):
            self.votes[leaf, juror] = vote

    @precondition(lambda self: self.model.cases)
    @rule(data=st.data())
    def reveal_vote(self, data: st.DataObject) -> None:
        choice = Dice(data)
        leaf, _ = self.case(choice)
        jury = self.model.cases[leaf].jury
        juror = choice.pick(VALIDATORS if choice.rarely() or not jury else jury)
        vote = self.votes.get((leaf, juror), ("vote", leaf, juror, True, 0, 0))
        if choice.rarely():
            vote = (*vote[:3], not vote[3], *vote[4:])
        self.duel.reveal_vote(juror, leaf, vote)

    @precondition(lambda self: self.model.cases)
    @rule(data=st.data())
    def close_case(self, data: st.DataObject) -> None:
        self.duel.close_case(self.case(Dice(data))[1])

    @precondition(lambda self: self.model.cases)
    @rule(data=st.data())
    def try_case(self, data: st.DataObject) -> None:
        """A case without delays: drawn, voted on and closed."""
        choice = Dice(data)
        leaf, proof = self.case(choice)
        self.duel.mine(FIXED.draw_delay)
        if not self.duel.draw_jury(proof):
            return
        for juror in self.model.cases[leaf].jury:
            self.vote(choice, leaf, juror)
        for juror in self.model.cases[leaf].jury:
            if (leaf, juror) in self.votes:
                self.duel.reveal_vote(juror, leaf, self.votes[leaf, juror])
        self.duel.close_case(proof)

    # ---------------------------------------------------------------------- faults

    @precondition(lambda self: self.model.batches)
    @rule(data=st.data())
    def accuse(self, data: st.DataObject) -> None:
        choice = Dice(data)
        kinds = (self.slash_overdue, self.prove_overcommit, self.hold_stake)
        proofs = (self.prove_double_outcome, self.prove_double_submission)
        cases = (self.slash_by_case,) * 3 if self.model.cases else ()
        choice.pick((*cases, *kinds, *proofs))(choice)

    def slash_by_case(self, choice: Dice) -> None:
        leaf = choice.pick(list(self.model.cases)[::-1])
        validator = choice.pick(VALIDATORS)
        if choice.pick((False, True)):
            self.duel.slash_signer(self.about(leaf), validator)
        else:
            caller = choice.pick(("stranger", "v0"))
            self.duel.slash_absent_juror(caller, leaf, validator)

    def slash_overdue(self, choice: Dice) -> None:
        header = self.batch(choice, posted=False).header
        caller = choice.pick(("stranger", "v0"))
        self.duel.slash_overdue(caller, header, choice.pick(VALIDATORS))

    def prove_double_outcome(self, choice: Dice) -> None:
        batch = self.batch(choice)
        header, record = batch.header, self.judged(choice, batch.submissions[0])
        first = Statement(header.batch, ("submissions", batch.submissions), (record,))
        second = first._replace(
            records=(record._replace(verdict=REJECTED, reason=choice.pick((1, 13))),)
        )
        if choice.rarely():
            second = second._replace(batch=header.batch + 1)
        signer = choice.pick((*VALIDATORS, "stranger", NOBODY))
        other = "v3" if choice.rarely() else signer
        signed = [(first, signer), (second, other)]
        self.duel.prove_double_outcome(choice.pick(("stranger", "v0")), header, signed)

    def prove_double_submission(self, choice: Dice) -> None:
        first = self.submission(choice, self.run(choice))
        second = first._replace(file=choice.pick((2, first.file)))
        signed = [(first, self.signer(choice, first)), (second, self.signer(choice, second))]
        self.duel.prove_double_submission("stranger", signed)

    def work(self, choice: Dice, batch: Batch) -> Work:
        proof = self.proof(choice, batch)
        return Work(proof, *self.evidence(choice, proof))

    def prove_overcommit(self, choice: Dice) -> None:
        works = [self.work(choice, self.batch(choice)) for _ in range(choice.pick((2, 1, 3, 4, 0)))]
        if not choice.rarely():
            worker = choice.pick(WORKERS[:2])
            slots = {
                work.submission[:4]: work for work in works if work.submission.worker == worker
            }
            works = [slots[slot] for slot in sorted(slots)]
        self.duel.prove_overcommit(works)

    def hold_stake(self, choice: Dice) -> None:
        self.duel.hold_stake(self.work(choice, self.batch(choice)))

    # ----------------------------------------------------------------------- money

    def claim_of(self, choice: Dice, batch: Batch, wanted: Callable[[Record], bool]) -> Claim:
        records = batch.records or tuple(map(self.model.as_claimed, batch.submissions))
        one = choice.pick(records)
        places = [i for i, r in enumerate(records) if r.number == one.number and wanted(r)]
        places = places or [0]
        claim = Claim(batch.header, tuple(places), tuple(records[i] for i in places), True)
        if not choice.rarely():
            return claim
        everything = tuple(range(len(records)))
        return choice.pick(
            (
                claim._replace(intact=False),
                claim._replace(records=claim.records[1:]),
                claim._replace(positions=everything, records=records),
                claim._replace(positions=(*claim.positions, 9), records=(*claim.records, one)),
                claim._replace(positions=(0, 0), records=(records[0], records[0])),
                Claim(batch.header, (), (), True),
            )
        )

    @precondition(lambda self: self.model.batches)
    @rule(data=st.data())
    def claim_or_recover(self, data: st.DataObject) -> None:
        choice = Dice(data)
        pays = choice.pick((True, False))
        claims = [
            self.claim_of(choice, self.batch(choice), lambda r: (r.verdict == ACCEPTED) is pays)
            for _ in range(choice.pick((1, 1, 2)))
        ]
        claims = [] if choice.rarely() else claims
        if pays:
            self.duel.claim(claims)
        else:
            self.duel.recover(claims)

    @precondition(lambda self: self.model.batches)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        """All that is due when a batch's window closes: pay, take back, release."""
        batch = self.batch(Dice(data))
        judged_at = batch.header.posted_at or batch.header.committed_at + FIXED.outcome_deadline
        self.duel.next_time = judged_at + FIXED.challenge_window
        records = batch.records or tuple(map(self.model.as_claimed, batch.submissions))
        for number in sorted({record.number for record in records}):
            for pays in (True, False):
                claim = self.all_of(batch, records, number, pays)
                if claim.positions:
                    (self.duel.claim if pays else self.duel.recover)([claim])
        for i, record in enumerate(records):
            if record.verdict == FRAUD:
                self.duel.finalise_fraud(Proof(batch.header, i, record, i, True))

    @staticmethod
    def all_of(batch: Batch, records: Sequence[Record], number: int, pays: bool) -> Claim:
        """Return the claim over a worker's outcomes that are, or are not, accepted."""
        mine = [
            (i, record)
            for i, record in enumerate(records)
            if record.number == number and (record.verdict == ACCEPTED) is pays
        ]
        return Claim(batch.header, tuple(i for i, _ in mine), tuple(r for _, r in mine), True)
