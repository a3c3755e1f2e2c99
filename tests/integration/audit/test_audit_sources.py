"""An auditor's sources: endpoints that lie, chains that were rewritten, dumps that were altered."""

import contextlib
import copy
import gzip
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from chain_scenario import CHEATER, HONEST, OWNER, TOKEN, Scenario, accepted, network, play
from lying_rpc import Lie, endpoint, honest

from muster.app.anvil import Anvil
from muster.chain.abi import contract_abi
from muster.client.audit.contradictions import Kind, ProofLevel
from muster.client.audit.history import ChainHistory, HistorySource, read
from muster.client.audit.proving import header_hash, receipts_root
from muster.lab.endpoints.faults import Faults, PublicEndpoint
from muster.lab.endpoints.proxy import RpcProxy
from muster.protocol.encoding import hex0x
from muster.protocol.errors import ChainInconsistent, ConfigError, EncodingError, MusterError
from muster.protocol.ids import RunId

pytestmark = pytest.mark.asyncio(loop_scope="module")
CHECKS = 22
"""Checks of an audit."""
CLAIMED = next(e.topic for e in contract_abi("RewardEscrow").events if e.name == "RewardClaimed")


async def audited(
    net: Scenario,
    *rpcs: str,
    proof: ProofLevel = ProofLevel.BLOCKS,
    since: Path | None = None,
    dump_to: Path | None = None,
) -> ChainHistory:
    source = HistorySource(rpcs, net.deployment, proof=proof, since=since)
    return await read(source, dump_to=dump_to)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def played() -> AsyncIterator[Scenario]:
    """A chain with every kind of event, which is only read."""
    async with network(block_time_s=Anvil.STILL_S) as net:
        await play(net)
        yield net


def kinds(history: ChainHistory) -> set[Kind]:
    return {found.kind for check in history.about_source for found in check.contradictions}


def details(history: ChainHistory) -> str:
    return "; ".join(check.detail for check in history.about_source if not check.passed)


# --------------------------------------------------------------------- one endpoint


def doubled(log: dict[str, Any]) -> dict[str, Any]:
    """Return a claim log that pays twice as much: forged, and consistent with nothing else."""
    words = bytes.fromhex(log["data"][2:])
    amount = 2 * int.from_bytes(words[-32:], "big")
    return {**log, "data": "0x" + (words[:-32] + amount.to_bytes(32, "big")).hex()}


def changed_logs(_method: str, _params: list[Any], result: Any) -> Any:
    if _method == "eth_getLogs":
        return [doubled(log) if log["topics"][0] == CLAIMED else log for log in result]
    return result


def dropped_logs(method: str, _params: list[Any], result: Any) -> Any:
    """Leave out the first log of a block with several."""
    if method != "eth_getLogs":
        return result
    blocks = [log["blockNumber"] for log in result]
    at = next(i for i, number in enumerate(blocks) if blocks.count(number) > 1)
    return result[:at] + result[at + 1 :]


def changed_receipts(method: str, params: list[Any], result: Any) -> Any:
    """The same forgery in the receipts."""
    if method == "eth_getBlockReceipts":
        for receipt in result:
            receipt["logs"] = [
                doubled(log) if log["topics"][0] == CLAIMED else log for log in receipt["logs"]
            ]
    return changed_logs(method, params, result)


def changed_timestamps(method: str, _params: list[Any], result: Any) -> Any:
    """Another time, in the logs and in the headers alike."""
    if method == "eth_getLogs":
        return [{**log, "blockTimestamp": "0x1"} for log in result]
    if method == "eth_getBlockByNumber" and isinstance(result, dict):
        return {**result, "timestamp": "0x1"}
    return result


def changed_header(method: str, _params: list[Any], result: Any) -> Any:
    if method == "eth_getBlockByNumber" and isinstance(result, dict):
        return {**result, "receiptsRoot": "0x" + "11" * 32}
    return result


LIES: list[tuple[Lie, Kind, str]] = [
    (changed_logs, Kind.SOURCE_LOGS, "the endpoint shows what no receipt has"),
    (dropped_logs, Kind.SOURCE_LOGS, "the endpoint leaves out"),
    (changed_receipts, Kind.SOURCE_RECEIPTS, "the receipts hash to"),
    (changed_timestamps, Kind.SOURCE_HEADER, "the header hashes to"),
    (changed_header, Kind.SOURCE_HEADER, "the header hashes to"),
]


