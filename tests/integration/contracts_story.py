"""One life of a network in which every event of the contracts happens, chapter by chapter.

Random lives reach rare states now and then; this one reaches them always. Every call must succeed.
"""

from __future__ import annotations

from collections.abc import Sequence

from contracts_duel import Calls
from contracts_life import EVER, FIXED, TERMS

from muster.devnet.simulator.model.words import Name, Run
from muster.devnet.simulator.model.work import (
    ACCEPTED,
    FRAUD,
    REJECTED,
    Batch,
    Claim,
    Proof,
    Statement,
    Submission,
    Work,
)


def tell(duel: Calls) -> None:
    for chapter in (govern, come_and_go, judge, dispute, settle, be_silent, contradict, end):
        chapter(duel)


def govern(duel: Calls) -> None:
    """What an owner does, and who publishes."""
    assert duel.fund("owner", 1, 1000)
    assert duel.publish("trainer", 1, 0, "manifest")
    assert duel.simple("stranger", "record_beacon", 1, 0)
    for paused in (True, False):
        assert duel.simple("owner", "pause", 1, paused)
    for role in ("trainer", "orchestrator"):
        assert duel.rotate_key("owner", 1, role, role, "owner")
        assert duel.rotate_key("owner", 1, role, "owner", role)
    assert duel.propose("owner", 1, TERMS._replace(price=14))
    assert duel.simple("owner", "cancel_change", 1)
    assert duel.propose("owner", 1, TERMS._replace(price=14))
    duel.next_time = duel.model.now + FIXED.change_delay
    assert duel.simple("stranger", "apply_change", 1)
    assert duel.create_run("challenger", Run("", "trainer", "orchestrator", TERMS, ["v0", "v1"]))


def come_and_go(duel: Calls) -> None:
    """A worker that leaves, comes back, is jailed and freed; a validator that loses its seat."""
    assert duel.register("carol", 1500, "node c", EVER, consents=True, permit=False)
    assert duel.simple("carol", "exit")
    assert duel.deposit("carol", "carol", FIXED.required_stake)
    assert duel.simple("carol", "rejoin")
    assert duel.rotate_node("carol", "node d", EVER, consents=True)
    assert duel.simple("carol", "request_unbond", 1)
    assert duel.deposit_with_permit("carol", 1, signed=True)
    duel.next_time = duel.model.now + FIXED.jail_time
    assert duel.simple("carol", "unjail")
    duel.next_time = duel.model.now + FIXED.unbonding
    assert duel.simple("carol", "withdraw")
    assert duel.deposit("v5", "v5", FIXED.required_validator_stake)
    assert duel.simple("owner", "seat_validator", 1, "v5")
    assert duel.simple("v5", "request_unbond", 1)
    assert duel.simple("stranger", "unseat_validator", 1, "v5")
    assert duel.deposit("v5", "v5", 1)
    assert duel.simple("owner", "rotate_validator", 1, "v4", "v5")


def work(worker: str, index: int, units: int = 100) -> Submission:
    return Submission(1, worker, 1, index, 0, index, 8, units)


def committed(duel: Calls, works: Sequence[Submission]) -> Batch:
    assert duel.commit("orchestrator", 1, tuple(works), sum(work.units for work in works))
    return duel.model.batches[len(duel.model.batches)]


def proof(duel: Calls, batch: Batch, position: int) -> Proof:
    records = batch.records or tuple(map(duel.model.as_claimed, batch.submissions))
    return Proof(batch.header, position, records[position], position, True)


def judge(duel: Calls) -> None:
    """Batch 1: accepted, an exact fraud, a statistical one, rejected. Batch 2 is sent directly."""
    works = [work("alice", 0), work("alice", 1), work("bob", 0), work("bob", 1)]
    batch = committed(duel, works)
    assert duel.submit_direct("node a", work("alice", 2, 10), "node a")
    decisions = ((ACCEPTED, 0), (FRAUD, 31), (FRAUD, 60), (REJECTED, 13))
    records = tuple(
        duel.model.as_claimed(judged)._replace(verdict=verdict, reason=reason)
        for judged, (verdict, reason) in zip(works, decisions, strict=True)
    )
    rank = duel.model.rank
    signers = sorted(duel.model.runs[1].validators, key=rank.__getitem__)[:2]
    assert duel.post(batch.header, records, signers)
    assert duel.pause_slashing("v0", 1, 0, 60, "evidence")
    assert not duel.execute_fraud(proof(duel, batch, 1), works[1], "node a")
    duel.next_time = duel.model.runs[1].slash_paused_until
    assert duel.execute_fraud(proof(duel, batch, 1), works[1], "node a")
    assert duel.execute_fraud(proof(duel, batch, 2), works[2], "node b")


