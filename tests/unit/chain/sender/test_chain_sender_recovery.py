"""The sender after crashes, cancelled callers, forgetful nodes and reorganisations."""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from chain_fakes import address
from hexbytes import HexBytes
from sender_fakes import KEY, POLICY, TO, Pool, until

from muster.chain import SendJournal, SendPolicy, TransactionSender
from muster.chain.quorum import QuorumRpc
from muster.chain.rpc import Rpc
from muster.chain.send_journal import ActionState
from muster.protocol import errors


@pytest.fixture
async def journal() -> AsyncIterator[SendJournal]:
    journal = SendJournal(None, "scope")
    yield journal
    journal.close()


def datas(pool: Pool) -> list[tuple[int, bytes]]:
    return [(t["nonce"], bytes(HexBytes(t["data"]))) for t in pool.sent]


async def abandoned(pool: Pool, sender: TransactionSender, data: bytes, label: str) -> None:
    """Send a transaction and stop waiting once it is sent, as a killed process does."""
    before = len(pool.sent)
    sending = asyncio.create_task(sender.send(TO, data, label=label))
    await until(lambda: len(pool.sent) > before, sending)
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending


# ------------------------------------------------------------------------ labels


async def test_label_is_sent_once(pool: Pool, journal: SendJournal) -> None:
    first = await pool.sender(journal=journal).send(TO, b"\1", label="commit 17")
    again = await pool.sender(journal=journal).send(TO, b"\1", label="commit 17")
    assert again["transactionHash"] == first["transactionHash"]
    assert len(pool.sent) == 1


async def test_other_labels_are_other_actions(journal: SendJournal) -> None:
    pool, sender = Pool(), None
    sender = pool.sender(journal=journal)
    await sender.send(TO, b"\1", label="commit 17")
    await sender.send(TO, b"\1", label="commit 18")
    await sender.send(TO, b"\1")
    await sender.send(TO, b"\1")
    assert datas(pool) == [(nonce, b"\1") for nonce in range(4)]


async def test_label_of_another_call_is_refused(pool: Pool, journal: SendJournal) -> None:
    sender = pool.sender(journal=journal)
    await sender.send(TO, b"\1\2\3\4 one", label="commit 17")
    with pytest.raises(errors.ChainError, match=r"names a call of .*:01020304, not of .*:05060708"):
        await sender.send(TO, b"\5\6\7\x08", label="commit 17")
    with pytest.raises(errors.ChainError, match="names a call of"):
        await sender.send(address(6), b"\1\2\3\4 one", label="commit 17")
    await sender.send(TO, b"\1\2\3\4 two", label="commit 17")
    assert len(pool.sent) == 1


async def test_tasks_of_one_label_share_one_transaction(pool: Pool, journal: SendJournal) -> None:
    pool.auto = False
    sender = pool.sender(journal=journal)
    sends = [asyncio.create_task(sender.send(TO, b"\1", label="one")) for _ in range(5)]
    await until(lambda: bool(pool.sent), *sends)
    pool.confirm(pool.sent[0])
    receipts = await asyncio.gather(*sends)
    assert {r["transactionHash"] for r in receipts} == {pool.sent[0]["hash"]}
    assert len(pool.sent) == 1


async def test_label_is_free_after_a_revert(pool: Pool, journal: SendJournal) -> None:
    sender = pool.sender(journal=journal)
    pool.status = 0
    with pytest.raises(errors.ContractRevert, match=r"LedgerPaused\(7\)"):
        await sender.send(TO, b"\1", label="one")
    assert await sender.receipt_of("one") is None
    pool.status = 1
    receipt = await sender.send(TO, b"\1", label="one")
    assert receipt["transactionHash"] == pool.sent[1]["hash"]


async def test_label_of_a_refused_transaction_is_free(pool: Pool, journal: SendJournal) -> None:
    sender = pool.sender(journal=journal)
    pool.refusals = [errors.RpcError("intrinsic gas too low", code=-32000)]
    with pytest.raises(errors.RpcError, match="intrinsic gas"):
        await sender.send(TO, b"\1", label="one")
    await sender.send(TO, b"\1", label="one")
    assert datas(pool) == [(0, b"\1")]


