"""TOPLOC against its reference library, and the cost of proofs and their checks.

    make bench-toploc

 1. For each width and length, both sides build and verify the proofs of the same bfloat16 tensor in
    turn, on one core, five times; CPU time over all threads, medians. The reference is toploc 0.1.6
    built from source, by its public `build_proofs_bytes` and `verify_proofs_bytes`, in the form of
    input (tensor or list of rows) that is faster for it. Proofs must be byte-identical, and figures
    on perturbed hidden states equal.
 2. The share of generation spent on proofs, and validation over generation, see
    `engine_costs.py`.

Writes results/toploc.json.
"""

import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from benchmarks.inference.engine_costs import measure_engine
from benchmarks.report import HERE, machine, print_table, write

from muster.toploc import ChunkResult, build_proofs, kernel, verify_proofs

REFERENCE = [str(HERE / ".envs/toploc/bin/python"), "-m", "benchmarks.proofs.toploc_reference"]
SHAPES = [(256, 2048), (1024, 2048), (4096, 2048), (5120, 512), (5120, 2048), (5120, 8192)]
"""(hidden, tokens); the ratios quoted are the worst of width 5120."""
ROUNDS = 5
REPEATS = 2
"""Calls per timing, the same for both sides."""
CHUNK_TOKENS = 32
TOPK = 128

Patterns = npt.NDArray[np.uint16]


@dataclass
class Row:
    """CPU seconds per proof of one shape, a value per round."""

    hidden: int
    tokens: int
    build_s: list[float] = field(default_factory=list)
    verify_s: list[float] = field(default_factory=list)
    reference_build_s: list[float] = field(default_factory=list)
    reference_verify_s: list[float] = field(default_factory=list)

    @property
    def build_ratio(self) -> float:
        """Reference over ours, of the medians."""
        return statistics.median(self.reference_build_s) / statistics.median(self.build_s)

    @property
    def verify_ratio(self) -> float:
        """Reference over ours, of the medians."""
        return statistics.median(self.reference_verify_s) / statistics.median(self.verify_s)


def gaussian_without_ties(tokens: int, hidden: int) -> Patterns:
    """Return normal hidden states, the largest of each chunk set apart by 3 in the last place.

    Among ties at the cut the reference's choice is arbitrary, so bytes could not be compared.
    """
    random = np.random.default_rng(hidden + tokens)
    values = random.standard_normal((tokens, hidden)).astype(np.float32)
    patterns = (values.view(np.uint32) >> 16).astype(np.uint16)
    for start in range(0, tokens, CHUNK_TOKENS):
        flat = patterns[start : start + CHUNK_TOKENS].reshape(-1)
        order = np.argsort(flat & 0x7FFF, kind="stable")[-TOPK - 1 :]
        distinct = (flat[order[0]] & 0x7FFF) + 3 * np.arange(TOPK + 1)
        flat[order] = (flat[order] & 0x8000) | distinct
    return patterns


def perturbed(patterns: Patterns) -> Patterns:
    """Return hidden states with mantissas moved by up to 2, less than what keeps ties away."""
    moves = np.random.default_rng(0).integers(0, 3, patterns.shape)
    return (patterns + moves).astype(np.uint16)


def timed(call: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    """Return CPU seconds of one call, over all threads, and its result."""
    started = time.process_time()
    for _ in range(repeats):
        result = call()
    return (time.process_time() - started) / repeats, result


@contextmanager
def reference() -> Iterator[Callable[[dict[str, Any]], dict[str, Any]]]:
    """Start the reference's process and yield a function that asks it."""
    with subprocess.Popen(
        REFERENCE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as peer:
        asked, answers = peer.stdin, peer.stdout
        assert asked is not None
        assert answers is not None

        def ask(request: dict[str, Any]) -> dict[str, Any]:
            print(json.dumps(request), file=asked, flush=True)
            answer: dict[str, Any] = json.loads(answers.readline())
            return answer

        yield ask


def measure(hidden: int, tokens: int, folder: Path, ask: Callable[..., dict[str, Any]]) -> Row:
    """Time both sides in turn; raises AssertionError when they differ."""
    patterns = gaussian_without_ties(tokens, hidden)
    other = perturbed(patterns)
    request = {"hidden": str(folder / "a.npy"), "other": str(folder / "b.npy")}
    np.save(request["hidden"], patterns)
    np.save(request["other"], other)
    tensor = torch.from_numpy(patterns.view(np.int16)).view(torch.bfloat16)
    row, chunks = Row(hidden, tokens), tokens // CHUNK_TOKENS
    for _ in range(ROUNDS):
        answer = ask({**request, "repeats": REPEATS})
        row.reference_build_s.append(min(answer["build_s"].values()) / chunks)
        row.reference_verify_s.append(min(answer["verify_s"].values()) / chunks)
        seconds, proofs = timed(partial(build_proofs, tensor), repeats=REPEATS)
        row.build_s.append(seconds / chunks)
        seconds, _ = timed(partial(verify_proofs, tensor, proofs), repeats=REPEATS)
        row.verify_s.append(seconds / chunks)
    assert [proof.hex() for proof in proofs] == answer["proofs"], "proofs differ"
    np.testing.assert_allclose(figures(verify_proofs(other, proofs)), answer["results"], rtol=1e-6)
    return row


def figures(results: list[ChunkResult]) -> list[list[float]]:
    """Return the figures that the reference also measures."""
    return [
        [r.exponent_mismatches, r.mantissa_error_mean, r.mantissa_error_median] for r in results
    ]


def show(rows: list[Row]) -> None:
    """Print microseconds per proof of both sides."""

    def cell(seconds: list[float]) -> str:
        return f"{statistics.median(seconds) * 1e6:.1f}"

    print_table(
        "CPU µs per proof (32 rows, 128 points), proofs byte-identical",
        ["hidden", "tokens", "build", "toploc 0.1.6", "ratio", "verify", "toploc 0.1.6", "ratio"],
        [
            [
                str(row.hidden),
                str(row.tokens),
                cell(row.build_s),
                cell(row.reference_build_s),
                f"{row.build_ratio:.1f}",
                cell(row.verify_s),
                cell(row.reference_verify_s),
                f"{row.verify_ratio:.1f}",
            ]
            for row in rows
        ],
    )


def main() -> None:
    """Measure everything, print it, write it."""
    measured_on = machine()
    # One core for both sides, because the reference starts threads.
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch, reference() as ask:
        rows = [measure(*shape, Path(scratch), ask) for shape in SHAPES]
    show(rows)
    costs = measure_engine()
    wide = [row for row in rows if row.hidden == 5120]
    metrics = {
        "build_ratio_5120": min(row.build_ratio for row in wide),
        "verify_ratio_5120": min(row.verify_ratio for row in wide),
        **costs.metrics,
    }
    backend = "kernel" if kernel.load() else "numpy"
    detail = {"backend": backend, "proofs": [vars(row) for row in rows], "engine": costs.detail}
    write("toploc", metrics, detail, measured_on=measured_on)


if __name__ == "__main__":
    main()
