"""Logs that were read before are not requested again, and never override the chain."""

import sqlite3
from pathlib import Path
from typing import Any

import pytest
from chain_fakes import FakeNode, deposit, owners

from muster.chain import ChainView, EventReader, read_view, reader
from muster.chain.log_store import log_file
from muster.protocol.errors import ChainUnreachable


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    """A chain of eight blocks with a deposit each, read four at a time, and a file for logs."""
    monkeypatch.setattr(reader, "FIRST_SPAN", 4)
    monkeypatch.setattr(reader, "LONGEST_SPAN", 4)
    node = FakeNode()
    node.log_file = tmp_path / "chains" / "1.sqlite"
    for owner in range(1, 9):
        node.mine(deposit(owner))
    return node


def asked(node: FakeNode) -> list[int]:
    """Let a node note the first block of each request for logs."""
    logs, firsts = node.methods["eth_getLogs"], list[int]()

    def noting(query: dict[str, Any]) -> Any:
        firsts.append(int(query["fromBlock"], 16))
        return logs(query)

    node.methods["eth_getLogs"] = noting
    return firsts


def failing_after(node: FakeNode, answers: int) -> None:
    """Let a node answer only `answers` requests for logs, and then fail."""
    logs, left = node.methods["eth_getLogs"], [answers]

    def answering(query: dict[str, Any]) -> Any:
        if not left[0]:
            raise ConnectionAbortedError
        left[0] -= 1
        return logs(query)

    node.methods["eth_getLogs"] = answering


async def test_second_process_asks_only_for_what_is_new(node: FakeNode) -> None:
    first = await EventReader(node).poll()
    node.mine(deposit(9))
    firsts = asked(node)
    second = await EventReader(node).poll()
    assert owners(first.events) == [*range(1, 9)]
    assert owners(second.events) == [*range(1, 10)]
    assert second.events[:8] == first.events
    assert firsts == [9]


async def test_without_a_file_all_is_asked_again(node: FakeNode) -> None:
    node.log_file = None
    await EventReader(node).poll()
    firsts = asked(node)
    await EventReader(node).poll()
    assert firsts == [1, 5]


async def test_killed_while_reading_goes_on_after_what_was_read(node: FakeNode) -> None:
    true = node.methods["eth_getLogs"]
    failing_after(node, 1)
    with pytest.raises(ChainUnreachable):
        await EventReader(node).poll()
    node.methods["eth_getLogs"] = true
    firsts = asked(node)
    assert owners((await EventReader(node).poll()).events) == [*range(1, 9)]
    assert firsts == [5]


async def test_failed_poll_goes_on_after_what_it_read(node: FakeNode) -> None:
    node.log_file = None
    true, events = node.methods["eth_getLogs"], EventReader(node)
    failing_after(node, 1)
    with pytest.raises(ChainUnreachable):
        await events.poll()
    node.methods["eth_getLogs"] = true
    firsts = asked(node)
    assert owners((await events.poll()).events) == [*range(1, 9)]
    assert firsts == [5, 7]
    assert (await events.poll()).events == []


async def test_unread_events_of_a_reorganised_block_are_never_told(node: FakeNode) -> None:
    node.log_file = None
    true, events = node.methods["eth_getLogs"], EventReader(node)
    failing_after(node, 1)
    with pytest.raises(ChainUnreachable):
        await events.poll()
    node.methods["eth_getLogs"] = true
    node.reorganise(6)
    for owner in range(13, 17):
        node.mine(deposit(owner))
    poll = await events.poll()
    assert owners(poll.events) == [1, 2, 13, 14, 15, 16]
    # No void log had been reported.
    assert poll.rewound_to is None


async def test_told_events_stay_void_when_the_poll_that_noticed_fails(node: FakeNode) -> None:
    node.log_file = None
    true, events = node.methods["eth_getLogs"], EventReader(node)
    assert len((await events.poll()).events) == 8
    node.reorganise(2)
    node.mine(deposit(17), deposit(18))
    node.mine()
    node.mine()
    failing_after(node, 0)
    with pytest.raises(ChainUnreachable):
        await events.poll()
    node.methods["eth_getLogs"] = true
    poll = await events.poll()
    assert (owners(poll.events), poll.rewound_to) == ([17, 18], 6)