async def test_an_endpoint_that_lies_is_caught_by_the_hashes_of_its_own_blocks(
    played: Scenario,
) -> None:
    for lie, kind, words in LIES:
        async with endpoint(played.anvil.rpc_url, lie) as rpc:
            history = await audited(played, rpc)
            assert kinds(history) == {kind}, lie.__name__
            assert words in details(history)
            assert not history.report().passed


async def test_an_honest_endpoint_proves_its_events(played: Scenario) -> None:
    async with endpoint(played.anvil.rpc_url, honest) as rpc:
        for proof in ProofLevel:
            history = await audited(played, rpc, proof=proof)
            assert kinds(history) == set()
            assert history.report().passed


def without_a_block(number: str, **header: str) -> Lie:
    """All logs of one block are kept back, and its header is changed."""

    def lie(method: str, params: list[Any], result: Any) -> Any:
        if method == "eth_getLogs":
            return [log for log in result if log["blockNumber"] != number]
        if method == "eth_getBlockByNumber" and params[0] == number:
            return {**result, **header}
        return result

    return lie


async def test_a_block_that_is_left_out_whole_is_seen_when_the_chain_is_proven(
    played: Scenario,
) -> None:
    number = hex((await played.view()).payments[0].block_number)
    # The bloom filter of the block's header shows that logs are missing.
    async with endpoint(played.anvil.rpc_url, without_a_block(number)) as rpc:
        with pytest.raises(ChainInconsistent, match="left out"):
            await audited(played, rpc)
    empty = "0x" + "00" * 256
    async with endpoint(played.anvil.rpc_url, without_a_block(number, logsBloom=empty)) as rpc:
        # Each block alone is consistent: only a client that hashes every header can notice.
        assert kinds(await audited(played, rpc)) == set()
        history = await audited(played, rpc, proof=ProofLevel.CHAIN)
        assert kinds(history) == {Kind.SOURCE_HEADER}
        assert f"block {int(number, 16)}" in details(history)


async def test_what_a_filter_betrays_is_seen_in_a_long_chain() -> None:
    """A plain reader samples the bloom filters of a long chain; `--prove chain` checks all."""
    async with network() as net:
        await play(net)
        number = hex((await net.view()).payments[0].block_number)
        await net.rpc.call("anvil_mine", hex(100))
        async with endpoint(net.anvil.rpc_url, without_a_block(number)) as rpc:
            history = await audited(net, rpc, proof=ProofLevel.CHAIN)
            assert kinds(history) == {Kind.SOURCE_LOGS}
            assert "the endpoint leaves out log" in details(history)


async def test_a_block_that_follows_no_other_is_seen_when_the_chain_is_proven() -> None:
    async with network() as net:
        await play(net)
        await net.rpc.call("anvil_mine", hex(100))
        number = hex(await net.of(OWNER).block_number() - 50)
        lie = without_a_block(number, parentHash="0x" + "22" * 32)
        async with endpoint(net.anvil.rpc_url, lie) as rpc:
            assert kinds(await audited(net, rpc)) == set()
            history = await audited(net, rpc, proof=ProofLevel.CHAIN)
            assert kinds(history) == {Kind.SOURCE_CHAIN, Kind.SOURCE_HEADER}
            assert "it follows 0x2222" in details(history)


async def with_another_block(net: Scenario, number: str) -> Lie:
    """A block with a forged claim is shown with its receipts; a client that asks for every block
    since the deployment gets the true one.
    """
    header = await net.rpc.call("eth_getBlockByNumber", number, False)
    receipts = await net.rpc.call("eth_getBlockReceipts", number)
    changed_receipts("eth_getBlockReceipts", [], receipts)
    header["receiptsRoot"] = hex0x(receipts_root(receipts))
    header["hash"] = hex0x(header_hash(header))
    following = net.deployment.deploy_block

    def lie(method: str, params: list[Any], result: Any) -> Any:
        nonlocal following
        if method == "eth_getLogs":
            logs = changed_logs(method, params, result)
            moved = {"blockHash": header["hash"]}
            return [{**log, **moved} if log["blockNumber"] == number else log for log in logs]
        if method == "eth_getBlockReceipts" and params[0] == number:
            return receipts
        if method == "eth_getBlockByNumber":
            is_linking = params[0] == hex(following)
            following = following + 1 if is_linking else net.deployment.deploy_block
            return header if params[0] == number and not is_linking else result
        return result

    return lie


