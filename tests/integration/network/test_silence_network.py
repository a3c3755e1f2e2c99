"""A worker whose run is silent is paid nevertheless: real contracts, relay and processes.

The orchestrator answers 202 and keeps nothing. The worker submits by itself, puts file and proofs
into the room of a relay, and validators judge from there. Garbage that comes the same way is not
paid.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from client_network import (
    JURORS,
    NODES,
    PARAMETERS,
    TOKEN,
    VALIDATORS,
    WORKERS,
    Network,
    eventually,
    open_network,
    relay_of,
    running,
)

from muster.api import NoWork
from muster.app.demo.adversary import ForgedReward
from muster.chain import BatchView, ChainView
from muster.client.cli.worker import worker
from muster.client.rewards import claim, find_earnings
from muster.client.validator.calls import SHOW_AT
from muster.client.validator.context import ValidatorContext
from muster.client.validator.loop import ValidatorLoop
from muster.client.worker.context import WorkerContext
from muster.client.worker.loop import WorkerLoop
from muster.orchestrator.intake.batching import Batching, Composition
from muster.protocol.ids import Hash32
from muster.protocol.messages import Reason, Submission, Verdict
from muster.wallet import save_wallet

LEASE_S = 3
BOND = PARAMETERS.bond
UNJUDGED = PARAMETERS.model_copy(
    update={
        "outcome_deadline_s": 20,
        "challenge_window_s": 20,
        "vote_commit_s": 300,
        "vote_reveal_s": 60,
    }
)
"""A short time, so that a test sees its end."""
DUE_AT_ONCE = UNJUDGED.model_copy(update={"outcome_deadline_s": 5})
NO_WORK = NoWork(retry_after_s=0.05)


def once(loop_class: type[WorkerLoop]) -> type[WorkerLoop]:
    """Return a worker that works on one ticket."""

    class Once(loop_class):  # type: ignore[misc, valid-type]
        async def lease(self) -> Any:
            return NO_WORK if self.uploads.count else await super().lease()

    return Once


def swallowed(loop_class: type[WorkerLoop]) -> type[WorkerLoop]:
    """Return a worker of one ticket whose orchestrator acknowledges the file, and drops it."""

    class Swallowed(once(loop_class)):  # type: ignore[misc]
        def __init__(self, context: WorkerContext) -> None:
            super().__init__(context)
            context.api.submit = thank  # type: ignore[method-assign]

    return Swallowed


async def thank(submission: Submission, _signature: bytes, _body: bytes) -> Hash32:
    return submission.file_hash


async def endow(network: Network, *tokens: int) -> None:
    """Give nodes tokens for a bond, and coins for gas."""
    for node, amount in zip(NODES, tokens, strict=False):
        await network.anvil.set_balance(node.address, TOKEN)
        await network.owner.token.faucet(node.address, amount)


async def see(
    network: Network, found: Callable[[ChainView], Any], timeout_s: float = 120
) -> tuple[ChainView, Any]:
    """Return the view once something is found in it, and what.

    A source that a busy machine made slow to refuse rests for a minute.
    """
    seen: list[Any] = []

    async def is_there() -> bool:
        view = await network.view()
        seen[:] = [view, found(view)]
        return bool(seen[1])

    await eventually(is_there, timeout_s)
    return seen[0], seen[1]


def direct_batch(view: ChainView) -> BatchView | None:
    return next((b for b in view.batches.values() if b.direct is not None), None)


def judged(view: ChainView) -> BatchView | None:
    batch = direct_batch(view)
    return batch if batch is not None and batch.records is not None else None


async def paid(network: Network, view: ChainView, number: int) -> int:
    """Return the payment to a worker's wallet once everything is final, which is at once."""
    account = WORKERS[number].address
    before = await network.owner.token.balance_of(account)
    window_s = await network.owner.ledger.challenge_window()
    await network.owner.rpc.call("evm_increaseTime", window_s + 1)
    await network.owner.rpc.call("evm_mine")
    earnings = await find_earnings(network.owner, view, network.run_id, account)
    assert not earnings.pending
    await claim(network.owner, earnings, size=8)
    return await network.owner.token.balance_of(account) - before


