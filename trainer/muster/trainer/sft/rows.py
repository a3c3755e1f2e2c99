"""Rows on disk as tokens, and the order in which optimiser steps take them.

Rows are encoded once, in the order of their files, into one memory-mapped file of tokens: a million
rows take as little memory as ten. The order of an epoch follows from the recipe's seed and the
number of rows, so that after a stop training continues with the same rows.
"""

from __future__ import annotations

import json
import random
from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from muster.protocol.encoding import keccak
from muster.protocol.errors import ConfigError
from muster.protocol.ids import Step
from muster.protocol.sft import SftTraining
from muster.tasks.row_files import read_rows
from muster.telemetry import Progress
from muster.trainer.learn.packing import TrainingSample
from muster.trainer.publish.policies import fresh_folder
from muster.trainer.sft.encoding import LeftOut, RowEncoder, first_question
from muster.trainer.sft.source import SftSource

TOKENS, ENDS, PROBLEMS = "tokens.i32", "ends.i64", "problems.i64"
IS_HELD_OUT, COUNTS = "held-out.u8", "counts.json"


@dataclass(slots=True)
class RowCounts:
    """Counts of a data set's rows by their use."""

    trained: int = 0
    """Rows that are trained on."""
    held_out: int = 0
    """Rows that are held out."""
    tokens: int = 0
    """Tokens of both, prompts included."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Rows that are left out, by reason."""

    def to_json(self) -> dict[str, Any]:
        """Return the counts as JSON values."""
        left_out = dict(sorted(self.left_out.items()))
        return {
            "trained": self.trained,
            "held_out": self.held_out,
            "tokens": self.tokens,
            "left_out": left_out,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RowCounts:
        """Return counts from JSON values."""
        return cls(**{**values, "left_out": Counter(values["left_out"])})

    def __str__(self) -> str:
        rows = f"{self.trained:,} rows to train on, {self.held_out:,} held out"
        why = ", ".join(f"{count:,} {name}" for name, count in sorted(self.left_out.items()))
        return f"{rows}; left out: {why or 'none'}"


class TokenRows:
    """Encoded rows, memory-mapped from a folder."""

    def __init__(self, folder: Path) -> None:
        """`folder` was written by `write_rows`."""
        self.counts = RowCounts.from_json(json.loads((folder / COUNTS).read_text()))
        self._tokens = np.memmap(folder / TOKENS, np.int32, mode="r")
        ends = np.fromfile(folder / ENDS, np.int64)
        self._starts = np.concatenate([[0], ends[:-1]])
        self.lengths: npt.NDArray[np.int64] = ends - self._starts
        """Tokens of each row."""
        self.problems: npt.NDArray[np.int64] = np.fromfile(folder / PROBLEMS, np.int64)
        """A number for the problem of each row."""
        is_held_out = np.fromfile(folder / IS_HELD_OUT, np.bool_)
        self.trained: npt.NDArray[np.int64] = np.flatnonzero(~is_held_out)
        """Numbers of the rows that are trained on."""
        self.held_out: npt.NDArray[np.int64] = np.flatnonzero(is_held_out)
        """Numbers of the others."""

    def sample(self, row: int) -> TrainingSample:
        """Return a row as the learner takes it."""
        start = self._starts[row]
        return sample_of(self._tokens[start : start + self.lengths[row]].tolist())


def sample_of(row: list[int]) -> TrainingSample:
    """Return a row of tokens as the learner takes it; complements are tokens that are not trained
    on."""
    first = next(place for place, token in enumerate(row) if token >= 0)
    rest = row[first:]
    edges = [
        place for place, token in enumerate(rest[1:], 1) if (token < 0) != (rest[place - 1] < 0)
    ]
    edges += [len(rest)] * (len(edges) % 2)
    return TrainingSample(
        tuple(~token for token in row[:first]),
        tuple(token if token >= 0 else ~token for token in rest),
        replies=tuple(zip(edges[::2], edges[1::2], strict=True)),
    )


def write_rows(
    folder: Path,
    source: SftSource,
    encoder: RowEncoder,
    held_out_share: float,
    on_progress: Progress = lambda _done, _of: None,
) -> RowCounts:
    """Encode a data set into a folder, which appears atomically.

    Raises ConfigError for a file that cannot be read at all, and when there is nothing to train on.
    """
    counts, ends, problems, is_held_out = RowCounts(), array("q"), array("q"), array("b")
    with fresh_folder(folder) as fresh:
        with (fresh / TOKENS).open("wb") as out:
            for each in source.files:
                for row in read_rows(each.path):
                    found = encoder.encode(row)
                    if isinstance(found, LeftOut):
                        counts.left_out[found.value] += 1
                        continue
                    array("i", found).tofile(out)
                    counts.tokens += len(found)
                    ends.append(counts.tokens)
                    problem = problem_of(row)
                    problems.append(int.from_bytes(keccak(problem)[:8], "big", signed=True))
                    is_out = each.is_held_out or is_drawn(problem, held_out_share)
                    is_held_out.append(is_out)
                    counts.held_out += is_out
                    counts.trained += not is_out
                    on_progress(len(ends) + counts.left_out.total(), 0)
        _require_rows(counts)
        (fresh / ENDS).write_bytes(ends.tobytes())
        (fresh / PROBLEMS).write_bytes(problems.tobytes())
        (fresh / IS_HELD_OUT).write_bytes(is_held_out.tobytes())
        (fresh / COUNTS).write_text(json.dumps(counts.to_json()))
    return counts


def _require_rows(counts: RowCounts) -> None:
    if counts.trained:
        return
    hint = "name the columns problem or prompt and completion, or messages"
    if counts.left_out[LeftOut.TOKENIZER]:
        hint = "set rows.form to 'text': the rows were sampled with another tokenizer"
    elif counts.left_out[LeftOut.LONG]:
        hint = "raise rows.max_tokens"
    raise ConfigError(f"there is nothing to train on: {counts}", hint=hint)


def problem_of(row: Mapping[str, Any]) -> bytes:
    """Return the problem of a row as bytes: its name, or else its first question."""
    names = (row.get(name) for name in ("problem_id", "problem", "prompt"))
    found = next((name for name in names if isinstance(name, str) and name), None)
    return (first_question(row) if found is None else found).encode(errors="surrogatepass")


def is_drawn(problem: bytes, share: float) -> bool:
    """Tell whether a problem's rows are held out; this depends on the problem alone."""
    drawn = keccak(b"held out " + problem)[:8]
    return int.from_bytes(drawn, "big") < share * 2**64


class Order:
    """Which rows each optimiser step takes."""

    def __init__(self, rows: TokenRows, training: SftTraining) -> None:
        self._rows, self._training = rows, training
        self._epoch, self._steps = -1, [np.empty(0, np.int64)]
        counts = [len(self._steps_of(epoch)) for epoch in range(training.epochs)]
        self._ends = list(accumulate(counts))

    @property
    def last(self) -> Step:
        """The last step."""
        return Step(self._ends[-1])

    def epoch_of(self, step: Step) -> int:
        """Return the epoch of a step, from 0."""
        return next(epoch for epoch, end in enumerate(self._ends) if step <= end)

    def samples(self, step: Step) -> list[TrainingSample]:
        """Return the rows of a step, from 1."""
        epoch = self.epoch_of(step)
        before = self._ends[epoch - 1] if epoch else 0
        return [self._rows.sample(row) for row in self._steps_of(epoch)[step - before - 1].tolist()]

    def _steps_of(self, epoch: int) -> list[npt.NDArray[np.int64]]:
        """Return the rows of an epoch's steps: a step takes the rows that begin before the next
        multiple of the batch's tokens.
        """
        if epoch != self._epoch:
            chosen = self._shuffled(epoch)
            ends = np.cumsum(self._rows.lengths[chosen])
            batch = (ends - self._rows.lengths[chosen]) // self._training.batch_tokens
            cuts = np.flatnonzero(np.diff(batch)) + 1
            self._epoch, self._steps = epoch, np.split(chosen, cuts)
        return self._steps

    def _shuffled(self, epoch: int) -> npt.NDArray[np.int64]:
        """Return the rows of an epoch in its order."""
        rows = self._rows.trained
        together = self._rows.problems[rows] if self._training.order == "problems" else rows
        problems, problem_of_row = np.unique(together, return_inverse=True)
        places = list(range(len(problems)))
        random.Random(f"sft {self._training.seed} epoch {epoch}").shuffle(places)
        return rows[np.argsort(np.array(places)[problem_of_row], kind="stable")]
