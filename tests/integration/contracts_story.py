"""One life of a network in which every event of the contracts happens, chapter by chapter.

Random lives reach rare states now and then; this one reaches them always. Every call must succeed.
"""

from collections.abc import Sequence
from itertools import cycle

from contracts_duel import Calls
from contracts_life import EVER, FIXED, TERMS, record_of

from muster.lab.simulator.model.words import NOBODY, Name, Run
from muster.lab.simulator.model.work import (
    ACCEPTED,
    FRAUD,
    REJECTED,
    Batch,
    Claim,
    Leased,
    Proof,
    Statement,
    Submission,
    Ticket,
)

ACCEPT, EXACT, STATISTICAL = ACCEPTED << 8, FRAUD << 8 | 31, FRAUD << 8 | 60


def tell(duel: Calls) -> None:
    for chapter in (govern, come_and_go, judge, dispute, settle, be_silent, contradict, end):
        chapter(duel)


def govern(duel: Calls) -> None:
    """The calls of an owner, and a published policy version."""
    assert duel.fund("owner", 1, 1000)
    assert duel.publish("trainer", 1, 0, "manifest")
    for paused in (True, False):
        assert duel.simple("owner", "pause", 1, paused)
    for role in ("trainer", "orchestrator"):
        assert duel.rotate_key("owner", 1, role, role, "owner")
        assert duel.rotate_key("owner", 1, role, "owner", role)
    assert duel.create_run("stranger", Run("", "trainer", "orchestrator", TERMS, ["v0", "v1"]))
    assert duel.propose("owner", 1, TERMS._replace(price=14))
    assert duel.simple("owner", "cancel_change", 1)
    assert duel.propose("owner", 1, TERMS._replace(price=14))
    assert not duel.simple("v5", "take_seat", 1, 1, FIXED.required_validator_stake)
    duel.next_time = duel.model.now + FIXED.change_delay
    assert duel.simple("stranger", "apply_change", 1)


def come_and_go(duel: Calls) -> None:
    """A worker that leaves, comes back, is jailed and freed; a validator and a juror that go."""
    assert duel.join("carol", 1, 2, 1500, "node c", EVER, consents=True, permit=False)
    assert duel.simple("carol", "exit", 1)
    assert duel.deposit("carol", 1, "carol", FIXED.required_stake)
    assert duel.simple("carol", "come_back", 1, 2)
    assert duel.rotate_node("carol", "node d", EVER, consents=True)
    assert duel.simple("carol", "request_unbond", 1, 1)
    assert duel.deposit("stranger", 1, "carol", 1)
    duel.next_time = duel.model.now + FIXED.jail_time
    assert duel.simple("carol", "come_back", 1, 2)
    duel.next_time = duel.model.now + FIXED.unbonding
    assert duel.simple("carol", "withdraw", 1)
    assert duel.simple("owner", "invite", 1, "v5", True)
    assert duel.simple("v5", "take_seat", 1, 2, FIXED.required_validator_stake)
    assert duel.simple("v5", "request_unbond", 1, 1)
    assert duel.deposit("v5", 1, "v5", 1)
    assert duel.simple("v5", "take_seat", 1, 2, 0)
    assert duel.simple("v4", "leave_seat", 1)
    assert duel.simple("owner", "dismiss", 1, "v3")
    assert duel.simple("j3", "leave_bench")
    assert not duel.simple("j3", "join_bench", FIXED.required_juror_stake)
    duel.next_time = duel.model.now + FIXED.commit_time + 1
    assert duel.simple("stranger", "shorten_bench", 9)
    assert duel.simple("j3", "join_bench", FIXED.required_juror_stake)


def work(worker: str, index: int, units: int = 100) -> Submission:
    return Submission(1, worker, 1, index, 0, index, 8, units)


def leased(submission: Submission, signer: str) -> Leased:
    return Leased(submission, signer, Ticket(*submission[:5], deadline=EVER), "orchestrator")


def committed(duel: Calls, works: Sequence[Submission]) -> Batch:
    assert duel.commit("orchestrator", 1, tuple(works), sum(work.units for work in works))
    return newest(duel)


def newest(duel: Calls) -> Batch:
    return duel.model.batches[len(duel.model.batches)]


def signers(duel: Calls) -> list[str]:
    return sorted(duel.model.runs[1].validators, key=duel.model.rank.__getitem__)[:2]


def proof(duel: Calls, batch: Batch, position: int) -> Proof:
    return Proof(batch.header, position, batch.records[position], position, True)


