"""Wrong networks, runs, keys and standings: refused with a reason and a next step."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from click.testing import CliRunner
from client_network import NODES, THIRD, TOKEN, VALIDATORS, WORKERS, Network, open_network

from muster.app.cli import exit_code, muster
from muster.chain import Chain
from muster.client.preflight import gas_money
from muster.client.settings import ValidatorSettings, WorkerSettings
from muster.client.validator.process import run_validator, warn_of_little
from muster.client.worker.process import run_worker
from muster.protocol.errors import ConfigError, MusterError
from muster.protocol.ids import Address, to_address
from muster.wallet import Wallet, save_wallet

pytestmark = pytest.mark.asyncio(loop_scope="module")
NOBODY = "0x" + "11" * 20


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def network(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Network]:
    async with open_network(tmp_path_factory.mktemp("bad")) as opened:
        yield opened


# The worker's process


def loads_no_model(_settings: object) -> Any:
    raise AssertionError("a model was loaded for a worker that may not work")


async def start(
    network: Network, folder: Path, node: Wallet, worker: str, run: int = 1, dtype: str = "float32"
) -> MusterError:
    """Return the error with which a worker's process must end before it loads a model."""
    settings = WorkerSettings(
        run=run,
        dtype=dtype,
        orchestrator=network.orchestrator,
        rpc=network.anvil.rpc_url,
        deployments=network.folder / "deployments",
        state_dir=folder,
        worker=worker,
    )
    with pytest.raises(MusterError) as caught:
        await asyncio.wait_for(run_worker(settings, node, engine_factory=loads_no_model), 180)
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize(
    ("node", "worker", "run", "says"),
    [
        (NODES[0], WORKERS[0].address, 9, "there is no run 9"),
        (NODES[0], NOBODY, 1, "is not a worker of run 1"),
        (NODES[1], WORKERS[0].address, 1, f"is served by node {NODES[0].address}"),
        (WORKERS[0], WORKERS[0].address, 1, "own (cold) key"),
    ],
)
async def test_a_worker_that_cannot_work_ends_before_a_model_is_loaded(
    network: Network, tmp_path: Path, node: Wallet, worker: str, run: int, says: str
) -> None:
    assert says in str(await start(network, tmp_path, node, worker, run))


