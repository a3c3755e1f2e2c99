"""The journal of signatures: a crash at any moment loses no promised entry."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from worlds.client_world import make_submission, make_ticket

from muster.client import durable_log
from muster.client.durable_log import Journal
from muster.client.worker import journal as worker_journals
from muster.client.worker.journal import BatchPlace, SignedSubmission, SubmissionJournal
from muster.lifecycle.files import write_durably
from muster.protocol.encoding import file_hash, keccak
from muster.protocol.errors import ConfigError, StorageError
from muster.protocol.ids import BatchName, PolicyVersion, RunId
from muster.protocol.messages import Submission, Ticket

SIGNED = b"\1" * 65
"""An orchestrator's signature on a ticket."""


class Entries(Journal):
    """Keeps entries as they are."""

    def __init__(self, path: Path) -> None:
        self.entries: list[dict[str, Any]] = []
        super().__init__(path)

    def take_in(self, entry: dict[str, Any]) -> None:
        self.entries.append(entry)


def reopened(path: Path) -> list[dict[str, Any]]:
    with Entries(path) as journal:
        return journal.entries


def claimed(ticket: Ticket, data: bytes) -> Submission:
    return make_submission(ticket, [], file_hash=file_hash(data), rollouts=1, units=1)


# The log itself


def test_appended_entry_is_synced_before_append_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[bytes] = []
    with Entries(tmp_path / "j") as journal:
        monkeypatch.setattr(
            os, "fsync", lambda _descriptor: synced.append((tmp_path / "j").read_bytes())
        )
        journal.append({"n": 1})
    assert synced == [b'{"n":1}\n']


