import asyncio
from pathlib import Path
from typing import Any

import pytest
from hexbytes import HexBytes
from sender_fakes import POLICY, REVERT, TO, Pool, until

from muster.chain import SendJournal
from muster.chain.outgoing import TELL_SENT, highest_fee
from muster.protocol import errors


async def test_send_returns_the_receipt(pool: Pool) -> None:
    receipt = await pool.sender().send(TO, b"\1\2")
    assert receipt["transactionHash"] == pool.sent[0]["hash"]


async def test_transaction_says_what_was_asked(pool: Pool) -> None:
    await pool.sender().send(TO, b"\1\2")
    sent = pool.sent[0]
    assert HexBytes(sent["to"]) == HexBytes(TO)
    assert HexBytes(sent["data"]) == b"\1\2"
    assert (sent["chainId"], sent["nonce"], sent["value"]) == (31337, 0, 0)
    assert sent["gas"] == 125_000
    # Twice the base fee of 1 gwei plus a tip of 1 gwei.
    assert sent["maxFeePerGas"] == 3 * 10**9
    assert sent["maxPriorityFeePerGas"] == 10**9


async def test_tip_has_a_default_when_the_endpoint_names_none(pool: Pool) -> None:
    del pool.methods["eth_maxPriorityFeePerGas"]
    await pool.sender().send(TO, b"")
    assert pool.sent[0]["maxPriorityFeePerGas"] == 10**9


async def test_deployment_has_no_receiver(pool: Pool) -> None:
    await pool.sender().send(None, b"\1")
    assert not pool.sent[0].get("to")


async def test_nonces_follow_one_another(pool: Pool) -> None:
    sender = pool.sender()
    for _ in range(3):
        await sender.send(TO, b"")
    assert [t["nonce"] for t in pool.sent] == [0, 1, 2]


async def test_concurrent_sends_get_different_nonces_before_any_is_mined(pool: Pool) -> None:
    pool.auto = False
    sender = pool.sender()
    sends = [asyncio.create_task(sender.send(TO, bytes([i]))) for i in range(10)]
    while len(pool.sent) < 10:
        await asyncio.sleep(0)
    for transaction in list(pool.sent):
        pool.confirm(transaction)
    await asyncio.gather(*sends)
    assert [t["nonce"] for t in pool.sent[:10]] == list(range(10))


async def test_revert_found_by_the_estimate_sends_nothing(pool: Pool) -> None:

    def estimate(_call: Any, _block: str) -> str:
        raise errors.RpcError("execution reverted", code=3, data=REVERT)

    pool.methods["eth_estimateGas"] = estimate
    with pytest.raises(errors.ContractRevert, match=r"LedgerPaused\(7\)") as error:
        await pool.sender().send(TO, b"")
    assert error.value.tx is None
    assert pool.sent == []


async def test_mined_revert_is_decoded_with_its_transaction(pool: Pool) -> None:
    pool.status = 0
    with pytest.raises(errors.ContractRevert, match=r"LedgerPaused\(7\)") as error:
        await pool.sender().send(TO, b"")
    assert error.value.tx == pool.sent[0]["hash"]


async def test_mined_revert_without_a_reason_is_reported(pool: Pool) -> None:
    pool.status = 0
    pool.methods["eth_call"] = lambda _call, _block: "0x"
    with pytest.raises(errors.ContractRevert, match="without a reason"):
        await pool.sender().send(TO, b"")


async def test_mined_revert_is_reported_when_its_reason_cannot_be_asked_for(pool: Pool) -> None:
    pool.status = 0

    def call(_call: Any, _block: str) -> str:
        raise ConnectionAbortedError

    pool.methods["eth_call"] = call
    pool.timeout_s = 0.5
    with pytest.raises(errors.ContractRevert, match="without a reason") as error:
        await pool.sender().send(TO, b"")
    assert error.value.tx == pool.sent[0]["hash"]
    assert "could not be asked why: replay the transaction at block 1" in str(error.value.hint)


async def test_mined_revert_keeps_its_reason_when_the_endpoint_is_briefly_away(pool: Pool) -> None:
    pool.status = 0
    answers, asked = pool.methods["eth_call"], []

    def call(call: Any, block: str) -> Any:
        asked.append(block)
        if len(asked) < POLICY.send_attempts:
            raise ConnectionAbortedError
        return answers(call, block)

    pool.methods["eth_call"] = call
    with pytest.raises(errors.ContractRevert, match=r"LedgerPaused\(7\)"):
        await pool.sender().send(TO, b"")
    assert asked == ["0x1"] * POLICY.send_attempts


async def test_missing_gas_money_has_a_hint(pool: Pool) -> None:

    def estimate(_call: Any, _block: str) -> str:
        raise errors.RpcError("Insufficient funds for gas * price + value", code=-32003)

    pool.methods["eth_estimateGas"] = estimate
    with pytest.raises(errors.RpcError, match=r"(?i)insufficient funds") as error:
        await pool.sender().send(TO, b"")
    assert "gas" in str(error.value.hint)


