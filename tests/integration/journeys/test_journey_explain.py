"""What became of work: accepted, fraudulent, unknown; on real services and contracts."""

import asyncio
import json
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from click.testing import CliRunner
from client_network import (
    NODES,
    PARAMETERS,
    PRICE,
    WORKERS,
    Network,
    eventually,
    open_network,
    running,
)

from muster.api import OrchestratorApi
from muster.app.cli import muster
from muster.app.demo.adversary import ForgedReward
from muster.chain import ChainView
from muster.client.quantities import format_tokens
from muster.protocol.errors import ConfigError, PolicyUnavailable
from muster.protocol.messages import OutcomeRecord, Reason, Verdict
from muster.protocol.rollouts import decode_rollouts
from muster.wallet import save_wallet

pytestmark = pytest.mark.asyncio(loop_scope="module")
WINDOW_S = 900


def outcomes(view: ChainView, verdict: Verdict) -> list[tuple[str, OutcomeRecord]]:
    return [
        (f"{batch.batch_id}:{position}", record)
        for batch in view.batches.values()
        for position, record in enumerate(batch.records or ())
        if record.verdict is verdict
    ]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def network(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Network]:
    """A network on which one worker was honest, one forged rewards, and both were judged."""
    folder = tmp_path_factory.mktemp("explain")
    parameters = PARAMETERS.model_copy(
        update={"challenge_window_s": WINDOW_S, "unbonding_s": 7200, "change_delay_s": 7200}
    )
    async with open_network(folder, parameters) as opened:
        mains = (opened.worker(0), opened.worker(1, ForgedReward), opened.validator(0))
        async with running(*mains, opened.validator(1)):

            async def are_judged() -> bool:
                view = await opened.view()
                slashed = bool(view.slashes)
                return bool(outcomes(view, Verdict.ACCEPTED)) and slashed

            async def are_proven() -> bool:
                place, _ = outcomes(await opened.view(), Verdict.ACCEPTED)[0]
                return len((await api.checking(int(place.split(":")[0]))).reports) == 2

            await eventually(are_judged)
            async with OrchestratorApi(opened.orchestrator) as api:
                await eventually(are_proven)
        for name, wallet in (("worker", WORKERS[0]), ("node", NODES[0])):
            save_wallet(folder / f"{name}.json", wallet.key, "s", light=True)
        yield opened


async def run(network: Network, *words: str) -> Any:
    chain = ["--rpc", network.anvil.rpc_url, "--deployments", str(network.folder / "deployments")]
    return await asyncio.to_thread(CliRunner().invoke, muster, [*words, *chain])


async def explain(network: Network, *words: str) -> Any:
    result = await run(network, "explain", *words, "--json")
    assert result.exception is None, result.output
    return json.loads(result.stdout)


def stored(network: Network, record: OutcomeRecord) -> str:
    files = (network.folder / "files").rglob(f"{record.file_hash.hex()}*")
    found = [path for path in files if path.suffix != ".json"]
    assert found, record
    return str(found[0])


# Accepted


async def test_an_accepted_submission_is_found_in_all_three_ways(network: Network) -> None:
    place, record = outcomes(await network.view(), Verdict.ACCEPTED)[0]
    slot = f"{record.step}:{record.index}"
    ways = [
        (place,),
        (f"{WORKERS[0].address}/{slot}",),
        (record.file_hash.hex(),),
        (record.file_hash.hex()[:12],),
        (f"1/{place}",),
        (f"{NODES[0].address}/{slot}",),
        ("0x" + record.file_hash.hex(), "--orchestrator", network.orchestrator),
    ]
    found = [await explain(network, *way) for way in ways]
    assert all(each["file_hash"] == "0x" + record.file_hash.hex() for each in found)
    assert {each["verdict"] for each in found} == {"accepted"}
    assert found[-1]["received_at"] is not None