@given(st.lists(st.dictionaries(st.text(), st.integers()), min_size=1, max_size=5), st.data())
def test_torn_tail_loses_the_last_entry_only(
    tmp_path_factory: pytest.TempPathFactory, entries: list[dict[str, int]], data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("torn") / "j"
    with Entries(path) as journal:
        for entry in entries:
            journal.append(entry)
    whole = path.read_bytes()
    start = whole.rstrip(b"\n").rfind(b"\n") + 1
    os.truncate(path, data.draw(st.integers(start, len(whole) - 1)))
    assert reopened(path) == entries[:-1]
    with Entries(path) as journal:
        journal.append({"after": 1})
    assert reopened(path) == [*entries[:-1], {"after": 1}]


def test_damage_before_the_tail_is_refused(tmp_path: Path) -> None:
    (tmp_path / "j").write_bytes(b'{"n":1}\nnonsense\n{"n":3}\n')
    with pytest.raises(StorageError, match="line 2") as caught:
        Entries(tmp_path / "j")
    assert "slashed" in (caught.value.hint or "")


def test_second_process_is_refused(tmp_path: Path) -> None:
    with Entries(tmp_path / "j"), pytest.raises(ConfigError, match="another process") as caught:
        Entries(tmp_path / "j")
    assert "--state-dir" in (caught.value.hint or "")
    assert reopened(tmp_path / "j") == []


def test_full_disk_leaves_a_journal_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with Entries(tmp_path / "j") as journal:
        journal.append({"n": 1})
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(StorageError, match="No space left"):
                journal.append({"n": 2})
        journal.append({"n": 3})
    assert reopened(tmp_path / "j") == [{"n": 1}, {"n": 3}]


def test_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    write_durably(tmp_path / "a" / "f", b"first")
    write_durably(tmp_path / "a" / "f", b"second")
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["f"]
    assert (tmp_path / "a" / "f").read_bytes() == b"second"


# Submissions


def test_recorded_submission_comes_back_with_its_file(tmp_path: Path) -> None:
    ticket = make_ticket()
    with SubmissionJournal(tmp_path) as journal:
        recorded = journal.record(ticket, SIGNED, claimed(ticket, b"one"), b"one")
    with SubmissionJournal(tmp_path) as journal:
        assert journal.signed(ticket) == recorded
        assert list(journal.unfinished().values()) == [recorded]
        assert journal.data(recorded) == b"one"


def test_slot_keeps_one_file_of_two_that_are_recorded_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticket, has_second_begun = make_ticket(), threading.Event()
    found: list[SignedSubmission] = []

    def record(data: bytes) -> None:
        found.append(journal.record(ticket, SIGNED, claimed(ticket, data), data))

    second = threading.Thread(target=record, args=(b"two",))

    def write(path: Path, data: bytes) -> None:
        if data == b"one":
            second.start()
            has_second_begun.wait(0.2)
        else:
            has_second_begun.set()
        write_durably(path, data)

    monkeypatch.setattr(worker_journals, "write_durably", write)
    with SubmissionJournal(tmp_path) as journal:
        record(b"one")
        second.join()
    assert found[0] == found[1]
    assert found[0].submission == claimed(ticket, b"one")


def test_slot_keeps_its_first_file_whatever_comes_later(tmp_path: Path) -> None:
    ticket = make_ticket()
    other = make_ticket(policy_version=PolicyVersion(9), deadline=5)
    with SubmissionJournal(tmp_path) as journal:
        first = journal.record(ticket, SIGNED, claimed(ticket, b"one"), b"one")
        assert journal.record(other, SIGNED, claimed(other, b"two"), b"two") == first
        journal.finish(first, "ACCEPTED")
        assert journal.record(other, SIGNED, claimed(other, b"two"), b"two") == first
    with SubmissionJournal(tmp_path) as journal:
        assert journal.record(other, SIGNED, claimed(other, b"two"), b"two") == first


def test_policy_versions_of_work_without_a_final_outcome_are_open(tmp_path: Path) -> None:
    tickets = [make_ticket(index=i, policy_version=PolicyVersion(i)) for i in range(3)]
    with SubmissionJournal(tmp_path) as journal:
        made = [
            journal.record(t, SIGNED, claimed(t, b"%d" % t.index), b"%d" % t.index) for t in tickets
        ]
        journal.finish(made[1], "ACCEPTED")
        assert journal.open_versions(tickets[0].run_id) == {0, 2}
        journal.accuse(made[1], keccak(b"a case"))
        assert journal.open_versions(tickets[0].run_id) == {0, 1, 2}
        journal.answer(made[1], keccak(b"a case"))
        assert journal.open_versions(tickets[0].run_id) == {0, 2}
        assert journal.open_versions(RunId(tickets[0].run_id + 1)) == set()


def test_accepted_submission_keeps_its_file_until_it_is_discarded(tmp_path: Path) -> None:
    ticket = make_ticket()
    with SubmissionJournal(tmp_path) as journal:
        recorded = journal.record(ticket, SIGNED, claimed(ticket, b"one"), b"one")
        journal.finish(recorded, "ACCEPTED")
        journal.finish(recorded, "ACCEPTED")
    with SubmissionJournal(tmp_path) as journal:
        assert not journal.unfinished()
        assert list(journal.accepted().values()) == [recorded]
        assert journal.data(recorded) == b"one"
        journal.discard(recorded)
        assert not journal.accepted()
    with SubmissionJournal(tmp_path) as journal:
        assert journal.signed(ticket) == recorded
        assert not journal.accepted()
        assert journal.data(recorded) is None
    assert list((tmp_path / "files").iterdir()) == []


def test_accepted_submission_that_is_called_fraud_later_keeps_its_file_aside(
    tmp_path: Path,
) -> None:
    ticket = make_ticket()
    with SubmissionJournal(tmp_path) as journal:
        recorded = journal.record(ticket, SIGNED, claimed(ticket, b"one"), b"one")
        journal.finish(recorded, "ACCEPTED")
        journal.finish(recorded, "FRAUD")
        journal.finish(recorded, "ACCEPTED")
    with SubmissionJournal(tmp_path) as journal:
        assert not journal.accepted()
    assert [path.read_bytes() for path in (tmp_path / "refused").iterdir()] == [b"one"]


def test_kept_files_of_accepted_work_are_bounded_and_the_oldest_go_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("muster.client.worker.journal.KEPT_ACCEPTED", 2)
    with SubmissionJournal(tmp_path) as journal:
        for index in range(4):
            ticket, data = make_ticket(index=index), b"file %d" % index
            journal.finish(journal.record(ticket, SIGNED, claimed(ticket, data), data), "ACCEPTED")
        assert [signed.ticket.index for signed in journal.accepted().values()] == [2, 3]
    assert {path.read_bytes() for path in (tmp_path / "files").iterdir()} == {b"file 2", b"file 3"}


def test_changed_file_is_not_handed_out(tmp_path: Path) -> None:
    ticket = make_ticket()
    with SubmissionJournal(tmp_path) as journal:
        recorded = journal.record(ticket, SIGNED, claimed(ticket, b"one"), b"one")
        next((tmp_path / "files").iterdir()).write_bytes(b"0ne")
        assert journal.data(recorded) is None


def test_proof_of_where_work_is_comes_back_until_it_is_finished(tmp_path: Path) -> None:
    ticket = make_ticket()
    proven = BatchPlace(BatchName(3, keccak(b"root")), 1, (keccak(b"a"), keccak(b"b")))
    with SubmissionJournal(tmp_path) as journal:
        recorded = journal.record(ticket, SIGNED, claimed(ticket, b"one"), b"one")
        assert journal.proven(recorded) is None
        journal.prove(recorded, proven)
        size = (tmp_path / "submissions.jsonl").stat().st_size
        journal.prove(recorded, proven)
        assert (tmp_path / "submissions.jsonl").stat().st_size == size
    with SubmissionJournal(tmp_path) as journal:
        assert journal.proven(recorded) == proven
        journal.finish(recorded, "ACCEPTED")
        assert journal.proven(recorded) is None
    with SubmissionJournal(tmp_path) as journal:
        assert journal.proven(recorded) is None


def test_signature_of_a_ticket_is_kept_and_never_shown(tmp_path: Path) -> None:
    ticket = make_ticket()
    with SubmissionJournal(tmp_path) as journal:
        journal.record(ticket, SIGNED, claimed(ticket, b"one"), b"one")
    with SubmissionJournal(tmp_path) as journal:
        kept = journal.signed(ticket)
    assert kept is not None
    assert kept.ticket_signature == SIGNED
    assert repr(SIGNED) not in repr(kept)


@pytest.mark.parametrize("line", [b'{"ticket":{}}\n', b'{"finished":7}\n', b'{"other":1}\n'])
def test_journal_with_unknown_entries_is_refused(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "submissions.jsonl").write_bytes(line)
    with pytest.raises(StorageError, match="is damaged") as caught:
        SubmissionJournal(tmp_path)
    # A backup lacks what was signed since.
    assert "put no old copy in its place" in (caught.value.hint or "")


class Crash(BaseException):
    """The power fails."""


class Power:
    """Counts down the durable operations until the power fails."""

    def __init__(self, operations: int) -> None:
        self.operations = operations

    def fsync(self, _descriptor: int) -> None:
        if self.operations == 0:
            raise Crash
        self.operations -= 1


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6)), min_size=1, max_size=8))
def test_no_slot_is_ever_signed_twice_whenever_the_power_goes(
    tmp_path_factory: pytest.TempPathFactory, attempts: list[tuple[int, int]]
) -> None:
    folder = tmp_path_factory.mktemp("power")
    signed: dict[int, Submission] = {}
    for attempt, (slot, operations) in enumerate(attempts):
        ticket, data = make_ticket(index=slot), f"attempt {attempt}".encode()
        with SubmissionJournal(folder) as journal:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(durable_log.os, "fsync", Power(operations).fsync)
                try:
                    recorded = journal.record(ticket, SIGNED, claimed(ticket, data), data)
                except Crash:
                    continue
            # Only here, after `record`, does a signature exist.
            assert signed.setdefault(slot, recorded.submission) == recorded.submission
            assert journal.data(recorded) is not None
    with SubmissionJournal(folder) as journal:
        for slot, submission in signed.items():
            found = journal.signed(make_ticket(index=slot))
            assert found is not None
            assert found.submission == submission