async def test_receipt_of_a_label_tells_what_has_happened(pool: Pool, journal: SendJournal) -> None:
    pool.auto = False
    sender = pool.sender(journal=journal)
    assert await sender.receipt_of("one") is None
    await abandoned(pool, sender, b"\1", "one")
    assert await sender.receipt_of("one") is None
    pool.confirm(pool.sent[0])
    receipt = await sender.receipt_of("one")
    assert receipt is not None
    assert receipt["transactionHash"] == pool.sent[0]["hash"]


async def test_receipt_of_a_label_is_not_that_of_a_revert(pool: Pool, journal: SendJournal) -> None:
    pool.auto, pool.status = False, 0
    sender = pool.sender(journal=journal)
    await abandoned(pool, sender, b"\1", "one")
    pool.confirm(pool.sent[0])
    assert await sender.receipt_of("one") is None


# ----------------------------------------------------------------------- restart


async def test_transaction_that_was_mined_meanwhile_is_not_repeated(
    pool: Pool, journal: SendJournal
) -> None:
    pool.auto = False
    await abandoned(pool, pool.sender(journal=journal), b"\1", "one")
    pool.confirm(pool.sent[0])
    receipt = await pool.sender(journal=journal).send(TO, b"\1", label="one")
    assert receipt["transactionHash"] == pool.sent[0]["hash"]
    assert len(pool.sent) == 1


async def test_transaction_that_never_left_is_sent_as_it_was_signed(
    pool: Pool, journal: SendJournal
) -> None:
    original = pool.methods["eth_sendRawTransaction"]

    swallowed: list[str] = []

    def swallow(raw: str) -> str:
        swallowed.append(raw)
        raise ConnectionAbortedError

    pool.methods["eth_sendRawTransaction"] = swallow
    sending = asyncio.create_task(pool.sender(journal=journal).send(TO, b"\1", label="one"))
    await until(lambda: swallowed != [])
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    assert pool.sent == []
    signed = (await journal.pending())[0].attempts[0]
    pool.methods["eth_sendRawTransaction"] = original
    await pool.sender(journal=journal).recover()
    assert [t["hash"] for t in pool.sent] == [signed.tx_hash]


async def test_new_work_comes_after_what_was_left_behind(pool: Pool, journal: SendJournal) -> None:
    pool.auto = False
    sender = pool.sender(journal=journal)
    await abandoned(pool, sender, b"\1", "one")
    # The node has lost its pool as well.
    pool.waiting.clear()
    pool.sent.clear()
    pool.auto = True
    await pool.sender(journal=journal).send(TO, b"\2", label="two")
    assert datas(pool) == [(0, b"\1"), (1, b"\2")]


async def test_recovery_keeps_the_order_of_several(pool: Pool, journal: SendJournal) -> None:
    pool.auto = False
    sender = pool.sender(journal=journal)
    sends = [asyncio.create_task(sender.send(TO, bytes([i]), label=f"{i}")) for i in range(4)]
    await until(lambda: len(pool.sent) >= 4, *sends)
    for sending in sends:
        sending.cancel()
    await asyncio.gather(*sends, return_exceptions=True)
    pool.waiting.clear()
    pool.sent.clear()
    pool.auto = True
    await pool.sender(journal=journal).recover()
    assert datas(pool) == [(i, bytes([i])) for i in range(4)]
    assert await journal.pending() == []


async def test_transaction_left_behind_is_paid_more_for_when_it_is_slow(
    pool: Pool, journal: SendJournal
) -> None:
    pool.auto = False
    await abandoned(pool, pool.sender(journal=journal), b"\1", "one")
    recovering = asyncio.create_task(pool.sender(journal=journal).recover())
    await until(lambda: len(pool.sent) >= 2, recovering)
    assert pool.sent[1]["maxFeePerGas"] >= 1.25 * pool.sent[0]["maxFeePerGas"]
    # Either may be mined; here it is the first.
    pool.confirm(pool.sent[0])
    await recovering
    settled = await journal.settled_from(0)
    assert [a.inclusion and a.inclusion.tx_hash for a in settled] == [pool.sent[0]["hash"]]


async def test_reverted_orphan_does_not_stop_the_next(pool: Pool, journal: SendJournal) -> None:
    pool.auto, pool.status = False, 0
    await abandoned(pool, pool.sender(journal=journal), b"\1", "one")
    pool.confirm(pool.sent[0])
    pool.auto, pool.status = True, 1
    await pool.sender(journal=journal).send(TO, b"\2")
    assert datas(pool) == [(0, b"\1"), (1, b"\2")]


