import asyncio
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from sender_fakes import KEY, TO

from muster.chain import SendJournal, send_journal
from muster.chain.outgoing import (
    Fees,
    SendRefusal,
    SignedTransaction,
    UnsignedTransaction,
    refusal_of,
)
from muster.chain.send_journal import ActionState, Execute, Inclusion, SqliteStore
from muster.protocol.eip712 import address_of
from muster.protocol.encoding import keccak
from muster.protocol.errors import ConfigError, EncodingError, RpcError, StorageError, StorageFailed

SCOPE = {"chain_id": 31337, "genesis": "0x01", "account": address_of(KEY)}
PLACE = Inclusion("0xaa", 7, "0xbb")


def opened(folder: Path, **scope: object) -> SendJournal:
    return SendJournal.of(folder / "journal", **(SCOPE | scope))  # type: ignore[arg-type]


def transaction(nonce: int, data: bytes = b"\1\2\3\4") -> SignedTransaction:
    return UnsignedTransaction(31337, nonce, TO, data, 21_000, Fees(3, 1)).signed(KEY)


async def begin(journal: SendJournal, nonce: int, label: str | None = None) -> object:
    return await journal.begin(label, "purpose", nonce, transaction(nonce))


# ---------------------------------------------------------------------- outgoing


@given(
    st.integers(0, 2**32),
    st.booleans(),
    st.binary(max_size=100),
    st.integers(1, 2**40),
    st.integers(1, 2**60),
)
def test_signed_transaction_says_what_was_signed(
    nonce: int, is_call: bool, data: bytes, gas: int, fee: int
) -> None:
    unsigned = UnsignedTransaction(
        31337, nonce, TO if is_call else None, data, gas, Fees(2 * fee, fee)
    )
    signed = unsigned.signed(KEY)
    assert UnsignedTransaction.from_raw(signed.raw) == unsigned
    assert signed.tx_hash == "0x" + keccak(signed.raw).hex()
    assert KEY not in signed.raw


@pytest.mark.parametrize("raw", [b"", b"\2", b"\2\xc0", transaction(1).raw[:-1], b"\x7f" * 9])
def test_what_is_no_transaction_is_refused(raw: bytes) -> None:
    with pytest.raises(EncodingError, match="not a signed transaction"):
        UnsignedTransaction.from_raw(raw)


@given(st.integers(0, 2**60), st.integers(0, 2**60))
def test_raised_fees_are_at_least_a_quarter_higher(most: int, tip: int) -> None:
    raised = Fees(most, tip).times(1.25)
    assert 4 * raised.max_wei >= 5 * most * (1 - 1e-15)
    assert raised.at_most(Fees(5, 5)).max_wei <= 5
    assert raised.can_replace(Fees(most, tip))
    assert not Fees(most, tip).can_replace(Fees(most + 1, tip))
    assert raised.at_least(Fees(9, 9)).tip_wei >= 9


# The words of geth, Nethermind, Besu, Erigon, reth and Anvil.
@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        ("already known", SendRefusal.KNOWN),
        ("INTERNAL_ERROR: existing tx with same hash", SendRefusal.KNOWN),
        ("could not replace existing tx", SendRefusal.NONCE_TAKEN),
        ("OwnNonceAlreadyUsed", SendRefusal.NONCE_TAKEN),
        ("pending sub-pool is full", SendRefusal.OTHER),
        ("transaction already imported", SendRefusal.KNOWN),
        ("AlreadyKnown", SendRefusal.KNOWN),
        ("Known transaction", SendRefusal.KNOWN),
        ("nonce too low: next nonce 5, tx nonce 4", SendRefusal.NONCE_USED),
        ("OldNonce", SendRefusal.NONCE_USED),
        ("replacement transaction underpriced", SendRefusal.NONCE_TAKEN),
        ("ReplacementNotAllowed", SendRefusal.NONCE_TAKEN),
        ("transaction underpriced: tip needed 25, tip permitted 1", SendRefusal.FEE_TOO_LOW),
        ("max fee per gas less than block base fee", SendRefusal.FEE_TOO_LOW),
        ("FeeTooLow, MaxFeePerGas too low", SendRefusal.FEE_TOO_LOW),
        ("Insufficient funds for gas * price + value", SendRefusal.OTHER),
        ("intrinsic gas too low", SendRefusal.OTHER),
    ],
)
def test_refusal_is_recognised_in_every_client(words: str, refusal: SendRefusal) -> None:
    assert refusal_of(RpcError(f"eth_sendRawTransaction failed: {words}", code=-32000)) is refusal


# ----------------------------------------------------------------------- journal


