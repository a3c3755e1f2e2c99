"""A wrong verdict before a jury: two signers in league, an honest third, real contracts.

The worker challenges from the command line; the third validator serves on the jury by itself.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from client_network import (
    PARAMETERS,
    THIRD,
    TOKEN,
    VALIDATORS,
    WORKERS,
    Network,
    eventually,
    open_network,
    running,
)

from muster.chain import BatchView, ChainView, Fault
from muster.client.dispute import dispute
from muster.client.rewards import claim, find_earnings
from muster.client.validator.checks import Claim, Finding
from muster.client.validator.judging import Judgement, unread
from muster.client.validator.loop import ValidatorLoop
from muster.protocol.messages import Reason, Verdict
from muster.wallet import save_wallet

WINDOW_S = 20
"""Long enough to challenge on a busy machine."""


class InLeague(ValidatorLoop):
    """Rejects whatever it judges."""

    async def judge_claim(self, claim: Claim) -> tuple[Judgement, bytes | None]:
        return unread(claim, Finding(Verdict.REJECTED, Reason.LATE, "we do not like it")), None


async def muster(network: Network, *words: str) -> Any:
    chain = ["--rpc", network.anvil.rpc_url, "--deployments", str(network.folder / "deployments")]
    result = await asyncio.to_thread(
        CliRunner().invoke, dispute, [*words, *chain], env={"MUSTER_PASSWORD": "secret"}
    )
    assert result.exception is None, result.output
    return result


async def judged_batch(network: Network) -> BatchView:
    found: list[BatchView] = []

    async def is_judged() -> bool:
        view = await network.view()
        found[:] = [b for b in view.batches.values() if b.records and b.signers == 0b011]
        return bool(found)

    await eventually(is_judged, 60)
    return found[0]


async def test_wrong_rejection_is_overturned_paid_and_its_signers_slashed(tmp_path: Path) -> None:
    parameters = PARAMETERS.model_copy(
        update={"challenge_window_s": WINDOW_S, "vote_commit_s": 40, "vote_reveal_s": 20}
    )
    async with open_network(tmp_path, parameters) as network:
        await network.seat_third()
        worker = WORKERS[0]
        mains = (
            network.worker(0),
            network.validator(0, InLeague),
            network.validator(1, InLeague),
            network.validator(2),
        )
        async with running(*mains) as tasks:
            batch = await judged_batch(network)
            tasks[0].cancel()
            await network.owner.token.faucet(worker.address, parameters.challenge_bond)
            keystore = tmp_path / "worker.json"
            save_wallet(keystore, worker.key, "secret", light=True)
            place = f"{batch.batch_id}:0"
            opened = await muster(
                network, "open", place, "--verdict", "accepted", "--yes",
                "--keystore", str(keystore),
            )  # fmt: skip
            view = await closed_case(network)
        assert "bond    10 of 10 tokens" in opened.stderr
        [case] = json.loads((await muster(network, "list", "--json")).stdout)
        assert case["case"] == opened.stdout.strip()
        assert f"later: muster dispute settle {place} --keystore FILE" in opened.stderr
        assert (case["phase"], case["jurors"]) == ("overturned", [THIRD.address])
        slashed = await signers_are_slashed(network, parameters.wrong_verdict_ppm)
        rewards = sum(
            min(each * parameters.reporter_ppm // 10**6, parameters.reporter_cap)
            for each in slashed
        )
        balance = await network.owner.token.balance_of(worker.address)
        assert balance == parameters.challenge_bond + rewards
        await has_been_paid(network, view, batch)


async def closed_case(network: Network) -> ChainView:
    views: list[ChainView] = []

    async def is_closed() -> bool:
        views[:] = [await network.view()]
        return all(case.closed for case in views[0].cases.values())

    await eventually(is_closed, 70)
    [case] = views[0].cases.values()
    assert (case.overturned, case.votes) == (True, {THIRD.address: True})
    results = list(network.folder.glob("validator-2/evidence/*/case-*.json"))
    assert [f"case-{case.leaf.hex()}.json"] == [path.name for path in results]
    return views[0]


async def has_been_paid(network: Network, view: ChainView, batch: BatchView) -> None:
    """The window passes, and the worker claims what the jury gave back."""
    await network.owner.rpc.call("evm_increaseTime", WINDOW_S + 1)
    await network.owner.rpc.call("evm_mine")
    worker = WORKERS[0].address
    earnings = await find_earnings(network.owner, view, network.run_id, worker)
    assert [(e.batch.batch_id, e.position) for e in earnings.claimable] == [(batch.batch_id, 0)]
    before = await network.owner.token.balance_of(worker)
    await claim(network.owner, earnings)
    paid = await network.owner.token.balance_of(worker) - before
    assert batch.records is not None
    assert paid == batch.records[0].units * batch.price_per_unit > 0


async def signers_are_slashed(network: Network, ppm: int) -> list[int]:
    """The orchestrator sees to it by itself; returns what each lost, in wei."""

    async def both_are() -> bool:
        return len((await network.view()).slashes) == len(VALIDATORS)

    await eventually(both_are)
    view = await network.view()
    punished = {slash.owner: slash for slash in view.slashes}
    assert set(punished) == {validator.address for validator in VALIDATORS}
    assert {slash.fault for slash in punished.values()} == {Fault.WRONG_VERDICT}
    assert {slash.amount_wei for slash in punished.values()} == {500 * TOKEN * ppm // 10**6}
    assert view.contradictions == []
    return [slash.amount_wei for slash in punished.values()]