async def test_an_accepted_submission_says_when_and_how_it_is_paid_or_disputed(
    network: Network,
) -> None:
    place, record = outcomes(await network.view(), Verdict.ACCEPTED)[0]
    found = await explain(network, place)
    assert found["payment"]["state"] == "pending"
    assert found["payment"]["amount_wei"] == str(record.units * PRICE)
    assert found["dispute"]["until"] == found["judged"]["at"] + WINDOW_S
    assert len(found["judged"]["by"]) == 2
    text = (await run(network, "explain", place)).stdout
    assert "accepted: paid, and offered to training" in text
    assert text.count("passed") == 7
    assert f"muster dispute open {place} --keystore FILE --orchestrator URL --wait" in text
    assert "0 of the network's bench could sit on it: nobody would decide" in text
    assert "takes a bond of 10 tokens" in text


@pytest.mark.usefixtures("hash_engine")
async def test_a_rerun_repeats_the_verdict_with_every_statistic(network: Network) -> None:
    place, record = outcomes(await network.view(), Verdict.ACCEPTED)[0]
    words = (place, "--orchestrator", network.orchestrator, "--rerun", stored(network, record))
    found = await explain(network, *words, "--state-dir", str(network.folder / "doctor"))
    assert found["rerun"]["verdict"] == "accepted"
    assert found["rerun"]["units"] == record.units
    assert all(each["passes"] for each in found["rerun"]["statistics"])
    assert len(found["rerun"]["statistics"]) == 7
    assert set(found["rerun"]["proofs_of_checking"].values()) == {"recomputed it"}


