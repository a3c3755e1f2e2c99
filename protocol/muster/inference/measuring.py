"""Generates and recomputes rollouts the way workers and validators do, and measures the difference.

What `muster.inference.calibrate` compares; applies no limits of its own. Axes: R rows, L width,
T completion tokens, H hidden units, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache

from muster.inference.batches import pad_left
from muster.inference.engine import Completion, InferenceEngine, Prefill, Request
from muster.inference.forgers import Chunks
from muster.inference.forward import Forward, to_patterns
from muster.inference.replaying import replay
from muster.inference.transformers_engine import TransformersEngine
from muster.inference.vllm.engine import VllmEngine
from muster.inference.ways import Way, computing
from muster.protocol.recipe import Recipe
from muster.toploc import ChunkResult, build_proofs_many, verify_proofs_many

PLAIN = Way("batched")
"""How work is generated and recomputed when nothing else is said."""

Tokens = Sequence[int]

_MOST_REDRAWS = 16
_REDRAWN_VALUES = 1 << 22
"""Noise values drawn per part and way, but for one draw at least."""

_PART_LOGITS = 1 << 26
"""Logits held at a time: 256 MiB, and as much a few times more where two prefills are compared."""


@dataclass(frozen=True, slots=True)
class Work:
    """Completions and the requests they claim to answer."""

    requests: Sequence[Request]
    """What was asked, with the seeds a validator replays."""
    completions: Sequence[Completion]
    """What was delivered."""

    def __getitem__(self, places: slice) -> Work:
        """Return some of the samples."""
        return Work(self.requests[places], self.completions[places])

    @property
    def pairs(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """The samples as (prompt, completion)."""
        asked = [request.prompt_tokens for request in self.requests]
        return list(zip(asked, [c.tokens for c in self.completions], strict=True))


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

    def only(self, kept: Sequence[bool]) -> Errors:
        """Return the samples marked True."""
        chunks = [c for c, keep in zip(self.chunks, kept, strict=True) if keep]
        return Errors(chunks, [m for m, keep in zip(self.margins, kept, strict=True) if keep])

    def __add__(self, other: Errors) -> Errors:
        """Return the samples of both."""
        return Errors(self.chunks + other.chunks, self.margins + other.margins)


class Party:
    """An engine on one recipe, as workers and validators use it."""

    engine: InferenceEngine

    def __init__(self, name: str, recipe: Recipe) -> None:
        self.name = name
        self.recipe = recipe

    def ways(self, ways: Sequence[Way]) -> Sequence[Way]:
        """Return those of some ways to compute that this engine has."""
        return [way for way in ways if way == PLAIN]

    def generate(self, requests: Sequence[Request], way: Way = PLAIN) -> Work:
        """Return what a worker delivers."""
        asked = requests[: way.samples]
        return Work(asked, self.engine.generate(asked, proof=self.recipe.proof))

    def recompute(self, work: Work, _way: Way = PLAIN) -> list[Prefill]:
        """Return what a validator computes for work."""
        return self.engine.prefill(work.pairs)

    def compare(self, work: Work, prefills: Sequence[Prefill]) -> Errors:
        """Return how far work is from its recomputation."""
        proof = self.recipe.proof
        chunks = verify_proofs_many(
            [prefill.hidden_TH for prefill in prefills],
            [completion.proofs for completion in work.completions],
            chunk_tokens=proof.chunk_tokens,
            topk=proof.topk,
        )
        replayed = replay(
            [prefill.logits_TV for prefill in prefills],
            [completion.tokens for completion in work.completions],
            [request.seed for request in work.requests],
            self.recipe.sampling.temperature,
        )
        return Errors(chunks, list(replayed.margins))


class VllmBench(Party):
    """The engine on vLLM, which has one way to compute: its own."""

    def __init__(self, engine: VllmEngine, recipe: Recipe) -> None:
        super().__init__(f"vLLM {engine.dtype}", recipe)
        self.engine = engine


class Bench(Party):
    """The engine on transformers, which can be made to compute in many ways."""

    engine: TransformersEngine

    def __init__(self, engine: TransformersEngine, recipe: Recipe) -> None:
        super().__init__(engine.dtype, recipe)
        self.engine = engine

    def ways(self, ways: Sequence[Way]) -> Sequence[Way]:
        """Return all of them."""
        return ways

    def generate(self, requests: Sequence[Request], way: Way = PLAIN) -> Work:
        """Return what a worker delivers."""
        asked = requests[: way.samples]
        with computing(self.engine, way):
            return Work(asked, self.engine.generate(asked, proof=self.recipe.proof))

    def recompute(self, work: Work, way: Way = PLAIN) -> list[Prefill]:
        """Return what a validator computes for work."""
        with computing(self.engine, way):
            if way.path == "prefill":
                return self.engine.prefill(work.pairs)
            forward = self.engine.forward
            run = _padded_left if way.path == "padded left" else _decoded
            with torch.inference_mode():
                return [
                    prefill
                    for start in range(0, len(work.pairs), way.max_rows)
                    for prefill in run(forward, work.pairs[start : start + way.max_rows])
                ]

    def parts(self, work: Work) -> Iterator[tuple[int, Work]]:
        """Yield the work in parts whose logits fit into memory, each with its first place."""
        start = tokens = 0
        most = max(1, _PART_LOGITS // self.engine.vocab_size)
        for place, completion in enumerate(work.completions):
            if tokens and tokens + len(completion.tokens) > most:
                yield start, work[start:place]
                start, tokens = place, 0
            tokens += len(completion.tokens)
        yield start, work[start:]

    def measure(self, work: Work) -> Errors:
        """Return how far work is from its recomputation in the plain way."""
        found = [self.compare(part, self.recompute(part)) for _, part in self.parts(work)]
        return sum(found[1:], found[0])

    def hidden_states(self, work: Work) -> list[npt.NDArray[np.uint16]]:
        """Return what proofs of the work would be about, sample by sample."""
        return [p.hidden_TH for _, part in self.parts(work) for p in self.recompute(part)]

    def prove(self, work: Work) -> list[Completion]:
        """Return the completions with true proofs, whatever the tokens came from."""
        proof = self.recipe.proof
        built = build_proofs_many(
            self.hidden_states(work), chunk_tokens=proof.chunk_tokens, topk=proof.topk
        )
        pairs = zip(work.completions, built, strict=True)
        return [Completion(completion.tokens, proofs) for completion, proofs in pairs]

    def chunks(self, work: Work) -> list[Chunks]:
        """Return recomputed chunks by shape, where prompts of both halves have some."""
        size = self.recipe.proof.chunk_tokens
        places: dict[tuple[int, ...], int] = {}
        members: defaultdict[int, list[tuple[npt.NDArray[np.uint16], tuple[int, ...], int]]]
        members = defaultdict(list)
        for request, completion, hidden_TH in zip(
            work.requests, work.completions, self.hidden_states(work), strict=True
        ):
            prompt = places.setdefault(request.prompt_tokens, len(places))
            for start in range(0, len(completion.tokens), size):
                rows = hidden_TH[start : start + size]
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


def _padded_left(forward: Forward, samples: Sequence[tuple[Tokens, Tokens]]) -> list[Prefill]:
    """Prefill as libraries do that pad every batch on the left."""
    tokens_RL, mask_RL = pad_left([(*prompt, *completion[:-1]) for prompt, completion in samples])
    positions = None if mask_RL is None else np.maximum(mask_RL.cumsum(axis=1) - 1, 0)
    longest = max(len(completion) for _, completion in samples)
    hidden, logits = forward(tokens_RL, keep=longest, mask=mask_RL, positions_RL=positions)
    patterns, scores = to_patterns(hidden), logits.cpu().numpy()
    return [
        Prefill(patterns[row, longest - len(c) :], scores[row, longest - len(c) :])
        for row, (_, c) in enumerate(samples)
    ]


def _decoded(forward: Forward, samples: Sequence[tuple[Tokens, Tokens]]) -> list[Prefill]:
    """Feed the completion token by token, as a worker does; one sample at a time."""
    made = []
    for prompt, completion in samples:
        cache = DynamicCache(config=forward.model.config)
        fed = [prompt, *([token] for token in completion[:-1])]
        rows = [forward(np.array([tokens]), keep=1, cache=cache) for tokens in fed]
        hidden = np.concatenate([to_patterns(h)[0] for h, _ in rows])
        made.append(Prefill(hidden, np.concatenate([s[0].cpu().numpy() for _, s in rows])))
    return made


def redrawn_margins(
    worker: Sequence[Prefill], validator: Sequence[Prefill], temperature: float, *, seed: int
) -> npt.NDArray[np.float32]:
    """Return the margins of choices under one party's logits, replayed under another's.

    The noise is drawn afresh, several times per token where that is cheap: honest margins are
    nearly all zero, and it takes many draws to see how large the rest may be.
    """
    random, scale = np.random.default_rng(seed), np.float32(temperature)
    own_NV = np.concatenate([prefill.logits_TV for prefill in worker[: len(validator)]]) / scale
    other_NV = np.concatenate([prefill.logits_TV for prefill in validator]) / scale
    found = []
    for _ in range(min(_MOST_REDRAWS, max(1, _REDRAWN_VALUES // own_NV.size))):
        noise_NV = random.gumbel(size=own_NV.shape).astype(np.float32)
        chosen_N = (own_NV + noise_NV).argmax(axis=1)
        scores_NV = other_NV + noise_NV
        found.append(scores_NV.max(axis=1) - scores_NV[np.arange(len(chosen_N)), chosen_N])
    return np.concatenate(found)


def one_token(requests: Sequence[Request]) -> list[Request]:
    """Return the requests cut to their first token: the smallest chunks."""
    return [replace(request, max_new_tokens=1) for request in requests]


def divergence(policy: Sequence[Prefill], other: Sequence[Prefill], temperature: float) -> float:
    """Return the mean KL divergence of another model's next-token law from the policy's, in nats
    per token, at a temperature.
    """
    total, tokens = 0.0, 0
    for own, changed in zip(policy, other, strict=True):
        p = torch.from_numpy(own.logits_TV / temperature).log_softmax(dim=1)
        q = torch.from_numpy(changed.logits_TV / temperature).log_softmax(dim=1)
        # Tokens that the other rules out for good would make it infinite; 50 nats are enough.
        total += float((p.exp() * (p - q.clamp_min(-50))).sum())
        tokens += len(p)
    return max(0.0, total / tokens)


Progress = Callable[[str], None]
"""Is told what is being measured."""
