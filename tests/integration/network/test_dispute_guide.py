"""Disputes to the end, from the command line: docs/guides/disputes.md, line by line.

Two of three validators in league call an honest worker's file fraud; and a cheater disputes a
verdict that is right. Real contracts, orchestrator and processes; the network's jurors decide.
"""

import asyncio
import re
import shlex
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

import pytest
from click.testing import CliRunner
from client_network import (
    JUROR_STAKE,
    JURORS,
    NODES,
    PARAMETERS,
    TOKEN,
    VALIDATOR_STAKE,
    VALIDATORS,
    WORKER_STAKE,
    WORKERS,
    Network,
    eventually,
    open_network,
    running,
)
from worlds.false_validators import FalseAccuser

from muster.api import Lease, NoWork
from muster.app.cli import muster
from muster.app.demo.adversary import ForgedReward
from muster.app.demo.processes import WarmProcess
from muster.chain import BatchView, CaseView, Offence, SlashState, WorkerStatus
from muster.client.validator.loop import ValidatorLoop
from muster.client.worker.loop import WorkerLoop
from muster.protocol.ids import RunId
from muster.protocol.jury import BENCH, Ruling
from muster.protocol.messages import Reason, Verdict
from muster.wallet import Wallet, save_wallet

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "disputes.md"
WINDOW_S = 30
"""Long enough to claim on a busy machine."""
LONGER = PARAMETERS.model_copy(
    update={"challenge_window_s": WINDOW_S, "vote_commit_s": 300, "vote_reveal_s": 60}
)
HONEST = (ValidatorLoop, ValidatorLoop)
FRAUD, ACCEPTED = (
    Ruling(*each)
    for each in ((Verdict.FRAUD, Reason.WRONG_REWARD), (Verdict.ACCEPTED, Reason.NONE))
)
PAY = "muster rewards claim --run 1 --worker $WORKER --keystore node.json --yes"


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
    """Yield the first batch that is called fraud by two of three validators, with jurors awake."""
    await network.seat_third()
    await network.seat_jurors()
    mains = [network.worker(0, worker), network.validator(2)]
    mains += [network.validator(number, loop) for number, loop in enumerate(signers)]
    mains += [network.juror(number) for number in range(len(JURORS))]
    found: list[BatchView] = []

    async def is_punished() -> bool:
        view = await network.view()
        slashed = {slash.batch_id for slash in view.slashes if slash.owner == WORKERS[0].address}
        found[:] = [batch for batch in view.batches.values() if batch.batch_id in slashed]
        return bool(found) and file_of(network, found[0]).exists()

    async with running(*mains):
        await eventually(is_punished)
        yield found[0]


def file_of(network: Network, batch: BatchView) -> Path:
    """Return where the worker keeps a file that was not accepted."""
    assert batch.records is not None
    return network.folder / "worker-0" / "refused" / f"{batch.records[0].file_hash.hex()}.parquet"


@dataclass
class Shell:
    """Runs lines of the guide as its reader would."""

    network: Network
    names: dict[str, str]
    codes: list[int] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        return {
            "MUSTER_PASSWORD": "secret",
            "MUSTER_RPC": self.network.anvil.rpc_url,
            "MUSTER_DEPLOYMENTS": str(self.network.folder / "deployments"),
            "HOME": str(self.network.folder),
        }

    def words(self, line: str) -> list[str]:
        """Return the words that a shell makes of a line, without the program's name."""
        words = shlex.split(Template(line).substitute(self.names), comments=True)
        return words[1 : words.index("||")] if "||" in words else words[1:]

    async def __call__(self, line: str) -> str:
        found = await asyncio.to_thread(
            CliRunner().invoke, muster, self.words(line), env=self.environment
        )
        self.codes.append(found.exit_code)
        assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
        return found.output


