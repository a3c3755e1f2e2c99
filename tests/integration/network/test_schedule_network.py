"""Seven validators on a real chain: each judges its share, and no single one holds things up.

The quorum is two. Who judged what is read from the validators' journals.
"""

from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from client_network import (
    PARAMETERS,
    THIRD,
    TOKEN,
    VALIDATORS,
    WORKERS,
    Network,
    Run,
    eventually,
    open_network,
    recipe_of,
    running,
)

from muster.app.demo.adversary import ForgedReward
from muster.chain import BatchView, ChainView, EventReader, apply_poll
from muster.client.validator.checks import ClaimedWork, FailedCheck
from muster.client.validator.judging import Judgement, unread
from muster.client.validator.loop import ValidatorLoop
from muster.client.validator.records import OutcomeJournal
from muster.protocol.eip712 import address_of
from muster.protocol.encoding import keccak
from muster.protocol.ids import Address
from muster.protocol.messages import Reason, Verdict
from muster.protocol.schedule import batch_seed, draw_order
from muster.wallet import Wallet

QUORUM = 2
TIMEOUT_S = 24
"""An eighth of the network's outcome deadline, in seconds. Seven validators that share one process
on a busy machine need more than a few seconds for a batch."""
PATIENT = PARAMETERS.model_copy(update={"outcome_deadline_s": 8 * TIMEOUT_S})
MORE = [Wallet(address_of(key), key) for key in (keccak(b"validator %d" % i) for i in range(4))]
BENCH = [*VALIDATORS, THIRD, *MORE]


class Liar(ValidatorLoop):
    """Rejects every submission."""

    async def judge_claim(self, claim: ClaimedWork) -> tuple[Judgement, bytes | None]:
        return unread(claim, FailedCheck(Verdict.REJECTED, Reason.LATE, "it lies")), None


@pytest.fixture
async def network(tmp_path: Path) -> AsyncIterator[Network]:
    # Even if a slow machine puts many submissions into one batch, there are enough batches.
    async with open_network(tmp_path, PATIENT, Run(recipe=recipe_of(100))) as opened:
        for wallet in BENCH[2:]:
            await opened.anvil.set_balance(wallet.address, TOKEN)
            await opened.owner.runs.invite(opened.run_id, wallet.address, True)
            await opened.take_seat(wallet)
        yield opened


def validator(
    network: Network, number: int, loop: type[ValidatorLoop] = ValidatorLoop, **settings: Any
) -> Any:
    # Seven validators that ask twenty times a second would keep the machine busy.
    return network.validator(number, loop, wallet=BENCH[number], poll_s=0.2, **settings)


async def until(network: Network, check: Callable[[list[BatchView]], bool]) -> list[BatchView]:
    """The run's batches once they are as wanted."""
    reader, view = EventReader(network.owner), ChainView()

    async def holds() -> bool:
        apply_poll(view, await reader.poll())
        return check(list(view.batches.values()))

    await eventually(holds, 300)
    return list(view.batches.values())


def judged(batches: list[BatchView]) -> list[BatchView]:
    return [batch for batch in batches if batch.records is not None]


def waited_s(batch: BatchView) -> int:
    return (batch.posted_at or 0) - batch.committed_at


def called_first(batch: BatchView) -> tuple[Address, ...]:
    seed = batch_seed(batch.beacon, batch.run_id, batch.batch_id, batch.root)
    return draw_order(seed, batch.seated)[:QUORUM]


def work(network: Network) -> dict[int, set[int]]:
    """The batches that each validator judged."""
    done: dict[int, set[int]] = {}
    for number in range(len(BENCH)):
        folder = network.folder / f"validator-{number}"
        if (folder / "outcomes.jsonl").exists():
            with OutcomeJournal(folder) as journal:
                done[number] = {batch.name.batch_id for batch in journal.all()}
    return done


async def test_every_validator_judges_its_share(network: Network) -> None:
    everybody = [validator(network, number) for number in range(len(BENCH))]
    async with running(network.worker(0), *everybody):
        batches = judged(await until(network, lambda b: len(judged(b)) >= 14))
    done = work(network)
    # On a busy machine called validators are late, and then others are called.
    ids = {batch.batch_id for batch in batches if waited_s(batch) < TIMEOUT_S}
    assert ids
    looks = sum(len(mine & ids) for mine in done.values())
    share = looks / len(ids) / len(BENCH)
    # 2/7, and the re-audits of one batch in twenty: of six in fourteen once in twenty thousand.
    assert QUORUM / len(BENCH) <= share <= 0.55
    heeded = 0
    for batch in batches:
        assert {v.verdict for v in batch.records or ()} == {Verdict.ACCEPTED}
        # A validator that was late once is replaced at once the next time.
        looked = {BENCH[n].address for n, mine in done.items() if batch.batch_id in mine}
        assert len(looked) >= QUORUM
        heeded += set(called_first(batch)) <= looked
    assert heeded > len(batches) / 2


async def test_silent_validator_is_replaced_and_then_no_longer_waited_for(network: Network) -> None:
    silent = BENCH[6].address
    present = [validator(network, number) for number in range(6)]

    def calls_of_it(batches: list[BatchView]) -> list[BatchView]:
        return [batch for batch in judged(batches) if silent in called_first(batch)]

    async with running(network.worker(0), *present):
        batches = await until(network, lambda b: len(calls_of_it(b)) >= 3)
    first, *later = calls_of_it(batches)
    before = [b for b in judged(batches) if b.batch_id < first.batch_id]
    # The first call runs out; from then on its replacement is called with it. Where a busy machine
    # made others late before, theirs are called already. The chain's time counts whole seconds, and
    # runs ahead by as many as it has mined blocks within one.
    assert max(map(waited_s, [first, *before])) >= TIMEOUT_S - 4
    assert max(map(waited_s, later)) <= 4 * TIMEOUT_S
    known_at = first.posted_at or 0
    # If it were waited for, each of these batches would take the timeout. A busy machine makes some
    # as slow.
    assert any((b.posted_at or 0) - max(b.committed_at, known_at) < TIMEOUT_S for b in later)


async def test_reject_calls_more_and_stands_when_they_agree(network: Network) -> None:
    everybody = [validator(network, number) for number in range(len(BENCH))]
    async with running(network.worker(1, ForgedReward), *everybody):

        def has_fraud(batches: list[BatchView]) -> bool:
            return any(v.verdict is Verdict.FRAUD for b in judged(batches) for v in b.records or ())

        batches = await until(network, has_fraud)
    fraud = next(b for b in batches if b.records and b.records[0].verdict is Verdict.FRAUD)
    looked = [n for n, mine in work(network).items() if fraud.batch_id in mine]
    # A majority of the 2 * quorum + 1 that an alarm calls.
    assert len(looked) >= QUORUM + 1


async def test_wrong_minority_does_not_hold_things_up(network: Network) -> None:
    honest = [validator(network, number) for number in range(6)]
    liar = validator(network, 6, Liar, checks_everything=True)
    async with running(network.worker(0), *honest, liar):
        batches = judged(await until(network, lambda b: len(judged(b)) >= 5))
    verdicts = Counter(v.verdict for batch in batches for v in batch.records or ())
    assert set(verdicts) == {Verdict.ACCEPTED}
    # As in any network of a busy machine; the outcome deadline is twice as far.
    assert max(map(waited_s, batches)) <= 4 * TIMEOUT_S
    view = await network.view()
    assert view.stake(network.run_id, WORKERS[0].address).slashed_wei == 0
