"""Verification of a data set against the ledger and the submissions' files.

The ledger proves which submissions of which workers were accepted, and the hash of each file; an
available file proves its rows. Rows whose file is not available are reported as open, not as right.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import chain, zip_longest
from typing import Any

import pyarrow as pa

from muster.client.audit.contradictions import Check
from muster.client.audit.history import ChainHistory
from muster.client.dataset.export import CardFigures, FindFile, Stream, origin_of, write_card
from muster.client.dataset.folder import CARD, DataFolder, DataPart
from muster.client.dataset.rows import SCHEMA, Accepted, RowMaker
from muster.client.dataset.selection import (
    HeldOut,
    Selection,
    SelectionSettings,
    group_faults,
    is_test,
    row_keys,
)
from muster.protocol.encoding import hex0x
from muster.protocol.errors import ApiError, ConfigError, EncodingError
from muster.protocol.ids import RunId, to_hash32
from muster.telemetry import Progress

MOST_NAMED = 5
"""Most faults of one kind that are listed."""
_LEDGER = (
    *("stream_position", "batch_id", "position", "worker", "policy_version", "policy_root"),
    "file_sha256",
)
"""Columns that the ledger determines."""


class Faults:
    """Faults found by one check of a data set."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._count = 0
        self._named: list[str] = []

    def add(self, what: str) -> None:
        """Add a fault."""
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
        if not end == part.start <= part.end:
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
    """Return the checks that need only the ledger; a wrong origin ends them."""
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
    """Return whether every row matches an accepted submission on the ledger."""
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
    """Yield each submission of a part as its rows describe it, with the number of rows."""
    tables = [rows for _, rows in folder.tables(part, _LEDGER)]
    if tables:
        counted = pa.concat_tables(tables).group_by(list(_LEDGER)).aggregate([([], "count_all")])
        yield from counted.to_pylist()


def _differs(said: dict[str, Any], stream: Stream, place: int) -> str:
    """Return how rows differ from the ledger about their submission; empty if they do not."""
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
    """Return whether the settings keep every row, and every row is in its problem's split.

    Without the held-out texts, the check for contamination stays open. Rules about groups cannot be
    checked on the kept rows alone; `check_rows` checks them.
    """
    settings, faults = folder.export.settings, Faults("settings")
    if held_out and tuple(held_out.hashes) != settings.held_out:
        raise ConfigError(
            "the held-out files are not those of the export",
            hint="give the files of the export with --exclude; their SHA-256: "
            f"{', '.join(settings.held_out) or 'none'}",
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
    held_out: HeldOut,
    on_progress: Progress = lambda _done, _of: None,
) -> Check:
    """Return whether the rows are those that the settings keep of the submissions' files.

    Open where a file or the held-out texts are not at hand.
    """
    faults, remade = Faults("rows"), _Remade(folder.export.settings, held_out)
    overturned = stream.overturned()
    for part in folder.export.parts:
        remade.left_out.clear()
        for place, rows in _submissions_in(folder, part):
            accepted = stream[place]
            try:
                again = _again(maker, await find_file(accepted.record.file_hash), accepted)
            except ApiError:
                again = None
            if place in overturned:
                remade.excuse(again)
            elif again is None:
                remade.skip(rows, accepted.record.rollouts)
            elif wrong := again if isinstance(again, str) else remade.compare(again, rows):
                faults.add(f"place {place} of the stream: {wrong}")
        if remade.is_exact and remade.left_out != Counter(part.left_out):
            faults.add(
                f"samples left out of the part from {part.start}: {part.left_out}, the rules say "
                f"{dict(remade.left_out)}"
            )
        on_progress(part.end, folder.export.end)
    return remade.check(faults)