def judge(duel: Calls) -> None:
    """Batch 1: accepted, an exact fraud, a statistical one, rejected, unavailable. Batch 2 is sent
    directly, and a validator shows what it signed of it.
    """
    works = [work("alice", 0), work("alice", 1), work("bob", 0), work("bob", 1), work("bob", 2)]
    batch = committed(duel, works)
    own = work("alice", 2, 10)
    assert duel.submit_direct("alice", leased(own, "node a"))
    direct = newest(duel)
    decisions = ((ACCEPTED, 0), (FRAUD, 31), (FRAUD, 60), (REJECTED, 13), (REJECTED, 15))
    records = tuple(
        record_of(duel.model, judged, verdict, reason)
        for judged, (verdict, reason) in zip(works, decisions, strict=True)
    )
    assert duel.post(batch.header, records, signers(duel))
    # The money of the tenth unit is the run's again.
    found = (record_of(duel.model, own)._replace(units=9),)
    stated = Statement(direct.header.batch, direct.header.root, found)
    assert duel.show(direct.header, stated, "v0", found)
    assert duel.post(direct.header, found, signers(duel))
    assert duel.return_bond(direct.header)
    assert duel.pause_slashing("v0", 1, 0, 60, "evidence")
    assert not duel.execute_fraud(proof(duel, batch, 1), works[1], "node a")
    duel.next_time = duel.model.runs[1].slash_paused_until
    assert duel.execute_fraud(proof(duel, batch, 1), works[1], "node a")
    assert duel.execute_fraud(proof(duel, batch, 2), works[2], "node b")


def claim(duel: Calls, claimant: str, outcome: Proof, ruling: int, *, proves: bool = True) -> Name:
    """Announce a claim and make it; return the case."""
    header, place = outcome.header, outcome.position
    case: Name = ("outcome", header.batch, place, outcome.record)
    assert duel.announce(claimant, ("announcement", claimant, case, ruling, 5))
    claimed = duel.model.batches[header.batch].submissions[place]
    node = duel.model.workers[claimed.worker].node
    assert duel.claim_ruling(claimant, outcome, claimed, node, ruling, 5, proves)
    return case


def hear(duel: Calls, case: Name, *rulings: int, absent: int = 0) -> None:
    """Draw and vote for the rulings in turn; the first `absent` jurors commit and do not reveal."""
    assert duel.draw(case)
    heard = duel.model.cases[case]
    if heard.unproven:
        duel.next_time = heard.opened_at + FIXED.commit_time // 2
    jury = zip(duel.model.cases[case].jury, cycle(rulings), strict=False)
    votes = {juror: ("vote", case, juror, ruling, 1, 2) for juror, ruling in jury}
    assert len(votes) == FIXED.jury_size
    for juror, vote in votes.items():
        assert duel.commit_vote(juror, case, vote)
    for juror, vote in list(votes.items())[absent:]:
        assert duel.reveal_vote(juror, case, vote)
    if absent:
        duel.next_time = duel.model.cases[case].opened_at + FIXED.jury_time


def pay(duel: Calls, case: Name) -> None:
    for juror in duel.model.cases[case].revealed:
        assert duel.collect_fee(case, juror)
        assert not duel.collect_fee(case, juror)


def dispute(duel: Calls) -> None:
    """The exact fraud is overturned, with a wrong claim beside the right one; the statistical one
    upheld by a jury that was drawn late; what nobody could see is accepted, and its claimant pays;
    what was rejected is a fraud, for three reasons.
    """
    batch = duel.model.batches[1]
    wrong, right, mild, unseen = (proof(duel, batch, place) for place in (1, 2, 3, 4))
    case = claim(duel, "challenger", wrong, ACCEPT)
    claim(duel, "stranger", wrong, REJECTED << 8 | 13)
    duel.mine(FIXED.draw_delay)
    hear(duel, case, ACCEPT)
    assert duel.settle(wrong)
    pay(duel, case)
    for validator in duel.model.runs[1].seats:
        if duel.model.seat_bit(1, validator) & batch.header.signers:
            assert duel.fine_signer(wrong, validator)
    case = claim(duel, "challenger", unseen, ACCEPT)
    duel.mine(FIXED.draw_delay)
    hear(duel, case, ACCEPT)
    assert duel.settle(unseen)
    assert not duel.fine_signer(unseen, signers(duel)[0])
    case = claim(duel, "challenger", mild, STATISTICAL)
    duel.mine(FIXED.draw_delay)
    hear(duel, case, STATISTICAL + 1, STATISTICAL, STATISTICAL + 2)
    assert duel.settle(mild)
    pay(duel, case)
    case = claim(duel, "challenger", right, REJECTED << 8 | 13)
    duel.mine(258 + FIXED.draw_delay)
    assert duel.draw(case)
    duel.mine(FIXED.draw_delay)
    hear(duel, case, STATISTICAL, absent=1)
    assert duel.settle(right)
    assert duel.fine_absent_juror(case, duel.model.cases[case].jury[0])


def settle(duel: Calls) -> None:
    """Final outcomes are paid, unused money is taken back, slashes are released."""
    batch = duel.model.batches[1]
    outcome = proof(duel, batch, 2)
    duel.next_time = duel.model.standing(outcome).closes_at
    records = batch.records
    assert duel.claim([Claim(batch.header, (0, 1), records[:2], True)])
    assert duel.claim([Claim(batch.header, (4,), records[4:], True)])
    assert duel.recover([Claim(batch.header, (2, 3), records[2:4], True)])
    assert duel.finalise_fraud(outcome)


