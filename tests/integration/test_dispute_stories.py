"""Disputes to the end, from the command line: docs/guides/disputes.md, line by line.

Two validators in league call an honest worker's file fraud; and a cheater challenges a verdict that
is right. Real contracts, orchestrator and processes; the third validator is the jury.
"""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from string import Template

import pytest
from click.testing import CliRunner
from client_network import (
    PARAMETERS,
    TOKEN,
    VALIDATORS,
    WORKERS,
    Network,
    eventually,
    open_network,
    running,
    world,
)

from muster.api import Lease, NoWork
from muster.chain import BatchView, Fault, SlashState, WorkerStatus
from muster.client.doctor import command
from muster.client.validator.loop import ValidatorLoop
from muster.client.worker.loop import WorkerLoop
from muster.devnet.adversary import ForgedReward
from muster.devnet.cli import muster
from muster.devnet.false_validators import FalseAccuser
from muster.protocol.messages import Verdict
from muster.wallet import save_wallet

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "disputes.md"
WINDOW_S = 30
"""Long enough to challenge on a busy machine."""
LONGER = PARAMETERS.model_copy(
    update={"challenge_window_s": WINDOW_S, "vote_commit_s": 60, "vote_reveal_s": 30}
)
STAKE, WORKER_STAKE = 500 * TOKEN, 100 * TOKEN
HONEST = (ValidatorLoop, ValidatorLoop)


class OneFile(WorkerLoop):
    """Works honestly, on one ticket only."""

    has_worked = False

    async def lease(self) -> Lease | NoWork:
        if self.has_worked:
            return NoWork(retry_after_s=60.0)
        found = await super().lease()
        self.has_worked = isinstance(found, Lease)
        return found


class Forger(ForgedReward, OneFile):
    """Claims that every answer is right, on one ticket."""


@asynccontextmanager
async def accused(
    network: Network, worker: type[WorkerLoop], signers: tuple[type[ValidatorLoop], ...]
) -> AsyncIterator[BatchView]:
    """Yield the first batch that is called fraud, with three validators awake: two sign, and one
    is left for the jury.
    """
    await network.seat_third()
    mains = [network.worker(0, worker)]
    mains += [network.validator(number, loop) for number, loop in enumerate(signers)]
    found: list[BatchView] = []

    async def is_punished() -> bool:
        view = await network.view()
        found[:] = [
            batch
            for batch in view.batches.values()
            if batch.signers.bit_count() == 2
            and any(s.owner == WORKERS[0].address and s.batch_id == batch.batch_id
                    for s in view.slashes)
        ]  # fmt: skip
        return bool(found) and file_of(network, found[0]).exists()

    async with running(*mains, network.validator(2)):
        await eventually(is_punished, 60)
        yield found[0]


def file_of(network: Network, batch: BatchView) -> Path:
    """Return where the worker keeps a file that was not accepted."""
    assert batch.records is not None
    return network.folder / "worker-0" / "refused" / f"{batch.records[0].file_hash.hex()}.parquet"


class Shell:
    """Runs lines of the guide as the worker would."""

    def __init__(self, network: Network, batch: BatchView) -> None:
        assert batch.records is not None
        self.names = {
            "PLACE": f"{batch.batch_id}:0",
            "FILE": batch.records[0].file_hash.hex(),
            "STATE": str(network.folder / "worker-0"),
            "ORCHESTRATOR": network.orchestrator,
            "WORKER": WORKERS[0].address,
        }
        self.environment = {
            "MUSTER_PASSWORD": "secret",
            "MUSTER_RPC": network.anvil.rpc_url,
            "MUSTER_DEPLOYMENTS": str(network.folder / "deployments"),
            "HOME": str(network.folder),
        }
        self.codes: list[int] = []

    async def __call__(self, line: str) -> str:
        words = shlex.split(Template(line).substitute(self.names), comments=True)
        words = words[: words.index("||")] if "||" in words else words
        found = await asyncio.to_thread(CliRunner().invoke, muster, words[1:], env=self.environment)
        self.codes.append(found.exit_code)
        assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
        return found.output


def lines_of(guide: Path) -> list[str]:
    """Return the guide's commands, without the line that sets its names."""
    blocks = re.findall(r"```sh\n(.*?)```", guide.read_text(), re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.startswith("muster ")]


@pytest.fixture
def hash_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        command, "load_transformers", lambda _threads: lambda _dtype, _device: world.HashEngine()
    )


