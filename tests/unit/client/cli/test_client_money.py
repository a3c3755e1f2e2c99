"""Rewards: what is earned, claims and their costs; amounts of tokens."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st
from worlds.client_world import RUN, WORKER

from muster.chain import BatchView, Event, Receipt
from muster.chain.abi import contract_abi
from muster.client.quantities import format_tokens, parse_tokens
from muster.client.rewards import (
    candidate_outcomes,
    claim,
    describe_earnings,
    facts_of,
    find_earnings,
    size_of_all,
    size_of_claims,
)
from muster.protocol.encoding import keccak
from muster.protocol.errors import ConfigError
from muster.protocol.ids import Address, PolicyVersion, RunId, Step, to_address
from muster.protocol.merkle import merkle_root, verify_merkle_proof
from muster.protocol.messages import OutcomeRecord, Reason, Verdict

ENVELOPE_BYTES = 115
"""A signed transaction without its call."""


# Amounts


@given(st.integers(1, 2**128 - 1))
def test_amounts_survive_formatting_and_parsing(wei: int) -> None:
    assert parse_tokens(format_tokens(wei)) == parse_tokens(format_tokens(wei, group="")) == wei
    assert parse_tokens(f"{format_tokens(wei)} tokens") == wei


@pytest.mark.parametrize(
    "text",
    [
        *("", "x", "-1", "0", "nan", "inf", "1e99", "0.0000000000000000001", "1 000"),
        *("1 coin", "tokens", " tokens", "1tokens", "1 wei"),
        # Commas elsewhere than between thousands.
        *("0,5", "1,00", "1,0000", "1,000,00", "1000,000", ",100"),
    ],
)
def test_amounts_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not an amount"):
        parse_tokens(text)


# Rewards


def make_record(
    index: int, worker_id: int = 5, verdict: Verdict = Verdict.ACCEPTED, step: int = 1
) -> OutcomeRecord:
    reason = Reason.NONE if verdict is Verdict.ACCEPTED else Reason.LATE
    digest_ = keccak(bytes([index]))
    return OutcomeRecord(
        worker_id, Step(step), index, PolicyVersion(0), digest_, 4, 100, verdict, reason
    )


def make_view(*batches: list[OutcomeRecord] | None, run_id: RunId = RUN) -> Any:
    views = {
        n: BatchView(
            batch_id=n,
            run_id=run_id,
            root=keccak(b"submissions"),
            count=len(records or ()),
            units=10_000,
            price_per_unit=3,
            terms=1,
            committed_at=1,
            block_number=n,
            tx_hash="0x",
            records=records,
            outcomes_root=keccak(b"outcomes"),
            posted_at=2,
        )
        for n, records in enumerate(batches, 1)
    }
    return SimpleNamespace(
        workers={WORKER: SimpleNamespace(worker_id=5)},
        runs={RUN: SimpleNamespace()},
        batches=views,
        cases={},
    )


class FakeLedger:
    """Final, pending and overturned outcomes by batch, and slots that are paid."""

    def __init__(self, view: Any) -> None:
        self.view = view
        self.pending: set[int] = set()
        self.overturned: dict[int, Verdict] = {}
        self.paid: set[tuple[int, int]] = set()
        self.claims: list[list[Any]] = []
        self.escrow = self.ledger = self

    async def is_paid(self, _run: RunId, _worker: Address, step: int, index: int) -> bool:
        await asyncio.sleep(0)
        return (step, index) in self.paid

    async def standing_of(self, outcome: Any) -> Any:
        record, batch_id = OutcomeRecord.from_bytes(outcome.record), outcome.batch.batch_id
        root = merkle_root(self.view.batches[batch_id].leaves())
        leaf = record.leaf(batch_id, outcome.position)
        assert verify_merkle_proof(leaf, outcome.proof, root)
        verdict = self.overturned.get(batch_id, record.verdict)
        return SimpleNamespace(verdict=verdict, is_final=batch_id not in self.pending)

    async def claim(self, claims: list[Any]) -> Any:
        self.claims.append(claims)
        return SimpleNamespace(tx_hash=f"0x{len(self.claims)}")


def test_only_the_workers_accepted_outcomes_of_the_run_count() -> None:
    mixed = [make_record(0), make_record(1, worker_id=6), make_record(2, verdict=Verdict.REJECTED)]
    view = make_view(mixed, None)
    assert [e.record.index for [e] in candidate_outcomes(view, RUN, WORKER)] == [0]
    assert candidate_outcomes(make_view(mixed, run_id=RunId(8)), RUN, WORKER) == []
    assert candidate_outcomes(view, RUN, to_address(bytes(20))) == []


async def test_slot_counts_once_whatever_batches_it_is_in() -> None:
    view = make_view([make_record(0)], [make_record(0), make_record(0, step=2)])
    found = (await find_earnings(FakeLedger(view), view, RUN, WORKER)).claimable  # type: ignore[arg-type]
    assert [(e.batch.batch_id, e.position) for e in found] == [(1, 0), (2, 1)]


@pytest.mark.parametrize(("pays", "part"), [(False, "claimable"), (True, "paid")])
async def test_an_earlier_lost_case_of_the_slot_hides_no_acceptance(pays: bool, part: str) -> None:
    view = make_view([make_record(0, verdict=Verdict.REJECTED)], [make_record(0)])
    view.cases = {view.batches[1].records[0].leaf(1, 0): "a case"}
    chain: Any = FakeLedger(view)
    chain.paid = {(1, 0)} if pays else set()
    earnings = await find_earnings(chain, view, RUN, WORKER)
    assert [e.batch.batch_id for e in getattr(earnings, part)] == [2]
    chain.overturned = {1: Verdict.ACCEPTED}
    earnings = await find_earnings(chain, view, RUN, WORKER)
    assert [e.batch.batch_id for e in getattr(earnings, part)] == [1]


async def test_earnings_are_told_apart_by_what_can_be_done_about_them() -> None:
    view = make_view(*([make_record(n)] for n in range(4)))
    chain: Any = FakeLedger(view)
    chain.pending, chain.paid, chain.overturned = {2}, {(1, 2)}, {4: Verdict.FRAUD}
    earnings = await find_earnings(chain, view, RUN, WORKER)
    parts = (earnings.claimable, earnings.pending, earnings.paid)
    assert [[e.record.index for e in part] for part in parts] == [[0], [1], [2]]
    assert earnings.amount_wei(earnings.claimable) == 300


async def test_rejection_that_was_overturned_is_earned_after_all() -> None:
    view = make_view([make_record(0, verdict=Verdict.REJECTED)])
    chain: Any = FakeLedger(view)
    assert (await find_earnings(chain, view, RUN, WORKER)).claimable == ()
    view.cases = {view.batches[1].records[0].leaf(1, 0): "a case"}
    assert (await find_earnings(chain, view, RUN, WORKER)).claimable == ()
    chain.overturned = {1: Verdict.ACCEPTED}
    assert len((await find_earnings(chain, view, RUN, WORKER)).claimable) == 1


@given(st.integers(0, 30), st.integers(1, 12))
def test_every_claimable_outcome_is_claimed_once_with_a_true_proof(count: int, size: int) -> None:
    view = make_view([make_record(n) for n in range(count)] or None)
    chain: Any = FakeLedger(view)

    async def run() -> list[str]:
        return await claim(chain, await find_earnings(chain, view, RUN, WORKER), size=size)

    transactions = asyncio.run(run())
    positions = [p for part in chain.claims for claimed in part for p in claimed.positions]
    assert sorted(positions) == list(range(count))
    assert all(1 <= len(claimed.positions) <= size for part in chain.claims for claimed in part)
    assert len(transactions) == -(-count // size)


@pytest.mark.parametrize(("positions", "siblings"), [(1, 12), (10, 20), (100, 30), (3, 0)])
def test_no_signed_claim_is_longer_than_its_bound(positions: int, siblings: int) -> None:
    view = make_view([make_record(n) for n in range(positions)])
    made = view.batches[1].claim(range(positions))
    made = replace(made, siblings=[keccak(b"node")] * siblings)
    for function in ("claim", "recover"):
        call = contract_abi("RewardEscrow").functions[function].encode([[made, made]])
        size = len(call) + ENVELOPE_BYTES
        assert size <= size_of_claims([made, made]) < 1.25 * size + 600


@pytest.mark.parametrize("size", [1, 3, 100])
async def test_bound_of_all_claims_counts_each_transaction(size: int) -> None:
    view = make_view([make_record(n) for n in range(7)])
    chain: Any = FakeLedger(view)
    earnings = await find_earnings(chain, view, RUN, WORKER)
    await claim(chain, earnings, size=size)
    assert size_of_all(earnings, size=size) == sum(map(size_of_claims, chain.claims))


def claimed(tx_hash: str, slots: int) -> Receipt:
    """Return the receipt of a claim that cost 0.002 of the chain's coin."""
    values = {"run_id": RUN, "worker": WORKER, "slots": slots, "amount": 300 * slots}
    event = Event("RewardEscrow", "RewardClaimed", values, 1, keccak(b"block"), 1, 0, tx_hash)
    return Receipt(tx_hash, 1, 1, [event], cost_wei=2 * 10**15)


