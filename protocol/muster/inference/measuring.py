"""Generates and recomputes rollouts the way workers and validators do, and measures the difference.

What `muster.inference.calibrate` compares; applies no limits of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from muster.inference.engine import Completion, Prefill, Request
from muster.inference.forgers import Chunks
from muster.inference.replaying import replay
from muster.inference.transformers_engine import TransformersEngine
from muster.protocol.recipe import Recipe
from muster.toploc import ChunkResult, verify_proofs_many

_FEW = 24
"""Samples for the ways that run one sample at a time."""


@dataclass(frozen=True, slots=True)
class Way:
    """A way to compute that gives the same results but for rounding."""

    name: str
    """What differs, in words."""
    max_rows: int = 256
    """Samples in a forward pass."""
    threads: int = 1
    """Threads of torch."""
    samples: int | None = None
    """How many samples to spend on it; None for all."""


WORKERS = (
    Way("batched"),
    Way("one by one", max_rows=1, samples=_FEW),
    Way("batches of 7", max_rows=7, samples=4 * _FEW),
    Way("two threads", threads=2),
)
VALIDATORS = (
    Way("batched"),
    Way("one by one", max_rows=1, samples=_FEW),
    Way("two threads", threads=2, samples=4 * _FEW),
)


@dataclass(frozen=True, slots=True)
class Work:
    """Completions and the requests they claim to answer."""

    requests: Sequence[Request]
    """What was asked, with the seeds a validator replays."""
    completions: Sequence[Completion]
    """What was delivered."""

    def first(self, count: int | None) -> Work:
        """Return the first `count` samples."""
        return Work(self.requests[:count], self.completions[:count])


@dataclass(frozen=True, slots=True)
class Errors:
    """Recomputed work against the work, sample by sample."""

    chunks: list[list[ChunkResult]]
    """Distances of the proofs."""
    margins: list[npt.NDArray[np.float32]]
    """Margins of the choices."""

    def all_chunks(self) -> list[ChunkResult]:
        """Return the chunks of every sample."""
        return [result for results in self.chunks for result in results]


class Bench:
    """One engine on one recipe."""

    def __init__(self, engine: TransformersEngine, recipe: Recipe) -> None:
        self.engine = engine
        self.recipe = recipe

    def generate(self, requests: Sequence[Request], way: Way = WORKERS[0]) -> Work:
        """Return what a worker delivers."""
        asked = requests[: way.samples]
        with self._computing(way):
            return Work(asked, self.engine.generate(asked, proof=self.recipe.proof))

    def recompute(self, work: Work, way: Way = VALIDATORS[0]) -> list[Prefill]:
        """Return what a validator computes for work."""
        samples = [
            (request.prompt_tokens, completion.tokens)
            for request, completion in zip(work.requests, work.completions, strict=True)
        ]
        with self._computing(way):
            return self.engine.prefill(samples)

    def compare(self, work: Work, prefills: Sequence[Prefill]) -> Errors:
        """Return how far work is from its recomputation."""
        tokens = [completion.tokens for completion in work.completions]
        proof = self.recipe.proof
        chunks = verify_proofs_many(
            [prefill.hidden_TH for prefill in prefills],
            [completion.proofs for completion in work.completions],
            chunk_tokens=proof.chunk_tokens,
            topk=proof.topk,
        )
        replayed = replay(
            [prefill.logits_TV for prefill in prefills],
            tokens,
            [request.seed for request in work.requests],
            self.recipe.sampling.temperature,
        )
        return Errors(chunks, list(replayed.margins))

    def chunks(self, work: Work, prefills: Sequence[Prefill]) -> list[Chunks]:
        """Return recomputed chunks by shape, where prompts of both halves have some."""
        size = self.recipe.proof.chunk_tokens
        places: dict[tuple[int, ...], int] = {}
        members: defaultdict[int, list[tuple[npt.NDArray[np.uint16], tuple[int, ...], int]]]
        members = defaultdict(list)
        for request, completion, prefill in zip(
            work.requests, work.completions, prefills, strict=True
        ):
            prompt = places.setdefault(request.prompt_tokens, len(places))
            for start in range(0, len(completion.tokens), size):
                rows = prefill.hidden_TH[start : start + size]
                members[len(rows)].append((rows, completion.tokens[start : start + size], prompt))
        shaped = [
            Chunks(
                np.stack([rows for rows, *_ in group]),
                np.array([tokens for _, tokens, _ in group]),
                np.array([prompt for *_, prompt in group]),
                self.recipe.proof,
            )
            for group in members.values()
        ]
        return [chunks for chunks in shaped if len(np.unique(chunks.prompts_B % 2)) == 2]

    @contextmanager
    def _computing(self, way: Way) -> Iterator[None]:
        own = self.engine.max_rows, torch.get_num_threads()
        self.engine.max_rows = way.max_rows
        torch.set_num_threads(way.threads)
        try:
            yield
        finally:
            self.engine.max_rows = own[0]
            torch.set_num_threads(own[1])


def one_token(requests: Sequence[Request]) -> list[Request]:
    """Return the requests cut to their first token: the smallest chunks."""
    return [replace(request, max_new_tokens=1) for request in requests]


def changed_only(work: Work, honest: Work, errors: Errors) -> list[npt.NDArray[np.float32]]:
    """Return the margins of samples whose tokens differ from the honest ones."""
    pairs = zip(work.completions, honest.completions, errors.margins, strict=True)
    return [margins for forged, true, margins in pairs if forged.tokens != true.tokens]


Progress = Callable[[str], None]
"""Is told what is being measured."""
