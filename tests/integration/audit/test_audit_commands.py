"""The output and exports of `muster audit` and its subcommands, on a played chain."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import chain_scenario
import pyarrow.parquet as pq
import pytest
import pytest_asyncio
from click.testing import CliRunner, Result
from pyarrow import csv

from muster.app.cli import muster
from muster.chain import save_deployment
from muster.client.audit.write_tables import COLUMNS
from muster.client.cli.printing import WIDTH
from muster.protocol.encoding import hex0x

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Played:
    """A chain with every kind of event, and the folder of its addresses."""

    def __init__(self, net: chain_scenario.Scenario, folder: Path) -> None:
        self.net, self.folder = net, folder

    async def run(self, *words: str) -> Result:
        flags = ["--rpc", self.net.anvil.rpc_url, "--deployments", str(self.folder)]
        return await asyncio.to_thread(CliRunner().invoke, muster, ["audit", *words, *flags])

    async def json(self, *words: str) -> Any:
        result = await self.run(*words, "--json")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)


@contextlib.asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[Played]:
    async with chain_scenario.network() as net:
        save_deployment(folder, net.deployment)
        await chain_scenario.play(net)
        yield Played(net, folder)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def played(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Played]:
    async with opened(tmp_path_factory.mktemp("audit")) as found:
        yield found


async def contradict(net: chain_scenario.Scenario) -> None:
    """Accept one slot twice."""
    submission = net.submission(chain_scenario.HONEST, 9)
    for _ in range(2):
        await net.judge(submission, chain_scenario.accepted(1, submission))


# One thing


async def test_a_worker_is_shown_with_everything_that_concerns_it(played: Played) -> None:
    found = await played.json("worker", chain_scenario.CHEATER.address)
    (membership,) = found["memberships"]
    assert (membership["run_id"], membership["status"]) == (1, "banned")
    (outcome,) = found["outcomes"]
    assert (outcome["verdict"], outcome["reason"]) == ("fraud", "wrong_seed")
    (slash,) = found["slashes"]
    assert slash["outcome_tx"] == outcome["posted_tx"]
    text = (await played.run("worker", chain_scenario.CHEATER.address)).stdout
    assert "fraud, wrong_seed" in text
    assert max(map(len, text.splitlines())) <= WIDTH
    text = (await played.run("worker", chain_scenario.HONEST.address)).stdout
    assert "1:0" not in text.splitlines()[0]
    assert text.rstrip().endswith("no contradictions")


async def test_somebody_unknown_is_no_worker(played: Played) -> None:
    result = await played.run("worker", "0x" + "11" * 20)
    assert "neither a worker nor the node of one" in str(result.exception)


async def test_a_submission_is_found_by_place_and_by_hash_with_its_proof(played: Played) -> None:
    record = ((await played.net.view()).batches[1].records or ())[1]
    found = await played.json("submission", "1:1")
    assert found == await played.json("submission", hex0x(record.file_hash))
    assert found["leaf"] == hex0x(record.leaf(1, 1))
    assert set(found["signed_by"]) == {v.address for v in chain_scenario.VALIDATORS[:2]}
    assert len(found["drawn_first"]) == 2
    is_first = set(found["drawn_first"]) == set(found["signed_by"])
    assert is_first is (found["signed_on_ground"] == "signed by those drawn first")
    assert found["slash_tx"] == (await played.net.view()).slashes[0].tx_hash
    for wrong in ("1:9", "77:0", "nonsense", "00" * 32):
        assert (await played.run("submission", wrong)).exit_code == 1


async def test_an_outcome_of_jurors_names_their_case_and_no_signer(tmp_path: Path) -> None:
    async with chain_scenario.network() as net:
        save_deployment(tmp_path, net.deployment)
        submission = net.submission(chain_scenario.HONEST, 0)
        batch_id = await net.submit_direct(submission, chain_scenario.HONEST)
        await net.pass_time(chain_scenario.PARAMETERS.outcome_deadline_s)
        await net.judge_by_jury(batch_id, submission, chain_scenario.HONEST, chain_scenario.ACCEPT)
        found = await Played(net, tmp_path).json("submission", f"{batch_id}:0")
        (case,) = (await net.view()).cases.values()
        assert (found["signed_by"], found["drawn_first"]) == ([], None)
        assert found["signed_on_ground"] == "judged by jurors of the network"
        assert found["case"]["closed_tx"] == case.closed_tx


async def test_slashes_name_what_they_rest_on(played: Played) -> None:
    found = await played.json("slashes")
    (slash,) = found["slashes"]
    assert (slash["is_founded"], slash["reason"]) == (True, "wrong_seed")
    text = (await played.run("slashes")).stdout
    assert slash["tx"] in text
    assert max(map(len, text.splitlines())) <= WIDTH


# Files


async def test_every_format_has_the_documented_columns_and_the_same_rows(
    played: Played, tmp_path: Path
) -> None:
    for form in ("csv", "parquet"):
        await played.json("run", "1", "--export", str(tmp_path / form), "--format", form)
    for name, columns in COLUMNS.items():
        table = pq.read_table(tmp_path / "parquet" / f"{name}.parquet")
        assert table.column_names == list(columns)
        types = csv.ConvertOptions(column_types=table.schema, strings_can_be_null=True)
        assert csv.read_csv(tmp_path / "csv" / f"{name}.csv", convert_options=types) == table
    outcomes = pq.read_table(tmp_path / "parquet" / "outcomes.parquet").to_pylist()
    assert [row["units"] for row in outcomes] == [1000, 500, 300, 1000]
    assert outcomes[1]["worker"] == chain_scenario.CHEATER.address
    assert {row["standing_verdict"] for row in outcomes} == {"accepted", "fraud"}


# Contradictions


async def test_contradictions_are_named_placed_and_reported_everywhere(tmp_path: Path) -> None:
    async with opened(tmp_path) as played:
        await contradict(played.net)
        result = await played.run("run", "1", "--json")
        assert result.exit_code == 1
        (found,) = json.loads(result.stdout)["contradictions"]
        assert (found["kind"], found["batch_id"], found["position"]) == ("slot-twice", 4, 0)
        assert found["tx"] == (await played.net.view()).batches[4].posted_tx
        assert found["rule"] == "a slot (run, worker, step, index) settles once"
        for words in (("worker", chain_scenario.HONEST.address), ("submission", "4:0")):
            assert (await played.run(*words)).exit_code == 1
            assert "slot-twice" in (await played.run(*words)).stdout
        assert (await played.run("submission", "3:0")).exit_code == 0
