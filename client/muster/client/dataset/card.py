"""The data card: what is in a data set and where it comes from, in figures.

Every figure is computed from the rows, from `export.json` or from the ledger, so whoever has these
writes the same card, byte for byte. `muster data verify` does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pyarrow.compute as pc

from muster.client.audit.dump import whole_file
from muster.client.dataset.export import Stream
from muster.client.dataset.folder import CARD, SPLITS, DataFolder, DataPart
from muster.protocol.encoding import hex0x

MOST_LISTED = 50
"""Rows of a table in the card."""
_WHY = {
    "part": "of a part that was not asked for",
    "reward": "reward below the least",
    "length": "completion shorter or longer than asked for",
    "unfinished": "cut off at the token limit",
    "disagrees": "another answer than most of its group, or a group that does not agree",
    "worse": "another of its group has a higher reward, or the same and comes first",
    "contaminated": "repeats a held-out text",
    "duplicate": "the same problem and completion as an earlier row",
    "enough": "the problem has its rows",
    "overturned": "a jury overturned the acceptance",
}


@dataclass(slots=True)
class _Sums:
    """Sums over some rows."""

    rows: int = 0
    reward: float = 0.0
    tokens: int = 0
    finished: int = 0
    problems: set[str] = field(default_factory=set)

    def line(self, name: str) -> str:
        """Return a table's line."""
        share = self.rows or 1
        return (
            f"| {name} | {self.rows:,} | {len(self.problems):,} | {self.reward / share:.4f} "
            f"| {self.tokens / share:.1f} | {self.finished / share:.2%} |"
        )


class CardFigures:
    """Figures over all rows of a data set, computed from its files."""

    COLUMNS = (
        *("problem_id", "part", "task_type", "verifier", "reward", "is_finished"),
        "completion_tokens",
        *("worker", "policy_version", "stream_position"),
    )
    """What is read of the rows."""

    def __init__(self, folder: DataFolder) -> None:
        self.splits = {split: _Sums() for split in SPLITS}
        self.tasks: dict[tuple[str, str, str], _Sums] = {}
        """By part, task type and verifier."""
        self.workers: Counter[str] = Counter()
        """Rows by worker."""
        self.versions: Counter[int] = Counter()
        """Rows by policy version."""
        self.submissions = 0
        """Submissions that have a row."""
        for part in folder.export.parts:
            self._take(folder, part)

    def _take(self, folder: DataFolder, part: DataPart) -> None:
        places: set[int] = set()
        for name, rows in folder.tables(part, self.COLUMNS):
            values = {column: rows[column].to_pylist() for column in self.COLUMNS[:6]}
            lengths = pc.list_value_length(rows["completion_tokens"]).to_pylist()
            keys = zip(values["part"], values["task_type"], values["verifier"], strict=True)
            split = self.splits[name.removeprefix("data/").partition("-")[0]]
            for problem, key, reward, finished, length in zip(
                values["problem_id"],
                keys,
                values["reward"],
                values["is_finished"],
                lengths,
                strict=True,
            ):
                for sums in (split, self.tasks.setdefault(key, _Sums())):
                    sums.rows += 1
                    sums.reward += reward
                    sums.tokens += length
                    sums.finished += finished
                    sums.problems.add(problem)
            self.workers.update(rows["worker"].to_pylist())
            self.versions.update(rows["policy_version"].to_pylist())
            places.update(rows["stream_position"].to_pylist())
        self.submissions += len(places)

    @property
    def rows(self) -> int:
        """All rows."""
        return sum(sums.rows for sums in self.splits.values())


def write_card(folder: DataFolder, stream: Stream, figures: CardFigures) -> str:
    """Return the data card of a folder that was exported from a stream."""
    export = folder.export
    origin, end = export.origin, export.end
    rollouts = sum(stream[place].record.rollouts for place in range(end))
    left_out = sum((Counter(part.left_out) for part in export.parts), Counter[str]())
    lines = [
        *_front_matter(figures),
        f"# Verified rollouts of run {origin.run_id} on chain {origin.chain_id}",
        "",
        f"{figures.rows:,} samples of {figures.submissions:,} submissions by "
        f"{len(figures.workers):,} workers. Strangers generated them; each submission was checked "
        "and accepted by the run's validators, who signed that on chain.",
        "",
        "| origin | |",
        "|---|---|",
        f"| ContributionLedger | `{origin.ledger}` |",
        f"| recipe | `{origin.recipe}` |",
        f"| task set | `{origin.task_set}` |",
        f"| tokenizer, of the policy | `{origin.tokenizer}` |",
        f"| accepted submissions looked at | {end:,} |",
        f"| samples in them | {rollouts:,} |",
        f"| data set | `{hex0x(export.root())}` |",
        "",
        "## Rows",
        "",
        "| split | rows | problems | mean reward | mean tokens | finished |",
        "|---|---|---|---|---|---|",
        *(sums.line(split) for split, sums in figures.splits.items() if sums.rows),
        "",
        "| part, task type, verifier | rows | problems | mean reward | mean tokens | finished |",
        "|---|---|---|---|---|---|",
        *(sums.line(", ".join(filter(None, key))) for key, sums in sorted(figures.tasks.items())),
        "",
        "## Left out",
        "",
        "| why | samples |",
        "|---|---|",
        *(f"| {_WHY[why]} | {left_out[why]:,} |" for why in _WHY if left_out[why]),
        "",
        "| setting | |",
        "|---|---|",
        *(f"| {name} | {value or 'none'} |" for name, value in export.settings.to_json().items()),
        "",
        "## Who and what made them",
        "",
        *_counts("worker", [(f"`{who}`", count) for who, count in figures.workers.most_common()]),
        "",
        *_counts("policy version", [(str(v), n) for v, n in sorted(figures.versions.items())]),
        "",
        "## Check it",
        "",
        "`muster data verify DIR` holds every row against the ledger, and with the submissions' "
        "files at hand makes every row again.",
        "",
    ]
    return "\n".join(lines)


def _front_matter(figures: CardFigures) -> list[str]:
    """Return what Hugging Face's libraries read of a card."""
    lines = ["---", "configs:", "- config_name: default", "  data_files:"]
    for split, sums in figures.splits.items():
        if sums.rows:
            lines += [f"  - split: {split}", f"    path: data/{split}-*.parquet"]
    return [*lines, "---", ""]


def _counts(what: str, rows: Sequence[tuple[str, int]]) -> list[str]:
    more = len(rows) - MOST_LISTED
    return [
        f"| {what} | rows |",
        "|---|---|",
        *(f"| {name} | {count:,} |" for name, count in rows[:MOST_LISTED]),
        *([f"| {more:,} more | |"] if more > 0 else []),
    ]


def put_card(folder: DataFolder, stream: Stream) -> None:
    """Write the data card into its folder, if it has parts."""
    if folder.export.parts:
        with whole_file(folder.path / CARD) as partial:
            partial.write_text(write_card(folder, stream, CardFigures(folder)), encoding="utf-8")