def leaf_of(duel: Calls) -> Name:
    return list(duel.model.cases)[-1]


def hear(duel: Calls, outcome: Proof, *, overturn: bool, absent: int = 0) -> None:
    """Draw, vote and close; the first `absent` jurors commit and do not reveal."""
    leaf = leaf_of(duel)
    assert duel.draw_jury(outcome)
    votes = {j: ("vote", leaf, j, overturn, 1, 2) for j in duel.model.cases[leaf].jury}
    for juror, vote in votes.items():
        assert duel.commit_vote(juror, leaf, vote)
    for juror, vote in list(votes.items())[absent:]:
        assert duel.reveal_vote(juror, leaf, vote)
    if absent:
        duel.next_time = duel.model.cases[leaf].opened_at + FIXED.jury_time
    assert duel.close_case(outcome)


def dispute(duel: Calls) -> None:
    """The exact fraud is overturned, the statistical one upheld by a jury that was drawn late."""
    batch = duel.model.batches[1]
    wrong, right = proof(duel, batch, 1), proof(duel, batch, 2)
    assert duel.challenge("challenger", wrong, ACCEPTED)
    duel.mine(FIXED.draw_delay)
    hear(duel, wrong, overturn=True)
    for validator in duel.model.runs[1].validators:
        if duel.model.seat_bit(1, validator) & batch.header.signers:
            assert duel.slash_signer(wrong, validator)
    assert duel.challenge("challenger", right, REJECTED)
    duel.mine(258 + FIXED.draw_delay)
    assert duel.draw_jury(right)
    duel.mine(FIXED.draw_delay)
    hear(duel, right, overturn=False, absent=1)
    leaf = leaf_of(duel)
    assert duel.slash_absent_juror("stranger", leaf, duel.model.cases[leaf].jury[0])


def settle(duel: Calls) -> None:
    """What is final is paid, taken back, released."""
    batch = duel.model.batches[1]
    duel.next_time = batch.header.posted_at + FIXED.challenge_window
    outcome = proof(duel, batch, 2)
    assert not duel.finalise_fraud(outcome)
    duel.next_time = duel.model.standing(outcome).closes_at
    records = batch.records
    assert duel.claim([Claim(batch.header, (0, 1), records[:2], True)])
    assert duel.recover([Claim(batch.header, (2, 3), records[2:], True)])
    assert duel.finalise_fraud(proof(duel, batch, 2))


def be_silent(duel: Calls) -> None:
    """Batch 3 has no outcomes; a jury finds fraud in what stood as claimed."""
    works = [work("alice", 4, 320), work("alice", 5, 320)]
    batch = committed(duel, works)
    sent = [Work(proof(duel, batch, i), each, "node a") for i, each in enumerate(works)]
    assert duel.hold_stake(sent[0])
    assert duel.prove_overcommit(sent)
    duel.next_time = batch.header.committed_at + FIXED.outcome_deadline
    assert duel.slash_overdue("stranger", batch.header, duel.model.runs[1].validators[0])
    outcome = proof(duel, batch, 0)
    assert duel.challenge("challenger", outcome, FRAUD)
    duel.mine(FIXED.draw_delay)
    hear(duel, outcome, overturn=True)
    assert duel.execute_fraud(outcome, works[0], "node a")
    duel.next_time = duel.model.now + FIXED.outcome_deadline + FIXED.challenge_window
    assert duel.claim([Claim(batch.header, (1,), (proof(duel, batch, 1).record,), True)])


def contradict(duel: Calls) -> None:
    """Two statements of a validator, two of a worker."""
    batch = committed(duel, [work("carol", 6)])
    record = duel.model.as_claimed(batch.submissions[0])
    first = Statement(batch.header.batch, batch.header.root, (record,))
    second = first._replace(records=(record._replace(verdict=REJECTED),))
    validator = duel.model.runs[1].validators[0]
    signed = [(first, validator), (second, validator)]
    assert duel.prove_double_outcome("stranger", batch.header, signed)
    twice = work("carol", 7), work("carol", 7)._replace(file=0)
    both = [(twice[0], "node c"), (twice[1], "node d")]
    assert duel.prove_double_submission("stranger", both)


def end(duel: Calls) -> None:
    assert duel.simple("owner", "close_run", 1)
    assert duel.simple("stranger", "reclaim", 1)
    duel.next_time = duel.model.now + FIXED.claim_period
    assert duel.simple("stranger", "reclaim", 1)