async def test_recovery_says_which_transaction_is_stuck(pool: Pool, tmp_path: Path) -> None:
    pool.auto = False
    journal = SendJournal(tmp_path / "sent", "scope")
    sender = pool.sender(journal=journal)
    await abandoned(pool, sender, b"\1", "commit 17")
    with pytest.raises(errors.TransactionLost, match=r"\(commit 17\) was not mined") as error:
        await sender.send(TO, b"\2")
    assert "run the same command again" in str(error.value.hint)
    journal.close()
    assert {data for _, data in datas(pool)} == {b"\1"}


async def test_recovery_without_a_chain_says_so_at_once(pool: Pool, journal: SendJournal) -> None:
    pool.failures = [OSError()]
    with pytest.raises(errors.ChainUnreachable):
        await pool.sender(journal=journal).recover()
    assert pool.now == 0.0


async def test_nothing_is_sent_that_could_not_be_journaled(tmp_path: Path) -> None:
    pool, journal = Pool(), SendJournal(tmp_path / "journal", "scope")
    sender = pool.sender(journal=journal)
    journal.close()
    with pytest.raises(errors.StorageError):
        await sender.send(TO, b"\1")
    assert pool.sent == []


# ----------------------------------------------------------------- forgetful node


async def test_transaction_that_the_node_forgot_is_sent_again(
    pool: Pool, journal: SendJournal
) -> None:
    pool.auto = False
    sending = asyncio.create_task(pool.sender(journal=journal).send(TO, b"\1"))
    await until(lambda: bool(pool.sent), sending)
    pool.waiting.clear()
    pool.auto = True
    await sending
    assert pool.sent[0]["hash"] == pool.sent[1]["hash"]
    assert pool.now < POLICY.bump_after_s


async def test_later_transaction_takes_care_of_an_abandoned_earlier_one(
    pool: Pool, journal: SendJournal
) -> None:
    pool.auto = False
    sender = pool.sender(journal=journal)
    first = asyncio.create_task(sender.send(TO, b"\1"))
    await until(lambda: len(pool.sent) >= 1, first)
    second = asyncio.create_task(sender.send(TO, b"\2"))
    await until(lambda: len(pool.sent) >= 2, second)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    del pool.waiting[pool.sent[0]["hash"]]
    # A gap: the second can only be mined after the first is sent again.
    await until(lambda: len(pool.sent) >= 3, second)
    assert pool.sent[2]["hash"] == pool.sent[0]["hash"]
    pool.confirm(pool.sent[0])
    pool.confirm(pool.sent[1])
    receipt = await second
    assert receipt["transactionHash"] == pool.sent[1]["hash"]
    assert len(pool.sent) == 3


async def test_transaction_behind_a_slow_one_is_not_paid_more_for(
    pool: Pool, journal: SendJournal
) -> None:
    pool.auto = False
    sender = pool.sender(journal=journal)
    sends = [asyncio.create_task(sender.send(TO, bytes([i]))) for i in range(2)]
    await until(lambda: len(pool.sent) >= 4, *sends)
    assert [nonce for nonce, _ in datas(pool)] == [0, 1, 0, 0]
    for transaction in (pool.sent[2], pool.sent[1]):
        pool.confirm(transaction)
    await asyncio.gather(*sends)


async def test_transaction_below_the_base_fee_is_paid_more_for_at_once(
    pool: Pool, journal: SendJournal
) -> None:
    pool.auto = False
    await abandoned(pool, pool.sender(journal=journal), b"\1", "one")
    pool.waiting.clear()
    pool.auto = True
    pool.refusals = [errors.RpcError("max fee per gas less than block base fee", code=-32003)] * 2
    await pool.sender(journal=journal).recover()
    assert pool.now < POLICY.bump_after_s
    assert pool.sent[1]["maxFeePerGas"] > pool.sent[0]["maxFeePerGas"]


