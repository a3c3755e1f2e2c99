"""Generates and recomputes rollouts the way workers and validators do, and measures the difference.

Whatever two honest parties may do differently is a way here, because limits are chosen from the
worst pair. `muster.inference.calibrate` compares them; nothing here applies limits. Axes: R rows, L
width, T completion tokens, H hidden units.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from muster.inference.blocks import examine_rows
from muster.inference.engine import (
    Completion,
    Examined,
    InferenceEngine,
    Redraw,
    Request,
    Sample,
)
from muster.inference.examining import Recomputed
from muster.inference.forgers import Chunks
from muster.inference.forward import Forward, Tokens, WholeBatch, pad_left
from muster.inference.transformers_engine import TransformersEngine
from muster.protocol.errors import EngineError
from muster.protocol.recipe import Recipe
from muster.toploc import ChunkResult

_PART_LOGITS = 1 << 26
"""Logits held at a time where two models are compared: 256 MiB for each."""


# ---------------------------------------------------------------------------------------- ways


Profile = Literal["quick", "full"]
NumberFormat = Literal["float32", "bfloat16"]

ENGINES: dict[str, NumberFormat] = {
    "transformers:float32": "float32",
    "transformers:bfloat16": "bfloat16",
    "vllm:float32": "float32",
    "vllm:bfloat16": "bfloat16",
}
"""Engines that can be measured, by what `--engines` calls them, of each kind the exacter first."""


def layout_of(engine: str) -> tuple[NumberFormat, int]:
    """Return an engine's number format and the devices that a model is spread over, by its name:
    "vllm:bfloat16:tp2" is vLLM over two GPUs. Raises EngineError when there is no such engine.
    """
    name, spread, devices = engine.partition(":tp")
    is_layout = name.startswith("vllm:") and re.fullmatch(r"[1-9]\d?", devices)
    if name not in ENGINES or (spread and not is_layout):
        known = f"{', '.join(ENGINES)}, and vllm:bfloat16:tp2 and the like over several GPUs"
        raise EngineError(f"no engine {engine!r}", hint=f"there are: {known}")
    return ENGINES[name], int(devices or 1)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured, and how thoroughly."""

    recipe: Recipe
    """Sampling, proofs and learning rate."""
    prompts: Sequence[str] = ()
    """Taken in turn; none means prompts that the model makes up."""
    engines: Sequence[str] = ("transformers:float32",)
    """Whose errors must be inside the limits, each against each; cheats use the first."""
    others: Mapping[str, Path] = field(default_factory=dict)
    """Further models of the same vocabulary that a cheat could run, by name: a smaller sibling,
    the base model."""
    profile: Profile = "full"
    """"quick" is for small models and demonstrations: fewer ways, fewer cheats."""
    samples: int = 320
    """Samples of most ways and cheats."""
    seed: int = 0
    """Of everything drawn."""


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
    attention: Literal["sdpa", "eager"] = "sdpa"
    """The attention kernel."""
    path: Literal["prefill", "padded left", "decode"] = "prefill"
    """How a validator feeds tokens: at once, at once behind padding, or one by one with a cache."""
    lean: bool = True
    """Whether a worker decodes without the model's own forward pass, where it can."""
    samples: int | None = None
    """How many samples to spend on it; None for all."""


WORKERS = {
    "quick": (
        Way("batched"),
        Way("one by one", max_rows=1, samples=_FEW),
        Way("batches of 7", max_rows=7, samples=4 * _FEW),
        Way("own forward pass", lean=False, samples=4 * _FEW),
        Way("two threads", threads=2),
    ),
    "full": (
        Way("batched"),
        Way("one by one", max_rows=1, samples=_FEW),
        Way("batches of 7", max_rows=7, samples=4 * _FEW),
        Way("own forward pass", lean=False),
        Way("own, batches of 7", lean=False, max_rows=7, samples=4 * _FEW),
        Way("batches of 2", max_rows=2, samples=2 * _FEW),
        Way("two threads", threads=2),
        Way("eager attention", attention="eager"),
        Way("eager, batches of 16", attention="eager", max_rows=16, samples=4 * _FEW),
    ),
}
"""How workers generate, by profile."""

