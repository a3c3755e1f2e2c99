"""Validators whose faults prove themselves are punished, once, and nobody else is."""

from __future__ import annotations

import pytest
from orchestrator_bench import Bench
from test_orchestrator_settlement import challenge, close, judged, leaf

from muster.chain import Fault
from muster.protocol.eip712 import address_of
from muster.protocol.errors import ChainUnreachable, ContractRevert
from muster.protocol.ids import Address
from muster.protocol.messages import Submission, Verdict

DEADLINE_S = 1000


def validator(bench: Bench, number: int) -> Address:
    return address_of(bench.network.keys.validators[number])


def stake(bench: Bench, *numbers: int) -> None:
    for number in numbers or range(3):
        bench.network.apply(
            "StakeVault", "Deposited",
            owner=validator(bench, number), amount=10**20, active=10**20,
        )  # fmt: skip


def punished(bench: Bench) -> list[tuple[Fault, Address]]:
    return bench.network.chain.faults.punished


async def committed(bench: Bench) -> Submission:
    stake(bench)
    submission = await bench.upload()
    await bench.commit()
    return submission


def pass_deadline(bench: Bench, seconds: int = DEADLINE_S) -> None:
    bench.set_chain_time(bench.network.view.batches[1].committed_at + seconds)


async def test_who_was_silent_until_the_deadline_is_punished_once(bench: Bench) -> None:
    submission = await committed(bench)
    await bench.judge(1, [submission], validators=(0,))
    pass_deadline(bench, DEADLINE_S - 1)
    await bench.punish()
    assert punished(bench) == []
    pass_deadline(bench)
    await bench.punish()
    await bench.punish()
    silent = sorted(validator(bench, number) for number in bench.order(1)[1:])
    assert sorted(punished(bench)) == [(Fault.MISSED_DEADLINE, v) for v in silent]
    assert {slash.fault for slash in bench.network.view.slashes} == {Fault.MISSED_DEADLINE}
    assert bench.network.view.contradictions == []


async def test_nobody_is_punished_when_nobody_could_judge(bench: Bench) -> None:
    await committed(bench)
    pass_deadline(bench)
    await bench.punish()
    assert punished(bench) == []


async def test_nobody_is_punished_when_the_batch_was_judged(bench: Bench) -> None:
    submission = await committed(bench)
    await bench.judge(1, [submission], validators=(0, 1))
    await bench.record()
    pass_deadline(bench)
    await bench.punish()
    assert punished(bench) == []


async def test_who_came_after_the_commitment_is_not_punished_for_silence(bench: Bench) -> None:
    submission = await committed(bench)
    await bench.judge(1, [submission], validators=(0,))
    late = bench.order(1)[2]
    batch = bench.network.view.batches[1]
    batch.seated = tuple(v for v in batch.seated if v != validator(bench, late))
    pass_deadline(bench)
    await bench.punish()
    assert validator(bench, late) not in {v for _, v in punished(bench)}
    assert len(punished(bench)) == 1


async def test_who_has_nothing_left_is_not_punished(bench: Bench) -> None:
    stake(bench, 0)
    submission = await bench.upload()
    await bench.commit()
    await bench.judge(1, [submission], validators=(0,))
    pass_deadline(bench)
    await bench.punish()
    assert {v for _, v in punished(bench)} <= {validator(bench, 0)}


async def test_signers_of_an_overturned_outcome_are_punished(bench: Bench) -> None:
    stake(bench)
    await judged(bench, Verdict.REJECTED)
    challenge(bench, Verdict.ACCEPTED)
    await bench.punish()
    assert punished(bench) == []
    close(bench, Verdict.ACCEPTED, overturned=True)
    await bench.punish()
    await bench.punish()
    # The ledger of these tests says of every batch that seats 0 and 1 signed it.
    assert set(punished(bench)) == {(Fault.WRONG_VERDICT, validator(bench, n)) for n in (0, 1)}
    assert len(punished(bench)) == 2


async def test_signers_of_an_upheld_outcome_are_not_punished(bench: Bench) -> None:
    stake(bench)
    await judged(bench, Verdict.REJECTED)
    challenge(bench, Verdict.ACCEPTED)
    close(bench, Verdict.REJECTED, overturned=False)
    await bench.punish()
    assert punished(bench) == []


async def test_juror_that_revealed_nothing_is_punished_once_the_case_is_closed(
    bench: Bench,
) -> None:
    stake(bench)
    await judged(bench, Verdict.REJECTED)
    challenge(bench, Verdict.ACCEPTED)
    voter, silent = validator(bench, 2), validator(bench, 1)
    about = {"leaf": leaf(bench)}
    bench.network.apply("DisputeCourt", "JuryDrawn", jurors=[voter, silent], **about)
    for juror in (voter, silent):
        bench.network.apply(
            "DisputeCourt", "VoteCommitted", juror=juror, commitment=leaf(bench), **about
        )
    bench.network.apply(
        "DisputeCourt", "VoteRevealed",
        juror=voter, overturn=False, result_hash=leaf(bench), **about,
    )  # fmt: skip
    await bench.punish()
    assert punished(bench) == []
    close(bench, Verdict.REJECTED, overturned=False)
    await bench.punish()
    await bench.punish()
    assert punished(bench) == [(Fault.ABSENT_JUROR, silent)]


@pytest.mark.parametrize("error", [ContractRevert("VaultOffenceSettled"), ChainUnreachable("away")])
async def test_punishment_is_tried_again_when_it_fails(bench: Bench, error: Exception) -> None:
    stake(bench)
    await judged(bench, Verdict.REJECTED)
    challenge(bench, Verdict.ACCEPTED)
    close(bench, Verdict.ACCEPTED, overturned=True)
    bench.network.chain.ledger.fail_next = error
    await bench.punish()
    assert len(punished(bench)) == 1
    await bench.punish()
    assert len(punished(bench)) == 2
