"""An endpoint that contradicts itself, lags, or answers nonsense: outcomes, no crash."""

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from chain_fakes import FakeNode, address, deposit, encode_log
from hypothesis import example, given, strategies as st
from sender_fakes import TO, Pool

from muster.chain import BlockId, ChainView, Event, EventReader, apply_poll
from muster.chain.abi import EventTable
from muster.chain.log_checks import MOST_HEADERS, LogChecks, LogsDisagree
from muster.chain.reader import LAG_POLLS
from muster.chain.rpc import Rpc
from muster.protocol.errors import ChainError, ChainInconsistent, ChainUnreachable, WrongChain
from muster.protocol.ids import Hash32


def transfer() -> dict[str, Any]:
    return encode_log("MusterToken", "Transfer", {"from": address(1), "to": TO, "value": 1})


def chain_of(blocks: int) -> FakeNode:
    node = FakeNode()
    for owner in range(1, blocks + 1):
        node.mine(deposit(owner))
    return node


def answering(node: FakeNode, method: str, change: Callable[[Any], Any]) -> None:
    """Let a node change its answers to a method."""
    true = node.methods[method]
    node.methods[method] = lambda *params: change(true(*params))


def with_logs(change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> Callable[[Any], Any]:
    return lambda logs: [log for log in map(change, logs) if log is not None]


OTHER = "0x" + "66" * 32
LIES: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any] | None], str]] = {
    "no logs": (lambda _: None, "logs of block 1 were left out"),
    "a log less": (lambda log: None if log["blockNumber"] == "0x3" else log, "logs of block 3"),
    "another block hash": (lambda log: log | {"blockHash": OTHER}, "of another block"),
    "two block hashes": (
        lambda log: log | ({"blockHash": OTHER} if log["logIndex"] == "0x1" else {}),
        "block 5 has two hashes",
    ),
    "another time": (lambda log: log | {"blockTimestamp": "0x7"}, "another time"),
    "another block": (lambda log: log | {"blockNumber": "0x63"}, "asked for blocks 1 to 5"),
}


@pytest.mark.parametrize("lie", LIES)
async def test_logs_that_do_not_fit_their_headers_are_not_taken(lie: str) -> None:
    node, (change, message) = chain_of(4), LIES[lie]
    node.mine(deposit(5), deposit(6))
    truth = node.methods["eth_getLogs"]
    answering(node, "eth_getLogs", with_logs(change))
    reader = EventReader(node)
    with pytest.raises(ChainInconsistent, match=message):
        await reader.poll()
    node.methods["eth_getLogs"] = truth
    assert len((await reader.poll()).events) == 6


async def test_logs_of_others_are_not_missed() -> None:
    node = chain_of(2)
    node.mine(transfer())
    answering(node, "eth_getLogs", with_logs(lambda log: log))
    assert len((await EventReader(node).poll()).events) == 2


async def test_foreign_logs_among_ours_are_no_events() -> None:
    node = chain_of(2)
    answering(
        node,
        "eth_getLogs",
        lambda logs: [*logs, logs[0] | {"address": address(99), "logIndex": "0x5"}],
    )
    assert len((await EventReader(node).poll()).events) == 2


async def test_filter_that_names_us_by_coincidence_is_settled_by_the_receipts() -> None:
    node = chain_of(2)
    full = "0x" + "ff" * 256
    answering(node, "eth_getBlockByNumber", lambda b: b and b | {"logsBloom": full})
    node.mine(transfer())
    assert len((await EventReader(node).poll()).events) == 2
    assert "eth_getBlockReceipts" in node.calls


async def test_filter_is_no_proof_when_the_endpoint_has_no_receipts() -> None:
    node = chain_of(2)
    del node.methods["eth_getBlockReceipts"]
    answering(node, "eth_getLogs", with_logs(lambda _: None))
    assert (await EventReader(node).poll()).events == []


async def test_header_that_does_not_follow_its_parent_is_noticed() -> None:
    node = chain_of(4)
    answering(
        node, "eth_getBlockByNumber", lambda b: b and b | {"parentHash": OTHER, "hash": b["hash"]}
    )
    with pytest.raises(ChainInconsistent, match="block 2 does not follow block 1"):
        await EventReader(node).poll()