async def test_failed_side_questions_are_reported(pool: Pool) -> None:
    del pool.methods["eth_getTransactionCount"]
    with pytest.raises(errors.RpcError, match="eth_getTransactionCount failed"):
        await pool.sender().send(TO, b"")


async def test_nonce_taken_by_another_writer_is_skipped(pool: Pool) -> None:
    sender = pool.sender()
    await sender.send(TO, b"")
    # The endpoint still reports the count from before another program sent.
    counts = iter([1, 5, 5, 5])
    pool.methods["eth_getTransactionCount"] = lambda _account, _block: hex(next(counts))
    pool.confirmed = 5
    await sender.send(TO, b"")
    assert [t["nonce"] for t in pool.sent] == [0, 5]


async def test_nonce_that_stays_wrong_is_given_up(pool: Pool) -> None:
    pool.refusals = [errors.RpcError("nonce too low", code=-32000)] * 50
    # An endpoint that contradicts itself: the nonce that it reports as next is already used.
    counts = {"pending": 7, "latest": 8}
    pool.methods["eth_getTransactionCount"] = lambda _account, block: hex(counts[block])
    with pytest.raises(errors.ChainError, match="in 5 tries") as error:
        await pool.sender().send(TO, b"")
    assert "same key" in str(error.value.hint)


async def test_underpriced_transaction_is_sent_dearer(pool: Pool) -> None:
    pool.refusals = [errors.RpcError("transaction underpriced", code=-32000)]
    await pool.sender().send(TO, b"")
    assert pool.sent[0]["maxFeePerGas"] >= 1.25 * 3 * 10**9


async def test_known_transaction_counts_as_sent(pool: Pool) -> None:
    original = pool.methods["eth_sendRawTransaction"]

    def send(raw: str) -> str:
        original(raw)
        raise errors.RpcError("already known", code=-32000)

    pool.methods["eth_sendRawTransaction"] = send
    assert await pool.sender().send(TO, b"")
    assert len(pool.sent) == 1


async def test_transaction_mined_behind_a_lost_answer_is_found(pool: Pool) -> None:
    original = pool.methods["eth_sendRawTransaction"]

    def send(raw: str) -> str:
        original(raw)
        # The repeated request meets a nonce that the first one used.
        raise errors.RpcError("nonce too low", code=-32000)

    pool.methods["eth_sendRawTransaction"] = send
    receipt = await pool.sender().send(TO, b"")
    assert receipt["transactionHash"] == pool.sent[0]["hash"]
    assert len(pool.sent) == 1


async def test_other_refusals_are_raised(pool: Pool) -> None:
    pool.refusals = [errors.RpcError("intrinsic gas too low", code=-32000)]
    with pytest.raises(errors.RpcError, match="intrinsic gas too low"):
        await pool.sender().send(TO, b"")


@pytest.mark.parametrize("words", ["is in the queue", "underpriced", "same nonce"])
@pytest.mark.parametrize("is_mined", [True, False])
async def test_refused_transaction_that_the_pool_has_is_watched(
    pool: Pool, words: str, is_mined: bool
) -> None:
    take = pool.methods["eth_sendRawTransaction"]

    def send(raw: str) -> str:
        take(raw)
        # A service that passes it to several nodes answers with one node's refusal.
        raise errors.RpcError(words, code=-32000)

    pool.auto = is_mined
    pool.methods["eth_sendRawTransaction"] = send
    sending = asyncio.create_task(pool.sender().send(TO, b""))
    await until(lambda: bool(pool.sent) and (is_mined or pool.now > 1.0), sending)
    pool.confirm(pool.sent[0])
    receipt = await sending
    assert receipt["transactionHash"] == pool.sent[0]["hash"]
    assert len(pool.sent) == 1


async def test_slow_transaction_is_sent_again_with_higher_fees(pool: Pool) -> None:
    pool.auto = False
    sending = asyncio.create_task(pool.sender().send(TO, b""))
    while len(pool.sent) < 3:
        await asyncio.sleep(0)
    first, second, third = pool.sent
    assert first["nonce"] == second["nonce"] == third["nonce"]
    assert second["maxFeePerGas"] >= 1.1 * first["maxFeePerGas"]
    assert third["maxPriorityFeePerGas"] >= 1.1 * second["maxPriorityFeePerGas"]
    pool.confirm(second)
    receipt = await sending
    assert receipt["transactionHash"] == second["hash"]