async def test_software_that_is_older_than_the_run_pins_is_refused(
    network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("muster.client.preflight.installed_version", lambda: "0.0.9")
    error = await start(network, tmp_path, NODES[0], WORKERS[0].address)
    assert str(error) == "this is muster-rl 0.0.9, the run asks for 0.1 or newer"
    with pytest.raises(ConfigError, match=r"the run asks for 0\.1"):
        await asyncio.wait_for(network.validator(0), 180)


async def test_an_engine_that_the_run_is_not_calibrated_for_is_refused(
    network: Network, tmp_path: Path
) -> None:
    error = await start(network, tmp_path, NODES[0], WORKERS[0].address, dtype="bfloat16")
    assert "not for transformers:bfloat16" in str(error)


async def test_a_validator_without_a_seat_ends_before_a_model_is_loaded(
    network: Network, tmp_path: Path
) -> None:
    settings = ValidatorSettings(
        run=1,
        orchestrator=network.orchestrator,
        rpc=network.anvil.rpc_url,
        deployments=network.folder / "deployments",
        state_dir=tmp_path,
    )
    with pytest.raises(ConfigError, match="is not a validator of run 1") as caught:
        await asyncio.wait_for(run_validator(settings, THIRD, engine_factory=loads_no_model), 180)
    assert "muster validator join --run 1" in (caught.value.hint or "")


async def test_a_validator_is_told_what_it_will_lack(
    network: Network, caplog: pytest.LogCaptureFixture
) -> None:
    async def said_to(account: Address) -> list[str]:
        caplog.clear()
        await warn_of_little(network.owner, network.run_id, account)
        # The orchestrator beside it may have something to say, too.
        return [r.getMessage() for r in caplog.records if r.name.startswith("muster.client")]

    assert await said_to(VALIDATORS[0].address) == []
    said = await said_to(to_address(NOBODY))
    assert [text.split(",")[0] for text in said] == [
        "too little gas money to show outcomes on chain",
        "stake is below what a validator must hold",
    ]
    # A budget is a twentieth of what the account holds.
    once, rpc = await gas_money(network.owner, "show and post"), network.owner.rpc
    for times, count in ((10, 2), (40, 1)):
        await rpc.call("anvil_setBalance", NOBODY, hex(times * once.wei))
        assert len(await said_to(to_address(NOBODY))) == count
    await rpc.call("anvil_setBalance", NOBODY, "0x0")


async def test_a_jailed_worker_is_told_the_way_back(network: Network, tmp_path: Path) -> None:
    deployments = network.folder / "deployments"
    async with await Chain.connect(network.anvil.rpc_url, deployments, key=WORKERS[1].key) as chain:
        await chain.vault.request_unbond(network.run_id, TOKEN)
    error = await start(network, tmp_path, NODES[1], WORKERS[1].address)
    assert "is jailed in run 1 and may not work" in str(error)
    assert "muster worker rejoin" in (error.hint or "")


# Every command that asks the chain

ASKS = [
    ("run", "list"),
    ("run", "show", "1"),
    ("worker", "status", "--run", "1", "--worker", NOBODY),
    ("explain", "1:0"),
    ("rewards", "--run", "1", "--worker", NOBODY),
    ("dispute", "list"),
    ("juror", "status", "--juror", NOBODY),
    ("audit",),
]
SIGNS = [
    ("stake", "--run", "1", "--yes"),
    ("unstake", "--run", "1", "--yes"),
    ("worker", "rejoin", "--run", "1", "--yes"),
    ("validator", "join", "--run", "1", "--keystore", "{key}", "--yes"),
    ("validator", "leave", "--run", "1", "--keystore", "{key}", "--yes"),
    ("juror", "join", "--keystore", "{key}", "--yes"),
    ("juror", "leave", "--keystore", "{key}", "--yes"),
    ("juror", "shorten", "--keystore", "{key}", "--yes"),
    ("node", "rotate", "--node", "{node}", "--yes"),
    ("rewards", "claim", "--run", "1"),
    ("run", "pause", "1", "--keystore", "{key}", "--yes"),
    ("run", "fund", "1", "5", "--keystore", "{key}", "--dry-run"),
]


async def say(tmp_path: Path, words: tuple[str, ...], rpc: str, deployments: Path) -> Any:
    """Return the error of a command on a network; keys are opened where they are needed."""
    key, node = tmp_path / "key.json", tmp_path / "node.json"
    for path, account in ((key, WORKERS[0]), (node, WORKERS[1])):
        if not path.exists():
            save_wallet(path, account.key, "s", light=True)
    words = tuple(word.format(key=key, node=node) for word in words)
    signs = ["--keystore", str(key)] if words[0] in ("stake", "unstake", "node") else []
    if words[1:2] in (("rejoin",), ("claim",)):
        signs = ["--keystore", str(key)]
    result = await asyncio.to_thread(
        CliRunner().invoke,
        muster,
        [*words, *signs, "--rpc", rpc, "--deployments", str(deployments)],
        env={"MUSTER_PASSWORD": "s"},
    )
    assert isinstance(result.exception, MusterError), result.output
    assert result.exception.hint
    assert "Traceback" not in result.output
    return result.exception


@pytest.mark.parametrize("words", [*ASKS, *SIGNS], ids=" ".join)
async def test_a_network_without_these_contracts_is_refused(
    network: Network, tmp_path: Path, words: tuple[str, ...]
) -> None:
    [file] = (network.folder / "deployments").glob("*.json")
    (tmp_path / "empty").mkdir()
    error = await say(tmp_path, words, network.anvil.rpc_url, tmp_path / "empty")
    assert isinstance(error, ConfigError)
    assert "no contracts are recorded for chain 31337" in str(error)
    elsewhere = json.loads(file.read_text())
    elsewhere["contracts"]["StakeVault"] = NOBODY
    (tmp_path / "31337.json").write_text(json.dumps(elsewhere))
    error = await say(tmp_path, words, network.anvil.rpc_url, tmp_path)
    assert "there is no code at the recorded address of StakeVault" in str(error)
    assert exit_code(error) == 1


@pytest.mark.parametrize("words", [*ASKS, *SIGNS], ids=" ".join)
async def test_a_chain_that_is_down_is_an_outage(
    network: Network, tmp_path: Path, words: tuple[str, ...]
) -> None:
    error = await say(tmp_path, words, "http://127.0.0.1:9", network.folder / "deployments")
    assert exit_code(error) == 3


@pytest.mark.parametrize(
    "words",
    [
        ("run", "show", "9"),
        ("run", "close", "9", "--keystore", "{key}", "--yes"),
        ("worker", "status", "--run", "9", "--worker", NOBODY),
        ("rewards", "--run", "9", "--worker", NOBODY),
        ("dispute", "list", "--run", "9"),
        ("stake", "--run", "9", "--amount", "1", "--yes"),
        ("validator", "join", "--run", "9", "--keystore", "{key}", "--yes"),
    ],
    ids=" ".join,
)
async def test_an_unknown_run_is_refused(
    network: Network, tmp_path: Path, words: tuple[str, ...]
) -> None:
    error = await say(tmp_path, words, network.anvil.rpc_url, network.folder / "deployments")
    assert "there is no run 9" in str(error)
