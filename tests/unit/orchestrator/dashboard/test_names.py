"""The things that texts name: one table for the command line and the dashboard's search."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orchestrator_bench
import pytest
from dashboard_stage import History, store
from orchestrator_fakes import FRAUD, RUN, Network, escrow_of, slash_of

from muster import chain
from muster.chain.structs import SlashSubject
from muster.protocol.encoding import hex0x, keccak
from muster.protocol.errors import ConfigError
from muster.protocol.ids import Address, Hash32, Step, to_address

NOBODY = to_address(bytes(range(1, 21)))


@dataclass(frozen=True)
class Row:
    """A text and the thing that it names."""

    text: str
    """The user's text."""
    outcome: str
    """BATCH:POSITION of the one submission, or what the command line's error says."""
    page: str
    """The page to which the dashboard goes, or its message."""


@pytest.fixture(scope="module")
def history() -> History:
    history = History(Network(), per_batch=16)
    history.register(8)
    history.work(250, steps=10)
    history.work(3, steps=1, after=10, judged=0)
    history.fund_and_pay()
    history.dispute()
    twin = _file(history.network.view.batches[3], 1).hex()[:6]
    history.network.join(
        to_address("0x" + twin + "00" * 17), to_address(bytes(19) + b"\1"), number=99
    )
    return history


def _file(batch: chain.BatchView, position: int) -> Hash32:
    assert batch.records is not None
    return batch.records[position].file_hash


def _table(history: History) -> Iterator[Row]:
    view = history.network.view
    batch, twin, last = view.batches[2], view.batches[3], view.batches[len(view.batches)]
    file, shared = _file(batch, 3).hex(), _file(twin, 1).hex()
    page = f"/submissions/0x{file}"
    record = (batch.records or ())[3]
    maker = view.worker_by_id[record.worker_id]
    slot = f"{record.step}:{record.index}"
    slash, case, paid = view.slashes[0], next(iter(view.cases.values())), view.payments[0]
    struck = _file(view.batches[slash.batch_id or 0], slash.position or 0).hex()
    disputed = _file(view.batches[case.batch_id], case.position).hex()
    several = f"has {batch.count} submissions: 2:0, 2:1, 2:2, 2:3, 2:4 and"
    worker, run = f"/workers/{maker.address}", view.runs[batch.run_id]
    unknown = bytes.fromhex(file)[:-1].hex() + ("00" if file[-2:] != "00" else "01")

    # By number.
    yield Row("2:3", "2:3", page)
    yield Row("  02:003 ", "2:3", page)
    yield Row("2:99", "batch 2 has no position 99", "Batch 2 has no position 99.")
    yield Row("999:0", "there is no batch 999", "There is no batch 999")
    yield Row(f"{batch.run_id}/2:3", "2:3", page)
    yield Row("7/2:3", "batch 2 is not of run 7", "Batch 2 is not of run 7.")
    yield Row(f"{batch.run_id}/2", several, f"{batch.count} submissions.")
    yield Row("7/2", "batch 2 is not of run 7", "Batch 2 is not of run 7.")
    yield Row("1/999", "there is no batch 999", "There is no batch 999")
    assert history.last is not None
    unjudged = f"0x{history.last.file_hash.hex()}"
    yield Row(f"{last.batch_id}:2", f"{last.batch_id}:2", f"/submissions/{unjudged}")
    yield Row(unjudged, "nothing on chain is 0x", f"/submissions/{unjudged}")
    yield Row(unjudged[:9], "nothing on chain begins with 0x", f"/submissions/{unjudged}")
    # By a file.
    yield Row(f"0x{file}", "2:3", page)
    yield Row(file.upper(), "2:3", page)
    yield Row(f"0x{file[:8]}", "2:3", page)
    yield Row(file[:7], "2:3", page)
    yield Row(file[:5] + "g", "is no name and no hexadecimal", "is no name and no hexadecimal")
    yield Row(f"0x{file[:5]}", "is too short for a hash", "is too short for a hash")
    yield Row(file + "0", "has 65 digits", "has 65 digits")
    yield Row(
        f"0x{unknown}", f"nothing on chain is 0x{unknown}", f"Nothing on chain is 0x{unknown}"
    )
    both = f"may be submission 3:1 (file 0x{shared}), worker 0x"
    yield Row(f"0x{shared[:6]}", both, both)
    yield Row(f"0x{shared[:9]}", "3:1", f"/submissions/0x{shared}")
    # By a worker or its node.
    theirs = f"worker {maker.address} has "
    for text in (maker.address, maker.address.lower(), maker.address[2:12], maker.node):
        yield Row(text, theirs, worker)
    yield Row(NOBODY, f"{NOBODY} is neither a worker nor", f"{NOBODY} is neither a worker nor")
    miscased = maker.address[:2] + maker.address[2:].swapcase()
    yield Row(miscased, "wrong checksum", "wrong checksum")
    yield Row(f"{maker.address}/{slot}", "2:3", page)
    yield Row(f"{maker.node}/{slot}", "2:3", page)
    yield Row(f"{maker.address}/9999:0", "no outcome of step 9999", "No outcome of step 9999")
    yield Row(f"{NOBODY}/{slot}", "neither a worker nor", "neither a worker nor")
    # By a transaction.
    yield Row(batch.tx_hash, several, "which commits batch 2")
    yield Row(batch.tx_hash[:12], several, "which commits batch 2")
    yield Row(batch.posted_tx or "", several, "which judges batch 2")
    yield Row(slash.tx_hash, f"{slash.batch_id}:{slash.position}", f"/submissions/0x{struck}")
    yield Row(case.opened_tx, f"{case.batch_id}:{case.position}", f"/submissions/0x{disputed}")
    pays = f"pays {paid.worker} for 2 submissions names no submission"
    yield Row(paid.tx_hash, pays, f"/workers/{paid.worker}")
    published = run.checkpoints[run.latest_version or 0].tx_hash
    yield Row(published, "names no submission", "publishes version 10 of run")
    # By a case.
    yield Row(f"0x{case.case_id.hex()}", f"{case.batch_id}:{case.position}", disputed)
    # By nothing.
    yield Row("", "is no name", "is no name")
    yield Row("<script>", "is no name", "&lt;script&gt;")
    yield Row("\u0662:\u0663", "is no name", "is no name")