@pytest.mark.usefixtures("hash_engine")
async def test_a_rerun_asks_no_relay_in_our_network_for_a_public_orchestrator(
    network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def is_inside(_: OrchestratorApi) -> bool:
        return False

    monkeypatch.setattr(OrchestratorApi, "is_inside", is_inside)
    place, record = outcomes(await network.view(), Verdict.ACCEPTED)[0]
    words = ("explain", place, "--orchestrator", network.orchestrator, "--state-dir", str(tmp_path))
    rerun = ("--rerun", stored(network, record))
    assert isinstance((await run(network, *words, *rerun)).exception, PolicyUnavailable)


async def test_a_rerun_of_another_file_is_refused(network: Network, tmp_path: Path) -> None:
    place, _ = outcomes(await network.view(), Verdict.ACCEPTED)[0]
    (tmp_path / "other").write_bytes(b"other")
    words = ("explain", place, "--rerun", str(tmp_path / "other"))
    assert "--rerun needs --orchestrator" in str((await run(network, *words)).exception)
    result = await run(network, *words, "--orchestrator", network.orchestrator)
    assert "is not the submission's file" in str(result.exception)


# Fraud


async def test_a_fraud_says_which_check_what_it_cost_and_how_to_appeal(network: Network) -> None:
    place, record = outcomes(await network.view(), Verdict.FRAUD)[0]
    assert record.reason is Reason.WRONG_REWARD
    text = (await run(network, "explain", place)).stdout
    assert "4 FAILED  grades" in text
    assert "5 -       endings" in text
    assert "WRONG_REWARD (40): a reward is not what" in text
    assert "no: only accepted work is paid" in text
    assert f"muster dispute open {place} --keystore FILE" in text
    assert f"--rerun STATE/refused/{record.file_hash.hex()}.parquet" in text
    slashed = [s for s in (await network.view()).slashes if s.owner == WORKERS[1].address]
    assert slashed
    found = [await explain(network, p) for p, _ in outcomes(await network.view(), Verdict.FRAUD)]
    of = next(each["slash"] for each in found if each["slash"])
    assert f"slashed     {format_tokens(int(of['amount_wei']))} tokens, " in text
    assert of["in_all"]["words"].startswith("banned; lost ")
    # More of its frauds may have been slashed between the two.
    assert "in all: banned; lost " in text


@pytest.mark.usefixtures("hash_engine")
async def test_a_rerun_of_a_fraud_names_the_row(network: Network) -> None:
    place, record = outcomes(await network.view(), Verdict.FRAUD)[0]
    words = (place, "--orchestrator", network.orchestrator, "--rerun", stored(network, record))
    again = (await explain(network, *words, "--state-dir", str(network.folder / "doctor")))["rerun"]
    assert (again["verdict"], again["reason"]) == ("fraud", "WRONG_REWARD")
    assert "claims reward 1.0, the verifier says" in again["detail"]


@pytest.mark.usefixtures("hash_engine")
async def test_a_rerun_of_accepted_work_says_how_much_of_it_can_be_trained_on(
    network: Network,
) -> None:
    place, record = outcomes(await network.view(), Verdict.ACCEPTED)[0]
    rewards: dict[int, set[float]] = {}
    rows = decode_rollouts(Path(stored(network, record)).read_bytes())
    for row in rows:
        rewards.setdefault(row.group, set()).add(row.task_reward)
    wanted = sum(len(rewards[row.group]) > 1 for row in rows)
    words = (place, "--orchestrator", network.orchestrator, "--rerun", stored(network, record))
    state = ("--state-dir", str(network.folder / "doctor"))
    text = (await run(network, "explain", *words, *state)).stdout
    assert f"{wanted} of {len(rows)} samples are in groups whose rewards differ" in text
    fraud, false = outcomes(await network.view(), Verdict.FRAUD)[0]
    words = (fraud, "--orchestrator", network.orchestrator, "--rerun", stored(network, false))
    assert "samples are in groups" not in (await run(network, "explain", *words, *state)).stdout


# Evidence bundles


async def save(network: Network, place: str, record: OutcomeRecord, bundle: Path) -> Any:
    words = ("explain", place, "--orchestrator", network.orchestrator, "--save", str(bundle))
    state = ("--state-dir", str(network.folder / "doctor"))
    return await run(network, *words, "--rerun", stored(network, record), *state)


@pytest.mark.usefixtures("hash_engine")
@pytest.mark.parametrize("verdict", [Verdict.ACCEPTED, Verdict.FRAUD])
async def test_a_saved_verdict_is_verified_against_the_chain_and_without_it(
    network: Network, tmp_path: Path, verdict: Verdict
) -> None:
    place, record = outcomes(await network.view(), verdict)[0]
    bundle = tmp_path / "evidence.zip"
    saved = await save(network, place, record, bundle)
    assert f"muster audit verify {place} --bundle {bundle}" in saved.stderr
    words = ("audit", "verify", place, "--bundle", str(bundle), "--json")
    found = json.loads((await run(network, *words)).stdout)
    assert (found["agrees"], found["verdict"]) == (True, verdict.name.lower())
    assert found["checks"][0]["answer"] == "agree"
    offline = json.loads((await run(network, *words, "--offline")).stdout)
    assert offline["agrees"]
    assert offline["facts"] == found["facts"]


@pytest.mark.usefixtures("hash_engine")
async def test_a_bundle_that_misstates_the_chain_is_contradicted(
    network: Network, tmp_path: Path
) -> None:
    place, record = outcomes(await network.view(), Verdict.FRAUD)[0]
    bundle, lying = tmp_path / "evidence.zip", tmp_path / "lying.zip"
    await save(network, place, record, bundle)
    with zipfile.ZipFile(bundle) as old, zipfile.ZipFile(lying, "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name).replace(b'"quorum": 2', b'"quorum": 1'))
    result = await run(network, "audit", "verify", place, "--bundle", str(lying))
    assert result.exit_code == 1
    assert "quorum: 1, on chain 2" in result.stdout
    assert "contradicted by chain facts" in result.stdout


async def test_a_bundle_without_a_rerun_is_refused(network: Network, tmp_path: Path) -> None:
    place, _ = outcomes(await network.view(), Verdict.ACCEPTED)[0]
    result = await run(network, "explain", place, "--save", str(tmp_path / "bundle"))
    assert "--save needs --rerun FILE" in str(result.exception)


# Unknown submissions


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("nonsense",), "'nonsense' is no name and no hexadecimal number"),
        (("99999:0",), "there is no batch 99999"),
        (("1:99",), "batch 1 has no position 99"),
        (("00" * 32,), "nothing on chain is 0x0000"),
        ((f"{WORKERS[0].address}/4000000:0",), "no outcome of step 4000000, index 0"),
        (("0x" + "11" * 20 + "/1:0",), "neither a worker nor the node of one"),
    ],
)
async def test_what_cannot_be_found_is_said_with_the_next_step(
    network: Network, words: tuple[str, ...], says: str
) -> None:
    result = await run(network, "explain", *words)
    assert isinstance(result.exception, ConfigError)
    assert says in str(result.exception)
    assert result.exception.hint


