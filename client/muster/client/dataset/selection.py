"""Which rows of accepted submissions a data set keeps, and in which split a problem is.

A row is counted under the first rule that leaves it out: `part`, `reward`, `length`, `unfinished`,
`disagrees`, when most of its group answers otherwise, `worse`, when another of its group has a
higher reward, `contaminated`, `duplicate`, and `enough`, when its problem has the rows that it may
have.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from muster.client.dataset.rows import TokenLists
from muster.protocol.errors import ConfigError

GRAM = 13
"""Words in a row that count as the same text, as in GPT-3's contamination check
(arXiv 2005.14165, appendix C)."""
LEAST_GROUP = 3
"""Samples of a group from which its majority says something."""
_WORD = re.compile(r"\w+")
_LISTS = ("parts", "held_out")


@dataclass(frozen=True, slots=True)
class SelectionSettings:
    """What a data set is asked to hold."""

    reward_at_least: float = 0.0
    """Least reward of a row, in [0, 1]."""
    tokens_at_least: int = 1
    """Least tokens of a completion."""
    tokens_at_most: int = 1 << 20
    """Most tokens of a completion."""
    only_finished: bool = False
    """Whether completions that were cut off at the token limit are left out."""
    agreement: float = 0.0
    """Least share of a group that gives the same answer; rows with another answer, and groups that
    agree less, are left out; 0 for no such rule. For problems without a gold answer
    (self-consistency, arXiv 2203.11171)."""
    only_best: bool = False
    """Whether of each group only the first row with the highest reward is kept (best of n)."""
    per_problem: int = 0
    """Most rows of one problem, the first in the stream's order; 0 for any number."""
    test_share: float = 0.0
    """Share of the problems whose rows are the split `test`."""
    parts: tuple[str, ...] = ()
    """Parts of the task set whose rows are kept; none for those of all."""
    held_out: tuple[str, ...] = ()
    """SHA-256 of each file of held-out texts that rows must not repeat, in order."""

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {**asdict(self), **{name: list(getattr(self, name)) for name in _LISTS}}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> SelectionSettings:
        """Return settings from their JSON values; raises TypeError or ValueError for others."""
        # Canonical JSON writes 1.0 as 1.
        names = ("reward_at_least", "agreement", "test_share")
        shares = {name: float(values.get(name, 0.0)) for name in names}
        return cls(**{**values, **shares, **{name: tuple(values[name]) for name in _LISTS}})


def is_test(problem_id: str, share: float) -> bool:
    """Tell whether a problem's rows are the split `test`: the problem's name alone decides."""
    drawn = hashlib.sha256(f"muster split {problem_id}".encode()).digest()[:8]
    return int.from_bytes(drawn, "big") < share * 2**64


class HeldOut:
    """Texts that a data set must not repeat, as grams of 13 words; shorter ones as a whole."""

    def __init__(self, files: Iterable[Path] = ()) -> None:
        """Raises ConfigError for a file that cannot be read or holds no text."""
        self._grams: set[bytes] = set()
        self._whole: set[bytes] = set()
        self.hashes: list[str] = []
        """SHA-256 of each file, in order."""
        for path in files:
            self._take(path)

    def _take(self, path: Path) -> None:
        found = 0
        try:
            self.hashes.append(hashlib.sha256(path.read_bytes()).hexdigest())
            for text in _texts_in(path):
                words = _words(text)
                found += bool(words)
                if len(words) < GRAM:
                    self._whole.add(_digest(words))
                self._grams.update(_grams(words))
        except (OSError, ValueError, pa.ArrowException) as error:
            raise ConfigError(
                f"cannot read held-out texts of {path}: {error}",
                hint="JSON lines, Parquet, or plain text with one text a line",
            ) from error
        if not found:
            raise ConfigError(f"{path} holds no text")

    def __bool__(self) -> bool:
        return bool(self._grams or self._whole)

    def has(self, *texts: str) -> bool:
        """Tell whether one of the texts repeats a held-out one."""
        for text in texts:
            words = _words(text)
            if _digest(words) in self._whole or not self._grams.isdisjoint(_grams(words)):
                return True
        return False


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def _grams(words: list[str]) -> Iterator[bytes]:
    return (_digest(words[i : i + GRAM]) for i in range(len(words) - GRAM + 1))


def _digest(words: list[str]) -> bytes:
    return hashlib.blake2b(" ".join(words).encode(), digest_size=8).digest()


def _texts_in(path: Path) -> Iterator[str]:
    """Yield every string of a file of JSON lines or Parquet, else its lines."""
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        for batch in pq.ParquetFile(path).iter_batches():
            for row in batch.to_pylist():
                yield from _strings(row)
    elif path.suffix in (".jsonl", ".json"):
        with path.open(encoding="utf-8") as file:
            for line in file:
                yield from _strings(json.loads(line))
    else:
        with path.open(encoding="utf-8") as file:
            yield from file


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _strings(each)
    elif isinstance(value, list):
        for each in value:
            yield from _strings(each)


