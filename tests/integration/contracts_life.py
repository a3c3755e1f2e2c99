"""Random lives of a network: what Hypothesis draws, as calls that chain and model both take.

Everything is drawn: who does what, to whom, with which flaw, and when. Most choices are sound, so
that lives get somewhere; one in eight is not.
"""

from collections.abc import Callable, Sequence
from typing import ClassVar, TypeVar

from contracts_duel import JURORS, NODES, VALIDATORS, WALLET, WORKERS, Calls
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from muster.lab.simulator.model.network import Network
from muster.lab.simulator.model.words import BENCH, NOBODY, Fixed, Name, Run, Terms
from muster.lab.simulator.model.work import (
    ACCEPTED,
    FRAUD,
    INCOMPLETE,
    JUDGED,
    OPEN,
    REJECTED,
    Batch,
    Claim,
    Leased,
    Proof,
    Record,
    Statement,
    Submission,
    Ticket,
)

T = TypeVar("T")

FIXED = Fixed()
EVER = 2**32
"""A deadline that never passes."""
TERMS = Terms(price=7, fraud_ppm=100_003, exact_ppm=500_009, quorum=2)
RULINGS = tuple(
    verdict << 8 | reason
    for verdict, reason in (
        *((ACCEPTED, 0), (FRAUD, 31), (FRAUD, 60)),
        *((REJECTED, 13), (REJECTED, 15), (FRAUD, 61), (REJECTED, 40)),
    )
)
"""Accepted, an exact fraud, a statistical one, rejected, an unavailable file, a statistical fraud
for another reason, and a reward that may be another elsewhere."""


def record_of(model: Network, work: Submission, verdict: int = ACCEPTED, reason: int = 0) -> Record:
    """Return the record of a submission."""
    return Record(model.number_of(work.worker), *work[2:], verdict=verdict, reason=reason)


class Dice:
    """Choices within a rule; the simplest comes first, and failures shrink to it."""

    def __init__(self, data: st.DataObject) -> None:
        self._data = data

    def pick(self, choices: Sequence[T]) -> T:
        return self._data.draw(st.sampled_from(choices))

    def rarely(self) -> bool:
        """Return true once in eight times."""
        return self.pick((False,) * 7 + (True,))