def test_the_command_line_finds_what_is_named_or_says_why_not(history: History) -> None:
    view = history.network.view
    for row in _table(history):
        said, hint = _answer(view, row.text)
        assert said == row.outcome if hint is None else row.outcome in said, row
        assert hint != ""
        assert "\n" not in said


def _answer(view: chain.ChainView, text: str) -> tuple[str, str | None]:
    """Return the outcome found, or the error with its hint."""
    try:
        return str(chain.find_outcome(view, text)), None
    except ConfigError as error:
        return str(error), error.hint or ""


async def test_the_search_goes_to_what_is_named_or_says_why_not(
    history: History, tmp_path: Path
) -> None:
    table = list(_table(history))
    async with orchestrator_bench.open_bench(tmp_path, history.network) as bench:
        await store(history, bench)
        async with bench.http() as http:
            for row in table:
                answer = await http.get("/search", params={"q": row.text})
                said = answer.headers.get("location") or answer.text
                assert row.page in said, row
                assert "<script>alert" not in said


def test_a_worker_is_found_by_whatever_is_of_one_worker_only(history: History) -> None:
    view = history.network.view
    batch, paid, slash = view.batches[2], view.payments[0], view.slashes[0]
    record = (batch.records or ())[3]
    maker = view.worker_by_id[record.worker_id]
    for text in (maker.address, maker.node, maker.address[:9], "2:3", _file(batch, 3).hex()):
        assert chain.find_worker(view, text) is maker
    assert chain.find_worker(view, paid.tx_hash).address == paid.worker
    assert chain.find_worker(view, slash.tx_hash).address == slash.owner
    with pytest.raises(ConfigError, match=r"batch 1/2 is of \d workers: 0x"):
        chain.find_worker(view, f"{batch.run_id}/2")
    newest = view.batches[len(view.batches)]
    with pytest.raises(ConfigError, match="is of no worker"):
        chain.find_worker(view, f"{newest.batch_id}:0")
    with pytest.raises(chain.NothingNamed, match="neither a worker nor"):
        chain.find_worker(view, NOBODY)


def test_a_slot_is_a_workers(history: History) -> None:
    view = history.network.view
    record = (view.batches[2].records or ())[3]
    maker: Address = view.worker_by_id[record.worker_id].address
    assert str(chain.find_outcome(view, f"{maker}/{record.step}:{record.index}")) == "2:3"
    with pytest.raises(chain.NothingNamed, match="no outcome of step 4000000, index"):
        chain.find_outcome(view, f"{maker}/4000000:{record.index}")


def test_many_candidates_are_cut_to_five(history: History) -> None:
    view = history.network.view
    received = [Hash32(bytes.fromhex("fedcba") + bytes([n] * 29)) for n in range(7)]
    with pytest.raises(ConfigError, match="and 2 more") as caught:
        chain.find_named(view, "fedcba", received=received)
    assert str(caught.value).count("received, not on chain") == 5


def test_a_bundle_alone_is_named_by_its_place_or_its_file() -> None:
    file = Hash32(bytes(range(32)))
    for text in ("12:3", "012:3", "4/12:3", "0x000102", file.hex()):
        assert chain.is_named(text, (12, 3), file)
    for text in ("12:4", "0x000103", file.hex()[:-1] + "0"):
        assert not chain.is_named(text, (12, 3), file)
    with pytest.raises(chain.NothingNamed, match="too short"):
        chain.is_named("0x0001", (12, 3), file)


class Unread(dict[Any, Any]):
    """A table in which single keys may be looked up, and that nobody may read from end to end."""

    def values(self) -> Any:
        raise AssertionError("a table is read from end to end")

    __iter__ = items = keys = values


class UnreadList(list[Any]):
    """A list, likewise."""

    def __iter__(self) -> Any:
        raise AssertionError("a list is read from end to end")