def test_what_was_not_accepted_keeps_its_file_for_a_dispute(tmp_path: Path) -> None:
    ticket = make_ticket()
    with SubmissionJournal(tmp_path) as journal:
        recorded = journal.record(ticket, SIGNED, claimed(ticket, b"one"), b"one")
        journal.finish(recorded, "REJECTED")
    assert list((tmp_path / "files").iterdir()) == []
    kept = tmp_path / "refused" / f"{recorded.submission.file_hash.hex()}.parquet"
    assert kept.read_bytes() == b"one"


def test_kept_files_are_bounded_and_the_oldest_go_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("muster.client.worker.journal.KEPT_REFUSED", 2)
    with SubmissionJournal(tmp_path) as journal:
        for index in range(4):
            data = b"file %d" % index
            recorded = journal.record(
                make_ticket(index=index), SIGNED, claimed(make_ticket(index=index), data), data
            )
            path = tmp_path / "files" / f"{recorded.submission.file_hash.hex()}.parquet"
            os.utime(path, (index, index))
            journal.finish(recorded, "FRAUD")
    assert {path.read_bytes() for path in (tmp_path / "refused").iterdir()} == {
        b"file 2",
        b"file 3",
    }


@pytest.mark.parametrize("noted", [None, "ACCEPTED", "REJECTED"])
def test_kept_files_of_accused_work_are_not_among_those_that_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noted: str | None
) -> None:
    monkeypatch.setattr("muster.client.worker.journal.KEPT_REFUSED", 1)
    case_id = keccak(b"a case")
    with SubmissionJournal(tmp_path) as journal:
        made = []
        for index in range(4):
            ticket, data = make_ticket(index=index), b"file %d" % index
            made.append(journal.record(ticket, SIGNED, claimed(ticket, data), data))
        accused, *others = made
        if noted:
            journal.finish(accused, noted)
        journal.accuse(accused, case_id)
        for each in others:
            journal.finish(each, "REJECTED")
        assert journal.data(accused) == b"file 0"
        assert [journal.data(each) is None for each in others] == [True, True, False]
        journal.answer(accused, case_id)
        ticket = make_ticket(index=5)
        later = journal.record(ticket, SIGNED, claimed(ticket, b"later"), b"later")
        journal.finish(later, "REJECTED")
        assert [journal.data(each) for each in (accused, later)] == [None, b"later"]