async def with_bond(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the worker a keystore and exactly the bond, in the folder where commands run."""
    worker = WORKERS[0]
    save_wallet(network.folder / "worker.json", worker.key, "secret", light=True)
    await network.owner.token.faucet(worker.address, LONGER.challenge_bond)
    monkeypatch.chdir(network.folder)


@pytest.mark.usefixtures("hash_engine")
async def test_honest_worker_accused_by_a_quorum_wins_with_the_guides_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    league = (FalseAccuser, FalseAccuser)
    async with (
        open_network(tmp_path, LONGER) as network,
        accused(network, OneFile, league) as batch,
    ):
        await with_bond(network, monkeypatch)
        shell, (*lines, claim) = Shell(network, batch), lines_of(GUIDE)
        assert (await network.owner.vault.active_stake(WORKERS[0].address)) < WORKER_STAKE
        pages = [await shell(line) for line in lines]
        says_what_to_do(pages, shell)
        await is_restored(network, batch)
        await signers_are_slashed(network)
        await network.owner.rpc.call("evm_increaseTime", WINDOW_S + 1)
        await network.owner.rpc.call("evm_mine")
        await is_paid(network, batch, shell, claim)


def says_what_to_do(pages: list[str], shell: Shell) -> None:
    """At every step the page names the next command, the price and the deadline."""
    first, rerun, verified, opened, listed, settled, last = pages
    place = shell.names["PLACE"]
    assert f"muster dispute open {place} --keystore FILE --wait" in first
    assert "takes a bond of 10 tokens, burned if the jury upholds" in first
    assert f"--rerun STATE/refused/{shell.names['FILE']}.parquet" in first
    assert "this machine finds accepted, validators signed fraud" in rerun
    assert "contradict" in verified
    assert shell.codes == [0, 0, 1, 0, 0, 0, 0]
    assert "outcome fraud (WRONG_REWARD)" in opened
    assert "overturned (1 to overturn, 0 to uphold): the verdict is accepted, and the" in opened
    assert "overturned" in listed
    assert "nothing was left to do" in settled
    assert "a jury overturned fraud" in last
    assert "nothing: the case is over" in last


async def is_restored(network: Network, batch: BatchView) -> None:
    """The stake is whole again, and the ban is lifted."""
    worker = WORKERS[0].address
    assert await network.owner.vault.active_stake(worker) == WORKER_STAKE
    assert (await network.owner.workers.worker_of(worker)).status is not WorkerStatus.BANNED
    view = await network.view()
    states = {s.state for s in view.slashes if s.batch_id == batch.batch_id}
    assert states == {SlashState.RESTORED}
    wrong = STAKE * LONGER.wrong_verdict_ppm // 10**6
    share = wrong * LONGER.reporter_ppm // 10**6
    held = await network.owner.token.balance_of(worker)
    assert held == LONGER.challenge_bond + len(VALIDATORS) * share


async def signers_are_slashed(network: Network) -> None:
    view = await network.view()
    wrong = [slash for slash in view.slashes if slash.fault is Fault.WRONG_VERDICT]
    assert {slash.owner for slash in wrong} == {each.address for each in VALIDATORS}
    assert {s.amount_wei for s in wrong} == {STAKE * LONGER.wrong_verdict_ppm // 10**6}
    assert {s.reporter for s in wrong} == {WORKERS[0].address}
    assert view.contradictions == []


async def is_paid(network: Network, batch: BatchView, shell: Shell, claim: str) -> None:
    assert batch.records is not None
    worker = WORKERS[0].address
    before = await network.owner.token.balance_of(worker)
    await shell(claim)
    paid = await network.owner.token.balance_of(worker) - before
    assert paid >= batch.records[0].units * batch.price_per_unit > 0


@pytest.mark.usefixtures("hash_engine")
async def test_cheater_that_challenges_a_right_verdict_loses_its_bond_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_network(tmp_path, LONGER) as network, accused(network, Forger, HONEST) as batch:
        await with_bond(network, monkeypatch)
        shell, (_, rerun, verify, challenge, _, settle, explain, claim) = (
            Shell(network, batch),
            lines_of(GUIDE),
        )
        (supply,) = await network.owner.read("MusterToken", "totalSupply", [])
        assert "this machine agrees with the verdict: a challenge would lose its bond" in (
            await shell(rerun)
        )
        await shell(verify)
        opened = await shell(challenge)
        assert "upheld (0 to overturn, 1 to uphold): the verdict is fraud" in opened
        assert "the challenger's bond was burned" in opened
        assert "nothing was left to do" in await shell(settle)
        assert "nothing: the case is over" in await shell(explain)
        assert await network.owner.token.balance_of(WORKERS[0].address) == 0
        (left,) = await network.owner.read("MusterToken", "totalSupply", [])
        assert supply - left >= LONGER.challenge_bond
        assert shell.codes == [0, 0, 0, 0, 0]
        worker = await network.owner.workers.worker_of(WORKERS[0].address)
        assert worker.status is WorkerStatus.BANNED
        assert await network.owner.vault.active_stake(WORKERS[0].address) < WORKER_STAKE
        view = await network.view()
        assert not [slash for slash in view.slashes if slash.fault is not None]
        [case] = view.cases.values()
        [juror] = case.jurors
        assert not view.runs[network.run_id].seats[juror] & batch.signers
        assert case.verdict == Verdict.FRAUD
        del claim