async def test_a_block_that_is_not_the_linked_one_is_seen_when_the_chain_is_proven() -> None:
    async with network(block_time_s=Anvil.STILL_S) as net:
        await play(net)
        number = hex((await net.view()).payments[0].block_number)
        # Of a long chain the reader looks at few headers.
        await net.rpc.call("anvil_mine", hex(100))
        async with endpoint(net.anvil.rpc_url, await with_another_block(net, number)) as rpc:
            assert kinds(await audited(net, rpc)) == set()
            history = await audited(net, rpc, proof=ProofLevel.CHAIN)
            assert kinds(history) == {Kind.SOURCE_CHAIN}
            assert f"there (block {int(number, 16)})" in details(history)


async def test_an_endpoint_without_receipts_is_refused_unless_it_is_believed() -> None:
    def refuse(method: str, _params: list[Any], result: Any) -> Any:
        return None if method == "eth_getBlockReceipts" else result

    async with network() as net, endpoint(net.anvil.rpc_url, refuse) as rpc:
        with pytest.raises(ConfigError, match="eth_getBlockReceipts") as refused:
            await audited(net, rpc)
        assert "another endpoint" in str(refused.value.hint)
        assert (await audited(net, rpc, proof=ProofLevel.NONE)).report().passed


# --------------------------------------------------------------- several endpoints


async def test_two_endpoints_of_different_chains_are_told_apart(played: Scenario) -> None:
    def elsewhere(method: str, _params: list[Any], result: Any) -> Any:
        if method == "eth_getBlockByNumber" and isinstance(result, dict):
            return {**result, "hash": "0x" + "33" * 32}
        return result

    async with endpoint(played.anvil.rpc_url, elsewhere) as other:
        history = await audited(played, played.anvil.rpc_url, other, proof=ProofLevel.NONE)
        assert kinds(history) == {Kind.SOURCE_DISAGREES}
        assert "says 0x" in details(history)


async def test_what_only_one_endpoint_shows_is_named(played: Scenario) -> None:
    async with endpoint(played.anvil.rpc_url, changed_logs) as liar:
        history = await audited(played, played.anvil.rpc_url, liar, proof=ProofLevel.NONE)
        assert kinds(history) == {Kind.SOURCE_DISAGREES}
        assert "only http://127.0.0.1" in details(history)


async def test_two_honest_endpoints_agree(played: Scenario) -> None:
    async with endpoint(played.anvil.rpc_url, honest) as other:
        history = await audited(played, played.anvil.rpc_url, other)
        assert history.report().passed
        assert sum("same history" in check.name for check in history.about_source) == 1


async def test_endpoints_that_limit_ranges_of_logs_agree() -> None:
    faults = Faults(rate=0, lost=0, late=0, lag=0, logless=0, pending=0, most_blocks=50)
    weather = PublicEndpoint(faults, 0)
    async with network(block_time_s=Anvil.STILL_S) as net, RpcProxy(net.anvil.rpc_url) as first:
        await play(net)
        await net.rpc.call("anvil_mine", hex(100))
        async with RpcProxy(net.anvil.rpc_url, weather) as other:
            history = await audited(net, first.url, other.url)
    assert history.report().passed
    assert weather.played["ranges refused"] > 0


# ------------------------------------------------------------------ reorganisations


async def one_more_batch(net: Scenario, index: int) -> None:
    submission = net.submission(HONEST, index)
    await net.judge(submission, accepted(1, submission))


async def test_history_that_was_rewritten_is_seen_by_who_kept_a_dump(tmp_path: Path) -> None:
    async with network(block_time_s=Anvil.STILL_S) as net:
        await play(net)
        before = await net.rpc.call("evm_snapshot")
        await one_more_batch(net, 7)
        dump = tmp_path / "before.dump.gz"
        await audited(net, net.anvil.rpc_url, dump_to=dump)
        await net.rpc.call("evm_revert", before)
        await net.pass_time(3)
        await one_more_batch(net, 8)
        history = await audited(net, net.anvil.rpc_url, since=dump)
        assert kinds(history) == {Kind.HISTORY_REWRITTEN}
        assert "gone with it: BatchCommitted (batch 3)" in details(history)
        assert "OutcomesPosted (batch 3)" in details(history)


async def test_history_that_only_grew_is_not_called_rewritten(tmp_path: Path) -> None:
    async with network() as net:
        await play(net)
        dump = tmp_path / "before.dump.gz"
        await audited(net, net.anvil.rpc_url, dump_to=dump)
        await one_more_batch(net, 8)
        history = await audited(net, net.anvil.rpc_url, since=dump)
        assert kinds(history) == set()


