"""Several endpoints: the majority decides, liars are named and left, laggards are not."""

import asyncio
import copy
from typing import Any

import pytest
from chain_fakes import DEPLOYMENT, FakeNode, address, deposit, owners

from muster.chain import Deployment, EventReader
from muster.chain.quorum import QuorumRpc, open_rpc
from muster.chain.rpc import Rpc
from muster.protocol.errors import ChainInconsistent, ChainUnreachable, ConfigError, RpcError


class Nodes:
    """Endpoints that know the same chain, each with its own faults."""

    def __init__(self, count: int) -> None:
        self.all = [FakeNode() for _ in range(count)]
        self.rpc: Rpc = QuorumRpc(
            [Rpc(f"http://node{i}/key", post=node) for i, node in enumerate(self.all)]
        )
        self.deployment: Deployment = DEPLOYMENT
        self.log_file = None
        for owner in range(1, 5):
            self.mine(deposit(owner))

    def __getitem__(self, index: int) -> FakeNode:
        return self.all[index]

    def mine(self, *logs: dict[str, Any]) -> None:
        for node in self.all:
            node.mine(*copy.deepcopy(logs))

    async def owners(self) -> list[int]:
        return owners((await EventReader(self).poll()).events)


def silent(node: FakeNode) -> None:
    """Stop a node from answering."""

    def fail(*_: Any) -> Any:
        raise ConnectionAbortedError

    node.methods = dict.fromkeys(node.methods, fail)


def answering(node: FakeNode, method: str, result: Any) -> None:
    def answer(*_: Any) -> Any:
        if isinstance(result, Exception):
            raise result
        return result

    node.methods[method] = answer


async def test_equal_answers_are_believed(caplog: pytest.LogCaptureFixture) -> None:
    assert await Nodes(3).owners() == [1, 2, 3, 4]
    assert caplog.text == ""


# ------------------------------------------------------------------------------- lies


async def test_one_that_leaves_logs_out_is_named_and_left(caplog: pytest.LogCaptureFixture) -> None:
    nodes = Nodes(3)
    answering(nodes[1], "eth_getLogs", [])
    assert await nodes.owners() == [1, 2, 3, 4]
    (record,) = caplog.records
    assert (record.endpoint, record.method) == ("http://node1/…", "eth_getLogs")  # type: ignore[attr-defined]
    nodes[1].calls.clear()
    await nodes.owners()
    assert nodes[1].calls == []


async def test_one_on_another_chain_is_named_and_left(caplog: pytest.LogCaptureFixture) -> None:
    nodes = Nodes(3)
    answering(nodes[2], "eth_chainId", "0x1")
    assert int(await nodes.rpc.call("eth_chainId"), 16) == DEPLOYMENT.chain_id
    assert [record.endpoint for record in caplog.records] == ["http://node2/…"]  # type: ignore[attr-defined]


async def test_two_that_contradict_each_other_are_both_named() -> None:
    nodes = Nodes(2)
    answering(nodes[1], "eth_getLogs", [])
    with pytest.raises(ChainInconsistent, match=r"http://node0/… and http://node1/… contradict"):
        await nodes.owners()


async def test_block_that_only_one_has_is_no_head() -> None:
    nodes = Nodes(3)
    nodes[0].mine(deposit(9))
    nodes[0].mine(deposit(10))
    assert await nodes.owners() == [1, 2, 3, 4]
    nodes[1].mine(deposit(9))
    assert await nodes.owners() == [1, 2, 3, 4, 9]


async def test_fork_that_one_is_on_is_not_followed(caplog: pytest.LogCaptureFixture) -> None:
    nodes = Nodes(3)
    nodes[1].reorganise(2)
    nodes[1].mine(deposit(21))
    nodes[1].mine(deposit(22))
    assert await nodes.owners() == [1, 2, 3, 4]
    assert {record.endpoint for record in caplog.records} == {"http://node1/…"}  # type: ignore[attr-defined]


async def test_nonce_is_the_middle_one() -> None:
    nodes = Nodes(3)
    for node, count in zip(nodes.all, ("0x7", "0x5", "0x3e8"), strict=True):
        answering(node, "eth_getTransactionCount", count)
    assert await nodes.rpc.call("eth_getTransactionCount", address(1), "pending") == "0x7"