async def test_work_that_the_orchestrator_swallows_is_judged_and_paid_unless_it_is_garbage(
    tmp_path: Path,
) -> None:
    async with open_network(tmp_path, lease_s=LEASE_S) as network:
        await endow(network, BOND, BOND)
        async with relay_of(network) as relay:
            clients = (
                network.worker(0, swallowed(WorkerLoop), relay=(relay,), keep_going=True),
                network.worker(1, swallowed(ForgedReward), relay=(relay,), keep_going=True),
                network.validator(0, relay=(relay,)),
                network.validator(1, relay=(relay,)),
            )
            async with running(*clients):
                view, (honest, forged) = await see(network, both_judged)

                async def have_their_bonds() -> bool:
                    token = network.owner.token
                    return [await token.balance_of(node.address) for node in NODES] == [BOND] * 2

                await eventually(have_their_bonds)
            room = (tmp_path / "relay" / "room" / "files").iterdir()
            files = {batch.direct.file_hash.hex() for batch in (honest, forged)}
            assert {path.name for path in room} == files
            assert honest.sources[0] == forged.sources[0] == relay
            assert [record.verdict for record in honest.records] == [Verdict.ACCEPTED]
            assert [record.verdict for record in forged.records] == [Verdict.FRAUD]
            assert len(view.batches) == 2
            view = await network.view()
            assert await paid(network, view, 0) == honest.direct.units * honest.price_per_unit > 0
            assert await paid(network, view, 1) == 0


def both_judged(view: ChainView) -> list[BatchView] | None:
    """Return the batches of both workers, in the workers' order."""
    found = {b.work.submission.worker: b for b in view.batches.values() if b.work and b.records}
    return [found[each.address] for each in WORKERS] if len(found) == 2 else None


@pytest.mark.parametrize(
    ("loop_class", "verdict"),
    [
        (WorkerLoop, Verdict.ACCEPTED),
        # test_dispute_guide has it too, with the worker's commands in place of its process.
        pytest.param(ForgedReward, Verdict.FRAUD, marks=pytest.mark.slow),
    ],
)
async def test_work_that_nobody_judges_is_taken_before_judges_of_the_network(
    tmp_path: Path, loop_class: type[WorkerLoop], verdict: Verdict
) -> None:
    async with open_network(tmp_path, DUE_AT_ONCE) as network:
        await network.seat_jurors()
        await endow(network, BOND)
        async with relay_of(network) as relay:
            clients = (
                network.worker(0, once(loop_class), relay=(relay,), keep_going=True),
                *(
                    network.juror(number, source=(network.orchestrator,), relay=(relay,))
                    for number in range(len(JURORS))
                ),
            )
            async with running(*clients):
                await see(network, lambda view: view.batches)
                # The ticket was signed by the orchestrator that committed the work.
                config = (await network.view()).runs[network.run_id].config
                await network.owner.runs.rotate_orchestrator(
                    network.run_id, config.orchestrator, JURORS[0].address
                )
                view, batch = await see(network, judged, 110)

                async def case_is_over() -> bool:
                    return all(case.closed for case in (await network.view()).cases.values())

                await eventually(case_is_over)
            [case] = (await network.view()).cases.values()
            assert case.is_summons
            assert batch.split_from is not None
            assert [record.verdict for record in batch.records] == [verdict]
            is_paid = verdict is Verdict.ACCEPTED
            expected = batch.direct.units * batch.price_per_unit if is_paid else 0
            assert await paid(network, await network.view(), 0) == expected
            bond = await network.owner.token.balance_of(NODES[0].address)
            assert bond == (BOND if is_paid else 0)
            assert view.contradictions == []