async def test_long_history_is_checked_at_some_blocks_and_at_beacons(node: FakeNode) -> None:
    args = {"run_id": 1, "version": 0, "manifest_root": Hash32(b"\1" * 32)}
    node.mine(encode_log("RunRegistry", "CheckpointPublished", args))
    for owner in range(1, 3 * MOST_HEADERS):
        node.mine(deposit(owner))
    await EventReader(node).poll()
    assert node.calls.count("eth_getBlockByNumber") <= MOST_HEADERS + 2
    forged = with_logs(
        lambda log: log | ({"blockHash": OTHER} if log["blockNumber"] == "0x1" else {})
    )
    answering(node, "eth_getLogs", forged)
    with pytest.raises(ChainInconsistent, match="logs of block 1 are of another block"):
        await EventReader(node).poll()


def without(is_hidden: Callable[[int, int], bool]) -> Callable[[Any], Any]:
    """Hide logs by their block and their index in it."""
    return with_logs(
        lambda log: (
            None if is_hidden(int(log["blockNumber"], 16), int(log["logIndex"], 16)) else log
        )
    )


HIDDEN: dict[str, Callable[[int, int], bool]] = {
    "all": lambda _block, _index: True,
    "those of one block": lambda block, _index: block == 77,
    "one of each block": lambda _block, index: index == 1,
}


@pytest.mark.parametrize("blocks", [8, 500])
@pytest.mark.parametrize("hidden", [*HIDDEN, "none"])
async def test_hidden_logs_are_noticed_in_a_history(hidden: str, blocks: int) -> None:
    node = FakeNode()
    for owner in range(blocks):
        node.mine(deposit(owner), deposit(owner + 1))
    answering(node, "eth_getLogs", without(HIDDEN.get(hidden, lambda _block, _index: False)))
    reader = EventReader(node)
    if hidden == "none" or (hidden == "those of one block" and blocks < 77):
        assert len((await reader.poll()).events) == 2 * blocks
        return
    with pytest.raises(ChainInconsistent, match="were left out or changed"):
        await reader.poll()


async def test_logs_that_differ_from_their_receipts_are_not_taken() -> None:
    node = chain_of(8)
    more = deposit(1, amount=9)["data"]
    answering(node, "eth_getLogs", with_logs(lambda log: log | {"data": more}))
    with pytest.raises(ChainInconsistent, match="were left out or changed"):
        await EventReader(node).poll()


@pytest.mark.parametrize("answer", ["method not found", "null"])
async def test_hidden_log_passes_when_the_endpoint_has_no_receipts(answer: str) -> None:
    node = FakeNode()
    for owner in range(8):
        node.mine(deposit(owner), deposit(owner + 1))
    answering(node, "eth_getLogs", without(HIDDEN["one of each block"]))
    if answer == "null":
        node.methods["eth_getBlockReceipts"] = lambda _number: None
    else:
        del node.methods["eth_getBlockReceipts"]
    assert len((await EventReader(node).poll()).events) == 8


async def test_reader_whose_caller_proves_the_logs_leaves_nothing_to_chance() -> None:
    node = FakeNode()
    for owner in range(500):
        node.mine(*([deposit(owner), deposit(owner + 1)] if owner < 400 else []))
    answering(node, "eth_getLogs", without(HIDDEN["one of each block"]))
    reader = EventReader(node, on_logs=lambda _logs: None)
    assert len((await reader.poll()).events) == 400
    assert "eth_getBlockReceipts" not in node.calls


async def test_newest_block_is_always_in_the_sample() -> None:
    node = FakeNode()
    for owner in range(5000):
        node.mine(*([deposit(owner)] if owner == 4999 else []))
    answering(node, "eth_getLogs", with_logs(lambda _: None))
    with pytest.raises(ChainInconsistent, match="logs of block 5000 were left out"):
        await EventReader(node).poll()


async def test_refused_block_is_looked_at_again() -> None:
    node = FakeNode()
    for owner in range(1000):
        node.mine(*([deposit(owner)] if owner < 990 else []))
        node.mine()
    events, blocks = (await EventReader(node).poll()).events, range(1, 2001)
    checks = LogChecks(node.rpc, EventTable(node.deployment.contracts))
    with pytest.raises(LogsDisagree) as first:
        await checks.check(blocks, blocks, [])
    block = first.value.block
    for _ in range(2):
        with pytest.raises(LogsDisagree, match=f"logs of block {block} were left out"):
            await checks.check(blocks, blocks, [e for e in events if e.block_number != block])
    await checks.check(blocks, blocks, events)


@pytest.mark.parametrize("longest", [10**6, 125])
async def test_sample_of_a_history_is_bounded_by_poll(longest: int) -> None:
    node = FakeNode()
    for _ in range(500):
        node.mine()
    node.max_range = longest
    full = "0x" + "ff" * 256
    answering(node, "eth_getBlockByNumber", lambda b: b and b | {"logsBloom": full})
    await EventReader(node).poll()
    # 40 at random, 8 newest; each of the four ranges may round up.
    assert 40 <= node.calls.count("eth_getBlockReceipts") <= 40 + 8 + 4


