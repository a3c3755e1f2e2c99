"""How a session in a whole network judges what it sees. The sessions are in the catalogue."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from muster.app.demo.adversary import KINDS
from muster.chain import ChainView
from muster.lab.redteam import network
from muster.lab.redteam.stage import Stage
from muster.protocol.errors import ChainError
from muster.protocol.messages import Reason, Verdict


class Seen:
    """The parts of a chain view that show a session's outcome."""

    def __init__(self, verdict: Verdict, reason: Reason, *, slashed_wei: int = 0) -> None:
        record = _Fields(worker_id=7, verdict=verdict, reason=reason)
        other = _Fields(worker_id=8, verdict=Verdict.FRAUD, reason=Reason.WRONG_UNITS)
        batch = _Fields(run_id=1, records=[other, record], posted_at=15, committed_at=10)
        self.batches = {1: batch}
        self.workers = {MEMBER.wallet.address: _Fields(worker_id=7)}
        self.slashed_wei = slashed_wei

    def stake(self, run_id: int, owner: str) -> _Fields:
        """The member's loss in its run; nobody has lost anything in other runs."""
        own = (run_id, owner) == (1, MEMBER.wallet.address)
        return _Fields(slashed_wei=self.slashed_wei if own else 0)


class _Fields:
    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)


MEMBER = network.Member("forged-reward", network._wallet("wallet"), network._wallet("node"))


def look(seen: Seen, member: network.Member = MEMBER) -> Any:
    return network.outcome_on_chain(cast(ChainView, seen), member)


def test_a_fraud_counts_once_its_stake_is_taken() -> None:
    assert look(Seen(Verdict.FRAUD, Reason.WRONG_REWARD)) is None
    slashed = look(Seen(Verdict.FRAUD, Reason.WRONG_REWARD, slashed_wei=1))
    assert (slashed.caught, slashed.knobs) == (True, {"seconds": 5.0})


@pytest.mark.parametrize(
    ("verdict", "reason"),
    [
        (Verdict.REJECTED, Reason.LATE),
        (Verdict.REJECTED, Reason.SCHEMA),
        (Verdict.ACCEPTED, Reason.NONE),
    ],
)
def test_another_reason_is_not_caught(verdict: Verdict, reason: Reason) -> None:
    assert look(Seen(verdict, reason)).caught is False


def test_an_honest_member_is_accepted_and_nothing_else() -> None:
    honest = network.Member(network.HONEST, MEMBER.wallet, MEMBER.node)
    assert look(Seen(Verdict.ACCEPTED, Reason.NONE), honest).verdict == "ACCEPTED"
    assert look(Seen(Verdict.REJECTED, Reason.SCHEMA), honest).verdict == "REJECTED"


def test_every_played_adversary_exists_and_has_its_reasons() -> None:
    assert set(network.PLAYED.values()) == network.EXPECTED.keys() - {network.HONEST}
    assert set(network.PLAYED.values()) <= KINDS.keys()
    assert all(network.EXPECTED[kind] for kind in network.PLAYED.values())


def test_patience_ends_when_computing_brings_nothing() -> None:
    cpu, clock = [0.0], [0.0]
    patience = network.Patience(cpu=lambda: cpu[0], clock=lambda: clock[0])
    assert not patience.is_over("begun")
    cpu[0] += network.STALLED_CPU_S
    assert not patience.is_over("begun")
    cpu[0] += 1
    assert not patience.is_over("further")
    cpu[0] += network.STALLED_CPU_S + 1
    assert patience.is_over("further")


def test_patience_outlasts_a_busy_machine_but_not_for_ever() -> None:
    cpu, clock = [0.0], [0.0]
    patience = network.Patience(cpu=lambda: cpu[0], clock=lambda: clock[0])
    clock[0] += network.STALLED_S
    assert not patience.is_over(0)
    clock[0] += 1 + network.STALLED_S
    assert patience.is_over(0)


async def test_what_ends_by_an_error_is_started_again() -> None:
    starts, tries = network.Starts(pause_s=0), []

    async def fail() -> None:
        tries.append(1)
        raise ChainError("no answer")

    await starts.keep("worker", fail, lambda: len(tries) == 3)
    assert (len(tries), starts.ended) == (3, {"worker": "no answer"})


async def test_what_ends_by_a_mistake_of_the_program_is_not() -> None:
    async def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await asyncio.wait_for(network.Starts(pause_s=0).keep("worker", fail), 5)


def test_who_has_no_outcome_is_told_with_what_it_did(stage: Stage, tmp_path: Path) -> None:
    session = network.Session(stage, tmp_path)
    session._starts.ended["validator 0"] = "no answer"
    why = session._why(MEMBER)
    assert "forged-reward not started" in why
    assert "validator 0" in why
