"""Rules that select the rows of a data set and the split of each problem.

An omitted row is counted under the first rule that omits it: `part`, `reward`, `length`,
`unfinished`, `disagrees` (most of its group answers otherwise), `worse` (another of its group has a
higher reward), `contaminated`, `duplicate`, and `enough` (its problem already has the allowed
number of rows).
"""

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
"""Number of consecutive words that count as the same text, as in GPT-3's contamination check
(arXiv 2005.14165, appendix C)."""
LEAST_GROUP = 3
"""Fewest samples of a group whose majority counts."""
_ONE_BY_ONE = r"\u3040-\u309f\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
"""Chinese characters and hiragana, which stand without spaces: each counts as a word. Katakana
stands between them. In Thai and its neighbours, combining marks separate words."""
_WORD = re.compile(rf"[{_ONE_BY_ONE}]|[^\W{_ONE_BY_ONE}]+")
_LISTS = ("parts", "held_out")


@dataclass(frozen=True, slots=True)
class SelectionSettings:
    """Settings of the selection."""

    reward_at_least: float = 0.0
    """Least reward of a row, in [0, 1]."""
    tokens_at_least: int = 1
    """Least tokens of a completion."""
    tokens_at_most: int = 1 << 20
    """Most tokens of a completion."""
    only_finished: bool = False
    """Whether completions that were cut off at the token limit are left out."""
    agreement: float = 0.0
    """Smallest share of a group that must give the same answer. Rows with another answer, and
    groups with a smaller share, are left out; 0 disables the rule. For problems without a gold
    answer (self-consistency, arXiv 2203.11171)."""
    only_best: bool = False
    """Whether only the first row with the highest reward of each group is kept (best of n)."""
    per_problem: int = 0
    """Most rows of one problem, taken in the stream's order; 0 for no limit."""
    test_share: float = 0.0
    """Share of the problems whose rows form the split `test`."""
    parts: tuple[str, ...] = ()
    """Parts of the task set whose rows are kept; empty for all parts."""
    held_out: tuple[str, ...] = ()
    """SHA-256 of each file of held-out texts that rows must not repeat, in order."""

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {**asdict(self), **{name: list(getattr(self, name)) for name in _LISTS}}


def is_test(problem_id: str, share: float) -> bool:
    """Tell whether a problem's rows are in the split `test`; this depends on its id only."""
    drawn = hashlib.sha256(f"muster split {problem_id}".encode()).digest()[:8]
    return int.from_bytes(drawn, "big") < share * 2**64


class HeldOut:
    """Texts that a data set must not repeat: as 13-grams of words, shorter texts as a whole."""

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
                if words and len(words) < GRAM:
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

    A group is the samples of one problem. Answers are compared as stripped text; an empty answer
    does not count. No row agrees in a group of fewer than LEAST_GROUP samples, or if the most
    frequent answer has less than `share` of all samples, or if two answers tie.
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
    """Return a mask of the first row with the highest reward in each group of a submission."""
    names, rewards = rows["problem_id"].to_pylist(), rows["reward"].to_pylist()
    chosen: dict[str, int] = {}
    for row, (name, reward) in enumerate(zip(names, rewards, strict=True)):
        if name not in chosen or reward > rewards[chosen[name]]:
            chosen[name] = row
    return np.isin(np.arange(len(names)), list(chosen.values()))


def group_faults(rows: pa.Table, settings: SelectionSettings) -> dict[str, npt.NDArray[np.bool_]]:
    """Return, by rule, the rows of a submission that are left out in comparison with their
    group."""
    faults = {}
    if settings.agreement:
        faults["disagrees"] = ~agreeing(rows, settings.agreement)
    if settings.only_best:
        faults["worse"] = ~best(rows)
    return faults


class Selection:
    """Chooses rows, submission by submission in the stream's order; remembers the kept rows.

    Needs 60 to 100 bytes of memory per kept row.
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
    """Columns that it reads."""

    def __init__(self, settings: SelectionSettings, held_out: HeldOut) -> None:
        self._settings = settings
        self._held_out = held_out
        self._seen: set[int] = set()
        self._of_problem: Counter[str] = Counter()
        self._contaminated: dict[str, bool] = {}

    def choose(self, rows: pa.Table) -> tuple[pa.Table, Counter[str]]:
        """Return the rows that are kept, and how many are left out by reason."""
        reasons = self._plain_faults(rows)
        keys = row_keys(rows)
        names = rows["problem_id"].to_pylist()
        for row, reason in enumerate(reasons):
            if reason is None:
                reasons[row] = reason = self._fault(rows, row, names[row], keys[row])
            if reason is None:
                self._keep(names[row], keys[row])
        kept = rows.filter(pa.array([reason is None for reason in reasons], pa.bool_()))
        return kept, Counter(reason for reason in reasons if reason is not None)

    def remember(self, rows: pa.Table) -> None:
        """Remember rows that an earlier export kept."""
        for name, key in zip(rows["problem_id"].to_pylist(), row_keys(rows), strict=True):
            self._keep(name, key)

    def _keep(self, problem_id: str, key: int) -> None:
        self._seen.add(key)
        if self._settings.per_problem:
            self._of_problem[problem_id] += 1

    def _plain_faults(self, rows: pa.Table) -> list[str | None]:
        """Return for each row why it is left out regardless of other rows, or None."""
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


def row_keys(rows: pa.Table) -> list[int]:
    """Return a 64-bit hash of each row's problem and tokens, equal for duplicates.

    Among a million rows, the chance of a collision is below 1e-7.
    """
    tokens, found = TokenLists.of(rows["completion_tokens"]), []
    for row, name in enumerate(rows["problem_id"].to_pylist()):
        text = hashlib.blake2b(name.encode(), digest_size=8)
        text.update(tokens.row(row).tobytes())
        found.append(int.from_bytes(text.digest(), "big"))
    return found