def be_silent(duel: Calls) -> None:
    """Nobody judges batch 3: of its three workers' submissions one is accepted by judges of the
    network, one is a fraud to them, one is void. Batch 4 is withheld.
    """
    works = [work("alice", 4), work("carol", 5), work("carol", 6)]
    batch = committed(duel, works)
    duel.next_time = batch.header.committed_at + FIXED.outcome_deadline
    for place, (worker, node) in enumerate((("alice", "node a"), ("carol", "node d"))):
        assert duel.split_off(worker, batch.header, leased(works[place], node), place, True)
    assert not duel.split_off("carol", batch.header, leased(works[1], "node d"), 1, True)
    number = len(duel.model.batches)
    for own, ruling in ((number - 1, ACCEPT), (number, EXACT)):
        header, (claimed,) = duel.model.batches[own].header, duel.model.batches[own].submissions
        assert duel.summon(claimed.worker, header, claimed)
        duel.mine(FIXED.draw_delay)
        hear(duel, ("summons", own), ruling)
        assert duel.settle_summoned(header, claimed)
        pay(duel, ("summons", own))
    good, bad = duel.model.batches[number - 1], duel.model.batches[number]
    assert duel.execute_fraud(proof(duel, bad, 0), bad.submissions[0], "node d")
    duel.next_time = duel.model.now + FIXED.challenge_window
    assert duel.claim([Claim(good.header, (0,), good.records, True)])
    rest = duel.model.batches[batch.header.batch].header
    duel.next_time = rest.committed_at + FIXED.outcome_deadline + FIXED.challenge_window
    assert duel.void(rest)
    committed(duel, [work("alice", 7)])
    assert duel.post(newest(duel).header, (), signers(duel))
    duel.next_time = duel.model.now + FIXED.challenge_window
    assert duel.void(newest(duel).header)


def contradict(duel: Calls) -> None:
    """Three frauds, the second of which a jury undoes, proven late: what comes back goes to the
    third first. Two statements of a validator, two submissions of a worker.
    """
    assert duel.join("v4", 2, 1, 2000, "node e", EVER, consents=True, permit=False)
    assert duel.fund("owner", 2, 5000)
    works = tuple(work("v4", place)._replace(run=2) for place in range(2))
    assert duel.commit("orchestrator", 2, works, 200)
    batch = newest(duel)
    records = tuple(record_of(duel.model, each, FRAUD, 60) for each in works)
    assert duel.post(batch.header, records, ["v0"])
    batch = newest(duel)
    for place, each in enumerate(works):
        assert duel.execute_fraud(proof(duel, batch, place), each, "node e")
    first = proof(duel, batch, 0)
    case = claim(duel, "challenger", first, ACCEPT, proves=False)
    duel.mine(FIXED.draw_delay)
    hear(duel, case, ACCEPT)
    assert not duel.prove(first, works[0], "node e")
    assert duel.settle(first)
    assert not duel.fine_signer(first, "v0")
    assert not duel.prove(first, works[0]._replace(units=1), "node e")
    assert not duel.prove(first, works[0], "node e", held=False)
    assert duel.prove(first, works[0], "node e")
    batch = newest(duel)
    misrecord(duel)
    second = records[1]._replace(verdict=REJECTED)
    stated = Statement(batch.header.batch, batch.header.root, (second,))
    signed = [(stated, "v0"), (stated._replace(records=(records[1],)), "v0")]
    assert duel.prove_double_outcome(batch.header, signed)
    both = [(works[0], "node e"), (works[0]._replace(file=9), "node e")]
    assert duel.prove_double_submission(first, both)


def misrecord(duel: Calls) -> None:
    """A record of another file: a claim needs the proof, and its signer loses its stake."""
    assert duel.commit("orchestrator", 2, (work("v4", 5)._replace(run=2),), 100)
    batch = newest(duel)
    (claimed,) = batch.submissions
    invented = record_of(duel.model, claimed)._replace(file=9)
    assert duel.post(batch.header, (invented,), ["v0"])
    outcome = proof(duel, newest(duel), 0)
    other = claimed._replace(rollouts=claimed.rollouts + 1)
    assert not duel.prove_misrecord(outcome, other, "node e", "v0")
    assert not duel.prove_misrecord(outcome, claimed, "node e", "v1")
    assert duel.prove_misrecord(outcome, claimed, "node e", "v0")


def end(duel: Calls) -> None:
    assert not duel.join("stranger", 1, 2, 0, NOBODY, EVER, consents=True, permit=False)
    assert duel.simple("owner", "close_run", 1)
    assert duel.simple("stranger", "reclaim", 1)
    assert not duel.simple("stranger", "reclaim", 1)