@pytest.mark.parametrize("method", ["eth_maxPriorityFeePerGas", "eth_gasPrice"])
@pytest.mark.parametrize("hostile", [0, 1, 2])
async def test_fees_are_the_middle_ones(method: str, hostile: int) -> None:
    nodes = Nodes(3)
    for node, wei in zip(nodes.all, (9, 10, 11), strict=True):
        answering(node, method, hex(wei))
    answering(nodes[hostile], method, hex(1000 * 10**9))
    assert int(await nodes.rpc.call(method), 16) in (10, 11)


@pytest.mark.parametrize("method", ["eth_maxPriorityFeePerGas", "eth_getTransactionCount"])
@pytest.mark.parametrize("nonsense", [None, "much", "0x", {}, "0x" + "f" * 65])
@pytest.mark.parametrize("hostile", [0, 2])
async def test_answer_that_is_no_number_counts_for_nothing(
    method: str, nonsense: Any, hostile: int
) -> None:
    nodes = Nodes(3)
    for node in nodes.all:
        answering(node, method, "0x7")
    answering(nodes[hostile], method, nonsense)
    assert await nodes.rpc.call(method, address(1), "pending") == "0x7"
    for node in nodes.all:
        answering(node, method, nonsense)
    assert await nodes.rpc.call(method, address(1), "pending") == nonsense


async def test_of_two_fees_the_lower_counts_and_one_suffices() -> None:
    nodes = Nodes(2)
    answering(nodes[0], "eth_maxPriorityFeePerGas", hex(1000 * 10**9))
    answering(nodes[1], "eth_maxPriorityFeePerGas", "0x9")
    assert await nodes.rpc.call("eth_maxPriorityFeePerGas") == "0x9"
    answering(nodes[1], "eth_maxPriorityFeePerGas", RpcError("no such method", code=-32601))
    assert int(await nodes.rpc.call("eth_maxPriorityFeePerGas"), 16) == 1000 * 10**9


# -------------------------------------------------------------------------------- lag


async def test_one_that_lags_is_neither_waited_for_nor_blamed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    nodes = Nodes(3)
    del nodes[2].blocks[3:]
    assert await nodes.owners() == [1, 2, 3, 4]
    assert caplog.text == ""


async def test_of_two_the_one_that_lags_decides_how_far_is_read() -> None:
    nodes = Nodes(2)
    del nodes[1].blocks[3:]
    assert await nodes.owners() == [1, 2]


async def test_receipt_that_most_have_counts() -> None:
    nodes = Nodes(3)
    receipt = {
        **dict.fromkeys(("transactionHash", "blockHash", "status", "blockNumber"), "0x1"),
        "logs": [],
    }
    answering(nodes[0], "eth_getTransactionReceipt", receipt)
    answering(nodes[1], "eth_getTransactionReceipt", None)
    answering(nodes[2], "eth_getTransactionReceipt", None)
    assert await nodes.rpc.call("eth_getTransactionReceipt", "0x1") is None
    answering(nodes[1], "eth_getTransactionReceipt", dict(receipt))
    assert await nodes.rpc.call("eth_getTransactionReceipt", "0x1") == receipt


async def test_views_at_different_heads_are_compared_at_one_block() -> None:
    nodes = Nodes(3)
    del nodes[2].blocks[4:]
    for number, node in enumerate(nodes.all):
        node.methods["eth_call"] = lambda _call, block, number=number: (
            f"0x{number:02x}" if block == "latest" else f"0x{int(block, 16):02x}"
        )
    assert await nodes.rpc.call("eth_call", {}, "latest") == "0x04"


# -------------------------------------------------------------------------- outages


@pytest.mark.parametrize(("count", "dead"), [(2, 1), (3, 1), (5, 2)])
async def test_goes_on_while_enough_answer(count: int, dead: int) -> None:
    nodes = Nodes(count)
    for node in nodes.all[:dead]:
        silent(node)
    assert await nodes.owners() == [1, 2, 3, 4]
    # Dead endpoints are not asked each time.
    for node in nodes.all[:dead]:
        node.calls.clear()
    assert await nodes.owners() == [1, 2, 3, 4]
    assert all(node.calls == [] for node in nodes.all[:dead])


@pytest.mark.parametrize(("count", "dead"), [(2, 2), (3, 2), (5, 3)])
async def test_stops_when_too_few_answer(count: int, dead: int) -> None:
    nodes = Nodes(count)
    for node in nodes.all[:dead]:
        silent(node)
    with pytest.raises(ChainUnreachable, match=rf"{count - dead} of {count} RPC endpoints answer"):
        await nodes.owners()