def three_files(journal: SubmissionJournal) -> list[SignedSubmission]:
    """Record work for three slots."""
    made = []
    for index in range(3):
        ticket, data = make_ticket(index=index), b"file %d" % index
        made.append(journal.record(ticket, SIGNED, claimed(ticket, data), data))
    return made


def test_unfinished_work_may_be_finished_while_it_is_looked_through(tmp_path: Path) -> None:
    with SubmissionJournal(tmp_path) as journal:
        made = three_files(journal)
        for each in journal.unfinished().values():
            journal.finish(each, "REJECTED")
        assert not journal.unfinished()
        assert all(journal.data(each) for each in made)


def test_kept_files_of_unfinished_work_stay_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("muster.client.worker.journal.KEPT_REFUSED", 1)
    with SubmissionJournal(tmp_path) as journal:
        made = three_files(journal)
        journal.accuse(made[0], keccak(b"a case"))
    with SubmissionJournal(tmp_path) as journal:
        for each in made[1:]:
            journal.finish(each, "REJECTED")
        assert [journal.data(each) for each in made] == [b"file 0", None, b"file 2"]


def test_file_that_is_set_aside_outlives_newer_ones_that_were_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("muster.client.worker.journal.KEPT_REFUSED", 2)
    with SubmissionJournal(tmp_path) as journal:
        made = three_files(journal)
        for index, each in enumerate(made):
            path = tmp_path / "files" / f"{each.submission.file_hash.hex()}.parquet"
            os.utime(path, (index, index))
        oldest, *newer = made
        for each in (*newer, oldest):
            journal.finish(each, "REJECTED")
        assert [journal.data(each) for each in made] == [b"file 0", None, b"file 2"]


def test_kept_file_that_another_thread_deletes_meanwhile_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("muster.client.worker.journal.KEPT_REFUSED", 1)
    with SubmissionJournal(tmp_path) as journal:
        made = three_files(journal)
        for each in made[:2]:
            journal.finish(each, "REJECTED")
        listed = Path.iterdir

        def and_delete(folder: Path) -> list[Path]:
            found = list(listed(folder))
            (folder / f"{made[1].submission.file_hash.hex()}.parquet").unlink()
            return found

        monkeypatch.setattr(Path, "iterdir", and_delete)
        journal.finish(made[2], "REJECTED")
        assert journal.data(made[2]) == b"file 2"


def test_answered_verdict_of_fraud_is_known_after_a_restart(tmp_path: Path) -> None:
    ticket, case_id = make_ticket(), keccak(b"a case")
    with SubmissionJournal(tmp_path) as journal:
        recorded = journal.record(ticket, SIGNED, claimed(ticket, b"one"), b"one")
        journal.finish(recorded, "REJECTED")
        assert journal.accuse(recorded, case_id)
        journal.answer(recorded, case_id)
    with SubmissionJournal(tmp_path) as journal:
        assert not journal.accuse(recorded, case_id)
        assert journal.accuse(recorded, keccak(b"another"))
        assert not journal.unfinished()
        assert journal.data(recorded) == b"one"
