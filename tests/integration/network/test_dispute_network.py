"""A wrong verdict before the network's jurors: a quorum in league, real contracts and processes.

Three validators with quorum two, three jurors who have nothing to do with the run. The worker
claims from the command line; jurors' processes do the rest by themselves, also where the
orchestrator hides the file.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from client_network import (
    JUROR_STAKE,
    JURORS,
    PARAMETERS,
    VALIDATOR_STAKE,
    VALIDATORS,
    WORKERS,
    Network,
    eventually,
    open_network,
    relay_of,
    running,
)

from muster.chain import BatchView, CaseView, ChainView, Offence
from muster.client.audit.history import HistorySource, read
from muster.client.cli.dispute import dispute
from muster.client.rewards import claim, find_earnings
from muster.client.validator.checks import ClaimedWork, FailedCheck
from muster.client.validator.judging import Judgement, unread
from muster.client.validator.loop import ValidatorLoop
from muster.protocol.jury import Ruling
from muster.protocol.messages import Reason, Verdict
from muster.wallet import save_wallet

WINDOW_S = 20
"""Long enough to claim on a busy machine."""
LONGER = PARAMETERS.model_copy(
    update={"challenge_window_s": WINDOW_S, "vote_commit_s": 300, "vote_reveal_s": 60}
)
ACCEPTED = Ruling(Verdict.ACCEPTED, Reason.NONE).number


class InLeague(ValidatorLoop):
    """Rejects every submission."""

    async def judge_claim(self, claim: ClaimedWork) -> tuple[Judgement, bytes | None]:
        return unread(
            claim, FailedCheck(Verdict.REJECTED, Reason.SCHEMA, "we do not like it")
        ), None


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

    await eventually(is_judged)
    return found[0]


async def test_wrong_rejection_is_overturned_paid_and_its_signers_fined(tmp_path: Path) -> None:
    async with open_network(tmp_path, LONGER) as network:
        await network.seat_third()
        await network.seat_jurors()
        worker = WORKERS[0]
        mains = (
            network.worker(0),
            network.validator(0, InLeague),
            network.validator(1, InLeague),
            network.validator(2),
            *(network.juror(number) for number in range(len(JURORS))),
        )
        async with running(*mains) as tasks:
            batch = await judged_batch(network)
            tasks[0].cancel()
            await network.owner.token.faucet(worker.address, LONGER.bond)
            keystore = tmp_path / "worker.json"
            save_wallet(keystore, worker.key, "secret", light=True)
            place = f"{batch.batch_id}:0"
            opened = await muster(
                network, "open", place, "--ruling", "accepted", "--yes",
                "--keystore", str(keystore), "--orchestrator", network.orchestrator,
            )  # fmt: skip
            view = await settled_case(network)
        assert "bond    10 of 10 tokens" in opened.stderr
        assert "jury    3 of the 3 that may sit" in opened.stderr
        [case] = json.loads((await muster(network, "list", "--json")).stdout)
        assert case["case"] == opened.stdout.strip()
        assert f"later: muster dispute settle {place} --keystore FILE" in opened.stderr
        assert (case["phase"], set(case["jurors"])) == ("overturned", addresses(JURORS))
        lost = signers_are_fined(view)
        rewards = sum(
            min(each * LONGER.reporter_ppm // 10**6, LONGER.reporter_cap) for each in lost
        )
        balance = await network.owner.token.balance_of(worker.address)
        assert balance == LONGER.bond + rewards
        await jurors_are_paid(network)
        await has_been_paid(network, view, batch)


async def test_file_that_the_orchestrator_hides_reaches_jurors_through_a_relays_room(
    tmp_path: Path,
) -> None:
    async with open_network(tmp_path, LONGER) as network, relay_of(network) as relay:
        await network.seat_third()
        await network.seat_jurors()
        worker = WORKERS[0]
        mains = (network.worker(0), *(network.validator(n, InLeague) for n in range(2)))
        async with running(*mains):
            batch = await judged_batch(network)
            record = batch.records[0]  # type: ignore[index]
            kept = tmp_path / "worker-0" / "refused" / f"{record.file_hash.hex()}.parquet"

            async def is_kept() -> bool:
                return kept.exists()

            await eventually(is_kept)
        found = (tmp_path / "files").rglob(f"*{record.file_hash.hex()}*")
        hidden = [path for path in found if path.is_file()]
        assert hidden
        for path in hidden:
            path.unlink()
        await network.owner.token.faucet(worker.address, LONGER.bond)
        save_wallet(tmp_path / "worker.json", worker.key, "secret", light=True)
        opened = await muster(
            network, "open", f"{batch.batch_id}:0", "--yes", "--file", str(kept),
            "--keystore", str(tmp_path / "worker.json"), "--relay", relay,
            "--orchestrator", network.orchestrator,
        )  # fmt: skip
        assert "did not take the file" not in opened.stderr
        async with running(*(network.juror(number) for number in range(len(JURORS)))):
            await settled_case(network)


async def test_a_right_claim_joins_the_case_that_a_wrong_one_opened(tmp_path: Path) -> None:
    """A rival calls rejected work fraud; its worker claims in the same case that it is honest."""
    async with open_network(tmp_path, LONGER) as network:
        await network.seat_third()
        await network.seat_jurors()
        worker, rival = WORKERS
        mains = (network.worker(0), *(network.validator(n, InLeague) for n in range(2)))
        async with running(*mains):
            batch = await judged_batch(network)
        place, token = f"{batch.batch_id}:0", network.owner.token
        cases, before = [], {}
        async with running(network.validator(2)):
            for claimant, ruling in ((rival, "fraud:wrong_reward"), (worker, "accepted")):
                await token.faucet(claimant.address, LONGER.bond)
                before[claimant.address] = await token.balance_of(claimant.address)
                keystore = tmp_path / f"{claimant.address}.json"
                save_wallet(keystore, claimant.key, "secret", light=True)
                opened = await muster(
                    network, "open", place, "--ruling", ruling, "--yes",
                    "--keystore", str(keystore), "--orchestrator", network.orchestrator,
                )  # fmt: skip
                cases.append(opened.stdout.strip())
        first, second = cases
        assert first == second
        # Start jurors when both have claimed: a quick jury would be done before.
        async with running(*(network.juror(number) for number in range(len(JURORS)))):
            view = await settled_case(network)
        [case] = view.cases.values()
        made = [(claim.claimant, Ruling.of(claim.ruling)) for claim in case.claims]
        assert made == [
            (rival.address, Ruling(Verdict.FRAUD, Reason.WRONG_REWARD)),
            (worker.address, Ruling(Verdict.ACCEPTED, Reason.NONE)),
        ]
        assert case.returned_wei == {0: 0, 1: LONGER.bond}
        assert case.reporter == worker.address
        rewards = sum(
            min(each * LONGER.reporter_ppm // 10**6, LONGER.reporter_cap)
            for each in signers_are_fined(view)
        )
        assert await token.balance_of(worker.address) - before[worker.address] == rewards
        assert before[rival.address] - await token.balance_of(rival.address) == LONGER.bond
        # The lost bond pays the jurors, and the run nothing.
        assert view.runs[network.run_id].court_wei == 0
        for juror in JURORS:
            assert await token.balance_of(juror.address) == LONGER.juror_fee
        history = await read(
            HistorySource((network.anvil.rpc_url,), network.folder / "deployments")
        )
        assert history.report(network.run_id).contradictions == ()
        await has_been_paid(network, view, batch)


def addresses(wallets: Any) -> set[str]:
    return {wallet.address for wallet in wallets}


async def settled_case(network: Network) -> ChainView:
    """Return the view once jurors have closed the case, fined both signers and taken their fees."""
    views: list[ChainView] = []

    def is_over(case: CaseView) -> bool:
        return case.closed and len(case.fined) == 2 and len(case.collected) == 3

    async def is_settled() -> bool:
        views[:] = [await network.view()]
        return all(map(is_over, views[0].cases.values()))

    await eventually(is_settled, 240)
    [case] = views[0].cases.values()
    assert case.overturned
    assert case.votes == dict.fromkeys(addresses(JURORS), ACCEPTED)
    results = list(network.folder.glob("juror-*/cases/case-*.json"))
    assert len(results) == len(JURORS)
    assert {path.name for path in results} == {f"case-1-{case.case_id.hex()}.json"}
    return views[0]


def signers_are_fined(view: ChainView) -> list[int]:
    """Return what each signer lost, in wei; the validator that did not sign lost nothing."""
    fined = {slash.owner: slash for slash in view.slashes}
    assert set(fined) == addresses(VALIDATORS)
    assert {slash.offence for slash in fined.values()} == {Offence.WRONG_VERDICT}
    expected = VALIDATOR_STAKE * LONGER.wrong_verdict_ppm // 10**6
    assert {slash.amount_wei for slash in fined.values()} == {expected}
    assert view.contradictions == []
    return [slash.amount_wei for slash in fined.values()]


async def jurors_are_paid(network: Network) -> None:
    """The run pays them, as its validators were wrong; none of their stake was touched."""
    view = await network.view()
    assert view.runs[network.run_id].court_wei == LONGER.juror_fee * len(JURORS)
    for juror in JURORS:
        assert await network.owner.token.balance_of(juror.address) == LONGER.juror_fee
        assert view.stake(network.run_id, juror.address).active_wei == 0
        assert await network.owner.vault.active_stake(0, juror.address) == JUROR_STAKE


async def has_been_paid(network: Network, view: ChainView, batch: BatchView) -> None:
    """After the window the worker claims the reward that the jury gave back."""
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
