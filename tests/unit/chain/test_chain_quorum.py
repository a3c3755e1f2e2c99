"""Several endpoints: the majority decides, liars are named and left, laggards are not."""

import asyncio
import copy
import json
from typing import Any

import pytest
from chain_fakes import DEPLOYMENT, FakeNode, address, deposit, owners

from muster.chain import Deployment, EventReader
from muster.chain.providers import Post
from muster.chain.quorum import QuorumRpc, open_rpc
from muster.chain.rpc import Rpc
from muster.protocol.errors import ChainInconsistent, ChainUnreachable, ConfigError, RpcError

PLACE = {
    **{"removed": False},
    **dict.fromkeys(("blockNumber", "blockHash", "logIndex", "transactionHash"), "0x1"),
}
"""Members of a log that say where it is."""


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


async def test_liar_that_does_not_say_how_far_it_is_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("muster.chain.quorum._GRACE_S", 0.0)
    nodes = Nodes(3)
    answering(nodes[1], "eth_getLogs", [])

    async def post(body: bytes) -> bytes:
        if b"eth_blockNumber" in body:
            await asyncio.Event().wait()
        return await nodes[1](body)

    posts: list[Post] = [nodes[0], post, nodes[2]]
    nodes.rpc = QuorumRpc([Rpc(f"http://node{i}", post=post) for i, post in enumerate(posts)])
    began = asyncio.get_running_loop().time()
    assert await nodes.owners() == [1, 2, 3, 4]
    assert asyncio.get_running_loop().time() - began < 5.0


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


@pytest.mark.parametrize("hostile", [0, 1, 2])
@pytest.mark.parametrize("gas", [21_000, 30_000_000])
async def test_gas_is_the_middle_estimate(hostile: int, gas: int) -> None:
    nodes = Nodes(3)
    for node, estimate in zip(nodes.all, (100_000, 100_001, 100_002), strict=True):
        answering(node, "eth_estimateGas", hex(estimate))
    answering(nodes[hostile], "eth_estimateGas", hex(gas))
    assert 100_000 <= int(await nodes.rpc.call("eth_estimateGas", {}, "pending"), 16) <= 100_002


@pytest.mark.parametrize("hostile", [0, 1, 2])
@pytest.mark.parametrize("lie", ["0x5208", RpcError("busy", code=-32005)])
async def test_what_most_refuse_is_refused(hostile: int, lie: Any) -> None:
    nodes = Nodes(3)
    for node in nodes.all:
        answering(node, "eth_estimateGas", RpcError("reverted", code=3, data=b"\1\2\3\4"))
    answering(nodes[hostile], "eth_estimateGas", lie)
    with pytest.raises(RpcError) as caught:
        await nodes.rpc.call("eth_estimateGas", {}, "pending")
    assert caught.value.data == b"\1\2\3\4"


async def test_of_two_estimates_the_higher_counts_whoever_else_refuses() -> None:
    nodes = Nodes(3)
    answering(nodes[0], "eth_estimateGas", RpcError("reverted", code=3))
    answering(nodes[1], "eth_estimateGas", hex(21_000))
    answering(nodes[2], "eth_estimateGas", hex(100_000))
    assert int(await nodes.rpc.call("eth_estimateGas", {}, "pending"), 16) == 100_000


async def test_tip_that_only_one_names_is_not_paid() -> None:
    nodes = Nodes(3)
    answering(nodes[0], "eth_maxPriorityFeePerGas", hex(1000 * 10**9))
    with pytest.raises(RpcError, match="method not found"):
        await nodes.rpc.call("eth_maxPriorityFeePerGas")


# ------------------------------------------------------- lies beside a right hash


