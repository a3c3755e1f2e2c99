"""What `muster audit` and its subcommands print, export and draw; on a played chain."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import json
import re
from collections.abc import AsyncIterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import pytest_asyncio
from chain_scenario import (
    ACCEPT,
    CHEATER,
    HONEST,
    ORCHESTRATOR,
    PARAMETERS,
    VALIDATORS,
    Scenario,
    accepted,
    network,
    play,
)
from click.testing import CliRunner, Result

from muster.app.cli import muster
from muster.chain import save_deployment
from muster.client.audit.contradictions import Kind, ProofLevel
from muster.client.audit.export import COLUMNS
from muster.client.audit.history import ChainWatch
from muster.client.cli.printing import WIDTH
from muster.protocol.encoding import hex0x

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Played:
    """A chain with something of everything, and where its addresses are."""

    def __init__(self, net: Scenario, folder: Path) -> None:
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
    async with network() as net:
        save_deployment(folder, net.deployment)
        await play(net)
        yield Played(net, folder)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def played(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Played]:
    async with opened(tmp_path_factory.mktemp("audit")) as found:
        yield found


async def contradict(net: Scenario) -> None:
    """Accept one slot twice."""
    submission = net.submission(HONEST, 9)
    for _ in range(2):
        await net.judge(submission, accepted(1, submission))


# One thing


async def test_a_worker_is_shown_with_everything_that_concerns_it(played: Played) -> None:
    found = await played.json("worker", CHEATER.address)
    (membership,) = found["memberships"]
    assert (membership["run_id"], membership["status"]) == (1, "banned")
    (outcome,) = found["outcomes"]
    assert (outcome["verdict"], outcome["reason"]) == ("fraud", "wrong_seed")
    (slash,) = found["slashes"]
    assert slash["outcome_tx"] == outcome["posted_tx"]
    text = (await played.run("worker", CHEATER.address)).stdout
    assert "fraud, wrong_seed" in text
    assert max(map(len, text.splitlines())) <= WIDTH
    text = (await played.run("worker", HONEST.address)).stdout
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
    assert set(found["signed_by"]) == {v.address for v in VALIDATORS[:2]}
    assert len(found["drawn_first"]) == 2
    is_first = set(found["drawn_first"]) == set(found["signed_by"])
    assert is_first is (found["signed_on_ground"] == "signed by those drawn first")
    assert found["slash_tx"] == (await played.net.view()).slashes[0].tx_hash
    for wrong in ("1:9", "77:0", "nonsense", "00" * 32):
        assert (await played.run("submission", wrong)).exit_code == 1


async def test_an_outcome_of_jurors_names_their_case_and_no_signer(tmp_path: Path) -> None:
    async with network() as net:
        save_deployment(tmp_path, net.deployment)
        submission = net.submission(HONEST, 0)
        batch_id = await net.submit_direct(submission, HONEST)
        await net.pass_time(PARAMETERS.outcome_deadline_s)
        await net.judge_by_jury(batch_id, submission, HONEST, ACCEPT)
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
    for form in ("csv", "parquet", "json"):
        await played.json("run", "1", "--export", str(tmp_path / form), "--format", form)
    for name, columns in COLUMNS.items():
        with (tmp_path / "csv" / f"{name}.csv").open(newline="") as file:
            header, *rows = list(csv.reader(file))
        table = pq.read_table(tmp_path / "parquet" / f"{name}.parquet")
        lines = (tmp_path / "json" / f"{name}.jsonl").read_text().splitlines()
        assert header == table.column_names == list(columns)
        assert len(rows) == table.num_rows == len(lines)
        assert [json.loads(line) for line in lines] == table.to_pylist()
    outcomes = pq.read_table(tmp_path / "parquet" / "outcomes.parquet").to_pylist()
    assert [row["units"] for row in outcomes] == [1000, 500, 300, 1000]
    assert outcomes[1]["worker"] == CHEATER.address
    assert {row["standing_verdict"] for row in outcomes} == {"accepted", "fraud"}


class Page(HTMLParser):
    """Checks that tags nest, and collects what a page would fetch or run."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "meta":
            self.open.append(tag)
        names = dict(attrs)
        self.fetched += [n for n in ("src", "href", "onclick", "onload") if n in names]
        self.fetched += ["script"] if tag in ("script", "link", "iframe", "img") else []

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