async def test_action_is_there_after_a_restart(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    action = await journal.begin("commit 17", "purpose", 3, transaction(3))
    action = await journal.add_attempt(action, transaction(3, b"dearer"))
    journal.close()
    journal = opened(tmp_path)
    assert await journal.find("commit 17") == action
    assert [a.tx_hash for a in action.attempts] == [
        transaction(3).tx_hash,
        transaction(3, b"dearer").tx_hash,
    ]
    journal.close()


async def test_file_is_only_its_owners_to_read(tmp_path: Path) -> None:
    journal = opened(tmp_path / "new")
    await begin(journal, 0)
    modes = {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "new").iterdir()}
    assert modes == {0o600}
    journal.close()


async def test_key_is_not_in_the_file(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    await begin(journal, 0)
    journal.close()
    content = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert transaction(0).raw in content
    assert KEY not in content


def test_raw_transaction_is_not_shown() -> None:
    assert transaction(0).raw.hex() not in repr(transaction(0))
    assert transaction(0).raw[:8].hex() not in repr(transaction(0))


async def test_two_live_actions_never_share_a_nonce() -> None:
    journal = SendJournal(None, "scope")
    await begin(journal, 4)
    with pytest.raises(StorageError, match="refuses a second action"):
        await begin(journal, 4)
    assert len(await journal.pending()) == 1


@pytest.mark.parametrize("state", [ActionState.REFUSED, ActionState.REPLACED])
async def test_nonce_is_free_again_when_its_action_is_out(state: ActionState) -> None:
    journal = SendJournal(None, "scope")
    action = await journal.begin("one", "purpose", 4, transaction(4))
    await journal.resolve(action, state)
    again = await journal.begin("one", "purpose", 4, transaction(4))
    assert await journal.find("one") == again


@pytest.mark.parametrize("state", [ActionState.MINED, ActionState.REVERTED])
async def test_nonce_of_a_mined_action_is_used(state: ActionState) -> None:
    journal = SendJournal(None, "scope")
    action = await journal.begin(None, "purpose", 4, transaction(4))
    await journal.resolve(action, state, PLACE)
    with pytest.raises(StorageError, match="refuses a second action"):
        await begin(journal, 4)


async def test_two_live_actions_never_share_a_label() -> None:
    journal = SendJournal(None, "scope")
    await begin(journal, 1, "commit 17")
    with pytest.raises(StorageError, match="refuses a second action"):
        await begin(journal, 2, "commit 17")


async def test_label_is_free_after_a_revert_and_kept_after_success() -> None:
    journal = SendJournal(None, "scope")
    action = await journal.begin("one", "purpose", 1, transaction(1))
    await journal.resolve(action, ActionState.REVERTED, PLACE)
    assert await journal.find("one") is None
    action = await journal.begin("one", "purpose", 2, transaction(2))
    await journal.resolve(action, ActionState.MINED, PLACE)
    found = await journal.find("one")
    assert found is not None
    assert (found.state, found.inclusion) == (ActionState.MINED, PLACE)


async def test_reopened_action_leaves_its_label_to_the_one_that_took_it() -> None:
    journal = SendJournal(None, "scope")
    reverted = await journal.begin("one", "purpose", 1, transaction(1))
    await journal.resolve(reverted, ActionState.REVERTED, PLACE)
    second = await journal.begin("one", "purpose", 2, transaction(2))
    reopened = await journal.resolve(reverted, ActionState.PENDING)
    assert (reopened.label, reopened.inclusion) == (None, None)
    assert await journal.find("one") == second


async def test_unlabelled_actions_do_not_collide() -> None:
    journal = SendJournal(None, "scope")
    for nonce in (2, 0, 1):
        await begin(journal, nonce)
    assert [action.nonce for action in await journal.pending()] == [0, 1, 2]


async def test_settled_actions_are_found_by_nonce() -> None:
    journal = SendJournal(None, "scope")
    for nonce in range(4):
        action = await journal.begin(None, "purpose", nonce, transaction(nonce))
        if nonce != 2:
            await journal.resolve(action, ActionState.MINED, PLACE)
    assert [action.nonce for action in await journal.settled_from(1)] == [1, 3]


@pytest.mark.parametrize(
    "other", [{"chain_id": 1}, {"genesis": "0x02"}, {"account": TO}], ids=lambda o: next(iter(o))
)
async def test_other_chains_and_accounts_are_left_alone(
    tmp_path: Path, other: dict[str, object]
) -> None:
    journal = opened(tmp_path)
    await begin(journal, 4, "one")
    journal.close()
    journal = opened(tmp_path, **other)
    assert await journal.find("one") is None
    assert await journal.pending() == []
    await begin(journal, 4, "one")
    journal.close()


async def test_old_transactions_are_forgotten_and_their_labels_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(send_journal, "KEPT_NONCES", 2)
    journal = SendJournal(None, "scope")
    for nonce in range(6):
        label = f"action {nonce}" if nonce % 2 else None
        action = await journal.begin(label, "purpose", nonce, transaction(nonce))
        await journal.resolve(action, ActionState.MINED, PLACE)
    settled = await journal.settled_from(0)
    assert [(a.nonce, len(a.attempts)) for a in settled] == [(1, 0), (3, 1), (4, 1), (5, 1)]
    first = await journal.find("action 1")
    assert first is not None
    assert first.inclusion == PLACE


async def test_pending_transactions_are_never_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send_journal, "KEPT_NONCES", 1)
    journal = SendJournal(None, "scope")
    await begin(journal, 0)
    later = await journal.begin(None, "purpose", 9, transaction(9))
    await journal.resolve(later, ActionState.MINED, PLACE)
    assert [len(action.attempts) for action in await journal.pending()] == [1]