async def test_transaction_that_is_never_mined_is_lost(pool: Pool) -> None:
    pool.auto = False
    with pytest.raises(errors.TransactionLost, match="not mined within 60 s") as error:
        await pool.sender().send(TO, b"")
    assert error.value.tx == pool.sent[-1]["hash"]
    assert f"look for {error.value.tx} on chain" in str(error.value.hint)
    assert 60 <= pool.now < 65


async def test_lost_transaction_is_brought_to_an_end_before_the_next_is_sent(pool: Pool) -> None:
    pool.auto = False
    sender = pool.sender()
    with pytest.raises(errors.TransactionLost):
        await sender.send(TO, b"")
    pool.auto = True
    await sender.send(TO, b"\1")
    dearer, following = pool.sent[-2:]
    assert (dearer["nonce"], HexBytes(dearer["data"])) == (0, b"")
    assert (following["nonce"], HexBytes(following["data"])) == (1, b"\1")


async def test_outage_while_waiting_only_delays(pool: Pool) -> None:
    pool.auto = False
    sending = asyncio.create_task(pool.sender().send(TO, b""))
    while not pool.sent:
        await asyncio.sleep(0)
    pool.failures = [OSError(), OSError()]
    pool.confirm(pool.sent[0])
    assert await sending
    assert pool.failures == []


async def test_outage_before_sending_is_raised(pool: Pool) -> None:
    pool.failures = [OSError()]
    with pytest.raises(errors.ChainUnreachable):
        await pool.sender().send(TO, b"")
    await pool.sender().send(TO, b"")


async def test_answer_lost_on_sending_is_waited_out(pool: Pool) -> None:
    original, lost = pool.methods["eth_sendRawTransaction"], [True]

    def send(raw: str) -> Any:
        original(raw)
        if lost:
            lost.pop()
            raise ConnectionAbortedError
        return None

    pool.methods["eth_sendRawTransaction"] = send
    receipt = await pool.sender().send(TO, b"")
    assert receipt["transactionHash"] == pool.sent[0]["hash"]


async def test_polling_starts_short_and_grows(pool: Pool) -> None:
    pool.auto = False
    pauses: list[float] = []
    original = pool.sleep

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        await original(seconds)

    pool.sleep = sleep  # type: ignore[method-assign]
    with pytest.raises(errors.TransactionLost):
        await pool.sender().send(TO, b"")
    assert pauses[0] == 0.05
    assert pauses == sorted(pauses)
    assert max(pauses) == 1.0


async def test_cancelled_send_leaves_the_sender_usable(pool: Pool) -> None:
    pool.auto = False
    sender = pool.sender()
    sending = asyncio.create_task(sender.send(TO, b""))
    while not pool.sent:
        await asyncio.sleep(0)
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    pool.confirm(pool.sent[0])
    pool.auto = True
    await sender.send(TO, b"")
    assert pool.sent[-1]["nonce"] == 1


@pytest.mark.parametrize(
    ("moment", "is_told"), [("refused", False), ("answered", True), ("cancelled", True)]
)
@pytest.mark.parametrize("is_kept", [True, False])
async def test_what_may_have_left_is_told_unless_a_journal_remembers_it(
    pool: Pool, tmp_path: Path, moment: str, is_told: bool, is_kept: bool
) -> None:
    pool.auto, told, take = False, list[str](), pool.methods["eth_sendRawTransaction"]

    def send(raw: str) -> Any:
        if moment == "refused":
            raise errors.RpcError("intrinsic gas too low", code=-32000)
        take(raw)
        if moment == "cancelled":
            raise asyncio.CancelledError
        return None

    pool.methods["eth_sendRawTransaction"] = send
    TELL_SENT.set(told.append)
    journal = SendJournal(tmp_path / "journal", "scope") if is_kept else None
    sender = pool.sender(journal=journal)
    sending = asyncio.create_task(sender.send(TO, b""))
    await until(lambda: sending.done() or bool(pool.sent and pool.now))
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    assert told == [each["hash"] for each in pool.sent if is_told and not is_kept]
    assert bool(pool.sent) is is_told
    sender.close()


async def test_dearer_attempt_is_told_too(pool: Pool) -> None:
    pool.auto, told = False, list[str]()
    TELL_SENT.set(told.append)
    with pytest.raises(errors.TransactionLost):
        await pool.sender().send(TO, b"")
    assert told == [each["hash"] for each in pool.sent]
    assert len(told) > 1


@pytest.mark.parametrize("block", ["latest", "pending"])
async def test_endpoint_that_does_not_count_transactions_is_reported(
    pool: Pool, block: str
) -> None:

    def count(_account: str, asked: str) -> str:
        if asked == block:
            raise errors.RpcError("state is not available", code=-32000)
        return "0x0"

    pool.methods["eth_getTransactionCount"] = count
    with pytest.raises(errors.RpcError, match="state is not available"):
        await pool.sender().send(TO, b"")
    assert pool.sent == []


