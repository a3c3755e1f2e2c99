from typing import Any

import pytest
from chain_fakes import DEPLOYMENT, FakeNode, address, deposit, encode_log, placed
from eth_abi.abi import encode
from sender_fakes import Pool

from muster.chain import Chain, WorkerStatus, connection
from muster.protocol.errors import ChainError, ConfigError, ContractRevert, RpcError, WrongChain
from muster.protocol.ids import RunId

KEY = bytes([1]) * 32


class CallNode(FakeNode):
    """Answers every view with given bytes, and records the calls."""

    def __init__(self, answer: bytes = b"") -> None:
        super().__init__()
        self.answer = answer
        self.asked: list[tuple[dict[str, Any], str]] = []
        self.methods["eth_call"] = self._call

    def _call(self, call: dict[str, Any], block: str) -> str:
        self.asked.append((call, block))
        return "0x" + self.answer.hex()

    def chain(self) -> Chain:
        return Chain(self.rpc, DEPLOYMENT)


async def test_view_is_called_at_the_contracts_address() -> None:
    node = CallNode(encode(["uint256"], [5]))
    assert await node.chain().vault.active_stake(RunId(1), address(1)) == 5
    (call, block) = node.asked[0]
    assert (call["to"], block) == (DEPLOYMENT.contracts["StakeVault"], "latest")
    assert call["data"].endswith(address(1)[2:].lower())


async def test_earlier_block_is_read_when_asked_for() -> None:
    node = CallNode(encode(["uint256"], [5]))
    assert await node.chain().at(17).vault.active_stake(RunId(1), address(1)) == 5
    assert node.asked[0][1] == "0x11"


async def test_struct_becomes_a_dataclass() -> None:
    kinds = "(uint8,uint64,uint64,uint64,uint32,uint32,uint8)"
    node = CallNode(encode([kinds], [(2, 50, 60, 70, 2, 1, 3)]))
    member = await node.chain().workers.member_of(RunId(1), address(1))
    assert (member.status, member.status_before) == (WorkerStatus.JAILED, WorkerStatus.EXITING)
    assert (member.active_from, member.jailed_until, member.left_at) == (50, 60, 70)
    assert (member.convictions, member.exact_convictions) == (2, 1)


async def test_two_values_become_a_pair() -> None:
    node = CallNode(encode(["uint32", "address"], [7, address(2)]))
    assert await node.chain().workers.worker_of(address(1)) == (7, address(2))


@pytest.mark.parametrize(("exists", "expected"), [(True, 3), (False, None)])
async def test_latest_version_may_be_none(exists: bool, expected: int | None) -> None:
    node = CallNode(encode(["uint32", "bool"], [3, exists]))
    assert await node.chain().runs.latest_version(RunId(1)) == expected


async def test_functions_without_a_method_are_read_by_name() -> None:
    node = CallNode(encode(["address"], [address(9)]))
    answer = await node.chain().read("DisputeCourt", "bondOf", [1])
    assert answer == (address(9),)


@pytest.mark.parametrize("answer", [b"", b"\1", bytes(31), b"\xff" * 32])
async def test_answer_that_is_none_of_the_contracts_is_the_wrong_chain(answer: bytes) -> None:
    chain = CallNode(answer).chain()
    with pytest.raises(WrongChain, match=r"RunRegistry\.isValidator"):
        await chain.runs.is_validator(RunId(1), address(1))


async def test_a_node_that_knows_no_contract_yet_is_asked_again() -> None:
    """Several nodes may serve one address; one that lags answers with no bytes."""
    node = CallNode(encode(["uint256"], [5]))
    behind = ["0x", "0x"]
    node.methods["eth_call"] = lambda *asked: behind.pop() if behind else node._call(*asked)
    assert await node.chain().vault.active_stake(RunId(1), address(1)) == 5


async def test_other_rpc_errors_pass_through(node: FakeNode) -> None:
    with pytest.raises(RpcError, match="method not found"):
        await Chain(node.rpc, DEPLOYMENT).token.nonces(address(1))


async def test_view_revert_without_data_is_a_revert() -> None:
    node = CallNode()

    def call(_call: Any, _block: str) -> str:
        raise RpcError("execution reverted", code=-32000)

    node.methods["eth_call"] = call
    with pytest.raises(ContractRevert, match="without a reason"):
        await node.chain().token.nonces(address(1))