_HOLDER = """
import sys, time
from pathlib import Path
from muster.chain.send_journal import SendJournal
journal = SendJournal(Path(sys.argv[1]), "scope")
print("held", flush=True)
time.sleep(60)
"""


def test_second_process_is_refused_until_the_first_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(send_journal, "LOCK_TIMEOUT_S", 0.05)
    path = tmp_path / "journal"
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(path)], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match="held by another process"):
            SendJournal(path, "scope")
        holder.kill()
    SendJournal(path, "scope").close()


def test_damaged_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "journal").write_bytes(b"no database" * 100)
    with pytest.raises(StorageError, match="is damaged"):
        opened(tmp_path)


def test_folder_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()
    with pytest.raises(StorageError, match="cannot open"):
        opened(tmp_path)


async def test_unusable_file_is_reported_before_anything_is_sent(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    journal.close()
    with pytest.raises(StorageError, match="cannot be used"):
        await begin(journal, 0)


async def test_full_disk_refuses_actions_until_there_is_space(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    store = journal._store
    assert isinstance(store, send_journal.SqliteStore)
    store._connection.execute("PRAGMA max_page_count = 1")  # the present size at least

    async def fill() -> None:
        for nonce in range(1000):
            await begin(journal, nonce)

    with pytest.raises(StorageFailed, match="is full"):
        await fill()
    written = len(await journal.pending())
    store._connection.execute("PRAGMA max_page_count = 1000000")
    await begin(journal, written)
    assert len(await journal.pending()) == written + 1


async def test_cancelled_write_leaves_the_journal_usable(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    for nonce in range(20):
        writing = asyncio.create_task(journal.begin(None, "purpose", nonce, transaction(nonce)))
        await asyncio.sleep(0)
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
    fresh = await journal.begin(None, "purpose", 99, transaction(99))
    # Cancelled writes may or may not be on the disk; the one that was not cancelled is.
    assert {fresh.nonce} <= {a.nonce for a in await journal.pending()} <= {*range(20), 99}
    journal.close()


def test_journal_is_a_plain_sqlite_file(tmp_path: Path) -> None:
    opened(tmp_path).close()
    with sqlite3.connect(tmp_path / "journal") as connection:
        assert connection.execute("SELECT count(*) FROM actions").fetchone() == (0,)
    connection.close()


class Planned(SqliteStore):
    """Keeps the plans of the statements that it runs."""

    def __init__(self) -> None:
        super().__init__(None)
        self.plans: list[str] = []

    def run(self, work: Callable[[Execute], Any]) -> Any:
        def planned(execute: Execute) -> Any:
            def run_one(sql: str, values: Sequence[object]) -> list[tuple[Any, ...]]:
                rows = execute(f"EXPLAIN QUERY PLAN {sql}", values)
                self.plans += [f"{row[-1]}: {sql}" for row in rows]
                return execute(sql, values)

            return work(run_one)

        return super().run(planned)


async def test_no_statement_reads_all_actions_that_were_ever_sent() -> None:
    store = Planned()
    journal = SendJournal(store, "scope")
    for nonce in range(3):
        action = await journal.begin(f"commit {nonce}", "purpose", nonce, transaction(nonce))
        await journal.resolve(action, ActionState.MINED, PLACE)
    await journal.pending()
    await journal.settled_from(1)
    await journal.find("commit 1")
    assert store.plans
    assert [plan for plan in store.plans if plan.startswith("SCAN actions")] == []
