"""A data set, held against the ledger and against the submissions' files.

The ledger proves which submissions were accepted, of whom, and the hash of each file; a file that
is at hand proves its rows. What no file at hand proves is said to be open, not to be right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import zip_longest
from typing import Any

import pyarrow as pa

from muster.client.audit.contradictions import Check
from muster.client.audit.history import ChainHistory
from muster.client.dataset.export import CardFigures, FindFile, Stream, origin_of, write_card
from muster.client.dataset.folder import CARD, DataFolder, DataPart
from muster.client.dataset.rows import Accepted, RowMaker
from muster.client.dataset.selection import (
    HeldOut,
    Selection,
    SelectionSettings,
    group_faults,
    is_test,
)
from muster.protocol.encoding import hex0x
from muster.protocol.errors import ApiError, ConfigError, EncodingError
from muster.protocol.ids import RunId, to_hash32
from muster.telemetry import Progress

MOST_NAMED = 5
"""Faults of one kind that are named."""
_LEDGER = (
    *("stream_position", "batch_id", "position", "worker", "policy_version", "policy_root"),
    "file_sha256",
)
"""Columns that the ledger knows."""


class Faults:
    """What disagrees with one statement about a data set."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._count = 0
        self._named: list[str] = []

    def add(self, what: str) -> None:
        """Note one."""
        self._count += 1
        if len(self._named) < MOST_NAMED:
            self._named.append(what)

    def check(self, summary: str, *, is_open: bool = False) -> Check:
        """Return the check: `summary` says what was compared."""
        if not self._count:
            return Check(self._name, passed=True, detail=summary, is_open=is_open)
        more = self._count - len(self._named)
        detail = "; ".join(self._named) + (f"; and {more} more" if more else "")
        return Check(self._name, passed=False, detail=detail, count=self._count)


def check_bytes(folder: DataFolder) -> Check:
    """Return whether the files are those that `export.json` names."""
    faults = Faults("files")
    end = 0
    for part in folder.export.parts:
        if part.start != end:
            faults.add(
                f"the part from {part.start} does not begin where the one before ends, {end}"
            )
        end = part.end
        if not folder.is_intact(part):
            faults.add(f"{', '.join(each.name for each in part.files)}: other bytes")
    files = list(folder.export.files())
    names = {each.name for each in files}
    for path in sorted((folder.path / "data").glob("*.parquet")):
        if f"data/{path.name}" not in names:
            faults.add(f"data/{path.name} is not part of the data set")
    rows = sum(each.rows for each in files)
    return faults.check(f"{len(files)} files, {rows:,} rows, as {hex0x(folder.export.root())} says")


def check_folder(folder: DataFolder, history: ChainHistory, held_out: HeldOut) -> list[Check]:
    """Return what can be checked with the ledger alone; a wrong origin ends it."""
    run_id = RunId(folder.export.origin.run_id)
    origin = _check_origin(folder, history, run_id)
    if not origin.passed:
        return [origin]
    stream = Stream.of(history, run_id)
    outcomes = check_outcomes(folder, stream)
    checks = [origin, outcomes, check_rules(folder, held_out)]
    return [*checks, check_card(folder, stream)] if outcomes.passed else checks


def _check_origin(folder: DataFolder, history: ChainHistory, run_id: RunId) -> Check:
    faults, said = Faults("origin"), folder.export.origin
    run = history.ledger.runs.get(run_id)
    if run is None:
        faults.add(f"chain {history.deployment.chain_id} has no run {run_id}")
        return faults.check("")
    known = origin_of(history, run_id, to_hash32(said.tokenizer))
    for name, value in asdict(known).items():
        if getattr(said, name) != value:
            faults.add(f"{name} {getattr(said, name)}, the chain has {value}")
    if to_hash32(said.tokenizer) not in {each.manifest_root for each in run.checkpoints.values()}:
        faults.add(f"the run has published no policy {said.tokenizer}, whose tokenizer made texts")
    return faults.check(f"run {run_id} of chain {said.chain_id}, its documents and tokenizer")


def check_outcomes(folder: DataFolder, stream: Stream) -> Check:
    """Return whether every row names an accepted submission as the ledger has it."""
    faults, overturned = Faults("outcomes"), stream.overturned()
    submissions = rows = 0
    for part in folder.export.parts:
        if part.end > len(stream):
            faults.add(f"rows up to {part.end} of a stream of {len(stream)}")
            continue
        accounted = Counter(part.left_out)
        for group in _submissions(folder, part):
            place, count = group["stream_position"], group["count_all"]
            submissions, rows = submissions + 1, rows + count
            accounted["kept"] += count
            if not part.start <= place < part.end:
                faults.add(f"a row of place {place} in the part {part.start} to {part.end}")
            elif place in overturned:
                faults.add(f"submission {group['batch_id']}:{group['position']} was overturned")
            elif wrong := _differs(group, stream, place):
                faults.add(wrong)
        rollouts = sum(stream[place].record.rollouts for place in range(part.start, part.end))
        if accounted.total() != rollouts:
            faults.add(
                f"the part from {part.start} accounts for {accounted.total()} samples, its "
                f"submissions have {rollouts}"
            )
    return faults.check(f"{rows:,} rows of {submissions:,} accepted submissions")