def shell_of(network: Network, batch: BatchView) -> Shell:
    assert batch.records is not None
    return Shell(
        network,
        {
            "PLACE": f"{batch.batch_id}:0",
            "FILE": batch.records[0].file_hash.hex(),
            "STATE": str(network.folder / "worker-0"),
            "ORCHESTRATOR": network.orchestrator,
            "WORKER": WORKERS[0].address,
        },
    )


def lines_of(*sections: str) -> list[str]:
    """Return the guide's commands in some of its sections, by the first word of their titles."""
    found = []
    for section in re.split(r"^## ", GUIDE.read_text(), flags=re.MULTILINE):
        if section.split(maxsplit=1)[0] in sections:
            blocks = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
            found += [line for block in blocks for line in block.splitlines()]
    assert all(line.startswith("muster ") for line in found)
    return found


async def with_bond(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the worker a keystore and exactly the bond, in the folder where commands run."""
    worker = WORKERS[0]
    save_wallet(network.folder / "worker.json", worker.key, "secret", light=True)
    await network.owner.token.faucet(worker.address, LONGER.bond)
    monkeypatch.chdir(network.folder)


async def staked(network: Network, wallet: Wallet) -> int:
    return await network.owner.vault.active_stake(network.run_id, wallet.address)


async def status_of(network: Network) -> WorkerStatus:
    member = await network.owner.workers.member_of(network.run_id, WORKERS[0].address)
    return member.status


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
        shell, (*lines, claim) = shell_of(network, batch), lines_of("1.", "2.", "3.", "4.")
        assert await staked(network, WORKERS[0]) < WORKER_STAKE
        assert await status_of(network) is WorkerStatus.BANNED
        pages = [await shell(line) for line in lines]
        says_what_to_do(pages, shell)
        await is_restored(network, batch)
        await signers_are_fined(network)
        await network.owner.rpc.call("evm_increaseTime", WINDOW_S + 1)
        await network.owner.rpc.call("evm_mine")
        await is_paid(network, batch, shell, claim)


def says_what_to_do(pages: list[str], shell: Shell) -> None:
    """At every step the page names the next command, the price and the deadline."""
    first, rerun, verified, opened, listed, settled, last = pages
    place = shell.names["PLACE"]
    assert f"muster dispute open {place} --keystore FILE" in first
    assert "takes a bond of 10 tokens, lost unless the jury finds the same" in first
    assert "3 of the network's bench could sit on it" in first
    assert f"--rerun STATE/refused/{shell.names['FILE']}.parquet" in first
    assert (
        "this machine finds accepted, validators signed fraud: honest jurors will find what this "
        "machine finds, so dispute it"
    ) in rerun
    assert "contradict" in verified
    assert shell.codes == [0, 0, 1, 0, 0, 0, 0]
    assert "outcome fraud for wrong_reward" in opened
    assert "overturned (3 accepted): the outcome is accepted" in opened
    assert "claimed accepted, 10 tokens back" in opened
    assert "overturned" in listed
    assert "nothing was left to do" in settled
    assert "a jury overturned fraud" in last
    assert "nothing: the case is over" in last


async def is_restored(network: Network, batch: BatchView) -> None:
    """The stake is whole again, and the ban is lifted."""
    worker = WORKERS[0]
    assert await staked(network, worker) == WORKER_STAKE
    assert await status_of(network) is WorkerStatus.ACTIVE
    view = await network.view()
    [state] = {s.state for s in view.slashes if s.batch_id == batch.batch_id}
    assert state is SlashState.RESTORED
    wrong = VALIDATOR_STAKE * LONGER.wrong_verdict_ppm // 10**6
    share = wrong * LONGER.reporter_ppm // 10**6
    held = await network.owner.token.balance_of(worker.address)
    assert held == LONGER.bond + len(VALIDATORS) * share


async def signers_are_fined(network: Network) -> None:
    view = await network.view()
    wrong = [slash for slash in view.slashes if slash.offence is Offence.WRONG_VERDICT]
    assert {slash.owner for slash in wrong} == {each.address for each in VALIDATORS}
    assert {s.amount_wei for s in wrong} == {VALIDATOR_STAKE * LONGER.wrong_verdict_ppm // 10**6}
    assert {s.reporter for s in wrong} == {WORKERS[0].address}
    assert view.contradictions == []


async def is_paid(network: Network, batch: BatchView, shell: Shell, claim: str) -> None:
    assert batch.records is not None
    worker = WORKERS[0].address
    before = await network.owner.token.balance_of(worker)
    await shell(claim)
    paid = await network.owner.token.balance_of(worker) - before
    assert paid == batch.records[0].units * batch.price_per_unit > 0


@pytest.mark.usefixtures("hash_engine")
async def test_cheater_that_disputes_a_right_verdict_loses_its_bond_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_network(tmp_path, LONGER) as network, accused(network, Forger, HONEST) as batch:
        await with_bond(network, monkeypatch)
        shell = shell_of(network, batch)
        _, rerun, verify, dispute, _, settle, explain, _ = lines_of("1.", "2.", "3.", "4.")
        (supply,) = await network.owner.read("MusterToken", "totalSupply", [])
        assert "this machine agrees with the verdict: a claim would lose its bond" in (
            await shell(rerun)
        )
        await shell(verify)
        opened = await shell(dispute)
        assert "upheld (3 fraud for wrong_reward): the outcome is fraud" in opened
        assert "claimed accepted, its bond lost" in opened
        assert "nothing was left to do" in await shell(settle)
        assert "nothing: the case is over" in await shell(explain)
        assert shell.codes == [0, 0, 0, 0, 0]
        await bond_is_lost(network, supply)
        assert await status_of(network) is WorkerStatus.BANNED
        assert await staked(network, WORKERS[0]) < WORKER_STAKE
        view = await network.view()
        assert {slash.owner for slash in view.slashes} == {WORKERS[0].address}
        [case] = view.cases.values()
        assert (case.ruling, case.overturned) == (FRAUD.number, False)


async def bond_is_lost(network: Network, supply_before: int) -> None:
    """Jurors get their fees from the bond, and the rest is burned."""
    token = network.owner.token
    assert await token.balance_of(WORKERS[0].address) == 0

    async def are_paid() -> bool:
        held = [await token.balance_of(juror.address) for juror in JURORS]
        return held == [LONGER.juror_fee] * len(JURORS)

    await eventually(are_paid)
    (left,) = await network.owner.read("MusterToken", "totalSupply", [])
    assert supply_before - left == LONGER.bond - len(JURORS) * LONGER.juror_fee


# Nobody judged it


@asynccontextmanager
async def unjudged(network: Network, worker: type[WorkerLoop]) -> AsyncIterator[Shell]:
    """Yield a shell for the worker of a batch that was due, with jurors and no validator awake."""
    await network.seat_jurors()
    state = network.folder / "worker-0"

    async def is_committed() -> bool:
        return bool((await network.view()).batches)

    async with running(network.worker(0, worker)):
        await eventually(is_committed)
    node = NODES[0]
    save_wallet(network.folder / "node.json", node.key, "secret", light=True)
    await network.anvil.set_balance(node.address, TOKEN)
    await network.owner.token.faucet(node.address, LONGER.bond)
    await network.owner.rpc.call("evm_increaseTime", LONGER.outcome_deadline_s + 1)
    await network.owner.rpc.call("evm_mine")
    async with running(*(network.juror(number) for number in range(len(JURORS)))):
        yield Shell(
            network,
            {
                "PLACE": "1:0",
                "STATE": str(state),
                "ORCHESTRATOR": network.orchestrator,
                "WORKER": WORKERS[0].address,
            },
        )


async def summoned(network: Network) -> CaseView:
    """Return the case once jurors have closed it and have their fees."""
    found: list[CaseView] = []

    async def is_settled() -> bool:
        found[:] = (await network.view()).cases.values()
        return all(case.closed and len(case.collected) == len(JURORS) for case in found)

    await eventually(is_settled)
    [case] = found
    assert case.is_summons
    return case


async def test_work_that_nobody_judged_is_judged_by_the_network_and_paid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_network(tmp_path, LONGER) as network, unjudged(network, OneFile) as shell:
        monkeypatch.chdir(tmp_path)
        [submit] = lines_of("Nobody")
        said = await shell(submit)
        assert "batch 1 is unjudged: split off, with a bond of 10 tokens" in said
        assert shell.codes == [0]
        case = await summoned(network)
        assert (case.ruling, case.overturned) == (ACCEPTED.number, True)
        view = await network.view()
        batch = view.batches[case.batch_id]
        assert (batch.split_from, batch.signers, batch.records is not None) == (1, 0, True)
        assert view.runs[network.run_id].court_wei == len(JURORS) * LONGER.juror_fee
        await network.owner.rpc.call("evm_increaseTime", WINDOW_S + 1)
        await network.owner.rpc.call("evm_mine")
        await is_paid(network, batch, shell, PAY)


async def test_work_that_judges_do_not_accept_costs_its_bond(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_network(tmp_path, LONGER) as network, unjudged(network, Forger) as shell:
        monkeypatch.chdir(tmp_path)
        await shell(lines_of("Nobody")[0])
        case = await summoned(network)
        assert case.ruling == FRAUD.number
        view = await network.view()
        assert view.runs[network.run_id].court_wei == 0
        token = network.owner.token
        assert await token.balance_of(NODES[0].address) == 0
        held = [await token.balance_of(juror.address) for juror in JURORS]
        assert held == [LONGER.juror_fee] * len(JURORS)


# Sitting on juries


async def test_juror_joins_waits_for_cases_and_leaves_with_the_guides_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_network(tmp_path, LONGER) as network:
        monkeypatch.chdir(tmp_path)
        juror = JURORS[0]
        save_wallet(tmp_path / "juror.json", juror.key, "secret", light=True)
        await network.anvil.set_balance(juror.address, 100 * TOKEN)
        await network.owner.token.faucet(juror.address, JUROR_STAKE)
        shell = Shell(network, {"ORCHESTRATOR": network.orchestrator})
        join, run, status, leave, unstake, *_ = lines_of("Sit")
        joined = await shell(join)
        assert "locks   500 tokens" in joined
        assert "risk    at most these 500 tokens, for absence only: 0.5 % for each case" in joined
        await starts_and_stops(shell, run)
        assert "on the bench of 1" in await shell(status)
        left = await shell(leave)
        assert "unbonds 500 tokens" in left
        assert "then    muster unstake --run 0 --keystore FILE withdraws it" in left
        waits = await shell(status)
        assert "not on the bench of 0" in waits
        assert "muster unstake" not in waits
        stake = (await network.view()).stake(RunId(BENCH), juror.address)
        assert (stake.active_wei, stake.unbonding_wei) == (0, JUROR_STAKE)
        await network.owner.rpc.call("evm_increaseTime", LONGER.unbonding_s + 1)
        await network.owner.rpc.call("evm_mine")
        assert "muster unstake --run 0 --keystore FILE withdraws" in await shell(status)
        assert "withdrawn" in await shell(unstake)
        assert shell.codes == [0] * 6
        assert await network.owner.token.balance_of(juror.address) == JUROR_STAKE


async def starts_and_stops(shell: Shell, line: str) -> None:
    """The process says that it is on the bench, and ends on SIGTERM."""
    log = shell.network.folder / "juror.log"
    log.touch()
    process = await WarmProcess.start(["muster.app", *shell.words(line)], log, shell.environment)
    try:
        async with asyncio.timeout(180):
            while b"on the bench" not in log.read_bytes():
                await asyncio.sleep(0.1)
            process.terminate()
            assert await process.wait() == 0, log.read_text()
    finally:
        if process.returncode is None:
            process.kill()