async def test_the_html_report_is_whole_static_and_names_every_transaction(
    played: Played, tmp_path: Path
) -> None:
    path = tmp_path / "audit.html"
    report = await played.json("run", "1", "--html", str(path))
    html = path.read_text()
    page = Page()
    page.feed(html)
    assert page.open == []
    assert page.fetched == []
    assert "url(" not in html
    assert "@import" not in html
    claims = [*report["slashes"], *report["payments"], *report["runs"][0]["checkpoints"]]
    assert claims
    assert all(claim["tx"] in html for claim in claims)
    assert "prefers-color-scheme:dark" in html
    assert 'name="viewport"' in html
    assert "No contradiction in 22 checks" in html


async def test_the_html_report_escapes_what_it_shows() -> None:
    from muster.client.audit.export import table

    hostile = "<script>alert(1)</script>&\"'"
    html = table(hostile, [{hostile: hostile, "result": hostile, "tx": f"0x{hostile}"}])
    assert "<script" not in html
    assert html.count("&lt;script&gt;") >= 4


# Contradictions


async def test_contradictions_are_named_placed_and_reported_everywhere(tmp_path: Path) -> None:
    async with opened(tmp_path) as played:
        await contradict(played.net)
        result = await played.run("run", "1", "--json", "--html", str(tmp_path / "a.html"))
        assert result.exit_code == 1
        (found,) = json.loads(result.stdout)["contradictions"]
        assert (found["kind"], found["batch_id"], found["position"]) == ("slot-twice", 4, 0)
        assert found["tx"] == (await played.net.view()).batches[4].posted_tx
        assert found["rule"] == "a slot (run, worker, step, index) settles once"
        assert "slot-twice" in (tmp_path / "a.html").read_text()
        for words in (("worker", HONEST.address), ("submission", "4:0"), ("watch", "--once")):
            assert (await played.run(*words)).exit_code == 1
            assert "slot-twice" in (await played.run(*words)).stdout
        assert (await played.run("submission", "3:0")).exit_code == 0


# Watching


async def test_watch_says_one_line_per_outcome_slash_claim_and_policy(played: Played) -> None:
    result = await played.run("watch", "--once", "--run", "1")
    assert result.exit_code == 0, result.output
    kinds = [line.split()[2] for line in result.stdout.splitlines()]
    assert kinds.count("outcome") == 4
    assert (kinds.count("slash"), kinds.count("claim"), kinds.count("policy")) == (1, 1, 1)
    lines = (await played.run("watch", "--once", "--json")).stdout.splitlines()
    assert len(lines) == len(kinds)
    assert all(re.fullmatch(r"0x[0-9a-f]{64}", json.loads(line)["tx"]) for line in lines)


async def test_watch_follows_and_says_a_contradiction_once() -> None:
    async with network() as net:
        watched = ChainWatch(net.of(ORCHESTRATOR))
        assert (await watched.look()).contradictions == []
        await play(net)
        assert len((await watched.look()).lines) == 6
        assert (await watched.look()).lines == []
        await contradict(net)
        (found,) = (await watched.look()).contradictions
        assert found.kind is Kind.SLOT_TWICE
        await net.pass_time(1)
        assert (await watched.look()).contradictions == []


@pytest.mark.parametrize(("finality", "expected"), [(0, [Kind.HISTORY_REWRITTEN]), (64, [])])
async def test_watch_says_what_a_reorganisation_took_back(
    finality: int, expected: list[Kind]
) -> None:
    async with network() as net:
        await play(net)
        watched = ChainWatch(net.of(ORCHESTRATOR), proof=ProofLevel.NONE, finality=finality)
        before = await net.rpc.call("evm_snapshot")
        submission = net.submission(HONEST, 5)
        await net.judge(submission, accepted(1, submission))
        await watched.look()
        await net.rpc.call("evm_revert", before)
        await net.pass_time(3)
        await net.pass_time(3)
        seen = await watched.look()
        (line,) = [line for line in seen.lines if line.what == "rewritten"]
        assert "OutcomesPosted" in line.text
        assert [found.kind for found in seen.contradictions] == expected
        assert 3 not in watched.ledger.batches