async def test_fees_have_a_cap(pool: Pool, journal: SendJournal) -> None:
    pool.auto = False
    policy = SendPolicy(bump_after_s=10, give_up_after_s=200, highest_fee_wei=5 * 10**9)
    with pytest.raises(errors.TransactionLost):
        await pool.sender(policy, journal).send(TO, b"\1")
    fees = [t["maxFeePerGas"] for t in pool.sent]
    # A third bump would exceed the cap, and a bump up to the cap is too small to replace.
    assert set(fees) == {3 * 10**9, 3_750_000_000, 4_687_500_000}
    assert fees.count(4_687_500_000) > 1


def set_market(pool: Pool, *, base_gwei: int, tip_wei: int) -> None:
    """Have the newest block and the node name these fees from now on."""
    block = pool.methods["eth_getBlockByNumber"]
    pool.methods["eth_getBlockByNumber"] = lambda number, full: {
        **block(number, full),
        "baseFeePerGas": hex(base_gwei * 10**9),
    }
    pool.methods["eth_maxPriorityFeePerGas"] = lambda: hex(tip_wei)


async def test_fees_follow_the_market(pool: Pool, journal: SendJournal) -> None:
    pool.auto = False
    sending = asyncio.create_task(pool.sender(journal=journal).send(TO, b"\1"))
    await until(lambda: bool(pool.sent), sending)
    set_market(pool, base_gwei=100, tip_wei=10**9)
    await until(lambda: len(pool.sent) >= 2, sending)
    assert pool.sent[1]["maxFeePerGas"] == 201 * 10**9
    pool.confirm(pool.sent[1])
    await sending


@pytest.mark.parametrize("tip_wei", [0, 200_000_000])
@pytest.mark.parametrize("is_dropped", [False, True])
async def test_fees_follow_the_base_fee_although_tips_fell(
    pool: Pool, journal: SendJournal, tip_wei: int, is_dropped: bool
) -> None:
    pool.auto = False
    sending = asyncio.create_task(pool.sender(journal=journal).send(TO, b"\1"))
    await until(lambda: bool(pool.sent), sending)
    set_market(pool, base_gwei=10, tip_wei=tip_wei)
    if is_dropped:
        pool.waiting.clear()
        pool.refusals = [errors.RpcError("max fee per gas less than block base fee", code=-32003)]
    await until(lambda: len(pool.sent) >= 2, sending)
    # Nodes take a replacement only if it raises both fees by a tenth.
    assert pool.sent[1]["maxFeePerGas"] == 20 * 10**9 + tip_wei
    assert pool.sent[1]["maxPriorityFeePerGas"] == 1.1 * 10**9
    assert (pool.now < POLICY.bump_after_s) == is_dropped
    pool.confirm(pool.sent[1])
    await sending


async def test_fees_do_not_rise_above_the_market_while_they_pay_the_base_fee(
    pool: Pool, journal: SendJournal
) -> None:
    pool.auto = False
    sending = asyncio.create_task(pool.sender(journal=journal).send(TO, b"\1"))
    await until(lambda: bool(pool.sent), sending)
    set_market(pool, base_gwei=1, tip_wei=200_000_000)
    with pytest.raises(errors.TransactionLost):
        await sending
    assert len(pool.sent) > 1
    assert len({t["hash"] for t in pool.sent}) == 1


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_fees_stay_while_no_block_is_made(
    pool: Pool, journal: SendJournal, is_restarted: bool
) -> None:
    pool.auto, pool.stands_still = False, True
    policy = SendPolicy(bump_after_s=20, give_up_after_s=600)
    if is_restarted:
        await abandoned(pool, pool.sender(journal=journal), b"\1", "one")
    with pytest.raises(errors.TransactionLost):
        await pool.sender(policy, journal).send(TO, b"\1", label="one")
    assert pool.now >= 600
    assert {t["maxPriorityFeePerGas"] for t in pool.sent} == {10**9}
    # It was never its fees: the first block takes it as it is.
    pool.confirm(pool.sent[0])
    await pool.sender(policy, journal).send(TO, b"\1", label="one")
    assert len({t["hash"] for t in pool.sent}) == 1


async def test_fees_stay_near_the_market_however_long_it_takes(
    pool: Pool, journal: SendJournal
) -> None:
    pool.auto = False
    policy = SendPolicy(bump_after_s=20, give_up_after_s=400)
    with pytest.raises(errors.TransactionLost):
        await pool.sender(policy, journal).send(TO, b"\1")
    assert pool.sent[1]["maxPriorityFeePerGas"] >= 1.1 * 10**9
    assert pool.sent[-1]["maxPriorityFeePerGas"] <= 4 * 10**9