class Life(RuleBasedStateMachine):
    """One life of a network; starts with a funded run of five validators and two workers, a run of
    thieves, and four jurors on the bench.
    """

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
        """Calls that are not about work: stakes, keys, runs."""
        choice = Dice(data)
        kinds = (self.deposit, self.unbond_or_withdraw, self.join, self.change_worker)
        seats = (self.change_seat, self.change_bench)
        runs = (self.fund, self.govern, self.anybody_governs, self.publish, self.create_run)
        choice.pick((*kinds, *seats, *runs, self.pause_slashing))(choice)

    # ---------------------------------------------------------------------- stake

    def deposit(self, choice: Dice) -> None:
        owner = choice.pick((*WORKERS, *VALIDATORS, *JURORS))
        run = BENCH if owner in JURORS else choice.pick((1, 1, 2, BENCH))
        amount = choice.pick((FIXED.required_stake, 1, 2003, 0, WALLET + 1))
        self.duel.deposit(choice.pick((owner, "challenger", "stranger")), run, owner, amount)

    def unbond_or_withdraw(self, choice: Dice) -> None:
        owner = choice.pick((*WORKERS, *VALIDATORS, *JURORS))
        run = BENCH if owner in JURORS else choice.pick((1, 1, 2, BENCH))
        if choice.pick((False, True)):
            self.duel.simple(owner, "withdraw", run)
            return
        active = self.model.stakes[run, owner].active
        self.duel.simple(
            owner, "request_unbond", run, choice.pick((active // 3, 1, active, active + 1, 0))
        )

    # -------------------------------------------------------------------- workers

    def join(self, choice: Dice) -> None:
        worker, run = choice.pick(("carol", "alice", "challenger", "v5")), self.run(choice)
        stake = choice.pick((FIXED.required_stake, 1500, 1008, 0))
        deadline = self.model.now if choice.rarely() else EVER
        node, permit = choice.pick((*NODES, NOBODY)), choice.pick((True, False))
        consents, terms = not choice.rarely(), self.terms(choice, run)
        self.duel.join(worker, run, terms, stake, node, deadline, consents=consents, permit=permit)

    def terms(self, choice: Dice, run: int) -> int:
        """Return mostly the number of a run's terms."""
        present = self.model.runs.get(run)
        return 9 if present is None or choice.rarely() else len(present.all_terms)

    def change_worker(self, choice: Dice) -> None:
        worker, run = choice.pick(WORKERS), choice.pick((1, 1, 2))
        does = choice.pick(("come_back", "come_back", "exit", "jail", "rotate", "rotate"))
        if does == "jail":
            self.duel.simple("stranger", "jail_for_low_stake", run, worker)
        elif does == "rotate":
            deadline = self.model.now if choice.rarely() else EVER
            self.duel.rotate_node(worker, choice.pick(NODES), deadline, not choice.rarely())
        elif does == "exit":
            self.duel.simple(worker, does, run)
        else:
            self.duel.simple(worker, does, run, self.terms(choice, run))

    # ----------------------------------------------------------- validators and jurors

    def change_seat(self, choice: Dice) -> None:
        validator, run = choice.pick((*VALIDATORS, "alice")), self.run(choice)
        does = choice.pick(("take_seat", "take_seat", "leave_seat", "unseat"))
        if does == "take_seat":
            stake = choice.pick((FIXED.required_validator_stake, 0, 1))
            self.duel.simple(validator, does, run, self.terms(choice, run), stake)
        elif does == "leave_seat":
            self.duel.simple(validator, does, run)
        else:
            self.duel.simple("stranger", "unseat_for_low_stake", run, validator)

    def change_bench(self, choice: Dice) -> None:
        juror = choice.pick((*JURORS, "stranger", "v0"))
        does = choice.pick(("join_bench", "join_bench", "leave_bench", "retire", "shorten"))
        if does == "join_bench":
            self.duel.simple(juror, does, choice.pick((FIXED.required_juror_stake, 0, 1)))
        elif does == "leave_bench":
            self.duel.simple(juror, does)
        elif does == "shorten":
            self.duel.simple("stranger", "shorten_bench", choice.pick((0, 1, 2, 9)))
        else:
            self.duel.simple("stranger", "retire_for_low_stake", juror)

    # ----------------------------------------------------------------------- runs

    def run(self, choice: Dice) -> int:
        return 99 if choice.rarely() else choice.pick(sorted(self.model.runs))

    def create_run(self, choice: Dice) -> None:
        validators = list(choice.pick((VALIDATORS[:3], VALIDATORS[2:], (NOBODY,), ())))
        quorum = choice.pick((1, 2, 0, 89))
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
        """Calls of a run's owner, also to another's run."""
        run = self.run(choice)
        owner = "stranger" if choice.rarely() else "owner"
        does = choice.pick(("propose", "invite", "dismiss", "pause", "cancel", "key", "close"))
        if does == "propose":
            self.propose(choice, owner, run)
        elif does == "invite":
            named = choice.pick((*VALIDATORS, NOBODY)), not choice.rarely()
            self.duel.simple(owner, "invite", run, *named)
        elif does == "dismiss":
            self.duel.simple(owner, "dismiss", run, choice.pick(VALIDATORS))
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
        self.duel.simple("stranger", choice.pick(("apply_change", "reclaim")), run)

    def pause_slashing(self, choice: Dice) -> None:
        caller = choice.pick(("v0", "orchestrator", "owner", "v5", "trainer", "stranger"))
        reason, why = choice.pick((60, 0, 255)), "" if choice.rarely() else "evidence"
        self.duel.pause_slashing(caller, self.run(choice), choice.pick((0, 1, 2)), reason, why)

    def publish(self, choice: Dice) -> None:
        caller = "stranger" if choice.rarely() else "trainer"
        self.duel.publish(caller, self.run(choice), choice.pick((0, 1, 2, 5, 1100)), "manifest")

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
        work = self.leased(choice, self.submission(choice, self.run(choice)))
        self.duel.submit_direct(self.sender(choice, work), work)

    def leased(self, choice: Dice, work: Submission) -> Leased:
        """Return mostly a submission with its worker's signature and its ticket."""
        deadline = choice.pick((EVER, self.model.now - 60, self.model.now - 61))
        ticket = Ticket(*work[:5], deadline=deadline)
        run = self.model.runs.get(work.run)
        issuer = run.orchestrator if run else "orchestrator"
        if choice.rarely():
            ticket = ticket._replace(index=7)
        if choice.rarely():
            issuer = choice.pick(("stranger", NOBODY))
        return Leased(work, self.signer(choice, work), ticket, issuer)

    def sender(self, choice: Dice, work: Leased) -> str:
        sender = choice.pick(
            (work.submission.worker, work.submission.worker, work.signer, "stranger")
        )
        return "stranger" if sender == NOBODY else sender

    @precondition(lambda self: self.model.batches)
    @rule(data=st.data())
    def be_silent(self, data: st.DataObject) -> None:
        """A batch that nobody judged: split, taken before judges, or void."""
        choice = Dice(data)
        batch = self.batch(choice, judged=False)
        header = batch.header
        due = header.posted_at or header.committed_at + FIXED.outcome_deadline
        self.duel.next_time = due + choice.pick(
            (0, 1, -1, FIXED.challenge_window - 1, FIXED.challenge_window)
        )
        place = choice.pick(range(len(batch.submissions)))
        does = choice.pick(("split", "split", "summon", "summon", "void", "bond"))
        if does == "split":
            work = self.leased(choice, batch.submissions[place])
            if choice.rarely():
                work = work._replace(submission=work.submission._replace(units=1))
            sender, intact = self.sender(choice, work), not choice.rarely()
            self.duel.split_off(sender, header, work, place, intact)
        elif does == "summon":
            work = batch.submissions[place]
            sender = choice.pick((work.worker, self.signer(choice, work), "stranger"))
            self.duel.summon("stranger" if sender == NOBODY else sender, header, work)
        elif does == "void":
            self.duel.void(header)
        else:
            self.duel.return_bond(header)

    @precondition(lambda self: self.model.batches)
    @rule(data=st.data())
    def show(self, data: st.DataObject) -> None:
        choice = Dice(data)
        batch = self.batch(choice, judged=False)
        header, record = batch.header, self.judged(choice, batch.submissions[0])
        stated = Statement(header.batch, header.root, (record,))
        shown = choice.pick(((record,), (), (record._replace(units=1),)))
        self.duel.show(header, stated, choice.pick((*VALIDATORS, "stranger", NOBODY)), shown)

    @precondition(lambda self: self.model.batches)
    @rule(data=st.data())
    def return_bond(self, data: st.DataObject) -> None:
        self.duel.return_bond(self.batch(Dice(data)).header)

    def signer(self, choice: Dice, work: Submission) -> str:
        """Return mostly the worker's node."""
        if choice.rarely():
            return choice.pick((*NODES, NOBODY))
        worker = self.model.workers.get(work.worker)
        return worker.node if worker else NODES[0]

    def batch(self, choice: Dice, *, judged: bool | None = None) -> Batch:
        """Return mostly a batch of a kind, the newest first."""
        batches = list(self.model.batches.values())[::-1]
        kind = [b for b in batches if judged is None or (b.header.status == JUDGED) is judged]
        return choice.pick(batches if choice.rarely() or not kind else kind)

    @precondition(lambda self: self.model.batches)
    @rule(data=st.data())
    def post(self, data: st.DataObject) -> None:
        choice = Dice(data)
        batch = self.batch(choice, judged=False)
        records = tuple(self.judged(choice, work) for work in batch.submissions)
        if choice.rarely():
            records = choice.pick(
                (
                    records[1:],
                    (records[0]._replace(verdict=5), *records[1:]),
                    (records[0]._replace(units=10**6), *records[1:]),
                    (records[0]._replace(number=77), *records[1:]),
                    (),
                )
            )
        self.duel.post(batch.header, records, self.signers(choice, batch.header.run))

    def judged(self, choice: Dice, work: Submission) -> Record:
        decided = ((ACCEPTED, 0), (FRAUD, 31), (FRAUD, 60), (REJECTED, 13), (INCOMPLETE, 23))
        record = record_of(self.model, work, *choice.pick((*decided, (REJECTED, 15))))
        if choice.rarely():
            # What a quorum may sign, and answers for with all its stake.
            return choice.pick(
                (
                    record._replace(number=2),
                    record._replace(index=7),
                    record._replace(file=3),
                    record._replace(rollouts=record.rollouts + 1),
                    record._replace(number=0),
                    record._replace(units=record.units // 2),
                )
            )
        return record

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
        ruling = RULINGS[0] if disputed.record.verdict == FRAUD else choice.pick(RULINGS[1:3])
        self.claim_ruling("challenger", disputed, ruling)

    def claim_ruling(self, claimant: str, proof: Proof, ruling: int, held: bool = True) -> bool:
        """Announce a claim and make it, with the submission that it is about."""
        leaf = ("outcome", proof.header.batch, proof.position, proof.record)
        self.duel.announce(claimant, ("announcement", claimant, leaf, ruling, 3))
        work = self.model.batches[proof.header.batch].submissions[proof.path]
        worker = self.model.workers.get(work.worker)
        signer = worker.node if worker else NODES[0]
        return self.duel.claim_ruling(claimant, proof, work, signer, ruling, 3, held)

    # ----------------------------------------------------------------- judged work

    def proof(self, choice: Dice, batch: Batch) -> Proof:
        """Return mostly a sound proof."""
        position = choice.pick(range(len(batch.submissions)))
        known = batch.records or [record_of(self.model, each) for each in batch.submissions]
        record = known[position]
        proof = Proof(batch.header, position, record, position, True)
        if not choice.rarely():
            return proof
        committed = batch.header._replace(
            root=("submissions", batch.submissions), posted_at=0, signers=0, status=0
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
        self.duel.execute_fraud(proof, *self.evidence(choice, proof), held=not choice.rarely())

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
    def dispute(self, data: st.DataObject) -> None:
        choice = Dice(data)
        proof = self.proof(choice, self.batch(choice, judged=True))
        claimant = choice.pick(("challenger", "v4", "alice", "stranger", "j0"))
        ruling = choice.pick((*RULINGS, 0, 5 << 8))
        leaf: Name = ("outcome", proof.header.batch, proof.position, proof.record)
        if not choice.rarely():
            announced = ("announcement", claimant, leaf, ruling, 3)
            self.duel.announce(choice.pick((claimant, "stranger")), announced)
        if choice.rarely():
            self.duel.mine(257)
        evidence = self.evidence(choice, proof)
        self.duel.claim_ruling(claimant, proof, *evidence, ruling, choice.pick((3, 3, 3, 4)))

    @precondition(lambda self: self.model.cases)
    @rule(data=st.data())
    def join_case(self, data: st.DataObject) -> None:
        """A further claim about an outcome."""
        choice = Dice(data)
        name = self.case(choice)
        if name[0] == "outcome":
            claimant = choice.pick(("stranger", "owner", "v3"))
            self.claim_ruling(claimant, self.about(name), choice.pick(RULINGS))

    def case(self, choice: Dice) -> Name:
        """Return mostly an open case."""
        names = list(self.model.cases)[::-1]
        open_ones = [name for name in names if self.model.cases[name].status == OPEN]
        return choice.pick(names if choice.rarely() or not open_ones else open_ones)

    def about(self, name: Name) -> Proof:
        """Return the outcome that a case is about; of work that nobody judged, as if accepted."""
        batch = self.model.batches[int(name[1])]
        if name[0] == "outcome":
            return Proof(batch.header, int(name[2]), Record(*name[3]), int(name[2]), True)
        record = record_of(self.model, batch.submissions[0])
        return Proof(batch.header, 0, record, 0, True)

    @precondition(lambda self: self.model.cases)
    @rule(data=st.data())
    def draw_jury(self, data: st.DataObject) -> None:
        self.duel.draw(self.case(Dice(data)))

    @precondition(lambda self: self.model.cases)
    @rule(data=st.data())
    def commit_vote(self, data: st.DataObject) -> None:
        choice = Dice(data)
        name = self.case(choice)
        jury = self.model.cases[name].jury
        juror = choice.pick(JURORS if choice.rarely() or not jury else jury)
        self.vote(choice, name, juror, choice.pick((*RULINGS, 0, 7)))

    def vote(self, choice: Dice, name: Name, juror: str, ruling: int) -> None:
        vote: Name = ("vote", name, juror, ruling, 1, choice.pick((1, 2)))
        if self.duel.commit_vote(juror, name, vote):
            self.votes[name, juror] = vote

    @precondition(lambda self: self.model.cases)
    @rule(data=st.data())
    def reveal_vote(self, data: st.DataObject) -> None:
        choice = Dice(data)
        name = self.case(choice)
        jury = self.model.cases[name].jury
        juror = choice.pick(JURORS if choice.rarely() or not jury else jury)
        vote = self.votes.get((name, juror), ("vote", name, juror, 0, 0, 0))
        if choice.rarely():
            vote = (*vote[:3], int(vote[3]) ^ 256, *vote[4:])
        self.duel.reveal_vote(juror, name, vote)

    @precondition(lambda self: self.model.cases)
    @rule(data=st.data())
    def settle_case(self, data: st.DataObject) -> None:
        choice = Dice(data)
        name = self.case(choice)
        if choice.pick((True, False)):
            opened_at = self.model.cases[name].opened_at
            self.duel.next_time = opened_at + FIXED.jury_time + choice.pick((0, -1))
        self.close(name)

    def close(self, name: Name) -> bool:
        if name[0] == "outcome":
            return self.duel.settle(self.about(name))
        batch = self.model.batches[int(name[1])]
        return self.duel.settle_summoned(batch.header, batch.submissions[0])

    @precondition(lambda self: self.model.cases)
    @rule(data=st.data())
    def try_case(self, data: st.DataObject) -> None:
        """A case without delays: drawn, voted on, closed, and its jurors paid."""
        choice = Dice(data)
        name = self.case(choice)
        self.duel.mine(FIXED.draw_delay)
        if not self.duel.draw(name):
            return
        ruling = choice.pick((*RULINGS, 0))
        for juror in self.model.cases[name].jury:
            other = choice.pick((ruling, ruling, ruling, *RULINGS))
            self.vote(choice, name, juror, other)
        for juror in self.model.cases[name].jury:
            if (name, juror) in self.votes:
                self.duel.reveal_vote(juror, name, self.votes[name, juror])
        if self.close(name):
            for juror in self.model.cases[name].jury:
                self.duel.collect_fee(name, juror)

    # ---------------------------------------------------------------------- faults

    @precondition(lambda self: self.model.batches)
    @rule(data=st.data())
    def accuse(self, data: st.DataObject) -> None:
        choice = Dice(data)
        proofs = (self.prove_double_outcome, self.prove_double_submission, self.prove_misrecord)
        cases = (self.punish_by_case,) * 3 if self.model.cases else ()
        choice.pick((*cases, *proofs))(choice)

    def punish_by_case(self, choice: Dice) -> None:
        name = choice.pick(list(self.model.cases)[::-1])
        juror = choice.pick((*JURORS, "stranger"))
        does = choice.pick(("fee", "absent", "signer", "signer", "prove"))
        if does == "fee":
            self.duel.collect_fee(name, juror)
        elif does == "absent":
            self.duel.fine_absent_juror(name, juror)
        elif does == "prove":
            proof = self.about(name)
            self.duel.prove(proof, *self.evidence(choice, proof), not choice.rarely())
        else:
            self.duel.fine_signer(self.about(name), choice.pick(VALIDATORS))

    def prove_double_outcome(self, choice: Dice) -> None:
        batch = self.batch(choice)
        header, record = batch.header, self.judged(choice, batch.submissions[0])
        first = Statement(header.batch, ("submissions", batch.submissions), (record,))
        other = record._replace(verdict=REJECTED, reason=choice.pick((1, 13)))
        second = first._replace(records=() if choice.rarely() else (other,))
        if choice.rarely():
            second = second._replace(batch=header.batch + 1)
        signer = choice.pick((*VALIDATORS, "stranger", NOBODY))
        by = "v3" if choice.rarely() else signer
        self.duel.prove_double_outcome(header, [(first, signer), (second, by)])

    def prove_double_submission(self, choice: Dice) -> None:
        batch = self.batch(choice, judged=True)
        proof = self.proof(choice, batch)
        first, signer = self.evidence(choice, proof)
        second = first._replace(file=choice.pick((2, first.file)))
        signed = [(first, signer), (second, self.signer(choice, second))]
        self.duel.prove_double_submission(proof, signed, choice.pick((True, False)))

    def prove_misrecord(self, choice: Dice) -> None:
        proof = self.proof(choice, self.batch(choice, judged=True))
        validator = choice.pick((*VALIDATORS, "stranger"))
        shown, held = self.evidence(choice, proof), not choice.rarely()
        self.duel.prove_misrecord(proof, *shown, validator, held)

    # ----------------------------------------------------------------------- money

    def claim_of(self, choice: Dice, batch: Batch, wanted: Callable[[Record], bool]) -> Claim:
        records = batch.records or tuple(record_of(self.model, each) for each in batch.submissions)
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
        """Everything due when a batch's window closes: pay, take back, release."""
        batch = self.batch(Dice(data), judged=True)
        self.duel.next_time = batch.header.posted_at + FIXED.challenge_window
        records = batch.records
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