async def test_one_that_comes_back_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muster.chain.quorum._ASIDE_S", (0.0, 0.0))
    nodes = Nodes(2)
    nodes[0].failures = [OSError()]
    assert await nodes.owners() == [1, 2, 3, 4]
    nodes[0].calls.clear()
    assert await nodes.owners() == [1, 2, 3, 4]
    assert nodes[0].calls != []


async def test_range_that_one_refuses_is_made_smaller() -> None:
    nodes = Nodes(2)
    nodes[1].max_range = 2
    assert await nodes.owners() == [1, 2, 3, 4]


# ----------------------------------------------------------------------- transactions

KNOWN, USED, FULL, NO_METHOD = (
    RpcError(message, code=code)
    for message, code in {
        "already known": -32000,
        "nonce too low": -32000,
        "txpool is full": -32000,
        "method not available": -32601,
    }.items()
)


def answering_sends(*results: Any) -> Nodes:
    """Return endpoints of which each gives one of these answers to a transaction."""
    nodes = Nodes(len(results))
    for node, result in zip(nodes.all, results, strict=True):
        answering(node, "eth_sendRawTransaction", result)
    return nodes


def slow(nodes: Nodes, index: int, turns: int, *, timeout_s: float = 10.0) -> None:
    """Let an endpoint answer some turns of the event loop after the others."""

    async def post(body: bytes) -> bytes:
        for _ in range(turns):
            await asyncio.sleep(0)
        return await nodes[index](body)

    rpcs = [Rpc(f"http://node{i}/key", post=node) for i, node in enumerate(nodes.all)]
    rpcs[index] = Rpc(f"http://node{index}/key", post=post, timeout_s=timeout_s)
    nodes.rpc = QuorumRpc(rpcs)


async def test_transaction_goes_to_all_and_one_that_takes_it_suffices() -> None:
    nodes = answering_sends(KNOWN, "0xaa", USED)
    assert await nodes.rpc.call("eth_sendRawTransaction", "0x02") == "0xaa"
    assert all("eth_sendRawTransaction" in node.calls for node in nodes.all)


@pytest.mark.parametrize("results", [(FULL, "0xaa", NO_METHOD), (FULL, "0xaa")])
async def test_fast_refusals_do_not_hide_a_slow_acceptance(
    monkeypatch: pytest.MonkeyPatch, results: tuple[Any, ...]
) -> None:
    monkeypatch.setattr("muster.chain.quorum._GRACE_S", 0.0)
    nodes = answering_sends(*results)
    slow(nodes, 1, turns=200)
    assert await nodes.rpc.call("eth_sendRawTransaction", "0x02") == "0xaa"


@pytest.mark.parametrize("results", [(FULL, "0xaa", NO_METHOD), (FULL, "0xaa")])
async def test_refused_transaction_may_have_been_taken_by_who_is_silent(
    results: tuple[Any, ...],
) -> None:
    nodes = answering_sends(*results)
    silent(nodes[1])
    with pytest.raises(ChainUnreachable, match=f"1 of {len(results)}|2 of {len(results)}"):
        await nodes.rpc.call("eth_sendRawTransaction", "0x02")


async def test_transaction_that_one_took_waits_for_nobody_who_is_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("muster.chain.quorum._GRACE_S", 0.0)
    nodes = answering_sends("0xaa", FULL, "0xaa")
    slow(nodes, 2, turns=10**9)
    assert await nodes.rpc.call("eth_sendRawTransaction", "0x02") == "0xaa"


@pytest.mark.parametrize(
    ("results", "told"),
    [
        ((FULL, KNOWN, KNOWN), "already known"),
        ((FULL, USED, KNOWN), "already known"),
        ((FULL, NO_METHOD, USED), "nonce too low"),
        ((FULL, FULL, FULL), "txpool is full"),
    ],
)
async def test_refusal_that_leaves_most_open_is_told(results: tuple[Any, ...], told: str) -> None:
    with pytest.raises(RpcError, match=told):
        await answering_sends(*results).rpc.call("eth_sendRawTransaction", "0x02")


def test_urls_are_given_in_any_way() -> None:
    assert not isinstance(open_rpc("http://a"), QuorumRpc)
    assert not isinstance(open_rpc("http://a, http://a"), QuorumRpc)
    for urls in ("http://a,http://b", "http://a http://b", ["http://a", "http://b"]):
        assert open_rpc(urls).masked_url == "http://a, http://b"
    with pytest.raises(ConfigError, match="no RPC endpoint"):
        open_rpc("http://a,ftp://b")