async def test_a_search_reads_no_table_from_end_to_end(
    history: History, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, view = list(_table(history)), history.network.view
    async with orchestrator_bench.open_bench(tmp_path, history.network) as bench:
        await store(history, bench)
        await bench.services.status.latest()
        bench.services.status.monotonic = lambda: 0.0
        for name in ("batches", "cases", "workers"):
            monkeypatch.setattr(view, name, Unread(getattr(view, name)))
        monkeypatch.setattr(view, "payments", UnreadList(view.payments))
        async with bench.http() as http:
            for row in table:
                answer = await http.get("/search", params={"q": row.text})
                assert row.page in (answer.headers.get("location") or answer.text), row


def test_an_index_finds_what_reading_everything_finds() -> None:
    network, seen = Network(), set[str]()
    index, kinds = chain.NameIndex(network.view), set[str]()
    for _ in _stages(network):
        seen |= set(_names(network.view))
        for name in sorted(seen):
            for text in (name, name[:9], name[:-1] + ("1" if name[-1] == "0" else "0")):
                whole = _said(network.view, text)
                assert _said(network.view, text, index) == whole, text
                kinds.add(whole.split(" ")[0])
    assert {"submission", "case", "worker", "transaction", "nothing", "no"} <= kinds


def _stages(network: Network) -> Iterator[None]:
    """Let a history grow, shrink and grow again; pause at each stage."""
    history, worker = History(network, per_batch=8), network.worker(0)
    history.register(5)
    history.work(60, steps=3)
    yield
    history.work(3, steps=1, after=3, judged=0)
    history.fund_and_pay()
    network.apply("WorkerRegistry", "NodeUnbound", worker=worker.address, node=worker.node)
    network.apply("WorkerRegistry", "NodeBound", worker=worker.address, node=NOBODY)
    yield
    case = network.open_case(1, 0, FRAUD)
    committed = network.view.block_number or 0
    subject = SlashSubject(RUN, worker.address, chain.Offence.FRAUD, 1, 1, 0)
    network.apply("StakeVault", "Slashed", **slash_of(subject, 5))
    yield
    network.close_case(case, FRAUD)
    network.apply(
        "StakeVault", "SlashReleased",
        escrow_id=escrow_of(subject), reporter=NOBODY, burned=5, insured=0, rewarded=0,
    )  # fmt: skip
    yield
    for name, step in (("DirectlySubmitted", 8), ("BatchSplit", 9)):
        assert history.last is not None
        submission = replace(
            history.last, worker=worker.address, step=Step(step), file_hash=keccak(name.encode())
        )
        shared = {"batch_id": len(network.view.batches) + 1, "run_id": RUN}
        network.apply(
            "ContributionLedger", "BatchCommitted",
            root=submission.leaf(), count=1, units=submission.units, price_per_unit=10**12,
            terms=1, committed_at=1, **shared,
        )  # fmt: skip
        yield
        network.apply(
            "ContributionLedger", name,
            from_batch_id=1, worker=worker.address, work=network.work(submission), sources=(),
            **shared,
        )  # fmt: skip
        yield
    network.summon(len(network.view.batches))
    yield
    network.view.rewind(committed)
    yield
    network.publish(9)
    yield


def _names(view: chain.ChainView) -> Iterator[str]:
    """Yield the full names of everything."""
    for batch in view.batches.values():
        yield from filter(None, (batch.tx_hash, batch.posted_tx))
        yield from map(hex0x, view.file_hashes(batch))
        claims = [batch.direct] if batch.direct else []
        yield from (f"{claim.worker}/{claim.step}:{claim.index}" for claim in claims)
        for record in batch.records or ():
            maker = view.worker_by_id[record.worker_id].address
            yield f"{maker}/{record.step}:{record.index}"
    for case_id, case in view.cases.items():
        yield from filter(None, (hex0x(case_id), case.opened_tx, case.closed_tx))
    for worker in view.workers.values():
        yield from (worker.address, worker.registered_tx, *(node for _, node in worker.nodes))
    for slash in view.slashes:
        yield from filter(None, (slash.tx_hash, slash.settled_tx))
    yield from (paid.tx_hash for paid in view.payments)
    for run in view.runs.values():
        yield from (run.created_tx, *(each.tx_hash for each in run.checkpoints.values()))


def _said(view: chain.ChainView, text: str, index: chain.NameIndex | None = None) -> str:
    try:
        named = chain.find_named(view, text, index=index)
    except ConfigError as error:
        return str(error)
    return f"{named}: {[*map(str, named.places)]}, {named.worker}"


def test_the_auditors_packed_records_name_the_same_files(history: History) -> None:
    from muster.client.audit.ledger import Ledger, PackedRecords

    ledger = Ledger()
    for batch in history.network.view.batches.values():
        plain = list(history.network.view.file_hashes(batch))
        records = batch.records
        if records is None:
            assert list(ledger.file_hashes(batch)) == plain == []
            continue
        packed = PackedRecords(b"".join(record.to_bytes() for record in records))
        batch.records = packed  # type: ignore[assignment]
        assert list(ledger.file_hashes(batch)) == plain
        batch.records = records