def agreeing(rows: pa.Table, share: float) -> npt.NDArray[np.bool_]:
    """Return which rows of a submission give the answer that most of their group gives.

    A group is the samples of one problem. Answers are compared as text, blanks at their ends aside;
    an empty one is nobody's vote. Nobody agrees in a group of less than LEAST_GROUP samples, where
    the most frequent answer has less than `share` of all samples, and where two answers tie.
    """
    names = rows["problem_id"].to_pylist()
    answers = [answer.strip() for answer in rows["answer"].to_pylist()]
    sizes, votes = Counter(names), Counter(zip(names, answers, strict=True))
    chosen: dict[str, str | None] = {}
    most: Counter[str] = Counter()
    for (name, answer), count in votes.items():
        if answer and count >= max(most[name], 1):
            chosen[name] = None if count == most[name] else answer
            most[name] = count
    for name, size in sizes.items():
        if size < LEAST_GROUP or most[name] < share * size:
            chosen[name] = None
    pairs = zip(names, answers, strict=True)
    return np.array([chosen.get(name) == answer for name, answer in pairs], bool)


def best(rows: pa.Table) -> npt.NDArray[np.bool_]:
    """Return which rows of a submission have the highest reward of their group, the first each."""
    names, rewards = rows["problem_id"].to_pylist(), rows["reward"].to_pylist()
    chosen: dict[str, int] = {}
    for row, (name, reward) in enumerate(zip(names, rewards, strict=True)):
        if name not in chosen or reward > rewards[chosen[name]]:
            chosen[name] = row
    return np.isin(np.arange(len(names)), list(chosen.values()))


def group_faults(rows: pa.Table, settings: SelectionSettings) -> dict[str, npt.NDArray[np.bool_]]:
    """Return which of a submission's rows are left out by what others of their group say."""
    faults = {}
    if settings.agreement:
        faults["disagrees"] = ~agreeing(rows, settings.agreement)
    if settings.only_best:
        faults["worse"] = ~best(rows)
    return faults


class Selection:
    """Chooses rows, submission by submission in the stream's order; knows what it has kept.

    Takes 60 to 100 bytes of memory a kept row.
    """

    COLUMNS = (
        "problem_id",
        "part",
        "problem",
        "completion",
        "completion_tokens",
        "answer",
        "reward",
        "is_finished",
    )
    """What it looks at."""

    def __init__(self, settings: SelectionSettings, held_out: HeldOut) -> None:
        self._settings = settings
        self._held_out = held_out
        self._seen: set[int] = set()
        self._of_problem: Counter[str] = Counter()
        self._contaminated: dict[str, bool] = {}

    def choose(self, rows: pa.Table) -> tuple[pa.Table, Counter[str]]:
        """Return the rows that are kept, and how many are left out by reason."""
        reasons = self._plain_faults(rows)
        keys = _keys(rows)
        names = rows["problem_id"].to_pylist()
        for row, reason in enumerate(reasons):
            if reason is None:
                reasons[row] = reason = self._fault(rows, row, names[row], keys[row])
            if reason is None:
                self._keep(names[row], keys[row])
        kept = rows.filter(pa.array([reason is None for reason in reasons], pa.bool_()))
        return kept, Counter(reason for reason in reasons if reason is not None)

    def remember(self, rows: pa.Table) -> None:
        """Take note of rows that an earlier export has kept."""
        for name, key in zip(rows["problem_id"].to_pylist(), _keys(rows), strict=True):
            self._keep(name, key)

    def _keep(self, problem_id: str, key: int) -> None:
        self._seen.add(key)
        if self._settings.per_problem:
            self._of_problem[problem_id] += 1

    def _plain_faults(self, rows: pa.Table) -> list[str | None]:
        """Return why each row is left out by its own figures alone, or None."""
        settings = self._settings
        lengths = np.diff(TokenLists.of(rows["completion_tokens"]).ends)
        reasons: list[str | None] = [None] * len(rows)
        wanted = settings.parts
        faults: dict[str, npt.NDArray[np.bool_]] = {
            "part": np.array([bool(wanted) and p not in wanted for p in rows["part"].to_pylist()]),
            "reward": np.asarray(rows["reward"].to_pylist()) < settings.reward_at_least,
            "length": (lengths < settings.tokens_at_least) | (lengths > settings.tokens_at_most),
        }
        if settings.only_finished:
            faults["unfinished"] = ~np.asarray(rows["is_finished"].to_pylist(), bool)
        faults |= group_faults(rows, settings)
        for reason, where in reversed(faults.items()):
            for row in np.flatnonzero(where):
                reasons[row] = reason
        return reasons

    def _fault(self, rows: pa.Table, row: int, problem_id: str, key: int) -> str | None:
        if self._held_out and self._is_contaminated(rows, row, problem_id):
            return "contaminated"
        if key in self._seen:
            return "duplicate"
        most = self._settings.per_problem
        return "enough" if most and self._of_problem[problem_id] >= most else None

    def _is_contaminated(self, rows: pa.Table, row: int, problem_id: str) -> bool:
        if problem_id not in self._contaminated:
            self._contaminated[problem_id] = self._held_out.has(rows["problem"][row].as_py())
        if self._contaminated[problem_id]:
            return True
        return self._held_out.has(rows["completion"][row].as_py())


def _keys(rows: pa.Table) -> list[int]:
    """Return what is the same of two rows that say the same: problem and tokens, in 64 bits.

    Of a million rows two different ones are taken for the same with a chance below 1e-7.
    """
    tokens, found = TokenLists.of(rows["completion_tokens"]), []
    for row, name in enumerate(rows["problem_id"].to_pylist()):
        text = hashlib.blake2b(name.encode(), digest_size=8)
        text.update(tokens.row(row).tobytes())
        found.append(int.from_bytes(text.digest(), "big"))
    return found