def _submissions_in(folder: DataFolder, part: DataPart) -> Iterator[tuple[int, pa.Table]]:
    """Yield each place of a part with its rows, also a place without any."""
    place, none = part.start, SCHEMA.empty_table()
    for found, rows in chain(folder.submissions(part), [(part.end, none)]):
        yield from ((empty, none) for empty in range(place, found))
        if found < part.end:
            yield found, rows
        place = found + 1


def _again(maker: RowMaker, data: bytes, accepted: Accepted) -> pa.Table | str:
    """Return all rows of a file, or why it is invalid."""
    try:
        return maker.rows(data, accepted)
    except EncodingError as error:
        return str(error)


class _Remade:
    """Submissions made again in the stream's order, and what the settings keep of them."""

    def __init__(self, settings: SelectionSettings, held_out: HeldOut) -> None:
        self._settings = settings
        self._selection = Selection(settings, held_out)
        self._made = self._absent = self._unproved = 0
        self._excused: set[str | int] = set()
        self._is_blind = bool(settings.held_out) and not held_out
        self.is_exact = not self._is_blind
        """Whether all that decides what is left out was at hand."""
        self.left_out: Counter[str] = Counter()
        """Samples of a part that the settings leave out, by rule."""

    def excuse(self, again: pa.Table | str | None) -> None:
        """Take an overturned submission: while it stood, its rows may have displaced others."""
        self.is_exact = False
        if isinstance(again, pa.Table):
            self._excused.update(self._displaced(again))
        else:
            self._is_blind = True

    def _displaced(self, rows: pa.Table) -> list[str] | list[int]:
        """Return what rows share with those that they displace: the problem, if only some rows of
        each are kept, else problem and completion."""
        if self._settings.per_problem:
            names: list[str] = rows["problem_id"].to_pylist()
            return names
        return row_keys(rows)

    def skip(self, rows: pa.Table, samples: int) -> None:
        """Take a submission whose file is not at hand."""
        self.is_exact = False
        self._absent += samples
        self._selection.remember(rows)

    def compare(self, again: pa.Table, rows: pa.Table) -> str:
        """Return how rows differ from what the settings keep of their file; empty if they do
        not."""
        self._made += len(again)
        kept, left_out = self._selection.choose(again)
        self.left_out += left_out
        places = rows["row"].to_pylist()
        if places != sorted(set(places)) or not set(places) <= set(range(len(again))):
            return f"rows {places} of {len(again)}"
        for reason, is_out in group_faults(again, self._settings).items():
            if others := [row for row in places if is_out[row]]:
                return f"rows {others} are left out by their group: {reason}"
        missing = sorted({*kept["row"].to_pylist()} - {*places})
        if missing and self._excused:
            keys = self._displaced(again.take(missing))
            missing = [
                row for row, key in zip(missing, keys, strict=True) if key not in self._excused
            ]
        if missing:
            if not self._is_blind:
                return f"rows {missing} are missing: no rule leaves them out"
            self._unproved += len(missing)
        again = again.take(rows["row"])
        differ = [name for name in again.column_names if again[name] != rows[name]]
        return f"other {', '.join(differ)}" if differ else ""

    def check(self, faults: Faults) -> Check:
        """Return the check, which says what was compared."""
        said = f"{self._made:,} samples made again from their files"
        if self._absent:
            said += f", {self._absent:,} not: their files are not at hand"
        if self._unproved:
            said += f"; {self._unproved:,} may be left out wrongly: texts or files are not at hand"
        return faults.check(said, is_open=self._absent + self._unproved > 0)


def check_card(folder: DataFolder, stream: Stream) -> Check:
    """Return whether the data card equals the one computed from rows and ledger."""
    faults = Faults("card")
    path = folder.path / CARD
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    wanted = write_card(folder, stream, CardFigures(folder))
    for number, (said, made) in enumerate(zip_longest(text.splitlines(), wanted.splitlines()), 1):
        if said != made:
            faults.add(f"line {number} says {said!r}, rows and ledger say {made!r}")
    return faults.check(f"{CARD} is the one that rows and ledger make")