# ------------------------------------------------------------------------- dumps

Change = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]


def rewritten(source: Path, to: Path, change: Change) -> Path:
    with gzip.open(source, "rt") as file:
        lines = [json.loads(line) for line in file]
    with gzip.open(to, "wt") as file:
        file.writelines(json.dumps(line) + "\n" for line in change(copy.deepcopy(lines)))
    return to


def more_money(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for line in lines:
        logs = line.get("logs", [])
        line["logs"] = [doubled(log) if log["topics"][0] == CLAIMED else log for log in logs]
    return lines


def without_a_line(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return lines[:4] + lines[5:]


def cut_off(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return lines[:-1]


def of_version(version: int) -> Change:
    return lambda lines: [{**lines[0], "version": version}, *lines[1:]]


def not_a_block(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [lines[0], {"number": "x"}, *lines[2:]]


def moved_log(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    lines[1]["logs"] = lines[2]["logs"]
    return lines


@contextlib.asynccontextmanager
async def dumped(folder: Path) -> AsyncIterator[tuple[Scenario, Path]]:
    async with network(block_time_s=Anvil.STILL_S) as net:
        await play(net)
        path = folder / "run.dump.gz"
        await audited(net, net.anvil.rpc_url, dump_to=path)
        yield net, path


async def test_a_dump_says_years_later_what_the_chain_said(tmp_path: Path) -> None:
    async with dumped(tmp_path) as (net, path):
        live = (await audited(net, net.anvil.rpc_url)).report(RunId(1)).to_json()
    archived = (await read(HistorySource(dump=path))).report(RunId(1))
    assert archived.passed
    assert {**archived.to_json(), "checks": 0} == {**live, "checks": 0}


GOLDEN = Path(__file__).parents[1] / "data" / "dump-2.gz"
"""Output of a `muster audit dump` of format version 2 (2026-11-27), for the played chain."""


async def test_a_dump_of_an_older_program_is_read_and_its_altered_twin_refused(
    tmp_path: Path,
) -> None:
    golden = await read(HistorySource(dump=GOLDEN))
    report = golden.report(RunId(1))
    assert report.passed
    assert len(report.checks) == CHECKS
    [slash] = report.to_json()["slashes"]
    assert (slash["amount_wei"], slash["worker"]) == (str(25 * TOKEN), CHEATER.address)
    altered = rewritten(GOLDEN, tmp_path / "altered.gz", more_money)
    assert kinds(await read(HistorySource(dump=altered))) == {Kind.SOURCE_LOGS}
    for version in (1, 99):
        other = rewritten(GOLDEN, tmp_path / "other.gz", of_version(version))
        with pytest.raises(ConfigError, match=f"is of version {version}, not 2") as refused:
            await read(HistorySource(dump=other))
        assert "muster 0.1.0 reads it" in str(refused.value.hint)


async def test_an_altered_dump_is_caught(tmp_path: Path) -> None:
    async with dumped(tmp_path) as (_, path):
        pass
    altered = rewritten(path, tmp_path / "altered.gz", more_money)
    assert kinds(await read(HistorySource(dump=altered))) == {Kind.SOURCE_LOGS}
    for change, words in (
        (without_a_line, "blocks, "),
        (cut_off, "cut off"),
        (of_version(99), "version 99"),
        (not_a_block, "malformed"),
        (moved_log, "under block"),
    ):
        twin = rewritten(path, tmp_path / "twin.gz", change)
        with pytest.raises(MusterError, match=words):
            await read(HistorySource(dump=twin))
    (tmp_path / "half.gz").write_bytes(path.read_bytes()[:-100])
    with pytest.raises(EncodingError, match="damaged"):
        await read(HistorySource(dump=tmp_path / "half.gz"))
    (tmp_path / "none.gz").write_bytes(b"no gzip")
    with pytest.raises(ConfigError, match="cannot read"):
        await read(HistorySource(dump=tmp_path / "none.gz"))


async def test_a_dump_without_proofs_says_so(tmp_path: Path) -> None:
    async with network() as net:
        await play(net)
        dump, url = tmp_path / "plain.gz", net.anvil.rpc_url
        count = (await audited(net, url, proof=ProofLevel.NONE, dump_to=dump)).dumped
        assert count > 0
    (check,) = (await read(HistorySource(dump=dump))).about_source
    assert check.passed
    assert check.detail == f"0 blocks proven, {count} as the dump has them"