async def test_reorganisation_meanwhile_voids_what_was_kept(node: FakeNode) -> None:
    await EventReader(node).poll()
    node.reorganise(3)
    node.mine(deposit(21))
    for _ in range(3):
        node.mine()
    poll = await EventReader(node).poll()
    assert owners(poll.events) == [1, 2, 3, 4, 5, 21]
    assert poll.rewound_to is None
    # The file holds the logs that stand now.
    firsts = asked(node)
    assert owners((await EventReader(node).poll()).events) == [1, 2, 3, 4, 5, 21]
    assert firsts == []


async def test_another_chain_of_the_same_number_is_read_from_the_start(node: FakeNode) -> None:
    await EventReader(node).poll()
    other = FakeNode()
    other.log_file, other.salt = node.log_file, 7
    for owner in range(31, 41):
        other.mine(deposit(owner))
    assert owners((await EventReader(other).poll()).events) == [*range(31, 41)]


async def test_only_one_of_two_writes_on(node: FakeNode) -> None:
    slow, quick = EventReader(node), EventReader(node)
    await slow.poll()
    await quick.poll()
    node.mine(deposit(9))
    await quick.poll()
    node.mine(deposit(10))
    assert owners((await slow.poll()).events) == [9, 10]
    firsts = asked(node)
    assert owners((await EventReader(node).poll()).events) == [*range(1, 11)]
    assert firsts == [10]


async def test_nothing_above_the_head_is_told(node: FakeNode) -> None:
    await EventReader(node).poll()
    behind = EventReader(node, confirmations=3)
    poll = await behind.poll()
    assert owners(poll.events) == [*range(1, 6)]
    assert poll.head.number == 5
    node.mine(deposit(9))
    assert owners((await behind.poll()).events) == [6]


@pytest.mark.parametrize("behind", [0, 1, 2])
async def test_block_above_the_head_that_was_taken_back_is_not_kept(
    node: FakeNode, behind: int
) -> None:
    await EventReader(node).poll()
    delayed = EventReader(node, confirmations=behind)
    await delayed.poll()
    node.reorganise(1)
    node.mine()
    for owner in (21, 22):
        node.mine(deposit(owner))
        node.mine()
        await delayed.poll()
    stored = await EventReader(node).poll()
    node.log_file = None
    assert owners(stored.events) == [*range(1, 8), 21, 22]
    assert stored.events == (await EventReader(node).poll()).events


@pytest.mark.parametrize("damage", ["bytes", "row"])
async def test_damaged_file_is_done_without(
    node: FakeNode, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    await EventReader(node).poll()
    assert node.log_file is not None
    if damage == "bytes":
        for file in node.log_file.parent.iterdir():
            file.write_bytes(b"no database " * 1000)
    else:
        with sqlite3.connect(node.log_file) as db:
            db.execute("UPDATE blocks SET logs = x'00' WHERE number = 3")
    assert owners((await EventReader(node).poll()).events) == [*range(1, 9)]
    assert "no logs are kept on disk" in caplog.text
    # The file was started again from nothing.
    await EventReader(node).poll()
    firsts = asked(node)
    assert owners((await EventReader(node).poll()).events) == [*range(1, 9)]
    assert firsts == []


async def test_unwritable_folder_is_done_without(node: FakeNode, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    node.log_file = tmp_path / "file" / "1.sqlite"
    assert owners((await EventReader(node).poll()).events) == [*range(1, 9)]


async def test_logs_without_times_are_kept_with_them(node: FakeNode) -> None:
    node.timed_logs = False
    first = await EventReader(node).poll()
    node.calls.clear()
    second = await EventReader(node).poll()
    assert second.events == first.events
    assert "eth_getBlockByHash" not in node.calls


async def test_quiet_blocks_leave_no_rows(node: FakeNode) -> None:
    events = EventReader(node)
    for _ in range(3):
        await events.poll()
        node.mine()
    assert node.log_file is not None
    with sqlite3.connect(node.log_file) as db:
        assert [n for (n,) in db.execute("SELECT number FROM blocks")] == [*range(1, 9)]


async def test_views_of_both_kinds_of_reading_are_equal(node: FakeNode) -> None:
    asking, keeping = await read_view(node, ChainView()), await read_view(node, ChainView())
    assert asking.recent_blocks() == keeping.recent_blocks() != []


def test_development_chains_keep_nothing(node: FakeNode) -> None:
    from dataclasses import replace

    assert log_file(replace(node.deployment, chain_id=31337)) is None
    found = log_file(replace(node.deployment, chain_id=8453))
    assert found is not None
    assert found.name.startswith("8453-0x")
    assert found.name.endswith("-2.sqlite")