async def test_a_file_that_the_orchestrator_never_saw_is_unknown(network: Network) -> None:
    result = await run(network, "explain", "00" * 32, "--orchestrator", network.orchestrator)
    assert "no submission with this file hash" in str(result.exception)


# Status


async def status(network: Network, *words: str) -> Any:
    result = await run(network, "worker", "status", "--run", "1", *words, "--json")
    assert result.exception is None, result.output
    return json.loads(result.stdout)


async def test_status_of_an_honest_worker_adds_up(network: Network) -> None:
    async def own() -> list[OutcomeRecord]:
        view = await network.view()
        return [r for _, r in outcomes(view, Verdict.ACCEPTED) if r.worker_id == 1]

    # The orchestrator may still post what validators handed in before they ended.
    mine: list[OutcomeRecord] = []
    found: Any = None
    while mine != (mine := await own()) or found is None:
        found = await status(network, "--worker", WORKERS[0].address)
    assert found["status"] == "active"
    assert found["outcomes"]["accepted"] == len(mine)
    units = sum(record.units for record in mine)
    assert found["units"]["in_flight"] == units
    assert found["pending_wei"] == found["earned_wei"] == str(units * PRICE)
    assert found["no_work_because"] == []


async def test_status_knows_worker_and_node_by_their_keystores(network: Network) -> None:
    for name in ("worker", "node"):
        keystore = str(network.folder / f"{name}.json")
        assert (await status(network, "--keystore", keystore))["worker"] == WORKERS[0].address
    for name in (NODES[0].address, WORKERS[0].address[:12], NODES[0].address[2:10].lower()):
        assert (await status(network, "--worker", name))["worker"] == WORKERS[0].address


async def test_status_with_an_orchestrator_tells_the_last_sign_of_life(network: Network) -> None:
    words = ("--worker", WORKERS[0].address, "--orchestrator", network.orchestrator)
    found = await status(network, *words)
    assert found["heartbeat"]["seen_at"] > 0
    assert found["phase"] == "collecting"
    text = (await run(network, "worker", "status", "--run", "1", *words)).stdout
    assert "ago, " in text


async def test_status_of_a_slashed_worker_says_why_there_is_no_work(network: Network) -> None:
    found = await status(network, "--worker", WORKERS[1].address)
    assert found["status"] == "banned"
    assert "until a jury" in found["no_work_because"][0]
    assert int(found["stake"]["slashed_wei"]) > 0
    assert found["not_accepted"][0]["reason"] == "WRONG_REWARD"
    text = await run(network, "worker", "status", "--run", "1", "--worker", WORKERS[1].address)
    assert "fraud WRONG_REWARD: muster explain" in text.stdout
    assert f"slashed     {found['loss']['words']}\n" in text.stdout
    assert "0 units are in flight" not in text.stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "exactly one of --worker and --keystore is needed"),
        (("--worker", "0x" + "11" * 20), "neither a worker nor the node of one"),
    ],
)
async def test_status_of_nobody_is_refused(
    network: Network, words: tuple[str, ...], says: str
) -> None:
    result = await run(network, "worker", "status", "--run", "1", *words)
    assert says in str(result.exception)


async def test_an_orchestrator_that_is_away_is_named_and_not_fatal(network: Network) -> None:
    words = ("--worker", WORKERS[0].address, "--orchestrator", "http://127.0.0.1:9")
    assert "no answer" in (await status(network, *words))["phase"]
