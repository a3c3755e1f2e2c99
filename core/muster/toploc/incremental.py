"""Proofs that are built during decoding: rows come step by step, a thread builds the proofs.

Owns one unfinished chunk per request and the queue to the thread. Memory does not grow with the
length of completions: the finished chunks that wait for the thread are bounded, and `add` blocks at
that bound. Axes: R requests of one step, N steps, Q all requests, C rows of a chunk, H hidden
units.
"""

import threading
from collections import defaultdict
from collections.abc import Sequence
from queue import SimpleQueue
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from muster.protocol.errors import ProofError
from muster.toploc.chunks import to_patterns
from muster.toploc.proofs import build_proofs_many

_WAITING_ELEMENTS = 1 << 25
"""Most entries of finished chunks that wait for the thread: 64 MiB as patterns, 128 as floats."""


class _Job(NamedTuple):
    """Chunks with the same number of rows."""

    requests: list[int]
    chunks: Any
    """The result of `_taken` for them."""
    elements: int
    """Their entries."""


class IncrementalBuilder:
    """Builds the proofs of samples that are being decoded; one thread calls it, and closes it.

    A request is a small integer of at least 0 that the caller chooses; after `take` it can be used
    again. Four methods decide where rows are kept and how they are proven, so that a subclass can
    keep them on a device. Leaving the context ends the thread and drops the proofs that were not
    taken.
    """

    def __init__(self, *, chunk_tokens: int = 32, topk: int = 128) -> None:
        self._chunk_tokens = chunk_tokens
        self._topk = topk
        self._rows_QCH: Any = np.empty((0, chunk_tokens, 0), np.uint16)
        self._filled_Q = np.zeros(0, np.int64)
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._changed = threading.Condition()
        # The attributes below are shared with the thread, under the condition's lock.
        self._waiting_elements = 0
        self._waiting_chunks: defaultdict[int, int] = defaultdict(int)
        self._proofs: defaultdict[int, list[bytes]] = defaultdict(list)
        self._failure: Exception | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="toploc", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def add(self, requests_R: npt.NDArray[np.int64], rows_RH: Any) -> None:
        """Take one more row [R, H] of each of some distinct requests. Width and type never change:
        bfloat16 patterns, or float32 that the thread rounds.

        Waits while too many chunks wait. Raises ProofError when a chunk could not be proven.
        """
        self.extend(requests_R, rows_RH[:, None])

    def extend(self, requests_R: npt.NDArray[np.int64], rows_RNH: Any) -> None:
        """Take N more rows of each of some distinct requests, like N calls of `add`."""
        start = 0
        while start < rows_RNH.shape[1]:
            try:
                filled_R = self._filled_Q[requests_R]
            except IndexError:
                self._grow(int(requests_R.max()) + 1, rows_RNH)
                continue
            # Up to where the first request's chunk is full.
            size = min(rows_RNH.shape[1] - start, self._chunk_tokens - int(filled_R.max()))
            places_RN = filled_R[:, None] + np.arange(size)
            self._write(requests_R, places_RN, rows_RNH[:, start : start + size])
            filled_R += size
            self._filled_Q[requests_R] = filled_R
            is_full_R = filled_R == self._chunk_tokens
            if is_full_R.any():
                self._hand_over(requests_R[is_full_R])
            start += size

    def end(self, requests_R: npt.NDArray[np.int64]) -> None:
        """Mark requests as complete: their last chunk is proven, however short."""
        unfinished = requests_R[self._filled_Q[requests_R] > 0]
        filled = self._filled_Q[unfinished]
        for rows in sorted(set(filled.tolist())):
            self._hand_over(unfinished[filled == rows])

    def take(self, request: int) -> list[bytes]:
        """Wait for an ended request's last proof, return all its proofs, and forget the request.

        Raises ProofError when one of the builder's chunks could not be proven.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._failure or not self._waiting_chunks[request])
            self._raise_failure()
            del self._waiting_chunks[request]
            return self._proofs.pop(request, [])

    def close(self) -> None:
        """End the thread without building the waiting chunks; may be called again."""
        with self._changed:
            self._is_closed = True
        self._jobs.put(None)
        self._thread.join()

    def _grow(self, requests: int, rows: Any) -> None:
        # At least doubled: requests that come one by one must not copy everything each time.
        used = len(self._filled_Q)
        self._filled_Q = np.concatenate(
            [self._filled_Q, np.zeros(max(requests - used, used), np.int64)]
        )
        shape = (len(self._filled_Q), self._chunk_tokens, rows.shape[-1])
        kept, self._rows_QCH = self._rows_QCH[:used], self._room(shape, rows)
        if used:
            self._rows_QCH[:used] = kept

    def _room(self, shape: tuple[int, ...], like: Any) -> Any:
        """Return a buffer for rows like `like`."""
        return np.empty(shape, like.dtype)

    def _write(
        self, requests_R: npt.NDArray[np.int64], places_RN: npt.NDArray[np.int64], rows_RNH: Any
    ) -> None:
        """Write rows into their requests' chunks."""
        self._rows_QCH[requests_R[:, None], places_RN] = rows_RNH

    def _taken(self, requests_R: npt.NDArray[np.int64], rows: int) -> Any:
        """Return what the thread needs of chunks; their buffer is reused afterwards."""
        return self._rows_QCH[requests_R, :rows]

    def _prove(self, chunks: Any) -> list[list[bytes]]:
        """Return the proofs of each request's chunk; runs in the thread."""
        patterns_RCH = to_patterns(chunks)
        return build_proofs_many(
            list(patterns_RCH), chunk_tokens=self._chunk_tokens, topk=self._topk
        )

    def _hand_over(self, requests_R: npt.NDArray[np.int64]) -> None:
        """Queue the chunks of requests, grouped by their number of rows."""
        rows = int(self._filled_Q[requests_R[0]])
        elements = len(requests_R) * rows * self._rows_QCH.shape[-1]
        job = _Job(requests_R.tolist(), self._taken(requests_R, rows), elements)
        self._filled_Q[requests_R] = 0
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure or self._waiting_elements <= _WAITING_ELEMENTS
            )
            self._raise_failure()
            self._waiting_elements += job.elements
            for request in job.requests:
                self._waiting_chunks[request] += 1
        self._jobs.put(job)

    def _raise_failure(self) -> None:
        if self._is_closed:
            raise ProofError("the builder is closed")
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._is_closed:
                continue
            try:
                built = self._prove(job.chunks)
            except Exception as error:  # Any error is raised again in the caller's thread.
                with self._changed:
                    self._failure = error
                    self._changed.notify_all()
                return
            self._note(job, built)

    def _note(self, job: _Job, built: Sequence[Sequence[bytes]]) -> None:
        with self._changed:
            self._waiting_elements -= job.elements
            for request, proofs in zip(job.requests, built, strict=True):
                self._proofs[request] += proofs
                self._waiting_chunks[request] -= 1
            self._changed.notify_all()