async def test_work_in_a_batch_that_declares_too_little_is_paid_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = Batching.commit

    async def declare_less(self: Batching, composition: Composition) -> int:
        composition.units -= 1
        return await commit(self, composition)

    monkeypatch.setattr(Batching, "commit", declare_less)
    async with open_network(tmp_path) as network:
        await endow(network, BOND)
        clients = (
            network.worker(0, once(WorkerLoop), keep_going=True),
            network.validator(0),
            network.validator(1),
        )
        async with running(*clients):

            def all_judged(view: ChainView) -> list[BatchView] | None:
                batches = list(view.batches.values())
                is_done = len(batches) == 2 and all(b.records is not None for b in batches)
                return batches if is_done else None

            _, [misdeclared, direct] = await see(network, all_judged)
        assert misdeclared.direct is None
        assert [r.reason for r in misdeclared.records] == [Reason.BATCH_MISDECLARED]
        assert [r.verdict for r in direct.records] == [Verdict.ACCEPTED]
        assert direct.records[0].file_hash == misdeclared.records[0].file_hash
        expected = direct.units * direct.price_per_unit
        assert await paid(network, await network.view(), 0) == expected > 0


async def by_hand(network: Network, *words: str) -> Any:
    """Run the command of a worker whose process is stopped; its own wallet pays."""
    folder = network.folder
    for name, wallet in (("node.json", NODES[0]), ("worker.json", WORKERS[0])):
        if not (folder / name).exists():
            save_wallet(folder / name, wallet.key, "secret", light=True)
    place = ("--rpc", network.anvil.rpc_url, "--deployments", str(folder / "deployments"))
    keys = ("--keystore", str(folder / "node.json"), "--payer", str(folder / "worker.json"))
    words = ("submit-direct", *words, *keys, *place, "--state-dir", str(folder / "worker-0"))
    return await asyncio.to_thread(
        CliRunner().invoke, worker, list(words), env={"MUSTER_PASSWORD": "secret"}
    )


async def test_stopped_worker_submits_by_hand_and_is_paid(tmp_path: Path) -> None:
    async with open_network(tmp_path) as network, relay_of(network) as relay:
        loops: list[WorkerLoop] = []

        class Noted(swallowed(WorkerLoop)):  # type: ignore[misc]
            def __init__(self, context: WorkerContext) -> None:
                super().__init__(context)
                loops.append(self)

        async def has_uploaded() -> bool:
            return any(loop.uploads.count for loop in loops)

        async with running(network.worker(0, Noted)):
            await eventually(has_uploaded)
        told = await by_hand(network, "--dry-run")
        assert "not committed: submit directly, with a bond of 10 tokens, until" in told.stderr
        assert not (await network.view()).batches
        poor = await by_hand(network, "--yes")
        assert "the bond is 10 tokens" in str(poor.exception)
        stranger = await by_hand(network, "7:0", "--yes")
        assert "7:0 is not a submission of this worker" in str(stranger.exception)
        await network.owner.token.faucet(WORKERS[0].address, BOND)
        done = await by_hand(network, "--yes", "--relay", relay)
        assert done.exception is None, done.output
        assert done.stdout.startswith("0x")
        async with running(*(network.validator(n, relay=(relay,)) for n in range(2))):
            view, batch = await see(network, judged)
        assert [record.verdict for record in batch.records] == [Verdict.ACCEPTED]
        earned = batch.direct.units * batch.price_per_unit
        assert await paid(network, view, 0) == earned


class Forgetful(ValidatorLoop):
    """A validator whose orchestrator acknowledges its outcomes, and drops them."""

    def __init__(self, context: ValidatorContext) -> None:
        super().__init__(context)
        context.api.post_outcomes = drop  # type: ignore[method-assign]


async def drop(_batch_id: int, _records: bytes, _signature: bytes) -> None:
    return None


def posted(view: ChainView) -> BatchView | None:
    return next((batch for batch in view.batches.values() if batch.records is not None), None)


async def test_validators_post_by_themselves_what_the_orchestrator_keeps_back(
    tmp_path: Path,
) -> None:
    async with open_network(tmp_path, UNJUDGED) as network:
        clients = (
            network.worker(0, once(WorkerLoop)),
            *(network.validator(number, Forgetful) for number in range(len(VALIDATORS))),
        )
        async with running(*clients):
            view, batch = await see(network, posted)
        assert [record.verdict for record in batch.records] == [Verdict.ACCEPTED]
        assert {who for signed in batch.shown.values() for who in signed} == {
            wallet.address for wallet in VALIDATORS
        }
        late_by = batch.posted_at - batch.committed_at
        assert SHOW_AT * UNJUDGED.outcome_deadline_s <= late_by < UNJUDGED.outcome_deadline_s
        assert view.contradictions == []