async def test_refused_attempt_does_not_raise_the_next_one(
    pool: Pool, journal: SendJournal
) -> None:
    pool.auto = False
    sending = asyncio.create_task(pool.sender(journal=journal).send(TO, b"\1"))
    await until(lambda: bool(pool.sent), sending)
    pool.refusals = [errors.RpcError("insufficient funds for gas", code=-32000)] * 2
    await until(lambda: len(pool.sent) >= 2, sending)
    assert pool.refusals == []
    assert pool.sent[1]["maxFeePerGas"] == 1.25 * pool.sent[0]["maxFeePerGas"]
    pool.confirm(pool.sent[1])
    await sending


@pytest.mark.parametrize("method", ["eth_getBlockByNumber", "eth_sendRawTransaction"])
async def test_outage_during_a_bump_only_delays(
    pool: Pool, method: str, journal: SendJournal
) -> None:
    pool.auto = False
    sending = asyncio.create_task(pool.sender(journal=journal).send(TO, b"\1"))
    await until(lambda: bool(pool.sent), sending)
    original, failures = pool.methods[method], [0, 0]

    def flaky(*args: Any) -> Any:
        if failures:
            failures.pop()
            raise errors.RpcError("busy", code=-32005)
        return original(*args)

    pool.methods[method] = flaky
    await until(lambda: len(pool.sent) >= 2, sending)
    pool.confirm(pool.sent[1])
    await sending


# ------------------------------------------------------------------- other writer


async def test_action_whose_nonce_another_program_used_is_done_anew(
    pool: Pool, journal: SendJournal
) -> None:
    pool.auto = False
    sending = asyncio.create_task(pool.sender(journal=journal).send(TO, b"\1", label="one"))
    await until(lambda: bool(pool.sent), sending)
    # Nonce 0 is mined, but not by our transaction, which the node drops.
    pool.confirmed, pool.auto = 1, True
    pool.waiting.clear()
    receipt = await sending
    assert pool.now >= 15
    assert datas(pool) == [(0, b"\1"), (1, b"\1")]
    assert receipt["transactionHash"] == pool.sent[1]["hash"]


async def test_nonce_that_waits_for_another_program_is_not_fought_over(
    pool: Pool, journal: SendJournal
) -> None:
    pool.refusals = [errors.RpcError("replacement transaction underpriced", code=-32000)]
    counts = iter([0, 0, 1])
    pool.methods["eth_getTransactionCount"] = lambda _account, block: hex(
        next(counts) if block == "pending" else pool.confirmed
    )
    await_first = pool.sender(journal=journal).send(TO, b"\1")
    next(counts)
    await await_first
    assert [(t["nonce"], t["maxFeePerGas"]) for t in pool.sent] == [(1, 3 * 10**9)]


async def test_receipt_that_is_late_does_not_mean_that_the_nonce_was_stolen(
    pool: Pool, journal: SendJournal
) -> None:
    looks: list[str] = []

    def late(tx: str) -> Any:
        looks.append(tx)
        return pool.mined.get(tx) if len(looks) >= 3 else None

    pool.methods["eth_getTransactionReceipt"] = late
    await pool.sender(journal=journal).send(TO, b"\1")
    assert len(pool.sent) == 1


@pytest.mark.parametrize("late_s", [2, 20])
async def test_transaction_whose_receipt_is_late_is_not_sent_again(
    pool: Pool, journal: SendJournal, late_s: float
) -> None:
    mined_at: dict[str, float] = {}

    def late(tx: str) -> Any:
        if tx in pool.mined and pool.now >= mined_at.setdefault(tx, pool.now) + late_s:
            return pool.mined[tx]
        return None

    pool.methods["eth_getTransactionReceipt"] = late
    receipt = await pool.sender(journal=journal).send(TO, b"\1")
    assert receipt["transactionHash"] == pool.sent[0]["hash"]
    assert len(pool.sent) == 1


async def test_node_that_knows_a_mined_transaction_only_later_is_waited_for(
    pool: Pool, journal: SendJournal
) -> None:
    for method in ("eth_getTransactionReceipt", "eth_getTransactionByHash"):
        answer = pool.methods[method]
        pool.methods[method] = lambda tx, answer=answer: answer(tx) if pool.now > 10 else None
    await pool.sender(journal=journal).send(TO, b"\1")
    assert len(pool.sent) == 1


