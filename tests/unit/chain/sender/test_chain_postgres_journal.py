"""The journal's rules in PostgreSQL, and what happens to a sender that lost its lock."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from postgres_server import PostgresServer

from muster.chain.outgoing import SignedTransaction
from muster.chain.send_journal import (
    ActionState,
    Inclusion,
    JournalStore,
    PostgresStore,
    SendJournal,
    SqliteStore,
)
from muster.protocol.errors import StorageError

LOCK = 77
PLACE = Inclusion("0x01", 5, "0x05")


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with PostgresServer() as started:
        yield started


@pytest.fixture
def url(server: PostgresServer) -> str:
    return server.create()


def acquired(url: str, lock: int = LOCK) -> PostgresStore:
    deadline = time.monotonic() + 10
    while (store := PostgresStore.acquire(url, lock)) is None:
        # The server takes a moment to end a connection.
        assert time.monotonic() < deadline
    return store


@pytest.fixture(params=["sqlite", "postgresql"])
def store(
    request: pytest.FixtureRequest, tmp_path: Path, server: PostgresServer
) -> Iterator[JournalStore]:
    is_file = request.param == "sqlite"
    opened = SqliteStore(tmp_path / "journal") if is_file else acquired(server.create())
    yield opened
    opened.close()


def signed(number: int) -> SignedTransaction:
    return SignedTransaction(f"0x{number:02x}", bytes([number, 0, 255]))


async def test_action_goes_from_pending_to_mined(store: JournalStore) -> None:
    journal = SendJournal(store, "scope")
    action = await journal.begin("a label", "a call", 7, signed(1))
    assert action == (await journal.find("a label"))
    action = await journal.add_attempt(action, signed(2))
    assert (await journal.pending())[0].attempts == (signed(1), signed(2))
    await journal.resolve(action, ActionState.MINED, PLACE)
    assert await journal.pending() == []
    found = await journal.settled_from(7)
    assert [(a.state, a.inclusion, a.nonce) for a in found] == [(ActionState.MINED, PLACE, 7)]
    assert await journal.settled_from(8) == []


async def test_second_action_of_a_label_or_nonce_is_refused(store: JournalStore) -> None:
    journal = SendJournal(store, "scope")
    first = await journal.begin("a label", "a call", 1, signed(1))
    with pytest.raises(StorageError, match="second action"):
        await journal.begin("a label", "a call", 2, signed(2))
    with pytest.raises(StorageError, match="second action"):
        await journal.begin("another", "a call", 1, signed(3))
    # Nothing of the refused write is left, and the store still works.
    assert [a.number for a in await journal.pending()] == [first.number]
    await journal.resolve(first, ActionState.REFUSED)
    assert (await journal.begin("a label", "a call", 1, signed(4))).nonce == 1


async def test_other_accounts_actions_are_left_alone(store: JournalStore) -> None:
    ours, others = SendJournal(store, "ours"), SendJournal(store, "others")
    await ours.begin("a label", "a call", 1, signed(1))
    await others.begin("a label", "a call", 1, signed(2))
    assert [a.attempts for a in await ours.pending()] == [(signed(1),)]


def test_one_process_holds_the_lock(url: str) -> None:
    holder = acquired(url)
    assert PostgresStore.acquire(url, LOCK) is None
    acquired(url, LOCK + 1).close()
    holder.close()
    acquired(url).close()


async def test_who_lost_the_lock_journals_nothing_and_its_successor_sees_all(
    url: str, server: PostgresServer
) -> None:
    old = acquired(url)
    journal = SendJournal(old, "scope")
    await journal.begin("sent", "a call", 1, signed(1))
    server.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND pid IN"
        f" (SELECT pid FROM pg_stat_activity WHERE datname = '{url.split('/')[3].split('?')[0]}')"
    )
    new = acquired(url)
    with pytest.raises(StorageError, match="cannot be used"):
        await journal.begin("too late", "a call", 2, signed(2))
    with pytest.raises(StorageError, match="cannot be used"):
        old.check()
    taken_over = await SendJournal(new, "scope").pending()
    assert [(a.label, a.attempts) for a in taken_over] == [("sent", (signed(1),))]
    new.check()
    for store in (old, new):
        store.close()


def test_server_that_is_away_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="does not answer"):
        PostgresStore.acquire(f"postgresql://muster@/none?host={tmp_path}", LOCK)