async def test_head_is_read(node: FakeNode) -> None:
    node.mine()
    chain = Chain(node.rpc, DEPLOYMENT)
    assert await chain.block_number() == 1
    assert await chain.now() == node.blocks[1].timestamp
    assert await chain.deploy_hash() == node.blocks[chain.deployment.deploy_block].hash


def test_domain_is_of_the_named_contract() -> None:
    domain = Chain(FakeNode().rpc, DEPLOYMENT).domain("RunRegistry")
    assert domain.chain_id == 31337
    assert domain.verifying_contract == DEPLOYMENT.contracts["RunRegistry"]


async def test_chain_without_key_has_no_account_and_cannot_write() -> None:
    chain = Chain(FakeNode().rpc, DEPLOYMENT)
    assert chain.account is None
    with pytest.raises(ConfigError, match=r"MusterToken\.faucet needs a key"):
        await chain.token.faucet(address(1), 1)


@pytest.mark.parametrize("timed", [True, False])
async def test_receipt_carries_the_events_of_our_contracts(node: FakeNode, timed: bool) -> None:
    block = node.mine()
    args = {"batch_id": 4, "run_id": 1, "root": bytes(32), "count": 1, "units": 9}
    args |= {"price_per_unit": 3, "terms": 1, "committed_at": 5}
    log = placed(encode_log("ContributionLedger", "BatchCommitted", args), block, 0, timed=timed)
    stranger = {**log, "address": address(1)}
    node.methods |= {
        "eth_estimateGas": lambda _call, _block: "0x5208",
        "eth_getTransactionCount": lambda _account, _block: "0x0",
        "eth_maxPriorityFeePerGas": lambda: "0x1",
        "eth_sendRawTransaction": lambda _raw: "0x",
        "eth_getTransactionByHash": lambda tx: {"hash": tx},
        "eth_getTransactionReceipt": lambda tx: {
            "status": "0x1",
            "transactionHash": tx,
            "blockNumber": hex(block.number),
            "blockHash": "0x" + block.hash.hex(),
            "gasUsed": "0x10",
            "effectiveGasPrice": "0x3",
            "l1Fee": None if timed else "0x5",
            "logs": [stranger, log],
        },
    }
    chain = Chain(node.rpc, DEPLOYMENT, key=KEY)
    batch_id, receipt = await chain.ledger.commit_batch(RunId(1), bytes(32), 1, 9)  # type: ignore[arg-type]
    assert (batch_id, receipt.gas_used, len(receipt.events)) == (4, 16, 1)
    assert receipt.cost_wei == (48 if timed else 53)
    assert receipt.events[0].block_timestamp == block.timestamp
    with pytest.raises(ChainError, match="emitted no RunCreated"):
        receipt.event("RunCreated")


@pytest.mark.parametrize(("answers", "time"), [(0, 1001), (2, 1001), (99, 0)])
@pytest.mark.parametrize("failure", [None, RpcError("limit exceeded", code=-32000)])
async def test_mined_transaction_has_its_receipt_though_its_block_is_not_served(
    pool: Pool,
    monkeypatch: pytest.MonkeyPatch,
    answers: int,
    time: int,
    failure: RpcError | None,
) -> None:
    """Several nodes may serve one address, and the receipt come from one that is ahead."""
    monkeypatch.setattr(connection, "_BEHIND_S", 0.5)
    block, left = pool.mine(deposit(1)), [answers]
    confirm, by_hash = pool.confirm, pool.methods["eth_getBlockByHash"]

    def with_log(transaction: dict[str, Any]) -> None:
        confirm(transaction)
        log = placed(block.logs[0], block, 0, timed=False)
        place = {"blockHash": log["blockHash"], "blockNumber": log["blockNumber"]}
        pool.mined[transaction["hash"]] |= {**place, "gasUsed": "0x10", "logs": [log]}

    def later(digest: str, full: bool) -> Any:
        if not left[0]:
            return by_hash(digest, full)
        left[0] -= 1
        if failure is not None:
            raise failure
        return None

    pool.confirm = with_log  # type: ignore[method-assign]
    pool.methods["eth_getBlockByHash"] = later
    chain = Chain(pool.rpc, DEPLOYMENT, key=KEY)
    receipt = await chain.vault.deposit(RunId(1), address(1), 1)
    assert receipt.tx_hash == pool.sent[0]["hash"]
    assert receipt.event("Deposited").block_timestamp == time