async def test_label_is_not_repeated_when_its_receipt_is_no_longer_served(
    pool: Pool, journal: SendJournal
) -> None:
    await pool.sender(journal=journal).send(TO, b"\1", label="one")
    pool.mined.clear()
    pool.methods["eth_getBlockByNumber"] = lambda _number, _full: {"hash": "0x" + "1b" * 32}
    with pytest.raises(errors.ChainError, match="does not serve its receipt"):
        await pool.sender(journal=journal).send(TO, b"\1", label="one")
    assert len(pool.sent) == 1


async def test_label_is_not_repeated_when_its_transaction_moved_to_another_block(
    pool: Pool, journal: SendJournal
) -> None:
    await pool.sender(journal=journal).send(TO, b"\1", label="one")
    moved = {tx: receipt | {"blockHash": "0x" + "2b" * 32} for tx, receipt in pool.mined.items()}
    pool.methods["eth_getTransactionReceipt"] = lambda tx: moved[tx] if pool.now > 30 else None
    receipt = await pool.sender(journal=journal).send(TO, b"\1", label="one")
    assert receipt["blockHash"] == "0x" + "2b" * 32
    assert len(pool.sent) == 1


# ---------------------------------------------------------------- several endpoints


def behind_two(pool: Pool, *, refusal: str) -> Rpc:
    """Return the pool's endpoint and one that refuses its transactions, as one."""

    def refuse(_raw: str) -> Any:
        raise errors.RpcError(refusal, code=-32000)

    readonly = Pool()
    readonly.methods = pool.methods | {"eth_sendRawTransaction": refuse}
    posts = (("readonly", readonly), ("pool", pool))
    return QuorumRpc([Rpc(f"http://{name}", post=post, timeout_s=0.01) for name, post in posts])


async def test_transaction_that_one_refused_and_one_took_in_silence_is_not_repeated(
    pool: Pool, journal: SendJournal
) -> None:
    take = pool.methods["eth_sendRawTransaction"]

    def send(raw: str) -> Any:
        take(raw)
        raise ConnectionAbortedError

    pool.methods["eth_sendRawTransaction"] = send
    sender = pool.sender(journal=journal, rpc=behind_two(pool, refusal="method not available"))
    first = await sender.send(TO, b"\1", label="one")
    again = await sender.send(TO, b"\1", label="one")
    assert first["transactionHash"] == again["transactionHash"] == pool.sent[0]["hash"]
    assert len(pool.sent) == 1


async def test_transaction_that_both_refused_is_over_at_once(
    pool: Pool, journal: SendJournal
) -> None:
    pool.refusals = [errors.RpcError("txpool is full", code=-32000)]
    sender = pool.sender(journal=journal, rpc=behind_two(pool, refusal="method not available"))
    with pytest.raises(errors.RpcError, match=r"not available|is full"):
        await sender.send(TO, b"\1", label="one")
    assert await journal.pending() == []
    assert pool.now == 0.0


async def test_transaction_that_is_refused_beside_silence_ends_with_the_reason(
    pool: Pool, journal: SendJournal
) -> None:
    take = pool.methods["eth_sendRawTransaction"]

    def fail(_raw: str) -> Any:
        raise ConnectionAbortedError

    pool.methods["eth_sendRawTransaction"] = fail
    sender = pool.sender(journal=journal, rpc=behind_two(pool, refusal="insufficient funds"))
    with pytest.raises(errors.TransactionLost, match=r"not mined within 60 s: .*insufficient"):
        await sender.send(TO, b"\1", label="one")
    assert pool.now < POLICY.give_up_after_s + 5
    pool.methods["eth_sendRawTransaction"] = take
    await pool.sender(journal=journal).send(TO, b"\1", label="one")
    assert datas(pool) == [(0, b"\1")]


# ------------------------------------------------------------------------- reorg


def take_back(pool: Pool, count: int, *, kept: bool = False) -> None:
    """Undo the newest transactions; `kept` says whether the node's pool gets them back."""
    for transaction in pool.sent[-count:]:
        del pool.mined[transaction["hash"]]
        if not kept:
            del pool.waiting[transaction["hash"]]
    pool.confirmed -= count