async def test_slots_that_a_claim_passed_over_are_not_called_claimed() -> None:
    view = make_view([make_record(n) for n in range(4)])
    chain: Any = FakeLedger(view)
    earnings = await find_earnings(chain, view, RUN, WORKER)
    report = describe_earnings(earnings, WORKER, [claimed("0xab", 2), claimed("0xcd", 1)])
    assert (report["claimed_slots"], report["claimed_wei"]) == (3, "900")
    assert (report["claimable_slots"], report["paid_slots"]) == (0, 4)
    assert report["cost_wei"] == str(4 * 10**15)
    assert facts_of(report)["claimed"].startswith("0.0000000000000009 tokens for 3 submissions")


async def test_report_states_slots_and_tokens() -> None:
    view = make_view([make_record(0), make_record(1)])
    chain: Any = FakeLedger(view)
    earnings = await find_earnings(chain, view, RUN, WORKER)
    report = describe_earnings(earnings, WORKER, [])
    assert (report["claimable_slots"], report["worker"]) == (2, WORKER)
    assert report["claimable_tokens"] == "0.0000000000000006"
    assert report["claimable_wei"] == "600"
    assert facts_of(report)["claimable"] == (
        "0.0000000000000006 tokens for 2 submissions: "
        f"muster rewards claim --run {RUN} --keystore FILE"
    )


async def test_a_claim_says_what_was_claimed_for_whom_and_where() -> None:
    view = make_view([make_record(0), make_record(1)])
    chain: Any = FakeLedger(view)
    earnings = await find_earnings(chain, view, RUN, WORKER)
    report = describe_earnings(earnings, WORKER, [claimed("0xab", 2)])
    assert (report["claimed_slots"], report["claimable_slots"], report["paid_slots"]) == (2, 0, 2)
    assert (report["claimed_wei"], report["claimable_wei"]) == ("600", "0")
    facts = facts_of(report)
    assert facts["claimed"] == f"0.0000000000000006 tokens for 2 submissions of run {RUN}"
    assert facts["to"] == f"{WORKER}, its wallet"
    assert facts["in"] == ["0xab"]
    assert (report["cost_wei"], facts["cost"]) == ("2000000000000000", "0.002 for gas")
    assert facts["claimable"] == "nothing now"
    assert facts["paid"] == "0.0000000000000006 tokens for 2 submissions in all"