def _submissions(folder: DataFolder, part: DataPart) -> Iterator[dict[str, Any]]:
    """Yield what the rows of a part say of their submissions, once each, with the rows' number."""
    tables = [rows for _, rows in folder.tables(part, _LEDGER)]
    if tables:
        counted = pa.concat_tables(tables).group_by(list(_LEDGER)).aggregate([([], "count_all")])
        yield from counted.to_pylist()


def _differs(said: dict[str, Any], stream: Stream, place: int) -> str:
    """Return what rows say of their submission that the ledger does not; empty for nothing."""
    accepted = stream[place]
    known = {
        "batch_id": accepted.batch_id,
        "position": accepted.position,
        "worker": accepted.worker,
        "policy_version": int(accepted.record.policy_version),
        "policy_root": hex0x(accepted.policy_root),
        "file_sha256": hex0x(accepted.record.file_hash),
    }
    wrong = [
        f"{name} {said[name]}, not {value}" for name, value in known.items() if said[name] != value
    ]
    return f"place {place} of the stream: {', '.join(wrong)}" if wrong else ""


def check_rules(folder: DataFolder, held_out: HeldOut) -> Check:
    """Return whether every row is one that the settings keep, and is in its problem's split.

    Without the held-out texts of the settings it stays open whether rows repeat one. What a group
    says cannot be told by the rows that are left of it: `check_rows` does.
    """
    settings, faults = folder.export.settings, Faults("settings")
    if held_out and tuple(held_out.hashes) != settings.held_out:
        raise ConfigError(
            "the held-out files are not those of the export",
            hint=f"it names SHA-256 {', '.join(settings.held_out) or 'of none'}",
        )
    selection = Selection(replace(settings, agreement=0.0, only_best=False), held_out)
    for part in folder.export.parts:
        for name, rows in folder.tables(part, Selection.COLUMNS):
            _, left_out = selection.choose(rows)
            for reason, count in left_out.items():
                faults.add(f"{count} rows of {name} that a rule leaves out: {reason}")
            in_test = name.startswith("data/test-")
            for problem in set(rows["problem_id"].to_pylist()):
                if is_test(problem, settings.test_share) != in_test:
                    faults.add(f"{name} has problem {problem!r} of the other split")
    is_open = bool(settings.held_out) and not held_out
    what = "held-out texts not at hand: --exclude FILE" if is_open else "every row is as asked for"
    return faults.check(what, is_open=is_open)


async def check_rows(
    folder: DataFolder,
    stream: Stream,
    maker: RowMaker,
    find_file: FindFile,
    on_progress: Progress = lambda _done, _of: None,
) -> Check:
    """Return whether the rows are those of the submissions' files, made again from each."""
    faults, settings = Faults("rows"), folder.export.settings
    made = absent = 0
    for part in folder.export.parts:
        for place, rows in folder.submissions(part):
            try:
                data = await find_file(stream[place].record.file_hash)
            except ApiError:
                absent += len(rows)
                continue
            made += len(rows)
            again = _again(maker, data, stream[place])
            wrong = again if isinstance(again, str) else _wrong_rows(again, rows, settings)
            if wrong:
                faults.add(f"place {place} of the stream: {wrong}")
        on_progress(part.end, folder.export.end)
    rest = f", {absent:,} without: their files are not at hand" if absent else ""
    return faults.check(f"{made:,} rows made again from their files{rest}", is_open=absent > 0)


def _again(maker: RowMaker, data: bytes, accepted: Accepted) -> pa.Table | str:
    """Return all rows of a file, or what is wrong with it."""
    try:
        return maker.rows(data, accepted)
    except EncodingError as error:
        return str(error)


def _wrong_rows(again: pa.Table, rows: pa.Table, settings: SelectionSettings) -> str:
    """Return in which column rows differ from those of their file, or which of them its groups
    leave out; empty for none.
    """
    places = rows["row"].to_pylist()
    if places != sorted(set(places)) or not set(places) <= set(range(len(again))):
        return f"rows {places} of {len(again)}"
    for reason, is_out in group_faults(again, settings).items():
        if others := [row for row in places if is_out[row]]:
            return f"rows {others} are left out by their group: {reason}"
    again = again.take(places)
    differ = [name for name in again.column_names if again[name] != rows[name]]
    return f"other {', '.join(differ)}" if differ else ""


def check_card(folder: DataFolder, stream: Stream) -> Check:
    """Return whether the data card is the one that rows and ledger make."""
    faults = Faults("card")
    path = folder.path / CARD
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    wanted = write_card(folder, stream, CardFigures(folder))
    for number, (said, made) in enumerate(zip_longest(text.splitlines(), wanted.splitlines()), 1):
        if said != made:
            faults.add(f"line {number} says {said!r}, rows and ledger say {made!r}")
    return faults.check(f"{CARD} is the one that rows and ledger make")