async def test_fees_that_are_never_enough_are_given_up(pool: Pool) -> None:
    pool.refusals = [errors.RpcError("transaction underpriced", code=-32000)] * 50
    with pytest.raises(errors.ChainError, match="in 5 tries"):
        await pool.sender().send(TO, b"")
    assert pool.sent == []


async def test_closed_sender_sends_nothing(pool: Pool, tmp_path: Path) -> None:
    sender = pool.sender(journal=SendJournal(tmp_path / "journal", "scope"))
    sender.close()
    with pytest.raises(errors.StorageError):
        await sender.send(TO, b"")
    assert pool.sent == []


@pytest.mark.parametrize(
    ("said", "wei"), [(None, 10**12), ("1000", 10**12), ("0.5", 5 * 10**8), ("30", 3 * 10**10)]
)
def test_highest_fee_is_what_the_environment_says(said: str | None, wei: int) -> None:
    assert highest_fee({} if said is None else {"MUSTER_MAX_FEE_GWEI": said}) == wei


@pytest.mark.parametrize("said", ["", "0", "-1", "nan", "inf", "1000001", "30 gwei"])
def test_highest_fee_that_is_no_price_is_refused(said: str) -> None:
    with pytest.raises(errors.ConfigError, match=f"MUSTER_MAX_FEE_GWEI is '{said}'"):
        highest_fee({"MUSTER_MAX_FEE_GWEI": said})


@pytest.mark.parametrize(("behind", "is_believed"), [(1, False), (0, True)])
async def test_refusal_by_a_node_that_lags_is_asked_again(
    pool: Pool, behind: int, is_believed: bool
) -> None:
    sender = pool.sender()
    mined = int((await sender.send(TO, b"approve"))["blockNumber"], 16)
    asked, block = [0], pool.methods["eth_getBlockByNumber"]

    def estimate(_call: Any, _block: str) -> str:
        asked[0] += 1
        if asked[0] > 2:
            return hex(100_000)
        raise errors.RpcError("execution reverted", code=3, data=REVERT)

    def newest(number: str, full: bool) -> Any:
        return {**block(number, full), "number": hex(mined - behind if asked[0] <= 2 else mined)}

    pool.methods |= {"eth_estimateGas": estimate, "eth_getBlockByNumber": newest}
    if is_believed:
        with pytest.raises(errors.ContractRevert, match="LedgerPaused"):
            await sender.send(TO, b"deposit")
        assert asked == [1]
    else:
        assert (await sender.send(TO, b"deposit"))["status"] == "0x1"
        assert asked == [3]


async def test_sends_behind_a_lost_transaction_wait_for_it_together(pool: Pool) -> None:
    pool.auto = False
    sender = pool.sender()
    with pytest.raises(errors.TransactionLost):
        await sender.send(TO, b"")
    began, calls = pool.now, [sender.send(TO, bytes([i])) for i in (1, 2, 3)]
    for error in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(error, errors.TransactionLost)
        assert error.tx in {each["hash"] for each in pool.sent}
    assert pool.now - began < POLICY.give_up_after_s + 5
    assert {each["nonce"] for each in pool.sent} == {0}  # nothing piles up behind it


async def test_transaction_that_was_sent_while_others_waited_has_all_its_time(pool: Pool) -> None:
    pool.auto = False
    sender = pool.sender()
    with pytest.raises(errors.TransactionLost):
        await sender.send(TO, b"")
    sends = [asyncio.create_task(sender.send(TO, bytes([i]))) for i in (1, 2)]
    began = pool.now
    await until(lambda: pool.now - began > POLICY.give_up_after_s - 10, *sends)
    take = pool.methods["eth_sendRawTransaction"]

    def cancelled(raw: str) -> Any:
        pool.methods["eth_sendRawTransaction"] = take
        take(raw)
        raise asyncio.CancelledError

    pool.methods["eth_sendRawTransaction"] = cancelled
    pool.confirm(pool.sent[-1])
    sent_at = pool.now
    with pytest.raises(errors.TransactionLost):
        await sends[1]
    assert 0 <= pool.now - sent_at - POLICY.give_up_after_s < 5


async def test_sends_behind_a_lost_transaction_follow_once_it_is_mined(pool: Pool) -> None:
    pool.auto = False
    sender = pool.sender()
    with pytest.raises(errors.TransactionLost):
        await sender.send(TO, b"")
    sends = [asyncio.create_task(sender.send(TO, bytes([i]))) for i in (1, 2, 3)]
    began, bumped = pool.now, len(pool.sent)
    await until(lambda: len(pool.sent) > bumped, *sends)
    assert pool.now - began < POLICY.give_up_after_s
    pool.auto = True
    pool.confirm(pool.sent[-1])
    await asyncio.gather(*sends)
    assert [each["nonce"] for each in pool.sent[-3:]] == [1, 2, 3]