async def test_transactions_that_a_reorg_took_back_are_sent_again_in_order(
    pool: Pool, journal: SendJournal, caplog: pytest.LogCaptureFixture
) -> None:
    sender = pool.sender(journal=journal)
    for i in range(4):
        await sender.send(TO, bytes([i]), label=f"action {i}")
    take_back(pool, 3)
    with caplog.at_level(logging.WARNING):
        await sender.send(TO, b"\4", label="action 4")
    assert datas(pool)[4:] == [(1, b"\1"), (2, b"\2"), (3, b"\3"), (4, b"\4")]
    assert caplog.text.count("taken back by a reorg") == 3
    assert [t["hash"] for t in pool.sent[1:4]] == [t["hash"] for t in pool.sent[4:7]]


async def test_transaction_that_waits_has_those_before_it_sent_again_after_a_reorg(
    pool: Pool, journal: SendJournal
) -> None:
    sender = pool.sender(journal=journal)
    for i in range(3):
        await sender.send(TO, bytes([i]), label=f"action {i}")
    pool.auto = False
    waiting = asyncio.create_task(sender.send(TO, b"\3", label="action 3"))
    await until(lambda: len(pool.sent) == 4, waiting)
    last = pool.sent.pop()
    take_back(pool, 2)
    pool.auto = True
    await until(lambda: pool.confirmed == 3, waiting)
    pool.confirm(last)
    await waiting
    assert datas(pool)[3:] == [(1, b"\1"), (2, b"\2")]
    assert pool.now < POLICY.bump_after_s


async def test_transaction_that_the_node_kept_in_a_reorg_is_only_waited_for(
    pool: Pool, journal: SendJournal
) -> None:
    sender = pool.sender(journal=journal)
    await sender.send(TO, b"\1", label="one")
    take_back(pool, 1, kept=True)
    repeating = asyncio.create_task(sender.send(TO, b"\1", label="one"))
    await until(lambda: pool.now > 0.0, repeating)
    pool.confirm(pool.sent[0])
    await repeating
    assert len(pool.sent) == 1


async def test_action_that_reverts_after_a_reorg_is_reported(
    pool: Pool, journal: SendJournal
) -> None:
    sender = pool.sender(journal=journal)
    await sender.send(TO, b"\1", label="one")
    take_back(pool, 1)
    pool.status = 0
    await sender.recover()
    assert (await journal.settled_from(0))[0].state is ActionState.REVERTED
    pool.status = 1
    await sender.send(TO, b"\1", label="one")
    assert datas(pool) == [(0, b"\1"), (0, b"\1"), (1, b"\1")]


async def test_lagging_endpoint_is_not_taken_for_a_reorg(pool: Pool, journal: SendJournal) -> None:
    sender = pool.sender(journal=journal)
    await sender.send(TO, b"\1")
    # The node's count omits a transaction for which it returns a receipt.
    pool.methods["eth_getTransactionCount"] = lambda _account, _block: hex(
        max(pool.confirmed - 1, 0)
    )
    await sender.send(TO, b"\2")
    assert datas(pool) == [(0, b"\1"), (1, b"\2")]


async def test_action_from_before_what_is_kept_is_done_anew_after_a_reorg(
    journal: SendJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("muster.chain.send_journal.KEPT_NONCES", 1)
    pool = Pool()
    sender = pool.sender(journal=journal)
    for i in range(3):
        await sender.send(TO, bytes([i]), label=f"action {i}")
    take_back(pool, 3)
    await sender.send(TO, b"\0", label="action 0")
    assert datas(pool)[3:] == [(0, b"\0")]


# --------------------------------------------------------------------- log hygiene


async def test_neither_key_nor_raw_transaction_is_logged(
    pool: Pool, journal: SendJournal, caplog: pytest.LogCaptureFixture
) -> None:
    pool.auto = False
    with caplog.at_level(logging.DEBUG), pytest.raises(errors.TransactionLost):
        await pool.sender(journal=journal).send(TO, b"\1" * 40, label="one")
    raws = [attempt.raw.hex() for attempt in (await journal.pending())[0].attempts]
    lines = " ".join(str(record.__dict__) for record in caplog.records)
    assert "higher fees" in lines
    assert KEY.hex() not in lines
    assert not any(raw[:200] in lines or raw[-100:] in lines for raw in raws)