@pytest.mark.parametrize("hostile", [0, 1, 2])
@pytest.mark.parametrize(
    ("name", "lie"),
    [
        ("baseFeePerGas", hex(10**12)),
        ("baseFeePerGas", "0x0"),
        ("baseFeePerGas", "much"),
        ("logsBloom", "0x" + "00" * 256),
        ("number", "0x99"),
        ("number", {}),
    ],
)
async def test_block_that_is_changed_beside_its_hash_is_not_believed(
    hostile: int, name: str, lie: Any, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = Nodes(3)
    true = await nodes.rpc.call("eth_getBlockByNumber", "latest", False)
    answering(nodes[hostile], "eth_getBlockByNumber", true | {name: lie})
    assert await nodes.rpc.call("eth_getBlockByNumber", "latest", False) == true
    assert [record.endpoint for record in caplog.records] == [f"http://node{hostile}/…"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("nonsense", [None, "much", {}, [], 7])
async def test_nonsense_of_one_stops_nobody(nonsense: Any) -> None:
    nodes = Nodes(3)
    for method in ("eth_blockNumber", "eth_getBlockByNumber", "eth_getLogs", "eth_estimateGas"):
        answering(nodes[0], method, nonsense)
    assert await nodes.owners() == [1, 2, 3, 4]
    assert int(await nodes.rpc.call("eth_blockNumber"), 16) == 4


@pytest.mark.parametrize("member", ["", "blockTimestamp", "logs", "more"])
@pytest.mark.parametrize("depth", range(800, 1000, 10))
async def test_answer_that_is_nested_too_deep_to_compare_stops_nobody(
    member: str, depth: int
) -> None:
    nodes, query = Nodes(3), {"fromBlock": "0x1", "toBlock": "0x4", "address": [address(1)]}
    for node in nodes.all:
        answering(node, "eth_getLogs", [{**PLACE, **deposit(1), "blockTimestamp": "0x1"}])

    async def post(body: bytes) -> bytes:
        deep = b"[" * depth + b"]" * depth
        if not member:
            return b'{"id": %d, "result": %b}' % (json.loads(body)["id"], deep)
        more = b'"0x1", "%b": %b}' % (member.encode(), deep)
        return (await nodes[0](body)).replace(b'"0x1"}', more)

    posts: list[Post] = [post, *nodes.all[1:]]
    rpc = QuorumRpc([Rpc(f"http://node{i}", post=post) for i, post in enumerate(posts)])

    async def call_below(frames: int) -> Any:
        if frames:
            return await call_below(frames - 1)
        return await rpc.call("eth_getLogs", query)

    (log,) = await call_below(60)
    assert (log["data"], log["blockTimestamp"]) == (deposit(1)["data"], "0x1")


@pytest.mark.parametrize("hostile", [0, 1, 2])
@pytest.mark.parametrize("lie", [{"blockTimestamp": "0x7"}, {"blockNumber": "0x3"}])
async def test_logs_that_are_changed_beside_their_hash_are_not_believed(
    hostile: int, lie: dict[str, str]
) -> None:
    nodes = Nodes(3)
    query = {"fromBlock": "0x1", "toBlock": "0x4", "address": [deposit(1)["address"]]}
    true = await nodes.rpc.call("eth_getLogs", query)
    answering(nodes[hostile], "eth_getLogs", [log | lie for log in true])
    assert await nodes.rpc.call("eth_getLogs", query) == true


@pytest.mark.parametrize("answering_times", [[], [0], [0, 1], [0, 1, 2]])
async def test_times_of_logs_count_where_most_give_them(
    answering_times: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    nodes = Nodes(3)
    for number, node in enumerate(nodes.all):
        node.timed_logs = number in answering_times
    query = {"fromBlock": "0x1", "toBlock": "0x4", "address": [deposit(1)["address"]]}
    logs = await nodes.rpc.call("eth_getLogs", query)
    assert {"blockTimestamp" in log for log in logs} == {len(answering_times) >= 2}
    assert await nodes.owners() == [1, 2, 3, 4]
    assert caplog.text == ""


@pytest.mark.parametrize("hostile", [0, 1, 2])
@pytest.mark.parametrize(
    "lie",
    [
        {"gasUsed": None},
        {"gasUsed": "0x9"},
        {"blockNumber": "0x9"},
        {"effectiveGasPrice": "much"},
        {"effectiveGasPrice": hex(10**15)},
        {"l1Fee": hex(10**18)},
    ],
)
async def test_receipt_that_is_changed_beside_its_hash_is_not_believed(
    hostile: int, lie: dict[str, Any]
) -> None:
    nodes = Nodes(3)
    true = dict.fromkeys(("transactionHash", "blockHash", "blockNumber"), "0x1")
    true |= dict.fromkeys(("status", "gasUsed", "effectiveGasPrice"), "0x1")
    receipt: dict[str, Any] = {**true, "logs": []}
    for node in nodes.all:
        answering(node, "eth_getTransactionReceipt", receipt)
    answering(nodes[hostile], "eth_getTransactionReceipt", receipt | lie)
    assert await nodes.rpc.call("eth_getTransactionReceipt", "0x1") == receipt


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