async def test_endpoint_that_lags_is_waited_for_and_nothing_is_void() -> None:
    node, lagging = chain_of(6), chain_of(6)
    lagging.blocks[4:] = []
    reader, view = EventReader(node), ChainView()
    apply_poll(view, await reader.poll())
    methods = node.methods
    for _ in range(LAG_POLLS):
        node.methods = lagging.methods
        with pytest.raises(ChainInconsistent, match="at block 3, it was at 6 before"):
            await reader.poll()
    node.methods = methods
    node.mine(deposit(7))
    poll = await reader.poll()
    assert (poll.rewound_to, len(poll.events)) == (None, 1)


async def test_endpoint_that_answers_for_another_chain_takes_nothing_back() -> None:
    node = chain_of(3)
    reader = EventReader(node)
    await reader.poll()
    other = FakeNode()
    for owner in range(9):
        other.mine(deposit(owner + 100))
    truth, node.methods = node.methods, other.methods | {"eth_chainId": lambda: "0x1"}
    with pytest.raises(WrongChain, match="answers for chain 1, before it was chain 31337"):
        await reader.poll()
    node.methods = truth
    assert (await reader.poll()).rewound_to is None


# --------------------------------------------------------------------- anything at all

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["0x", "0x0", "0xzz", OTHER, "0x" + "f" * 70, "-0x1"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(
            ["number", "hash", "timestamp", "logs", "topics", "data", "address", "blockHash",
             "blockNumber", "logIndex", "status", "transactionHash", "baseFeePerGas", "parentHash",
             "logsBloom", "removed", "gasUsed", "effectiveGasPrice", "l1Fee"]
        ),
        inner,
        max_size=5,
    ),
    max_leaves=6,
)  # fmt: skip
READ = ("eth_getBlockByNumber", "eth_getLogs", "eth_getBlockByHash", "eth_getBlockReceipts",
        "eth_chainId")  # fmt: skip
SENT = ("eth_estimateGas", "eth_getTransactionCount", "eth_getTransactionReceipt",
        "eth_getBlockByNumber", "eth_maxPriorityFeePerGas", "eth_sendRawTransaction",
        "eth_getTransactionByHash", "eth_call")  # fmt: skip


@given(method=st.sampled_from(READ), garbage=JSON, nth=st.integers(0, 3), timed=st.booleans())
async def test_reader_lives_through_any_answer(
    method: str, garbage: Any, nth: int, timed: bool
) -> None:
    node = chain_of(3)
    node.timed_logs = timed
    reader, asked = EventReader(node, known=[BlockId(1, Hash32(bytes(32)))]), [0]

    def change(result: Any) -> Any:
        asked[0] += 1
        return garbage if asked[0] > nth else result

    answering(node, method, change)
    try:
        poll = await reader.poll()
    except ChainError:
        return
    assert all(isinstance(event, Event) for event in poll.events)


MEMBERS = ("address", "topics", "data", "blockNumber", "blockHash", "blockTimestamp", "logIndex",
           "transactionHash", "removed")  # fmt: skip


@given(name=st.sampled_from(MEMBERS), garbage=JSON)
async def test_reader_lives_through_any_member_of_a_log(name: str, garbage: Any) -> None:
    node = chain_of(2)
    answering(node, "eth_getLogs", with_logs(lambda log: log | {name: garbage}))
    with suppress(ChainError):
        await EventReader(node).poll()


@given(method=st.sampled_from(SENT), garbage=JSON, nth=st.integers(0, 2))
@example("eth_getTransactionCount", hex(1 << 63), 0)
@example("eth_getTransactionCount", hex(1 << 63), 1)
async def test_sender_lives_through_any_answer(method: str, garbage: Any, nth: int) -> None:
    pool, asked = Pool(), [0]

    def change(result: Any) -> Any:
        asked[0] += 1
        return garbage if asked[0] > nth else result

    answering(pool, method, change)
    try:
        receipt = await pool.sender().send(TO, b"\1\2\3\4")
    except ChainError:
        return
    assert receipt["transactionHash"]


@given(st.binary(max_size=200))
async def test_any_bytes_are_an_unreachable_chain_or_an_answer(body: bytes) -> None:
    async def post(_body: bytes) -> bytes:
        return body

    rpc = Rpc("http://node", post=post)
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        with pytest.raises(ChainUnreachable, match="not JSON"):
            await rpc.call("eth_chainId")