VALIDATORS = {
    "quick": (
        Way("batched"),
        Way("one by one", max_rows=1, samples=_FEW),
        Way("two threads", threads=2, samples=4 * _FEW),
    ),
    "full": (
        Way("batched"),
        Way("one by one", max_rows=1, samples=_FEW),
        Way("batches of 5", max_rows=5, samples=4 * _FEW),
        Way("two threads", threads=2, samples=4 * _FEW),
        Way("eager attention", attention="eager"),
        Way("padded left", path="padded left", samples=4 * _FEW),
        Way("decoding with a cache", path="decode", samples=_FEW // 3),
    ),
}
"""How validators recompute, by profile."""


@contextmanager
def computing(engine: TransformersEngine, way: Way) -> Iterator[None]:
    """Run the body with the engine set up in a way; afterwards it is as before."""
    config = engine.model.config
    own = engine.max_rows, engine.lean, torch.get_num_threads(), config._attn_implementation
    _set_up(engine, way.max_rows, way.lean, way.threads, way.attention)
    try:
        yield
    finally:
        _set_up(engine, *own)


def _set_up(
    engine: TransformersEngine, max_rows: int, lean: bool, threads: int, attention: str
) -> None:
    engine.max_rows, engine.lean = max_rows, lean
    torch.set_num_threads(threads)
    if engine.model.config._attn_implementation != attention:
        engine.model.set_attn_implementation(attention)


# ------------------------------------------------------------------------------------- parties


PLAIN = Way("batched")
"""How work is generated and recomputed when nothing else is said."""


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

    def samples(self, redraws: Sequence[tuple[Redraw, ...]] = ()) -> list[Sample]:
        """Return what a validator examines; `redraws` are each sample's, none at all if empty."""
        rows = zip(
            self.requests, self.completions, redraws or [()] * len(self.requests), strict=True
        )
        return [Sample(r.prompt_tokens, c.tokens, r.seed, c.proofs, (), d) for r, c, d in rows]


@dataclass(frozen=True, slots=True)
class Errors:
    """Recomputed work against the work, sample by sample."""

    chunks: list[list[ChunkResult]]
    """Distances of the proofs."""
    margins: list[npt.NDArray[np.float32]]
    """Margins of the choices."""

    @staticmethod
    def of(examined: Sequence[Examined]) -> Errors:
        """Return the errors among what was found."""
        chunks = [list(each.chunks) for each in examined]
        return Errors(chunks, [each.replayed.margins_T for each in examined])

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


def one_token(requests: Sequence[Request]) -> list[Request]:
    """Return the requests cut to their first token: the smallest chunks."""
    return [replace(request, max_new_tokens=1) for request in requests]


class Party:
    """An engine on one recipe, as workers and validators use it; it has one way to compute."""

    engine: InferenceEngine

    def __init__(self, name: str, engine: InferenceEngine, recipe: Recipe) -> None:
        self.name, self.engine, self.recipe = name, engine, recipe

    def ways(self, ways: Sequence[Way]) -> Sequence[Way]:
        """Return those of some ways to compute that this engine has."""
        return [way for way in ways if way == PLAIN]

    def generate(self, requests: Sequence[Request], way: Way = PLAIN) -> Work:
        """Return what a worker delivers."""
        asked = requests[: way.samples]
        return Work(asked, self.engine.generate(asked, proof=self.recipe.proof))

    def examine(
        self, work: Work, _way: Way = PLAIN, redraws: Sequence[tuple[Redraw, ...]] = ()
    ) -> list[Examined]:
        """Return what a validator finds in work."""
        proof, temperature = self.recipe.proof, self.recipe.sampling.temperature
        return self.engine.examine(work.samples(redraws), proof=proof, temperature=temperature)


class Bench(Party):
    """The engine on transformers, which can be made to compute in many ways."""

    engine: TransformersEngine

    def __init__(self, engine: TransformersEngine, recipe: Recipe) -> None:
        super().__init__(engine.dtype, engine, recipe)

    def ways(self, ways: Sequence[Way]) -> Sequence[Way]:
        """Return all of them."""
        return ways

    def generate(self, requests: Sequence[Request], way: Way = PLAIN) -> Work:
        """Return what a worker delivers."""
        with computing(self.engine, way):
            return super().generate(requests, way)

    def examine(
        self, work: Work, way: Way = PLAIN, redraws: Sequence[tuple[Redraw, ...]] = ()
    ) -> list[Examined]:
        """Return what a validator finds in work."""
        with computing(self.engine, way):
            if way.path == "prefill":
                return super().examine(work, way, redraws)
            run = _padded_left if way.path == "padded left" else _decoded
            samples, found = work.samples(redraws), []
            with torch.inference_mode():
                for start in range(0, len(samples), way.max_rows):
                    places = slice(start, start + way.max_rows)
                    hidden = run(self.engine.forward, work[places].pairs)
                    found += self._examine_rows(samples[places], hidden)
        return found

    def _examine_rows(
        self, samples: Sequence[Sample], hidden: Sequence[torch.Tensor]
    ) -> list[Examined]:
        engine, recipe = self.engine, self.recipe
        return examine_rows(
            samples,
            hidden,
            engine.forward.logits,
            vocab_size=engine.vocab_size,
            eos=engine.eos_token_ids,
            proof=recipe.proof,
            temperature=recipe.sampling.temperature,
        )

    def recompute(self, work: Work) -> list[Recomputed]:
        """Return hidden states and logits of one of the `parts` of some work."""
        return self.engine.recompute(work.pairs)

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
        return Errors.of(self.examine(work))

    def hidden_states(self, work: Work) -> list[npt.NDArray[np.uint16]]:
        """Return what proofs of the work would be about, sample by sample."""
        return [found.hidden_TH for _, part in self.parts(work) for found in self.recompute(part)]

    def prove(self, work: Work) -> list[Completion]:
        """Return the completions with true proofs, whatever the tokens came from."""
        built = self.engine.prove(work.pairs, proof=self.recipe.proof)
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


def _padded_left(forward: Forward, samples: Sequence[tuple[Tokens, Tokens]]) -> list[torch.Tensor]:
    """Prefill as libraries do that pad every batch on the left."""
    tokens_RL, mask_RL = pad_left([(*prompt, *completion[:-1]) for prompt, completion in samples])
    positions = None if mask_RL is None else np.maximum(mask_RL.cumsum(axis=1) - 1, 0)
    longest = max(len(completion) for _, completion in samples)
    hidden = forward.hidden(tokens_RL, keep=longest, mask=mask_RL, positions_RL=positions)
    return [rows[longest - len(c) :] for rows, (_, c) in zip(hidden, samples, strict=True)]


def _decoded(forward: Forward, samples: Sequence[tuple[Tokens, Tokens]]) -> list[torch.Tensor]:
    """Feed the completion token by token, as a worker does; one sample at a time."""
    made = []
    for prompt, completion in samples:
        rows = WholeBatch(forward, 1, len(completion))
        steps = [rows.admit([tuple(prompt)]), *(rows.step(np.array([t])) for t in completion[:-1])]
        made.append(torch.cat([hidden for hidden, _ in steps]))
    return made
