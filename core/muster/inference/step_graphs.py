"""Steps of a decode, recorded once and replayed: one launch instead of some five hundred.

A GPU computes a step of a small model in less time than a CPU takes to launch it. A recording has
fixed numbers of rows and positions; here both are rounded up, so that a recording serves many
steps. The added rows lie in places that no sample has, and masks hide the added positions. Axes: S
places for rows, R rows in use, V vocabulary.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from muster.inference.forward import Predicted

LEAST_WIDTH = 256
"""Short widths are rounded up to a multiple of this."""

_ORDINARY_STEPS = 3
"""Steps of a size that are computed before one is recorded: recording takes as long as these."""

Work: TypeAlias = Callable[[], None]
Record: TypeAlias = Callable[[Work], Work]
"""Does some work on fixed tensors, and returns a function that repeats it."""

Compute: TypeAlias = Callable[[torch.Tensor, int], Predicted]
"""Called with the [3, R] of `StepGraphs.step` and a width; never synchronises with the host."""


def record_cuda(work: Work) -> Work:
    """Record work as a CUDA graph; its memory is the recording's own."""
    graph = torch.cuda.CUDAGraph()
    # The thread that builds proofs may wait for events during the capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    replay: Work = graph.replay
    return replay


class StepGraphs:
    """The recordings of one decode. They hold no reference to its keys and values: those are
    gigabytes, and are freed when the decode is over.
    """

    def __init__(self, record: Record, results: Predicted, length: int) -> None:
        """`results` has room for the hidden states [S, H] and logits [S, V] of a step; `length` is
        the stride of a place, and the largest width.
        """
        self._record, self._results = record, results
        self._length, self._device = length, results[0].device
        self._given: dict[int, torch.Tensor] = {}
        self._ordinary: Counter[tuple[int, int]] = Counter()
        self._recorded: dict[tuple[int, int], Work] = {}

    def step(self, compute: Compute, given_3R: npt.NDArray[np.int64], width: int) -> Predicted:
        """Return the hidden states and logits of the next token of each row, valid until the next
        step. A row is given as its last token, that token's position, and the position's index in
        the buffer of all places.
        """
        rows = given_3R.shape[1]
        size = min(len(self._results[0]), 1 << (rows - 1).bit_length())
        wide = min(self._length, _round_up(width, width_step(width)))
        given_3S = np.zeros((3, size), np.int64)
        given_3S[2] = np.arange(size) * self._length
        given_3S[:, :rows] = given_3R
        if size not in self._given:
            self._given[size] = torch.empty_like(torch.from_numpy(given_3S), device=self._device)
        given = self._given[size].copy_(torch.from_numpy(given_3S), non_blocking=True)
        hidden, logits = self._done(compute, given, wide)
        # Hidden states are kept for some steps until proofs are built of them.
        return hidden[:rows].clone(), logits[:rows]

    def _done(self, compute: Compute, given: torch.Tensor, wide: int) -> Predicted:
        key = given.shape[1], wide
        if key not in self._recorded:
            self._ordinary[key] += 1
            if self._ordinary[key] <= _ORDINARY_STEPS:
                return compute(given, wide)
            self._recorded[key] = self._record(partial(self._fill, compute, given, wide))
        self._recorded[key]()
        return self._results

    def _fill(self, compute: Compute, given: torch.Tensor, wide: int) -> None:
        """Compute a step into tensors that all recordings share and that outlive each recording."""
        for kept, made in zip(self._results, compute(given, wide), strict=True):
            kept[: len(made)].copy_(made)


def width_step(width: int) -> int:
    """Return the step that a width is rounded up by: at most a quarter of a long width."""
    return max(LEAST_WIDTH, 1 << max(0, (width - 1).bit_length() - 3))


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step
